"""What the tests of the suite share: a foreign package of faulty backends, tiny suites, and the command itself."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnsuite.suite.command_line import main
from attnsuite.suite.record import Record
from attnsuite.suite.store import RunStore
from command import EMPTY, TINY, bring_workers_here, installed, known_machine

FAULTY = """
import dataclasses, os, signal, time
from attnsuite.backends.contract import Plan
from attnsuite.backends.features import FEATURES, Takes
from attnsuite.backends.standard import STANDARD

@dataclasses.dataclass(frozen=True)
class Faulty:
    name: str
    exact: bool = True

    def takes(self, target, mode):
        return Takes(features=frozenset(FEATURES))

    def refuses(self, spec, target, mode, options):
        if self.name == "undecided":
            raise ZeroDivisionError("no cores to deal heads to")
        if self.name == "refusing":
            return "refusing takes no head_dim at all.", "refusing does not like Mondays."
        if self.name == "elsewhere":
            return () if mode == "interpret" else ("elsewhere is for devices that are not here.",)
        return () if mode != "interpret" else ("no kernel.",)

    def plan(self, spec, layout, *, target, mode="native", options=None):
        if self.name == "hanging":
            time.sleep(1000)
        if self.name == "hungry":
            held = []
            while True:
                held.append(b"x" * 2**25)
                time.sleep(0.01)
        if self.name == "dying":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.name == "raising":
            raise RuntimeError("raising raised")
        if self.name == "leaving":
            raise SystemExit(0)
        if self.name == "surrogate":
            raise RuntimeError("half a character: \\udc80")
        attend = STANDARD.plan(spec, layout, target=target).attend
        factor = 1.01 if self.name == "wrong" else float("nan") if self.name == "nan" else 1.0
        def run(q, k, v, layer, carry):
            print("a backend may print")
            out, carry = attend(q, k, v, layer, carry)
            return out * factor, carry
        return Plan(run)

class Listless(Faulty):
    def takes(self, target, mode):
        raise AttributeError("no attribute 'sm_count'")

def __getattr__(name):
    return Listless(name) if name == "listless" else Faulty(name)
"""
# Each of these cannot be asked what it takes: (entry point, what its reason says).
UNASKABLE = {
    "undecided": ("faulty_backends:undecided", "ZeroDivisionError: no cores to deal heads to"),
    "listless": ("faulty_backends:listless", "AttributeError: no attribute 'sm_count'"),
    "unloadable": ("faulty_on_import:BACKEND", "RuntimeError: built for another JAX"),
}
FAULTY_NAMES = (
    *("elsewhere", "hanging", "hungry", "dying", "raising", "leaving", "wrong", "nan", "refusing", "surrogate"),
    *UNASKABLE,
)


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an installed package that brings faulty backends by entry point."""
    references = {name: f"faulty_backends:{name}" for name in FAULTY_NAMES}
    references |= {name: reference for name, (reference, _) in UNASKABLE.items()}
    entries = "".join(f"{name} = {reference}\n" for name, reference in references.items())
    modules = {"faulty_backends": FAULTY, "faulty_on_import": "raise RuntimeError('built for another JAX')\n"}
    return installed(tmp_path_factory.mktemp("foreign"), f"[attnsuite.backends]\n{entries}", **modules)


@pytest.fixture(autouse=True)
def _started_by_a_terminal() -> Iterator[None]:
    """nohup and jobs in the background hand on signals that are ignored; the processes here start without."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in usual if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite file with two cases that take no time."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that comes with the package, as a directory of one's own."""
    from attnsuite.models import load_shipped, save  # noqa: PLC0415 (few of these tests have a model)

    directory = tmp_path_factory.mktemp("shipped") / "tiny"
    save(load_shipped(), directory)
    return directory


@pytest.fixture
def new_run(tmp_path: Path) -> Path:
    """A run directory where the machine's peaks are known already, which saves measuring them."""
    return known_machine(tmp_path / "run")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run whose workers are this process: for claims about what is recorded and shown, not about processes."""
    bring_workers_here(monkeypatch, tmp_path_factory.mktemp("worker"))


@pytest.fixture(scope="session")
def faulty_names() -> tuple[str, ...]:
    """Backends of the foreign package."""
    return FAULTY_NAMES


@pytest.fixture(scope="session")
def unaskable() -> dict[str, str]:
    """Those of them that raise when they are loaded or asked, and what they raise."""
    return {name: raised for name, (_, raised) in UNASKABLE.items()}


@pytest.fixture(scope="session")
def example_record() -> Record:
    """A record with nothing in it."""
    return EMPTY


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with one record, which has nothing in it."""
    folder = tmp_path / "run"
    with RunStore(folder, resume=False) as store:
        store.append([EMPTY])
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The sentence with which a command is refused: exit code 2, one line on stderr (its own parser prints a box)."""

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        error = capsys.readouterr().err
        assert ended.value.code == 2, error
        assert "Traceback" not in error
        assert "For full helptext" in error or (error.startswith("attnsuite: ") and error.count("\n") == 1), error
        return " ".join(error.split())

    return run


@dataclasses.dataclass(frozen=True)
class Attnsuite:
    """The command as a process of its own."""

    start: Callable[..., subprocess.Popen[str]]
    finish: Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def attnsuite() -> Attnsuite:
    """Start the command, and wait for it."""
    return Attnsuite(_start, _finish)


def _start(*arguments: object, path: Path | None = None) -> subprocess.Popen[str]:
    """``attnsuite`` as it is installed, as a process of its own, with ``path`` to import from."""
    entries = [*([str(path)] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "attnsuite", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entries), "JAX_PLATFORMS": "cpu"},
    )


def _finish(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err
