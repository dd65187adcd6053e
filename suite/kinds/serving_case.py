"""Continuous batching: a trace of requests through one server, and whether each gets the tokens that it gets alone."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from msgspec import Meta

from ..errors import InputError
from ..typed import Count, Seed
from .kind import Least, Long, check_fields, model_word, name_case


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingCase:
    """Continuous batching: ``requests`` arrive at random, ``per_second`` of them, and are served together.

    A prompt is held-out text of a quarter of ``sequence`` tokens up to all of it, and each request wants ``new_tokens``
    tokens. At most ``batch`` sequences run at once, over a paged cache with pages of ``page_size`` slots. A step reads
    at most ``tokens_per_step`` tokens, of prompts and of sequences that decode, as one ragged batch. The trace follows
    from ``seed``. A request that does not get the tokens that ``standard`` gives it alone makes the cell wrong. Raises
    InputError for a field that does not fit.
    """

    kind: Literal["serving"] = "serving"
    name: str = ""
    model: str = "text"
    requests: Least = 12
    per_second: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    sequence: Long = 256
    new_tokens: Count = 16
    batch: Count = 4
    tokens_per_step: Count = 64
    page_size: Count = 16
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, f"serving-{model_word(self.model)}-s{self.sequence}-n{self.requests}-b{self.batch}")
        if self.tokens_per_step < self.batch:
            raise InputError(
                f"case {self.name}: tokens_per_step = {self.tokens_per_step} is below batch = {self.batch}; a step "
                "needs room for a token of each sequence."
            )
