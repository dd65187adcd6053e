from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from backends import AttentionSpec, Layout, Target, UnknownBackendError, support
from backends.chunked import CHUNKED
from backends.registry import BrokenBackend, Registry
from backends.standard import STANDARD, Standard

SPEC = AttentionSpec(batch=1, query_length=4, key_value_length=4, num_heads=1, num_kv_heads=1, head_dim=8)
OTHER = dataclasses.replace(Standard(), name="other")


def test_built_in_backends_come_first_and_load_by_name() -> None:
    registry = Registry()
    assert registry.names()[:2] == ("standard", "chunked")
    assert registry.get("standard") is STANDARD
    assert registry.get("chunked") is CHUNKED


def test_unknown_name_lists_the_registered_ones() -> None:
    with pytest.raises(UnknownBackendError, match="backend 'flesh' is not registered; registered are: standard, "):
        Registry().get("flesh")


def test_registered_backend_is_found_in_its_registry_alone() -> None:
    registry = Registry()
    registry.register(OTHER)
    assert registry.get("other") is OTHER
    assert registry.names()[-1] == "other"
    assert "other" not in Registry().names()


def test_taken_name_is_refused() -> None:
    registry = Registry()
    registry.register(OTHER)
    for taken in (OTHER, STANDARD):
        with pytest.raises(ValueError, match=f"a backend named '{taken.name}' is already registered"):
            registry.register(taken)


@pytest.mark.parametrize("thing", [object(), "standard", len])
def test_what_is_no_backend_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match="is not a backend; it needs "):
        Registry().register(thing)


def test_broken_backend_refuses_with_its_error_and_does_not_plan() -> None:
    broken = BrokenBackend("odd", "entry point odd:X failed to load: KeyError: 'x'")
    assert support(broken, SPEC, Target("cpu")).reasons == (broken.error,)
    with pytest.raises(ImportError, match="KeyError"):
        broken.plan(SPEC, Layout(), target=Target("cpu"))


GOOD = """
import dataclasses
from backends.standard import Standard

BACKEND = dataclasses.replace(Standard(), name="thirdparty")

def make():
    return dataclasses.replace(Standard(), name="made")
"""
ENTRY_POINTS = """[attention_suite.backends]
thirdparty = thirdparty_attention:BACKEND
made = thirdparty_attention:make
missing = thirdparty_attention:NOWHERE
misnamed = thirdparty_attention:BACKEND
number = thirdparty_attention:__doc__
broken = broken_attention:BACKEND
quits = quitting_attention:BACKEND
"""


def wheel(folder: Path) -> Path:
    """A real package with one module that works and two that do not."""
    files = {
        "thirdparty_attention.py": GOOD,
        "broken_attention.py": "raise AttributeError('jax.experimental.shard_map has no Specs')\n",
        "quitting_attention.py": "import no_such_dependency\n",
        "thirdparty_attention-1.0.dist-info/METADATA": (
            "Metadata-Version: 2.1\nName: thirdparty-attention\nVersion: 1.0\n"
        ),
        "thirdparty_attention-1.0.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        "thirdparty_attention-1.0.dist-info/entry_points.txt": ENTRY_POINTS,
    }
    record = "thirdparty_attention-1.0.dist-info/RECORD"
    lines = [f"{name},{_digest(text)},{len(text.encode())}" for name, text in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""])
    path = folder / "thirdparty_attention-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"),
            *("--disable-pip-version-check", "--target", str(folder)),
            str(wheel(tmp_path_factory.mktemp("wheel"))),
        ],
        check=True,
    )
    return folder


def python(installed: Path, code: str) -> str:
    path = os.pathsep.join([str(installed), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_installed_package_joins_by_its_entry_point_and_runs(installed: Path) -> None:
    code = """
import json, jax.numpy as jnp
from backends import attention, names
x = jnp.ones((1, 4, 2, 8))
shapes = [attention(x, x, x, backend=name, on_unavailable="raise").shape for name in ("thirdparty", "made")]
print(json.dumps([names(), shapes]))
"""
    names, shapes = json.loads(python(installed, code))
    assert {"standard", "thirdparty", "made"} <= set(names)
    assert names.index("standard") < names.index("thirdparty")
    assert shapes == [[1, 4, 2, 8]] * 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "AttributeError: jax.experimental.shard_map has no Specs"),
        ("quits", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("missing", "NOWHERE"),
        ("misnamed", "is not a backend named 'misnamed'"),
        ("number", "is not a backend named 'number'"),
    ],
)
def test_broken_package_becomes_a_reason_and_takes_nobody_down(installed: Path, name: str, reason: str) -> None:
    code = f"""
import jax.numpy as jnp
from backends import AttentionSpec, Target, attention, get, support
spec = AttentionSpec(batch=1, query_length=4, key_value_length=4, num_heads=1, num_kv_heads=1, head_dim=8)
print(support(get({name!r}), spec, Target("cpu")).reasons[0])
attention(*[jnp.ones((1, 4, 1, 8))] * 3, backend="standard", on_unavailable="raise")
"""
    said = python(installed, code)
    assert reason in said
    assert "thirdparty-attention" in said or "thirdparty_attention" in said


def test_built_in_backend_that_does_not_load_says_why_and_leaves_the_others() -> None:
    registry = Registry({"standard": "backends.standard:STANDARD", "gone": "backends.no_such_module:GONE"})
    found = support(registry.get("gone"), SPEC, Target("cpu"))
    assert "gone does not load here (ModuleNotFoundError" in found.reasons[0]
    assert support(registry.get("standard"), SPEC, Target("cpu"))
