from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import re

import pytest

from attnsuite.suite.diagnosis import describe
from attnsuite.suite.measure.environment import source_digest
from command import bring_workers_here, code_of
from script import python


@pytest.fixture(scope="module")
def found(foreign, tmp_path_factory):
    """What the command finds, whose worker is this process."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.syspath_prepend(foreign)
        bring_workers_here(patch, tmp_path_factory.mktemp("worker"))
        assert code_of("doctor", "--json") == 0
    return json.loads(out.getvalue())


def test_doctor_lists_every_backend_with_its_mode_or_every_reason(found, faulty_names):
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert {"standard", "chunked", "cudnn", *faulty_names} <= set(backends)
    for backend in backends.values():
        for support in backend["problems"].values():
            assert (support["mode"] == "native") != bool(support["reasons"])
    assert len(backends["refusing"]["problems"]["forward"]["reasons"]) == 2
    kvax = backends["kvax"]["problems"]["forward"]
    assert kvax["mode"] == "interpret" or any("pip install '.[kvax]'" in reason for reason in kvax["reasons"])
    kascade = backends["kascade"]
    assert kascade["exact"] is False
    assert {problem["mode"] for problem in kascade["problems"].values()} == {"native"}
    assert found["environment"]["versions"]["jax"]
    assert describe(found)


def test_doctor_has_a_line_per_backend_below_what_it_needs_and_fits_80_columns(found):
    lines = list(describe(found))
    assert max(map(len, lines)) < 80
    below = {name: heading for heading, names in headed(lines).items() for name in names}
    assert set(below) == {backend["name"] for backend in found["backends"]}
    assert {below["standard"], below["chunked"], below["kascade"]} == {"runs here"}
    assert below["cudnn"] == "needs another device"
    assert below["splash"].startswith("runs here in an interpreter only")
    assert not any("not supported" in line for line in lines)
    every = " ".join(describe(found, every=True)).replace("  ", " ")
    assert "cudnn: cuDNN runs on NVIDIA GPUs, not on cpu" in every
    assert max(map(len, describe(found, every=True))) < 80


def test_doctor_says_the_line_that_installs_a_backend(found):
    kvax = by_name(found)["kvax"]
    reason = "kvax: needs the package kvax; pip install '.[kvax]'."
    problems = {name: {"mode": None, "reasons": [reason]} for name in kvax["problems"]}
    lines = list(describe(found | {"backends": [kvax | {"problems": problems}]}))
    assert (
        lines[lines.index("needs an install") + 1].split("  ", 2)[2].strip() == "pip install '.[kvax]' (for NVIDIA GPU)"
    )


def headed(lines):
    """The first word of each backend's line, by the heading above it."""
    found, heading = {}, ""
    for before, line in itertools.pairwise(lines):
        if not before and line and not line.startswith(" "):
            heading = line
        elif re.match(r"  \S", line):
            found.setdefault(heading, []).append(line.split()[0])
    return found


def by_name(found):
    return {backend["name"]: backend for backend in found["backends"]}


def test_fault_of_a_foreign_package_is_a_reason_of_its_backend_alone(found, unaskable):
    reasons = {
        backend["name"]: [support["reasons"] for support in backend["problems"].values()]
        for backend in found["backends"]
    }
    for name, raised in unaskable.items():
        assert all(len(said) == 1 and raised in said[0] for said in reasons[name]), reasons[name]
        others = str([said for other, said in reasons.items() if other != name])
        assert raised not in others
    assert not any(reasons["standard"])
    assert not any(reasons["chunked"])


def test_backend_that_does_not_load_stands_below_no_device_and_has_its_reason(found):
    lines = list(describe(found | {"backends": [by_name(found)["unloadable"]]}))
    below = " ".join(" ".join(lines[lines.index("runs nowhere, as installed here") :]).split())
    assert "unloadable" in below
    assert "RuntimeError: built for another JAX" in below


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("JAX_ENABLE_X64", "banana", "invalid truth value 'banana'"),
        ("JAX_NUM_CPU_DEVICES", "banana", "for JAX flag jax_num_cpu_devices"),
        ("JAX_PLATFORMS", "cuda", "does not start on this machine with JAX_PLATFORMS=cuda: "),
    ],
)
def test_variable_with_which_jax_does_not_start_is_named(variable, value, sentence):
    done = python("-m", "attnsuite", "doctor", **{variable: value})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert sentence in done.stderr
    assert variable in done.stderr.rpartition("unset it")[2]


def test_source_that_is_digested_is_this_projects_and_no_users(tmp_path, monkeypatch):
    found = source_digest()
    assert found != hashlib.sha256().hexdigest()[:16]  # of no file at all
    for room in ("backends", "models", "suite"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("ours = False\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert source_digest() == found


def test_the_examination_fits_a_narrow_terminal(found):
    assert max(map(len, describe(found, width=60))) <= 60
