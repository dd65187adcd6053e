"""Continuous batching: requests come and go, and each step reads some tokens of every running one, without padding.

A step is one ragged batch over a paged cache (``backends/kv_cache.py``): a token of each sequence that decodes, and as
much of the prompts as the step has room for (Orca, OSDI 2022; chunked prefill: Sarathi-Serve, arXiv 2403.02310). The
shapes of all steps are equal, so that there is one program. A request is admitted when the pool has pages for all of
its tokens; none is ever interrupted. Decoding is greedy.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .cache import Held, KVCache
from .checks import is_number, require_positive_int
from .config import ModelConfig
from .forward_pass import forward_ragged
from .parameters import Params
from .planning import Call, Resolutions, planned
from .transformer import Transformer, check_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt that arrives after ``arrives`` seconds and wants ``new_tokens`` tokens. Raises ValueError."""

    prompt: tuple[int, ...]
    new_tokens: int
    arrives: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "new_tokens", require_positive_int("new_tokens", self.new_tokens))
        if len(self.prompt) == 0:
            raise ValueError("prompt is empty; give at least one token.")
        if not (is_number(self.arrives) and 0.0 <= self.arrives < float("inf")):
            raise ValueError(f"arrives={self.arrives!r} must be a finite number of seconds, at least 0.")

    @property
    def length(self) -> int:
        """Slots that it needs: the last new token is never read."""
        return len(self.prompt) + self.new_tokens - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """The new tokens of a request, and the seconds from its arrival to each of them.

    >>> Served((5, 6, 7), (0.5, 0.75, 1.0)).tpot
    0.25
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.seconds[0]

    @property
    def tpot(self) -> float | None:
        """Mean seconds from one token to the next; None for a single token."""
        steps = len(self.seconds) - 1
        return (self.seconds[-1] - self.seconds[0]) / steps if steps else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a server has room for: sequences at once, slots of each, tokens of a step, pages. Raises ValueError."""

    sequences: int
    capacity: int
    tokens_per_step: int
    page_size: int = 16
    num_pages: int | None = None

    def __post_init__(self) -> None:
        for name in ("sequences", "capacity", "tokens_per_step", "page_size"):
            object.__setattr__(self, name, require_positive_int(name, getattr(self, name)))
        if self.tokens_per_step < self.sequences:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is below sequences={self.sequences}; a step needs room for a "
                "token of each sequence."
            )


@dataclasses.dataclass(slots=True)
class _Running:
    """A request in a row of the cache: the tokens that were read, those that were made, and when."""

    index: int
    request: Request
    read: int = 0
    made: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def unread(self) -> list[int]:
        return [*self.request.prompt, *self.made][self.read :]


def ragged_problem(cache: KVCache, sizes: Sizes) -> dict[str, Any]:
    """What ``planning.attention_spec`` has to know of a step."""
    return cache.problem | {
        "batch": 1,
        "query_length": sizes.tokens_per_step,
        "key_value_length": cache.batch * cache.capacity,
        "packed": True,
        "needs_grad": False,
    }


def serve(
    model: Transformer,
    requests: Sequence[Request],
    sizes: Sizes,
    *,
    cache_dtype: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **call: Unpack[Call],
) -> list[Served]:
    """What each request gets, first come first served.

    Time is that of the steps by ``clock``, which waits for the device; where nothing runs, it jumps to the next
    arrival. ``call`` are the keywords of :class:`attnsuite.models.planning.Call`. Raises ValueError for a request that
    the cache could never hold, and for a prompt that the vocabulary does not have.
    """
    cache = model.new_cache(
        sizes.sequences, sizes.capacity, cache_dtype, page_size=sizes.page_size, num_pages=sizes.num_pages
    )
    num_pages, page_size = cache.pages or (0, 1)
    for number, request in enumerate(requests):
        check_tokens([request.prompt], model.config.vocab_size)
        if request.length > sizes.capacity or -(-request.length // page_size) > num_pages:
            raise ValueError(
                f"request {number} needs {request.length} slots; a sequence has {sizes.capacity}, and all pages "
                f"together {num_pages * page_size}."
            )
    found = planned(model.config, call, **ragged_problem(cache, sizes))
    params = model.arrays()
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].arrives)
    rows: list[_Running | None] = [None] * sizes.sequences
    done: dict[int, Served] = {}
    now = 0.0
    while len(done) < len(requests):
        if not any(rows):
            now = max(now, requests[waiting[0]].arrives)
        _admit(rows, waiting, requests, now, (num_pages, page_size))
        counts = _counts(rows, sizes.tokens_per_step)
        tokens = np.zeros(sizes.tokens_per_step, np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for row, one in enumerate(rows):
            if one is not None:
                tokens[starts[row] : starts[row + 1]] = one.unread()[: counts[row]]
        after = (cache.lengths + counts).astype(np.int32)
        table = cache.table_after(after)
        began = clock()
        latest, (keys, values) = _step(
            model.config, params, tokens[None], (cache.keys, cache.values), lengths=after, query_starts=starts,
            page_table=table, resolutions=found,
        )  # fmt: skip
        latest = np.asarray(latest)
        now += clock() - began
        cache = KVCache(keys=keys, values=values, lengths=after, page_table=table)
        for row, one in enumerate(rows):
            if one is None:
                continue
            one.read += int(counts[row])
            if counts[row] and not one.unread():
                one.made.append(int(latest[row]))
                one.seconds.append(now - one.request.arrives)
            if len(one.made) == one.request.new_tokens:
                done[one.index] = Served(tuple(one.made), tuple(one.seconds))
                cache, rows[row] = cache.released([row]), None
    return [done[i] for i in range(len(requests))]


def _admit(
    rows: list[_Running | None], waiting: list[int], requests: Sequence[Request], now: float, pages: tuple[int, int]
) -> None:
    """Give free rows to the requests that have arrived, in order, while there are pages for all of their tokens."""
    num_pages, page_size = pages
    free = num_pages - sum(-(-one.request.length // page_size) for one in rows if one is not None)
    for row, one in enumerate(rows):
        if one is not None or not waiting:
            continue
        request = requests[waiting[0]]
        needed = -(-request.length // page_size)
        if request.arrives > now or needed > free:
            return
        rows[row], free = _Running(waiting.pop(0), request), free - needed


def _counts(rows: Sequence[_Running | None], room: int) -> Int[np.ndarray, " sequences"]:
    """How many tokens of each row the next step reads: those that decode come first, then prompts in order."""
    counts = np.zeros(len(rows), np.int32)
    running = [(not one.made, one.index, row) for row, one in enumerate(rows) if one is not None]
    for _, _, row in sorted(running):
        one = rows[row]
        counts[row] = 0 if one is None else min(len(one.unread()), room)
        room -= int(counts[row])
    return counts


@functools.partial(jax.jit, static_argnames=("config", "resolutions"), donate_argnames="held")
def _step(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "1 tokens"],
    held: Held,
    *,
    resolutions: Resolutions,
    **batch: Array,
) -> tuple[Array, Held]:
    """The next token of each sequence, and the cache; ``batch`` are the other arrays of ``forward_ragged``."""
    logits, held = forward_ragged(config, params, tokens, held, resolutions=resolutions, **batch)
    return logits.argmax(-1).astype(jnp.int32), held
