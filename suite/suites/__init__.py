"""Named suites, each a TOML file beside this module that is read as a user's is (``suite_file.py``).

Also the suite of ``attnsuite run --model NAME``: every backend in one checkpoint. Cases on text show what a backend
loses; prefill and decode cases show what it costs. A backend with an extension adds its own cases, where it is asked
for.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from attnsuite.backends import names, registry
from attnsuite.sentences import nearest

from ..cell import Case
from ..errors import InputError, as_input
from ..kinds import built_in, extensions, kind_of
from ..kinds.kind import Dtype, Least
from ..suite_file import read_suite_file
from ..typed import Count

C = TypeVar("C", bound=Case)

CHECKPOINT = "checkpoint"  # the name of the suite of a checkpoint in records
SEQUENCES = 12  # the same for every row, so that their perplexities compare
_LISTED, _NEAREST = 20, 8  # cases that a refusal names: all of so few, else those whose names are nearest


@dataclasses.dataclass(frozen=True, slots=True)
class Suite:
    """A name and the cases under it; the names of the cases are unique.

    The rows are ``backends`` (empty: all), unless others are asked for, and beside them ``peers``. With ``exact_only``
    approximate backends are measured only where they are asked for: without calibration and controls, which their own
    suites have, their rows show what nobody would use. With ``all_cores`` each backend on a CPU is also measured with
    one device per core.
    """

    name: str
    cases: tuple[Case, ...]
    backends: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    all_cores: bool = False
    exact_only: bool = False

    def __post_init__(self) -> None:
        if not self.cases:
            raise InputError(f"suite {self.name} has no cases; add a [[case]] table.")

    def default_backends(self) -> tuple[str, ...]:
        """The backends that are measured unless others are asked for."""
        return self.backends or tuple(name for name in names() if registry.get(name).exact or not self.exact_only)


def _load(path: Path) -> Suite:
    read, cases = read_suite_file(path)
    with as_input(f"suite file {path}: "):
        return Suite(read.name or path.stem, cases, read.backends, read.peers, read.all_cores, read.exact_only)


def shipped(name: str) -> Suite:
    """The suite in the file ``name.toml`` beside this module."""
    return _load(Path(__file__).with_name(f"{name}.toml"))


def _device() -> Suite:
    """Attention calls first, then what is in bfloat16: a run that is cut has done what is of the most use.

    The kernels of GPUs, Kvax among them, take no float32.
    """
    device = shipped("device")
    calls = [case for case in (*QUICK.cases, *device.cases) if kind_of(case.kind).is_call]
    others = [case for case in QUICK.cases if case not in calls]
    calls.sort(key=lambda case: getattr(case, "dtype", "") != "bfloat16")
    half = (dataclasses.replace(case, dtype="bfloat16", name="") for case in others if hasattr(case, "dtype"))  # pyright: ignore[reportArgumentType]  (every case is a dataclass)
    return dataclasses.replace(device, cases=(*calls, *half, *others))


QUICK = shipped("quick")
DEVICE, FULL, CPU_SPEED = _device(), shipped("full"), shipped("cpu-speed")
_ADDED = (name for added in extensions().values() for name in added.SUITES)
_NAMED = (QUICK, DEVICE, FULL, CPU_SPEED, *map(shipped, ("caller", *_ADDED, "serving", "sharded", "curves")))
SUITES = {suite.name: suite for suite in _NAMED}


def find_suite(name: str) -> Suite:
    """The named suite, or the one in a TOML file. Raises InputError naming those that exist.

    >>> find_suite("quick").cases[0].name
    'forward-backward-s2048-h8k8-d64-f32'
    """
    if name in SUITES:
        return SUITES[name]
    if name.endswith(".toml"):
        return _load(Path(name))
    known = f"use {', '.join(SUITES)}, or the path of a .toml file."
    raise InputError(f"suite {name!r} is not known; {known}{nearest(name, SUITES)}")


def select(cases: Sequence[C], patterns: Sequence[str]) -> tuple[C, ...]:
    """The cases whose name matches any of the glob patterns. Raises InputError for a pattern that matches none."""
    known = [case.name for case in cases]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            if len(known) <= _LISTED:
                which = f"the cases are {', '.join(known)}.{nearest(pattern, known)}"
            else:
                near = difflib.get_close_matches(pattern, known, n=_NEAREST, cutoff=0)
                which = f"of the {len(known)} cases the nearest are {', '.join(near)}."
            raise InputError(f"no case matches {pattern!r}; {which}")
    return tuple(case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns))


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` (from 1) of ``count`` parts of the cases: every ``count``-th case, whole."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def select(self, cases: Sequence[C]) -> tuple[C, ...]:
        """The cases of this part. Raises InputError if there are more parts than cases."""
        if self.count > len(cases):
            raise InputError(f"--shard {self} is of {len(cases)} cases; use at most {len(cases)} shards.")
        return tuple(cases[self.number - 1 :: self.count])


def parse_shard(text: str) -> Shard:
    """The shard ``i/n``, with i from 1 to n. Raises InputError.

    >>> parse_shard("2/3").select("abcde")
    ('b', 'e')
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    shard = Shard(int(match[1]), int(match[2])) if match else Shard(0, 0)
    if not 1 <= shard.number <= shard.count:
        raise InputError(f"--shard {text!r} must be i/n with i from 1 to n, such as 1/4.")
    return shard


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSuiteFlags:
    """The flags of the command line: the checkpoint, and sizes that replace the suite's.

    ``suite`` is the suite that an extension makes for a checkpoint (:func:`model_suites`), if it was asked for.
    """

    model: str
    suite: str = ""
    sequence: Least = 512
    batch: Count = 1
    dtype: Dtype | None = None

    def as_json(self) -> dict[str, Any]:
        """The flags that were given, for the manifest of a run."""
        from ..named_model import absolute  # noqa: PLC0415 (flax)

        found = dataclasses.asdict(self) | {"model": absolute(self.model)}
        return {name: value for name, value in found.items() if name != "suite" or value}


