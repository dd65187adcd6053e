"""What is installed is what is tested, and it brings what it needs."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif("ATTNSUITE_TESTED_WHEEL" not in os.environ, reason="only tox knows where the wheel is")
ROOMS = ("backends", "models", "suite", "reports", "testing")


@pytest.mark.parametrize("room", ROOMS)
def test_the_wheel_is_tested_not_the_checkout(room):
    found = importlib.util.find_spec(f"attnsuite.{room}")
    assert Path(found.origin).is_relative_to(os.environ["ATTNSUITE_TESTED_WHEEL"])


def test_processes_that_tests_start_are_of_the_wheel():
    """As tests/suite/conftest.py starts the command, in whatever directory; the checkout is not on their path."""
    code = "import attnsuite.suite.entry as entry; print(entry.__file__)"
    started = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert Path(started.stdout.strip()).is_relative_to(os.environ["ATTNSUITE_TESTED_WHEEL"])


def test_the_distribution_has_its_name_and_its_command():
    entry_points = importlib.metadata.distribution("attnsuite").entry_points
    assert [e.value for e in entry_points if e.name == "attnsuite"] == ["attnsuite.suite.entry:main"]
