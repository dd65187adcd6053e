"""Verdict ``batch_invariant``: a sequence has the same bits whatever else is computed beside it.

One sequence is computed alone. Then it stands in batches, beside sequences of other lengths, in prefixes and chunks of
its prefill, and in single decode steps. Whoever serves a model wants all of these equal: an answer then does not depend
on the load of the server (Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025; vllm#42259).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from attnsuite.backends import AttentionSpec, Layout

from ..caches import pool
from .finding import Finding, Trial, concluded
from .subject import Arrays, Subject, difference

BATCHES = (2, 3, 8)
CHUNKS = (64, 128, 100)
_PAGE = 16


def batch_invariant(subject: Subject) -> Finding:
    """Compare one sequence with itself, in other company."""
    return concluded(_trials(subject), f"{subject.backend.name} takes no problem of this verdict.")


def _trials(subject: Subject) -> Iterator[Trial]:
    few = subject.few_heads
    for _, spec in subject.dtypes(**few, needs_grad=False):
        yield from _batches(subject, spec, "in a batch", Layout())
        yield from _prefixes(subject, spec)
    for _, spec in subject.dtypes(**few, needs_grad=False, has_seq_lengths=True):
        yield from _batches(subject, spec, "beside other lengths", _lengths(spec))
    for _, spec in subject.dtypes(**few, is_causal=True, has_positions=True, needs_grad=False):
        yield from _chunks(subject, spec)
    step = {"query_length": 1, "needs_grad": False, "has_seq_lengths": True}
    for _, spec in subject.dtypes(**few, is_causal=True, has_positions=True, **step):
        yield from _batches(subject, spec, "a decode step beside other lengths", _lengths(spec))
    pool = {"page_size": _PAGE, "num_pages": max(BATCHES) * subject.length // _PAGE}
    for _, spec in subject.dtypes(**few, is_causal=True, has_positions=True, **step, **pool):
        yield from _page_orders(subject, spec)
    for _, spec in subject.dtypes(**few, needs_grad=True):
        yield from _batches(subject, spec, "a training step in a batch", Layout())


def _lengths(spec: AttentionSpec) -> Layout:
    """Layouts of the largest batch: the first sequence is almost full, the others have other lengths."""
    S, n = spec.key_value_length, max(BATCHES)
    lengths = np.array([S - 3, 17, S // 2, 1, S, 100, S - 1, 64][:n], np.int32)
    at = lengths[:, None] - spec.query_length + np.arange(spec.query_length, dtype=np.int32)
    return Layout(key_value_seq_lengths=lengths, query_positions=at if spec.has_positions else None)


def _batches(subject: Subject, spec: AttentionSpec, change: str, layout: Layout) -> Iterator[Trial]:
    """The first sequence alone, then first and last in each batch."""
    inputs = subject.drawn(dataclasses.replace(spec, batch=max(BATCHES)))
    alone = subject.run(spec, tuple(x[:1] for x in inputs), _entries(layout, [0]))
    for n in BATCHES:
        wider = dataclasses.replace(spec, batch=n)
        if not subject.takes(wider):
            continue
        broken = ""
        for order in ([*range(n)], [*range(1, n), 0]):
            found = subject.run(wider, tuple(x[order] for x in inputs), _entries(layout, order))
            place = order.index(0)
            broken = broken or difference(alone, {name: x[place : place + 1] for name, x in found.items()})
        yield Trial(change, f"{n} sequences", spec.dtype, broken)


def _entries(layout: Layout, order: list[int]) -> Layout:
    fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    return Layout(**{name: None if x is None else x[order] for name, x in fields.items()})


def _prefixes(subject: Subject, spec: AttentionSpec) -> Iterator[Trial]:
    """The first tokens of a causal sequence alone, against the same rows of all of it."""
    if not spec.is_causal:
        return
    inputs = subject.drawn(spec)
    whole = subject.run(spec, inputs)["output"]
    for length in CHUNKS:
        shorter = dataclasses.replace(spec, query_length=length, key_value_length=length)
        if subject.takes(shorter):
            found = subject.run(shorter, tuple(x[:, :length] for x in inputs))
            yield Trial("a prefix alone", f"{length} tokens", spec.dtype, _rows(whole, found, slice(length)))


def _chunks(subject: Subject, spec: AttentionSpec) -> Iterator[Trial]:
    """Prefill in chunks, and step by step, over a cache that holds the whole sequence."""
    inputs = subject.drawn(spec)
    T = spec.query_length
    whole = subject.run(spec, inputs, _at(slice(T)))["output"]
    for size in CHUNKS:
        starts = range(0, T - size + 1, size)
        yield from _pieces(subject, spec, inputs, whole, size, starts, "prefill in chunks")
    steps = sorted({0, 1, 63, 64, 127, 128, T // 2 + 5, T - 1})
    yield from _pieces(subject, spec, inputs, whole, 1, steps, "step-by-step decode")


def _pieces(
    subject: Subject, spec: AttentionSpec, inputs: Any, whole: np.ndarray, size: int, starts: Any, change: str
) -> Iterator[Trial]:
    piece = dataclasses.replace(spec, query_length=size)
    if not subject.takes(piece):
        return
    query, key, value, cotangent = inputs
    broken = ""
    for start in starts:
        rows = slice(start, start + size)
        found = subject.run(piece, (query[:, rows], key, value, cotangent[:, rows]), _at(rows))
        broken = broken or _rows(whole, found, rows)
    yield Trial(change, f"{size} tokens", spec.dtype, broken)


def _at(rows: slice) -> Layout:
    return Layout(query_positions=np.arange(rows.start or 0, rows.stop, dtype=np.int32)[None])


def _rows(whole: np.ndarray, found: Arrays, rows: slice) -> str:
    return difference({"output": whole[:, rows]}, {"output": found["output"]})


def _page_orders(subject: Subject, spec: AttentionSpec) -> Iterator[Trial]:
    """A decode step over pages in order, and over the same pages elsewhere in the pool."""
    query, key, value, cotangent = subject.drawn(dataclasses.replace(spec, page_size=None, num_pages=None))
    count, pages = spec.key_value_length // _PAGE, spec.num_pages
    assert pages is not None
    found = []
    for table in (np.arange(count), np.random.default_rng(0).permutation(pages)[:count]):
        table = table[None].astype(np.int32)  # noqa: PLW2901
        pools = [pool(x, table, pages, 0.0) for x in (key, value)]
        layout = dataclasses.replace(_entries(_lengths(spec), [0]), page_table=table)
        found.append(subject.run(spec, (query, *pools, cotangent), layout))
    yield Trial("pages in another order", "", spec.dtype, difference(*found))
