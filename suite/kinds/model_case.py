"""A pass of a whole transformer: the case."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..errors import InputError
from ..typed import Count, Seed
from .kind import SHORT_DTYPE, Dtype, Kernel, Layers, Share, check_fields, model_word, name_case

ModelKind = Literal["model_prefill", "model_decode", "model_train"]
PHASES: dict[str, ModelKind] = {"prefill": "model_prefill", "train": "model_train", "decode": "model_decode"}


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