def model_suites() -> dict[str, Any]:
    """The suites that extensions make for a checkpoint, by name."""
    return {found.MODEL_SUITE: found for found in extensions().values()}


def model_suite(flags: ModelSuiteFlags, backends: Sequence[str] = ()) -> Suite:
    """The cases of a checkpoint, with those of the extensions of ``backends``.

    Raises InputError for an unknown name, and for a checkpoint that cannot be read.
    """
    from attnsuite.models.checkpoint import read_config  # noqa: PLC0415 (JAX)

    from ..named_model import absolute, checkpoint_of  # noqa: PLC0415 (flax)

    with checkpoint_of(flags.model) as directory, as_input(f"--model {flags.model!r}: "):
        config = read_config(directory)
    added = [model_suites()[flags.suite]] if flags.suite else _added(backends)
    shared: dict[str, Any] = {"model": absolute(flags.model), "sequence": flags.sequence}
    of_text, dtype = shared | {"sequences": SEQUENCES}, {"dtype": flags.dtype or config.dtype}
    timed = shared | dtype | {"batch": flags.batch, "ragged": flags.batch > 1}
    for extension in added:
        timed |= extension.model_sizes(config)
    kinds = dict.fromkeys(built_in().values())
    cases: list[Case] = [case for kind in kinds for case in kind.of_checkpoint(of_text | dtype, timed)]
    for extension in added:
        cases += extension.model_cases(config, of_text, flags.suite)
    return Suite(flags.suite or CHECKPOINT, tuple(cases))


def model_rows(requested: Sequence[str]) -> tuple[str, ...]:
    """The rows of the suite: the requested backends, and the rows that their extensions have beside them."""
    return tuple(dict.fromkeys([*requested, *(row for extension in _added(requested) for row in extension.ROWS)]))


def _added(backends: Sequence[str]) -> list[Any]:
    return [extension for name, extension in extensions().items() if name in backends]
