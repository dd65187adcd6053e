"""What all tests share: fixed hypothesis, marks of folders, and the part of them that ``pytest`` alone runs.

``pytest`` without a path, ``-m`` or ``-k`` runs what would break first for a user (:data:`FIRST`), on two processes and
on the CPU, and ends with what it left out. ``pytest --all`` leaves nothing out; the environments of tox.ini name paths.
``.ci/run`` leaves out what is marked thorough (``landing.py``), by ``ATTNSUITE_LANDING``; ``.ci/run --all`` does not.
"""

from __future__ import annotations  # pytest 8.3 has not every type that is named here

import functools
import gc
import os
import pwd
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX and NumPy read these when they are imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest

from attnsuite.testing import Conformance
from attnsuite.testing.cases import CASES
from landing import BREADTH, CORE, ONCE_MORE, SLOW, is_landing

# derandomize: a failure is the same on every machine; deadline None: a first example compiles.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None, print_blob=False)
hypothesis.settings.load_profile("fixed")


TESTS = Path(__file__).parent


# What breaks first for a user, beside the core of every backend's conformance suite: files, or parts of them.
FIRST = (
    *("backends/test_attention.py", "backends/test_isolation.py", "backends/test_resolve.py"),
    *("suite/test_command_line.py", "suite/test_speed.py", "suite/test_caller.py", "suite/test_doctor.py"),
    *("models/test_shipped.py", "models/test_generate.py", "models/test_weights.py"),
    *("reports/test_answer.py", "reports/test_render.py", "reports/test_published.py"),
)
_FURTHER = {
    "backends/kvax": "Kvax beyond its core",
    "backends/kascade": "sparse attention: its kernels, every defect known, the gate",
    "backends/flash_cpu": "the native kernels beyond their core",
    "backends": "all of these, and other backends beyond their core",
    "models": "checkpoints, families, training, serving",
    "reports": "pages beyond the answer, browsers",
    "suite": "every verb, faults, compilers of absent devices",
    "test_*.py": "packaging, documentation, examples",
}
# These take longest, each in one process of xdist (--dist loadscope --no-loadscope-reorder). They begin first, so that
# none of them is left for the end, when the other process has nothing to do.
LONGEST = (
    *("test_tutorial.py", "test_docs.py", "suite/test_cheats.py", "suite/test_kascade.py", "suite/test_sharded.py"),
    *("suite/test_judging.py", "suite/test_faults.py", "suite/test_interruption.py", "suite/test_lone_device.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all``."""
    parser.addoption("--all", action="store_true", help="every test, also where no path is named")


def _runs_first_alone(config: pytest.Config) -> bool:
    chosen = config.option.all or config.option.markexpr or config.option.keyword
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen


def _runs_first(config: pytest.Config) -> bool:
    """Whether the first run alone; a worker of xdist is given paths, and reads the variable."""
    return _runs_first_alone(config) or os.environ.get("ATTNSUITE_FIRST") == "1"


@pytest.hookimpl(tryfirst=True)  # before xdist looks
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Two processes, and programs compiled without optimisation, which takes half the time."""
    if _runs_first_alone(config) and not hasattr(config, "workerinput"):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        os.environ["ATTNSUITE_FIRST"] = "1"
        if getattr(config.option, "numprocesses", None) is None and config.pluginmanager.has_plugin("xdist"):
            config.option.numprocesses = 2


@functools.cache
def _path(path: Path) -> str | None:
    """The path as this file writes it; None of a file of somebody who inherits the suite."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else None


def _is_first(item: pytest.Item) -> bool:
    path = _path(item.path)
    if path is None or item.get_closest_marker("thorough") is not None:
        return False
    return path in FIRST or (item.get_closest_marker("core") is not None and path.startswith("backends/"))


def _case_of(item: pytest.Item) -> str | None:
    """The case of the conformance suite that a test is about, if there is one."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = parameters.get("taken", parameters.get("case"))
    return case if isinstance(case, str) and case in CASES else None


def _ran_before(item: pytest.Item) -> bool:
    """Whether the README's command has run it in .ci/run, with the newest JAX and compiled in the same way.

    A newer Python has the same JAX, and runs all others.
    """
    ran = os.environ.get("ATTNSUITE_FIRST_RAN")
    return bool(ran) and sys.version_info[:2] >= tuple(map(int, ran.split("."))) and _is_first(item)


def _waits(item: pytest.Item) -> bool:
    """Whether .ci/run leaves it to .ci/run --all."""
    return is_landing() and item.get_closest_marker("thorough") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where the first run alone, files without one of them are not even imported."""
    if collection_path.suffix != ".py" or not _runs_first(config) or not collection_path.is_relative_to(TESTS):
        return None
    path = collection_path.relative_to(TESTS).as_posix()
    has_a_core = path.startswith("backends/") and "(Conformance)" in collection_path.read_text("utf-8")
    return None if path in FIRST or has_a_core or collection_path.name == "conftest.py" else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was left out, and the command for it."""
    if not _runs_first_alone(config):
        return
    terminalreporter.section("left out, which .ci/run --all runs")
    for folder, content in _FURTHER.items():
        terminalreporter.line(f"{content:62} pytest --all tests/{folder}")


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test carries the names of its folders as marks: tests/backends/kvax gives backends and kvax."""
    for item in items:
        path = _path(item.path)
        if path is None:
            continue
        for folder in path.split("/")[:-1]:
            item.add_marker(folder)
        cls: Any = getattr(item, "cls", None) or object
        of_a_suite = issubclass(cls, Conformance)
        if of_a_suite:
            item.add_marker("conformance")
        name = str(getattr(item, "originalname", ""))
        if name == Conformance.test_matches_the_oracle.__name__ and item.callspec.params["taken"] in CORE:
            item.add_marker("core")
        number = item.callspec.params.get("number") if of_a_suite and hasattr(item, "callspec") else None
        sweeps = number is not None and (cls.backend, number) != ("flash_cpu", cls.random_problems[0])
        slow = of_a_suite and (cls.mode == "interpret" or cls.backend == "chunked")
        once_more = (*ONCE_MORE.get(name, ()), *(SLOW.get(name, ()) if slow else ()))
        case = _case_of(item)
        if sweeps or case not in (None, *BREADTH) or case in once_more:
            item.add_marker("thorough")
    items.sort(key=lambda item: _path(item.path) not in LONGEST)
    if _runs_first(config):
        left_out = {item: None for item in items if not _is_first(item)}
    else:
        left_out = {item: None for item in items if _ran_before(item) or _waits(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Garbage is collected less often: tracing makes many objects, and nearly none of them is in a circle."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The present user has no home directory, as an arbitrary user of a container."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
