"""The state of a GPU as nvidia-smi says it. The lines are made up after its format."""

from __future__ import annotations

import pytest

from attnsuite.suite import typed
from attnsuite.suite.measure.accelerator import nvidia_state, parse_state, used_by_others
from attnsuite.suite.record import Environment

LINE = "570.86.15, 1980, 1980, 2619, 650.00, 700.00, Enabled, Disabled, Enabled"


def put_command(folder, monkeypatch, script):
    """Let this script be the only command that there is; None is no command at all."""
    monkeypatch.setenv("PATH", str(folder))
    if script is not None:
        command = folder / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)


def test_state_is_read_and_fits_a_record_without_what_the_driver_does_not_say():
    state = parse_state(LINE + "\n")
    assert state["power_limit_watts"] == 650.0
    assert (state["driver"], state["ecc"], state["mig"]) == ("570.86.15", "Enabled", "Disabled")
    typed.convert({"accelerator": state}, Environment)
    partly = parse_state(LINE.replace("650.00", "[N/A]").replace("1980", "[Unknown Error]"))
    assert {"power_limit_watts", "sm_mhz"} <= set(state) - set(partly)


@pytest.mark.parametrize("text", [None, "", "\n", "No devices were found", LINE + ", more"])
def test_other_answers_are_no_state(text):
    assert parse_state(text) == {}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f'case "$1" in *gpu*) echo "{LINE}";; *) printf "1\\n2\\n";; esac', 2),
        ("exit 9", None),
        ("printf '\\377'", None),
        (None, None),
    ],
)
def test_command_is_asked_and_its_failure_or_absence_is_no_state(tmp_path, monkeypatch, script, found):
    put_command(tmp_path, monkeypatch, script)
    assert nvidia_state().get("compute_processes") == found
    assert bool(nvidia_state()) is (found is not None)


@pytest.mark.parametrize(
    ("load", "processes", "words"),
    [
        ("0", "", None),
        ("3", "", None),
        ("0", "4711", "1 other process"),
        ("97", "4711\n4712", "2 other processes"),
        ("97", "", "somebody else, 97% of the time"),  # of another container, whose processes are not listed
        ("[N/A]", "", None),
    ],
)
def test_others_on_the_gpu_are_told_by_their_processes_or_by_its_load(tmp_path, monkeypatch, load, processes, words):
    put_command(tmp_path, monkeypatch, f'case "$1" in *gpu*) echo "{load}";; *) printf "{processes}";; esac')
    assert used_by_others() == words


def test_gpu_that_jax_sees_first_is_asked_about(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    put_command(tmp_path, monkeypatch, 'case "$*" in *gpu*--id=3) echo 50;; *gpu*) echo 0;; esac')
    assert used_by_others() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert used_by_others() == "somebody else, 50% of the time"
