"""The Dockerfile installs what doctor says, and nothing that the project does not name."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from attnsuite.backends import tokamax_package
from attnsuite.backends.kvax import availability

ROOT = Path(__file__).parents[1]


def stages():
    """The install lines of each image, and the words of its command."""
    found, name = {}, ""
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"FROM (\S+) AS (\w+)", line):
            name = match[2]
            found[name] = list(found.get(match[1], []))
        elif line.startswith("RUN "):
            found[name].append(line.removeprefix("RUN "))
    return found


@pytest.mark.parametrize(
    ("image", "lines"),
    [
        ("cuda", {"pip install '.[cuda12]'", availability.INSTALL, tokamax_package.INSTALL}),
        ("tpu", {"pip install '.[tpu]'", tokamax_package.INSTALL}),
    ],
)
def test_image_installs_what_doctor_says(image, lines):
    assert set(stages()[image]) == lines


def test_every_extra_exists_and_the_command_is_the_suite_for_devices():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    used = {extra for lines in stages().values() for line in lines for extra in re.findall(r"\.\[([\w-]+)\]", line)}
    assert used
    assert used <= set(extras)
    words = shlex.split(re.search(r"^CMD \[(.*)\]$", text, re.MULTILINE)[1].replace(",", " "))
    assert words[:3] == ["run", "--suite", "device"]
