"""Verdict ``isolates``: what a row may not see changes no bit of it, whatever stands there.

A batch has an entry for each boundary that a kernel's blocks may have, with one token less and one more. What lies
behind the boundary is filled with huge numbers, infinity and NaN in turn. The contract (``backends/contract.py``) asks
for all of them behind lengths, in padding and in other documents, and for the huge ones in later keys of a causal mask
and outside of a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attnsuite.backends import AttentionSpec, Layout

from ..checks import HUGE
from .finding import Finding, Trial, concluded
from .subject import Arrays, Subject, difference, drawn

BLOCKS = (16, 32, 64, 128)  # keys of a block, in the kernels of this package and in those that it knows
BOUNDARIES = np.unique([1, *(block + d for block in BLOCKS for d in (-1, 0, 1)), 192, 200])
LENGTH = 256


def isolates(subject: Subject) -> Finding:
    """Fill what is hidden, and compare the rows that may not see it, forward and backward."""
    otherwise = f"{subject.backend.name} takes no lengths, documents, window or causal mask: nothing is hidden."
    return concluded(_trials(subject), otherwise)


def _trials(subject: Subject) -> Iterator[Trial]:
    size: dict[str, Any] = {"batch": len(BOUNDARIES), "length": LENGTH}
    at = np.arange(LENGTH)[None]
    behind, everywhere = at >= BOUNDARIES[:, None], np.full((len(BOUNDARIES), LENGTH), fill_value=True)
    for dtype, spec in subject.dtypes(has_seq_lengths=True, is_causal=False, **size):
        layout = Layout(key_value_seq_lengths=BOUNDARIES.astype(np.int32))
        yield from _filled(subject, spec, layout, "behind lengths", behind, everywhere, ~behind, _numbers(dtype))
    for words, other in (("in another document", 1), ("in padding", -1)):
        ids = np.where(behind, np.int32(other), np.int32(0))
        layout = Layout(query_segment_ids=ids, key_value_segment_ids=ids)
        for dtype, spec in subject.dtypes(has_segment_ids=True, **size):
            yield from _filled(subject, spec, layout, words, behind, ~behind, ~behind, _numbers(dtype))
    for dtype, spec in subject.dtypes(is_causal=True, **size):
        yield from _filled(subject, spec, Layout(), "in later keys", behind, ~behind, None, _finite(dtype))
    for dtype, spec in subject.dtypes(is_causal=True, local_window_size=(15, 0), **size):
        before = at < BOUNDARIES[:, None] - 15
        yield from _filled(subject, spec, Layout(), "before a window", before, behind, None, _finite(dtype))


def _numbers(dtype: str) -> dict[str, float]:
    return {**_finite(dtype), "infinity": np.inf, "NaN": np.nan}


def _finite(dtype: str) -> dict[str, float]:
    return {"huge numbers": HUGE[dtype]}


def _filled(
    subject: Subject,
    spec: AttentionSpec,
    layout: Layout,
    words: str,
    hidden: np.ndarray,
    rows: np.ndarray,
    keys: np.ndarray | None,
    numbers: Mapping[str, float],
) -> Iterator[Trial]:
    """Fill the slots ``hidden``, and compare ``rows`` (output, dq) and ``keys`` (dk, dv; None where rows see both)."""
    query, key, value, cotangent = drawn(spec)
    clean = _kept(subject.run(spec, (query, key, value, cotangent), layout), rows, keys)
    for name, number in numbers.items():
        filled = [np.where(hidden[..., None, None], np.asarray(number, x.dtype), x) for x in (key, value)]
        found = subject.run(spec, (query, *filled, cotangent), layout)
        yield Trial(words, name, spec.dtype, difference(clean, _kept(found, rows, keys)))


def _kept(found: Arrays, rows: np.ndarray, keys: np.ndarray | None) -> Arrays:
    """The numbers that are compared."""
    of = {"output": rows, "dq": rows, "dk": keys, "dv": keys}
    return {name: x[chosen] for name, x in found.items() if (chosen := of[name]) is not None}
