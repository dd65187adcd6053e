"""The state of a GPU as nvidia-smi says it. The lines are made up after its format."""

from __future__ import annotations

import os

import pytest

from attnsuite.suite import typed
from attnsuite.suite.measure.accelerator import nvidia_state, parse_state
from attnsuite.suite.record import Environment

LINE = "570.86.15, 1980, 1980, 2619, 650.00, 700.00, Enabled, Disabled, Enabled"


def test_state_is_read_and_fits_a_record():
    state = parse_state(LINE + "\n")
    assert state["power_limit_watts"] == 650.0
    assert (state["driver"], state["ecc"], state["mig"]) == ("570.86.15", "Enabled", "Disabled")
    typed.convert({"accelerator": state}, Environment)


@pytest.mark.parametrize("text", [None, "", "\n", "No devices were found", LINE + ", more"])
def test_other_answers_are_no_state(text):
    assert parse_state(text) == {}


def test_what_the_driver_does_not_say_is_left_out():
    state = parse_state(LINE.replace("650.00", "[N/A]").replace("1980", "[Unknown Error]"))
    assert "power_limit_watts" not in state
    assert "sm_mhz" not in state


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f'case "$1" in *gpu*) echo "{LINE}";; *) printf "1\\n2\\n";; esac', 2),
        ("exit 9", None),
        ("printf '\\377'", None),
    ],
)
def test_command_is_asked_and_its_failure_is_no_state(tmp_path, monkeypatch, script, found):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert nvidia_state().get("compute_processes") == found


def test_machine_without_the_command_has_no_state(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_state() == {}
