"""Hostile input, drawn by hypothesis: what users, disks, other programs and other versions may hand to ``attnsuite``.

Each kind takes something valid, changes it at random and gives it to the command line in this process. Whatever comes
out is an exit code and, for code 2, one sentence on stderr: never a traceback, never a warning of Python's. Nothing is
measured: where work would begin, :class:`Begins` ends the command.

    PYTHONPATH=tests python tests/mutations.py --count 2000 --seed 0            # every kind
    PYTHONPATH=tests python tests/mutations.py --count 500 --kinds records,suites
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import strategies as st

import hostile_checkpoints
import hostile_inputs
from attnsuite.backends import BackendFallbackWarning
from attnsuite.models import weights as model_weights
from attnsuite.suite import command_line, compile_run, diagnosis, layerwise_perplexity, training_run, tuning
from attnsuite.suite.grid import execute, process, run_grid
from attnsuite.suite.grid.work import find_cells
from attnsuite.suite.kinds.kascade import calibration_run
from attnsuite.suite.measure import environment
from hostile_inputs import ENVIRONMENT, TRAIN, Commands, Hand, Valid, make_valid
from hostile_words import flags

SLOW_SECONDS = 5.0  # of CPU; nothing here needs one
_MEMORY = 12 * 2**30  # bytes of data, beyond which an input fails with a MemoryError
_Kind = Callable[[Hand, Path, Valid], Commands]

KINDS: dict[str, _Kind] = {kind.__name__: kind for kind in (*hostile_inputs.KINDS, *hostile_checkpoints.KINDS, flags)}


def missing(kind: str) -> list[str]:
    """The libraries that the inputs of a kind need and that are not installed."""
    return [name for name in hostile_checkpoints.NEEDS.get(kind, ()) if importlib.util.find_spec(name) is None]


class Begins(BaseException):
    """The command took its input and would begin to work."""


@dataclasses.dataclass
class Tally:
    """What became of the inputs of one kind. ``codes`` counts exit codes, and ``begins``; ``refused`` are sentences."""

    tried: int = 0
    refused: list[str] = dataclasses.field(default_factory=list)
    codes: dict[object, int] = dataclasses.field(default_factory=dict)
    slow: list[str] = dataclasses.field(default_factory=list)
    tracebacks: list[str] = dataclasses.field(default_factory=list)


def run_kind(
    kind: str, count: int, seed: int, valid: Valid, *, spoils: bool = True, say: Callable[[str], None] = lambda _: None
) -> Tally:
    """Try ``count`` inputs of a kind; the same ones for the same seed and version of hypothesis."""
    tally = Tally()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.data())
    def each(data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
            for words in KINDS[kind](Hand(data.draw, spoils), Path(folder), valid):
                _try(tally, words, Path(folder))
                if tally.tried % 200 == 0:
                    say(f"{kind}: {_counts(tally)}")

    with nothing_begins():
        each()
    return tally


def _try(tally: Tally, words: list[str], folder: Path) -> None:
    begin = time.process_time()
    code, said, trouble = attempt(words)
    seconds = time.process_time() - begin
    tally.tried += 1
    tally.codes[code] = tally.codes.get(code, 0) + 1
    tally.refused += [said] if code == 2 else []
    told = " ".join(words).encode("ascii", "backslashreplace").decode()[:300]
    if trouble:
        kept = Path(tempfile.mkdtemp(prefix="mutation-kept-"))
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(folder, kept, dirs_exist_ok=True, symlinks=True)
        tally.tracebacks.append(f"attnsuite {told}\n(in {kept})\n{trouble}")
    if seconds > SLOW_SECONDS:
        tally.slow.append(f"{seconds:.1f} s: attnsuite {told}")


def attempt(words: list[str]) -> tuple[object, str, str | None]:
    """The exit code of a command line (``begins`` where work would begin), its stderr, and what is wrong with that."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace"), io.StringIO()
    code: object = None
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            warnings.simplefilter("error")
            command_line.main(words)
    except SystemExit as ending:
        code = ending.code
    except Begins:
        return "begins", "", None
    except BaseException:  # noqa: BLE001 (this is what is looked for)
        return "traceback", "", traceback.format_exc()[-3000:]
    said = err.getvalue()
    if code not in (0, 1, 2, 3) or "Traceback" in said:
        return code, said, f"exit code {code}: {said[:500]}"
    is_usage = said.lstrip().startswith(("\u256d", "\u2554", "usage", "Required", "Parsing", "Unrecognized"))
    if code == 2 and not is_usage and (said.count("\n") != 1 or not said.startswith("attnsuite: ")):
        return code, said, f"exit code 2 without its sentence: {said[:500]!r}"
    return code, said, None


@contextlib.contextmanager
def valid_places() -> Iterator[Valid]:
    """What the kinds start from: a checkpoint, a calibration and a training run that are as they should be."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        valid = make_valid(Path(folder))
        with nothing_begins(), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Begins):
            command_line.main([*TRAIN, "--out", str(valid.training.parent)])
        yield valid


@contextlib.contextmanager
def nothing_begins() -> Iterator[None]:
    """Where a command would begin to work it ends instead."""

    def begins(*_: Any, **__: Any) -> Any:
        raise Begins

    def probe_here(request: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BackendFallbackWarning)  # as in the worker
            find_cells(request.backends, request.cases, request.text, request.all_cores)
        return ENVIRONMENT, []

    def steps(request: Any, problem: Any, started: Any, out: Path, **_: Any) -> None:
        if (out / training_run.LOSSES).is_file():
            training_run._keep(out / training_run.LOSSES, 2)
        raise Begins

    replaced: list[tuple[Any, str, Any]] = [
        (calibration_run, "calibrate", begins),
        (diagnosis, "examine_here", begins),
        (compile_run, "execute", begins),
        (execute, "References", begins),
        (environment, "describe", lambda: ENVIRONMENT),
        (model_weights, "_write", begins),
        (process.Worker, "__init__", begins),
        (run_grid, "probe", probe_here),
        (layerwise_perplexity, "streamed_nats", begins),
        (training_run, "_started", lambda *_: None),
        (training_run, "_steps", steps),
        (training_run, "describe", lambda: ENVIRONMENT),
        (tuning, "rank_candidates", begins),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, other in replaced:
            stack.enter_context(mock.patch.object(module, name, other))
        yield


def main() -> int:
    """Try every kind and say what came of it; exit status 1 where there was a traceback or a slow input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="draws of each kind (200), each for 1 to 4 commands")
    parser.add_argument("--seed", type=int, default=0)
    drawn = [kind for kind in KINDS if not missing(kind)]
    parser.add_argument("--kinds", default=",".join(drawn), help="of " + ", ".join(KINDS))
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.RLIM_INFINITY))
    with valid_places() as valid:
        tallies = {kind: run_kind(kind, asked.count, asked.seed, valid, say=_say) for kind in asked.kinds.split(",")}
    whole = Tally()
    for kind, tally in tallies.items():
        for told in (*tally.tracebacks, *tally.slow):
            _say(f"{told}\n")
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(tally.codes.items(), key=str))
        _say(f"{kind:<16}{_counts(tally)}; exit codes {codes}")
        whole.tried += tally.tried
        whole.tracebacks += tally.tracebacks
        whole.slow += tally.slow
    _say(f"{'all':<16}{_counts(whole)}")
    return int(bool(whole.tracebacks or whole.slow))


def _counts(tally: Tally) -> str:
    return f"{tally.tried} tried, {len(tally.tracebacks)} tracebacks, {len(tally.slow)} slow"


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 (this is a command)


if __name__ == "__main__":
    sys.exit(main())
