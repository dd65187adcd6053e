"""The suite of ``attnsuite run --model NAME``: every backend in one model, measured for quality and for speed.

Cases on text show what a backend loses; prefill and decode cases show what it costs. A backend with an extension adds
its own cases, where it is asked for. The cases name the checkpoint; :class:`ModelSuiteFlags` gives lengths and counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .cell import Case
from .errors import as_input
from .kinds import built_in, extensions
from .kinds.kind import Dtype, Least
from .suites import Suite
from .typed import Count

NAME = "checkpoint"  # the suite's name in records
SEQUENCES = 12  # the same for every row, so that their perplexities compare


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
        from .named_model import absolute  # noqa: PLC0415 (flax)

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

    from .named_model import absolute, checkpoint_of  # noqa: PLC0415 (flax)

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
    return Suite(flags.suite or NAME, tuple(cases))


def rows(requested: Sequence[str]) -> tuple[str, ...]:
    """The rows of the suite: the requested backends, and the rows that their extensions have beside them."""
    return tuple(dict.fromkeys([*requested, *(row for extension in _added(requested) for row in extension.ROWS)]))


def _added(backends: Sequence[str]) -> list[Any]:
    return [extension for name, extension in extensions().items() if name in backends]
