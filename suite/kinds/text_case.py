"""Perplexity of a model on held-out text, and its agreement with the standard backend, sequence by sequence."""

from __future__ import annotations

import dataclasses
from typing import Literal

from .kind import SHORT_DTYPE, Dtype, Least, check_fields, model_word, name_case


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextCase:
    """Perplexity of a model on held-out text: ``sequences`` windows of ``sequence`` tokens each."""

    kind: Literal["perplexity"] = "perplexity"
    name: str = ""
    model: str = "text"
    sequence: Least = 512
    sequences: Least = 16
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, f"perplexity-{model_word(self.model)}-s{self.sequence}-{SHORT_DTYPE[self.dtype]}")
