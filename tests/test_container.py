"""The Dockerfile installs what doctor says, and nothing that the project does not name."""

from __future__ import annotations

import re
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


def test_the_command_is_the_suite_for_devices():
    words = re.search(r"^CMD \[(.*)\]$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert words.startswith('"run", "--suite", "device"')
