"""The kind of :class:`.model_case.ModelCase`: its rows, and how its cells are judged and timed.

The numbers of a model are judged against the standard backend in float32, since there is no transformer in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from attnsuite.backends import AttentionSpec, Target
from attnsuite.models import TextFile
from attnsuite.models.planning import attention_spec

from .. import peers
from ..cell import Cell, Means, Prepared, Request
from ..measure import execution
from ..measure.program import Draw
from ..measure.tensor_errors import as_model_error
from ..record import TensorError
from .kind import Kind, of_backends, of_peers
from .model_case import ModelCase

_STANDARD = "standard_"


class Model(Kind):
    """The kind of :class:`ModelCase`. What imports flax is imported where it is used."""

    titles: ClassVar = {
        "model_prefill": "model prefill",
        "model_decode": "model decode",
        "model_train": "model train step",
    }
    phases: ClassVar = {"model_prefill": "prefill", "model_decode": "decode"}
    case: ClassVar = ModelCase
    peers: ClassVar = ("transformers", "transformers_unthrottled")
    judges_in_subprocess: ClassVar = True

    def cells(self, case: ModelCase, request: Request) -> Iterable[Cell]:
        """A cell per backend and peer. Raises InputError for a model that is not known."""
        from . import model_program  # noqa: PLC0415

        config = model_program.model_config(case)
        found = of_backends(case, request, lambda row: model_program.resolutions_of(case, config, row))
        return [*found, *of_peers(case, request, self.peers)]

    def of_checkpoint(self, text: Mapping[str, Any], timed: Mapping[str, Any]) -> Iterable[ModelCase]:
        """What the first token costs, and each more."""
        return ModelCase(kind="model_prefill", **timed), ModelCase(kind="model_decode", **timed)

    def spec(self, case: ModelCase) -> AttentionSpec | None:
        """The attention of a layer, if all layers have the same type."""
        from . import model_program  # noqa: PLC0415 (flax)

        config = model_program.model_config(case)
        if len(config.attention_types) != 1:
            return None
        return attention_spec(config, *config.attention_types, **model_program.problem_of_layer(case, config))

    def write_reference(self, case: ModelCase, path: Path, text: TextFile | None, draw: Draw | None) -> None:
        """The standard backend's outputs, in float32 and in the case's own dtype, always for the same tokens."""
        _write(case, path, None)

    def judge(
        self, case: ModelCase, outputs: Mapping[str, Any], reference: Path, draw: Draw | None, *, exact: bool
    ) -> dict[str, TensorError]:
        """By the standard backend."""
        with np.load(reference, allow_pickle=False) as arrays:
            return {
                name: as_model_error(tensor, arrays[name], arrays[_STANDARD + name], case.dtype)
                for name, tensor in outputs.items()
            }

    def recheck(self, case: ModelCase, outputs: Mapping[str, Any], draw: Draw, choice: int) -> dict[str, TensorError]:
        """The logits of a timed call, or its loss, by the standard backend."""
        with tempfile.TemporaryDirectory() as folder:
            _write(case, path := Path(folder) / "model.npz", draw)
            return self.judge(case, outputs, path, draw, exact=True)

    def prepare(self, cell: Cell, case: ModelCase, means: Means) -> Prepared:
        """Make the timed program ready. Its outputs answer; of a train step, those of the judged program."""
        from . import model_program  # noqa: PLC0415

        model = model_program.open_model(case)
        is_peer = cell.row in peers.PEERS
        program = peers.program(cell.row, case) if is_peer else model_program.model_program(case, model, cell.row)
        outputs, timed, outcome = execution.execute(program, means)
        if not is_peer and case.needs_grad:
            del outputs  # the next weights, in which a gradient cannot be judged
            outputs = execution.outputs_of(model_program.judged_program(case, model, cell.row))
        elif not is_peer:
            outputs = model_program.judged_outputs(outputs)
        outcome = dataclasses.replace(
            outcome,
            flops=model_program.model_flops(case, model.config),
            tokens=model_program.model_tokens(case),
            steps=model_program.model_steps(case),
            figures={} if is_peer or case.needs_grad else model_program.cache_figures(model.config),
            notes=() if is_peer else model_program.notes(case, model.config, cell.row),
        )
        return Prepared(outcome, timed, lambda _: outputs, functools.partial(model_program.timed_outputs, case))


def _write(case: ModelCase, path: Path, draw: Draw | None) -> None:
    from . import model_program  # noqa: PLC0415

    model = model_program.open_model(case)
    with jax.default_matmul_precision("highest"):
        wide = model_program.judged_program(case, model.with_config(dtype="float32"), "standard")
        expected = execution.outputs_of(wide, draw)
    standard = expected
    # A CPU multiplies float32 in float32 whatever the precision: the same program.
    if case.dtype != "float32" or Target.here().platform != "cpu":
        narrow = model_program.judged_program(case, model, "standard")
        standard = execution.outputs_of(narrow, draw)
    arrays = {name: np.asarray(tensor, np.float32) for name, tensor in expected.items()}
    arrays |= {_STANDARD + name: np.asarray(tensor, np.float32) for name, tensor in standard.items()}
    np.savez(path, allow_pickle=False, **arrays)


MODEL = Model()
