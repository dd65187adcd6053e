from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from attnsuite.suite.doctor import describe


@pytest.fixture(scope="module")
def found(foreign, attnsuite):
    code, out, err = attnsuite.finish(attnsuite.start("doctor", "--json", path=foreign))
    assert code == 0, err
    return json.loads(out)


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


def test_doctor_groups_backends_by_the_devices_that_they_are_for(found):
    console = Console(width=200, file=io.StringIO())
    console.print(describe(found))
    lines = [line.strip(" \u2502").partition("  ")[0] for line in console.file.getvalue().splitlines()]
    for group, first, second in (
        ("for CPU, NVIDIA GPU, TPU", "standard", "chunked"),
        ("for NVIDIA GPU", "cudnn", "kvax"),
        ("for NVIDIA GPU", "cudnn", "tokamax_triton"),
        ("for TPU", "splash", "tokamax_splash"),
        ("for TPU", "splash", "paged_attention"),
    ):
        below = lines[lines.index(group) :]
        headings = [line for line in below[1:] if line.startswith("for ")]
        end = below.index(headings[0], 1) if headings else len(below)
        assert {first, second} <= set(below[:end]), group
    broken = [name for name, backend in by_name(found).items() if not backend["devices"]]
    assert "refusing" in broken
    assert lines.index("for no device, as installed here") < lines.index("refusing")


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


def test_devices_that_are_not_here_are_named_with_the_variable_that_asked_for_them():
    done = subprocess.run(
        [sys.executable, "-m", "attnsuite", "doctor"],
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "JAX does not start on this machine with JAX_PLATFORMS=cuda: " in done.stderr
    assert done.stderr.rstrip().endswith("unset it, or set JAX_PLATFORMS=cpu.")
    assert "AssertionError" not in done.stderr
