"""A pass of a whole transformer: the case, and how its cells are judged and timed.

The numbers of a model are judged against the standard backend in float32, since there is no transformer in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import numpy as np

from attnsuite.backends import AttentionSpec, Target

from .. import peers
from ..cell import Cell, Means, Prepared, Request
from ..errors import InputError
from ..measure import execution
from ..measure.fresh import Draw
from ..measure.tensor_errors import as_model_error
from ..record import TensorError
from ..typed import Count, Seed
from .kind import (
    SHORT_DTYPE,
    Dtype,
    Kernel,
    Kind,
    Layers,
    Share,
    check_fields,
    model_word,
    name_case,
    of_backends,
    of_peers,
)

if TYPE_CHECKING:
    from attnsuite.models import TextFile

ModelKind = Literal["model_prefill", "model_decode", "model_train"]
PHASES: dict[str, ModelKind] = {"prefill": "model_prefill", "train": "model_train", "decode": "model_decode"}
_STANDARD = "standard_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A pass of a whole transformer: prefill, decode of ``new_tokens`` after a prompt, or one train step.

    ``model`` is a checkpoint that ships here, or a preset with random weights. ``sequence`` counts prompt tokens per
    batch row. With ``ragged`` it is the longest prompt of the batch; the others are shorter, down to a quarter of it,
    and padded on the right. ``top_k``, ``tile_size`` (16), ``anchors`` (a quarter of the layers) and ``kernel`` (the
    device's default) are for the row of a sparse backend only; its anchors are spread evenly. Without ``top_k`` it runs
    with its defaults. Raises InputError for a field that does not fit.
    """

    kind: ModelKind
    name: str = ""
    model: str = "text"
    sequence: Count = 1024
    new_tokens: Count = 32
    batch: Count = 1
    ragged: bool = False
    top_k: Share | None = None
    tile_size: Count | None = None
    anchors: Layers | None = None
    kernel: Kernel = ""
    dtype: Dtype = "float32"
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ragged and (self.batch == 1 or self.needs_grad):
            raise InputError(
                f"case {self.name or self.kind}: ragged = true is about several prompts; use it in a prefill or a "
                "decode with batch of at least 2."
            )
        name_case(self, _name(self))

    @property
    def is_decode(self) -> bool:
        """Whether it decodes behind a prompt."""
        return self.kind == "model_decode"

    @property
    def needs_grad(self) -> bool:
        """Whether it is a train step."""
        return self.kind == "model_train"

    @property
    def dtypes(self) -> dict[str, str]:
        """What it computes in and holds its weights in, as fields of a configuration.

        They are the same, as in a server and in the peers: otherwise every call would convert the weights. A train step
        in less than float32 keeps them as they are stored.
        """
        if self.needs_grad and self.dtype != "float32":
            return {"dtype": self.dtype}
        return {"dtype": self.dtype, "param_dtype": self.dtype}


def _name(case: ModelCase) -> str:
    parts = [case.kind.removeprefix("model_"), model_word(case.model), f"s{case.sequence}"]
    parts += [f"b{case.batch}"] if case.batch != 1 else []
    parts += ["ragged"] if case.ragged else []
    return "-".join([*parts, SHORT_DTYPE[case.dtype]])


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
        from attnsuite.models.planning import attention_spec  # noqa: PLC0415 (flax)

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
