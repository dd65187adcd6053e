"""A user's own folders named backends, models, suite and reports are never imported in place of ours."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from attnsuite.suite.verbs import VERBS
from script import python, run

ROOMS = ("backends", "models", "suite", "reports")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A directory whose rooms raise when they are imported, as a research repository has them."""
    folder = tmp_path_factory.mktemp("research")
    for room in ROOMS:
        (folder / room).mkdir()
        (folder / room / "__init__.py").write_text(f"raise RuntimeError('the user\\'s own {room} was imported')\n")
    return folder


def started(folder, *words):
    """A Python process in ``folder``, with the folder itself first on its path."""
    return python(*words, folder=folder, first=Path())


EVERY_VERB = f"""
from attnsuite.suite.command_line import main
for verb in {[*VERBS]}:
    try:
        main([verb, "--help"])
    except SystemExit as end:
        assert end.code == 0, verb
from attnsuite import backends, models
print(backends.names()[0])
"""


def test_every_verb_and_a_script_start_beside_the_users_own_rooms(hostile):
    (hostile / "train.py").write_text(EVERY_VERB)
    done = started(hostile, "train.py")
    assert done.returncode == 0, done.stderr
    assert all(f"attnsuite {verb} " in done.stdout for verb in VERBS)
    assert done.stdout.splitlines()[-1] == "standard"


def test_workers_import_our_rooms_beside_the_users_own(hostile):
    done = started(hostile, "-m", "attnsuite", "doctor")  # its worker asks every backend and loads every kind
    assert done.returncode == 0, done.stderr
    assert "standard" in done.stdout


def test_modules_need_no_import_of_their_own():
    code = (
        "import attnsuite; print(attnsuite.models.lora.__name__, attnsuite.backends.adapters.keras.__name__, "
        "attnsuite.backends.kascade.manual.__name__); attnsuite.models.absent"
    )
    done = run(code)
    assert done.stdout.split() == ["attnsuite.models.lora", "attnsuite.backends.adapters.keras", "manual"]
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'attnsuite.models' has no attribute 'absent'"


def test_what_type_checkers_read_of_models_is_what_is_imported():
    from attnsuite import models  # noqa: PLC0415

    imports = re.findall(r"^    from \.(\w+) import (\w+) as \2$", Path(models.__file__).read_text(), re.MULTILINE)
    assert {name: home for home, name in imports} == models._HOMES
    assert {*models._HOMES} <= {*dir(models)}
    assert all(getattr(models, name) is not None for name in models._HOMES)


def test_a_folder_of_the_repository_is_no_package_of_its_own():
    program = f"""
import sys
from collections import Counter
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
for room in {ROOMS}:
    try:
        __import__(room)
    except ImportError as error:
        print(error)
"""
    done = run(program)
    sentence = "write import attnsuite.{0}; the folder {0} is no package of its own."
    assert done.stdout.splitlines() == [sentence.format(room) for room in ROOMS], done.stderr


# One thing for two owners, such as the page of a run and Kascade's part of it.
SHARED_NAMES = {
    *("availability", "backend", "backward", "block_sizes", "environment", "page", "sharding", "tuning"),
}


def test_a_module_has_a_name_of_its_own_or_is_the_same_thing_for_another_owner():
    import attnsuite  # noqa: PLC0415

    names = Counter(
        path.stem
        for room in ROOMS
        for path in Path(attnsuite.__path__[0], room).rglob("*.py")
        if path.stem != "__init__"
    )
    assert {name for name, count in names.items() if count > 1} == SHARED_NAMES
