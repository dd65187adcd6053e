"""Every test belongs to an environment of tox.ini, by its marks and its folder."""

import configparser
import dataclasses
import functools
import itertools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

import faults
from attnsuite.testing import problems
from attnsuite.testing.cases import CASES
from landing import BREADTH, ONCE_MORE, SLOW

TESTS = Path(__file__).parent
TOX = TESTS.parent / "tox.ini"


@dataclass(frozen=True)
class Selection:
    """What one pytest command of an environment runs."""

    environment: str
    marks: Expression
    keyword: str
    paths: tuple[Path, ...]

    def holds(self, item):
        if not is_within(item.path, self.paths) or self.keyword not in item.nodeid:
            return False
        marks = {mark.name for mark in item.iter_markers()}
        return self.marks.evaluate(lambda name, **_: name in marks)


@functools.cache
def is_within(path, folders):
    return any(path.is_relative_to(folder) for folder in folders)


@dataclass
class Collected:
    """Plugin: the tests that pytest finds."""

    items: list[pytest.Item] = field(default_factory=list)

    def pytest_collection_finish(self, session):
        self.items = list(session.items)


# Clusters, traced commands and whole servings take time: `tox` alone leaves them out.
ASKED_FOR = ("ray", "sandbox", "serving")


def selections():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(TOX)
    names = [name.strip() for name in tox["tox"]["env_list"].split(",")] + [*ASKED_FOR]
    for name in names:
        section = f"testenv:{name}"
        commands = tox[section].get("commands", "") if section in tox else ""
        for command in commands.replace("\\\n", " ").splitlines():
            words = shlex.split(command)
            if words[:1] == ["pytest"]:
                option = dict(itertools.pairwise(words))
                paths = [re.sub(r"^\{tox_root\}/", "", word) for word in words if word.startswith("{tox_root}/")]
                marks = Expression.compile(option.get("-m", "not nothing"))
                yield Selection(name, marks, option.get("-k", ""), tuple(TOX.parent / path for path in paths))


def without_environment(items):
    found = list(selections())
    return [item.nodeid for item in items if not any(selection.holds(item) for selection in found)]


@pytest.fixture(scope="module")
def items():
    collected = Collected()
    with pytest.MonkeyPatch.context() as environment:
        for name in ("ATTNSUITE_LANDING", "ATTNSUITE_FIRST_RAN"):  # with which .ci/run leaves some out
            environment.delenv(name, raising=False)
        code = pytest.main(
            ["--collect-only", "--quiet", "--quiet", "-p", "no:cacheprovider", str(TESTS)], plugins=[collected]
        )
    assert code == pytest.ExitCode.OK
    return collected.items


def test_every_test_belongs_to_an_environment(items):
    assert len(items) > 4000
    assert not without_environment(items)


def elsewhere(items):
    """Tests that the environment of one of their marks leaves out.

    Where annotations are checked (``standard``), no type is wrong and nothing is timed.
    """
    of_mark = {}
    for selection in selections():
        of_mark.setdefault(selection.environment, []).append(selection)

    def left_out(item):
        marks = {mark.name for mark in item.iter_markers()}
        asked = [
            of_mark[name]
            for name in (marks - {"standard"} if "speed" in marks else marks) & set(of_mark)
            if "wrong_types" not in marks
        ]
        return any(not any(one.holds(item) for one in found) for found in asked)

    return [item.nodeid for item in items if left_out(item)]


def test_every_test_runs_in_the_environments_of_its_marks(items):
    assert not elsewhere(items)


def test_every_fault_of_the_table_names_tests_that_exist(items):
    names = [item.nodeid for item in items]
    gone = [
        test
        for fault in faults.FAULTS
        for test in fault.tests
        if not any(dataclasses.replace(fault, tests=(test,)).holds(name) for name in names)
    ]
    assert not gone


@pytest.mark.parametrize(("mark", "found"), [("kvax", elsewhere), ("compile", without_environment)])
def test_test_that_no_environment_collects_is_found(items, monkeypatch, mark, found):
    """No environment of these marks looks into the file's folder, and the others leave ``compile`` to its own."""
    fallback = next(item for item in items if item.path.name == "test_fallback.py")
    assert not found([fallback])
    monkeypatch.setattr(fallback, "iter_markers", lambda *_: iter([getattr(pytest.mark, mark).mark]))
    assert found([fallback]) == [fallback.nodeid]


def test_every_command_of_an_environment_selects_tests_of_its_own(items):
    # Of files that need a package of their environment, only what is collected without it is here.
    idle = [selection for selection in selections() if not any(map(selection.holds, items))]
    assert not idle


def asked(names):
    """Features, options and dtypes of these problems."""
    found = set()
    for name in names:
        layout, terms, inputs = problems.arrays(CASES[name], name)
        spec = problems.spec_of(CASES[name], layout, terms, inputs)
        found |= {*spec.features(), spec.dtype, *CASES[name].options}
    return found


def test_before_a_change_lands_a_backend_is_held_to_every_feature_dtype_and_option():
    everything, judged = asked(CASES), set(BREADTH) - {*ONCE_MORE["test_matches_the_oracle"]}
    assert asked(judged - {*SLOW["test_matches_the_oracle"]}) == everything
    assert asked(judged - {"chunk-causal"}) < everything


def test_files_with_the_core_of_a_backend_are_those_that_pytest_alone_imports(items):
    """By their text (conftest.py), since a file that runs nothing is not imported."""
    files = {item.path for item in items if item.get_closest_marker("core")}
    assert files
    assert all("(Conformance)" in path.read_text() for path in files)


def test_most_tests_wait_for_nothing(items):
    waiting = [item for item in items if item.get_closest_marker("thorough")]
    assert 500 < len(waiting) < len(items) / 3
