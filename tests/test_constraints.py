"""The versions that CI uses fit pyproject.toml, for every Python; the oldest are its lower bounds."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEWEST = (ROOT / "constraints.txt").read_text()
OLDEST = (ROOT / "constraints-oldest.txt").read_text()
PYTHONS = ("3.11", "3.12", "3.13")
OLDEST_EXTRAS = ("text", "history", "train", "testing")  # as `tox -e constraints` has them


def requirements(extras, groups):
    project = PYPROJECT["project"]
    texts = [*project["dependencies"], *(t for name in extras for t in project["optional-dependencies"][name])]
    texts += [t for name in groups for t in PYPROJECT["dependency-groups"][name] if isinstance(t, str)]
    return [Requirement(text) for text in texts]


def pins(text, python):
    """The version of each distribution on Linux with this Python."""
    here = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux",
            "platform_machine": "x86_64", "platform_system": "Linux", "implementation_name": "cpython",
            "platform_python_implementation": "CPython", "os_name": "posix"}  # fmt: skip
    found = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    kept = [pin for pin in found if pin.marker is None or pin.marker.evaluate(here)]
    assert len({pin.name for pin in kept}) == len(kept)
    return {pin.name: Version(str(pin.specifier).removeprefix("==")) for pin in kept}, here


def misfits(asked, text, python):
    """Requirements for this Python without a version, or with one that they do not allow."""
    versions, here = pins(text, python)
    wanted = [one for one in asked if one.marker is None or one.marker.evaluate(here)]
    return [str(one) for one in wanted if one.name not in versions or versions[one.name] not in one.specifier]


@pytest.mark.parametrize("python", PYTHONS)
def test_newest_versions_are_those_of_every_requirement_and_allowed(python):
    groups = ("test", "lint", "type", "dev", "docs", "browser", "parity")
    asked = requirements(PYPROJECT["project"]["optional-dependencies"], groups)
    assert not misfits(asked, NEWEST, python)


def test_oldest_versions_are_the_lower_bounds():
    asked = requirements(OLDEST_EXTRAS, ["test"])
    assert not misfits(asked, OLDEST, "3.11")
    bounds = {(one.name, Version(part.version)) for one in asked for part in one.specifier if part.operator == ">="}
    versions, _ = pins(OLDEST, "3.11")
    assert [name for name, bound in bounds if versions[name] != bound] == []


def test_a_version_that_is_not_allowed_is_found():
    jax = Requirement("jax>=99")
    assert misfits([jax], NEWEST, "3.13") == ["jax>=99"]
    assert misfits([Requirement("left-pad")], NEWEST, "3.13") == ["left-pad"]


def test_every_environment_takes_the_versions_that_are_tested():
    sections = re.split(r"^\[", (ROOT / "tox.ini").read_text(), flags=re.MULTILINE)
    inherit = ("{[testenv]set_env}", "{[unoptimised]set_env}", "{[constrained]set_env}")
    setting = [section for section in sections if section.startswith("testenv") and "set_env =" in section]
    free = [section.split("]")[0] for section in setting if not any(way in section for way in inherit)]
    assert free == ["testenv:constraints"]  # writes them
