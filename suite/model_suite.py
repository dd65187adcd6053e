"""The suite of ``attnsuite run --model NAME``: every backend in one model, measured for quality and for speed.

Cases on text show what a backend loses; prefill and decode cases show what it costs. If Kascade is asked for, cases
with its controls are added. The cases name the checkpoint; :class:`ModelSuiteWords` gives lengths and counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .cell import Case
from .errors import InputError
from .kinds import make_case
from .kinds.kascade import guide
from .kinds.kascade.selection import SelectionCase
from .kinds.kind import Dtype, Least
from .suites import Suite
from .typed import Count

NAME = "checkpoint"  # the suite's name in records
TOP_K, TILE_SIZE = 0.125, 16
SEQUENCES = 12  # the same for every row, so that their perplexities compare
# Rows that stand beside Kascade's on a text: dense, the best possible selection, and controls that have to fail.
ROWS = ("dense", "oracle_query", "kascade", "sinks_window", "random_tiles")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSuiteWords:
    """The flags of the command line: the checkpoint, and sizes that replace the suite's.

    With ``guide`` the suite is ``kascade-guide`` (``kinds/kascade/guide.py``).
    """

    model: str
    guide: bool = False
    sequence: Least = 512
    batch: Count = 1
    new_tokens: Count = 32
    dtype: Dtype | None = None

    def as_json(self) -> dict[str, Any]:
        """The flags that were given, for the manifest of a run."""
        from .named_model import absolute  # noqa: PLC0415 (flax)

        found = dataclasses.asdict(self) | {"model": absolute(self.model)}
        return {name: value for name, value in found.items() if name != "guide" or value}


def model_suite(words: ModelSuiteWords, *, kascade: bool) -> Suite:
    """The cases of a checkpoint. Raises InputError for an unknown name, and for a checkpoint that cannot be read."""
    from attnsuite.models.checkpoint import read_config  # noqa: PLC0415 (flax)

    from .named_model import absolute, checkpoint_of  # noqa: PLC0415 (flax)

    with checkpoint_of(words.model) as directory:
        try:
            config = read_config(directory)
        except ValueError as error:
            raise InputError(f"--model {words.model!r}: {error}") from error
    model, anchors = absolute(words.model), max(2, config.num_layers // 4)
    shared: dict[str, Any] = {"model": model, "sequence": words.sequence}
    timed = shared | {
        "dtype": words.dtype or config.dtype,
        "batch": words.batch,
        "ragged": words.batch > 1,
        **({"top_k": TOP_K, "tile_size": TILE_SIZE, "anchors": anchors} if kascade else {}),
    }
    cases: list[Case] = [
        make_case({"kind": "perplexity", **shared, "sequences": SEQUENCES, "dtype": timed["dtype"]}),
        make_case({"kind": "model_prefill", **timed}),
        make_case({"kind": "model_decode", "new_tokens": words.new_tokens, **timed}),
    ]
    if words.guide:
        if set(config.layer_types) != {"global"}:
            others = ", ".join(sorted(set(config.layer_types) - {"global"}))
            raise InputError(
                f"--model {words.model!r} has layers of type {others}; --suite {guide.NAME} is for models "
                "whose layers all see the whole context before them."
            )
        return Suite(guide.NAME, (*cases, *guide.guide_cases(config, SEQUENCES, shared)))
    if kascade and set(config.layer_types) == {"global"}:
        chosen: dict[str, Any] = {
            "top_k": TOP_K,
            "tile_size": TILE_SIZE,
            "anchors": str(anchors),
            "sequences": SEQUENCES,
        }
        cases += [
            SelectionCase(kind="kascade_text", phase=phase, **shared, **chosen) for phase in ("prefill", "decode")
        ]
    return Suite(NAME, tuple(cases))


def rows(asked: Sequence[str]) -> tuple[str, ...]:
    """The rows of the suite: the backends that are asked for, and if Kascade is one of them, the rows beside it."""
    return tuple(dict.fromkeys([*asked, *(ROWS if "kascade" in asked else ())]))
