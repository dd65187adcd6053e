"""Recall of distant needles on the constructed checkpoint: an attention that misses distant keys fails this test."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..typed import Seed
from .kind import Least, Long, check_fields, name_case


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalCase:
    """Recall at distance on the constructed checkpoint: ``prompts`` needles in ``sequence`` tokens."""

    kind: Literal["retrieval"] = "retrieval"
    name: str = ""
    sequence: Long = 1024
    prompts: Least = 64
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, f"retrieval-s{self.sequence}")
