"""Verdict ``isolates``: what a row may not see changes no bit of it, whatever stands there.

A batch has an entry for each boundary of the kernel's blocks, with one token less and one more: its plan says how many
keys a block has (``Plan.key_blocks``), and the sequences are longer than a block. What lies behind the boundary is
filled with other numbers of the same size, huge numbers, infinity and NaN in turn. The contract
(``backends/contract.py``) asks for all of them behind lengths, in padding and in other documents, and for the finite
ones in later keys of a causal mask and outside of a window. A kernel that sets aside what is huge or no number is not
caught by these: the other numbers look like those that a row may see.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from attnsuite.backends import AttentionSpec, Layout

from ..caches import pool
from ..checks import HUGE
from .finding import Finding, Trial, concluded
from .subject import Arrays, Subject, difference

USUAL = (16, 32, 64, 128)  # keys of a block where a kernel does not say, as in the kernels that this package knows
LENGTHS = (256, 512, 1024, 2048)  # of the sequences: the first that is longer than a block
_WINDOW, _PAGE = 15, 16


@dataclasses.dataclass(frozen=True, slots=True)
class _Hidden:
    """What one layout hides: slots ``[batch, length]`` to fill, and the rows and keys that may not see them.

    ``keys`` (of dk and dv) is None where a key is seen by other rows too.
    """

    layout: Layout
    slots: np.ndarray
    rows: np.ndarray
    keys: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """A way to hide: ``hide(spec, boundaries)`` in problems with these ``fields``; ``finite`` allows no infinity."""

    description: str
    fields: Mapping[str, Any]
    hide: Callable[[AttentionSpec, np.ndarray], _Hidden]
    finite: bool = False


def isolates(subject: Subject) -> Finding:
    """Fill what is hidden, and compare the rows that may not see it, forward and backward."""
    trials, blocks = list[Trial](), set[int]()
    for way in _WAYS:
        for _, spec in subject.dtypes(length=LENGTHS[0], **way.fields):
            longer, block_sizes = _longer_than_a_block(subject, spec, way)
            blocks.update(block_sizes)
            boundaries = _boundaries({*(block_sizes or USUAL), spec.page_size or 1}, longer.key_value_length)
            if subject.takes(batch := _batch(longer, boundaries)):
                trials += _filled(subject, batch, way, way.hide(batch, boundaries))
    found = concluded(trials, f"{subject.backend.name} takes no problem here in which something is hidden.")
    if found.answer != "yes":
        return found
    of = ", ".join(map(str, sorted(blocks))) + " keys" if blocks else "usual sizes, since it does not say its own"
    return dataclasses.replace(found, message=f"{found.message} At the ends of blocks of {of}.")


def _longer_than_a_block(subject: Subject, spec: AttentionSpec, way: _Way) -> tuple[AttentionSpec, tuple[int, ...]]:
    """The problem with the first length that has a boundary of every block in it, and the sizes of these blocks.

    Without a size where no plan names one.
    """
    longer, block_sizes = spec, ()
    for length in LENGTHS:
        query_length = 1 if spec.query_length == 1 else length
        tried = dataclasses.replace(spec, query_length=query_length, key_value_length=length)
        tried = _batch(tried, np.array([length // 2]))
        if not subject.takes(tried):
            break
        if sizes := subject.key_blocks(tried, way.hide(tried, np.array([length // 2])).layout):
            longer, block_sizes = tried, sizes
            if max(sizes) < length:
                break
    return longer, block_sizes


def _batch(spec: AttentionSpec, boundaries: np.ndarray) -> AttentionSpec:
    """The problem with a sequence for each boundary; of a cache with a page more than they have."""
    batch, page = len(boundaries), spec.page_size
    pages = {} if page is None else {"num_pages": batch * spec.key_value_length // page + 1}
    return dataclasses.replace(spec, batch=batch, **pages)


def _boundaries(blocks: Iterable[int], length: int) -> np.ndarray:
    """The first end of a block of each size, the second and the last, with one token less and one more."""
    ends = {end for size in blocks for end in (size, 2 * size, (length - 1) // size * size)}
    near = {end + d for end in ends for d in (-1, 0, 1)}
    return np.array(sorted(at for at in near | {1} if 0 < at < length), np.int32)


def _behind(spec: AttentionSpec, boundaries: np.ndarray) -> np.ndarray:
    return np.arange(spec.key_value_length)[None] >= boundaries[:, None]


def _lengths(spec: AttentionSpec, boundaries: np.ndarray) -> _Hidden:
    behind = _behind(spec, boundaries)
    at = boundaries[:, None] - 1 if spec.has_positions else None
    layout = Layout(key_value_seq_lengths=boundaries, query_positions=at)
    if spec.page_size is not None:
        table = np.random.default_rng(0).permutation(spec.num_pages or 0)[: spec.batch * _pages(spec)]
        layout = dataclasses.replace(layout, page_table=table.reshape(spec.batch, -1).astype(np.int32))
    return _Hidden(layout, behind, np.ones((spec.batch, spec.query_length), bool), ~behind)


def _pages(spec: AttentionSpec) -> int:
    return spec.key_value_length // (spec.page_size or 1)


def _documents(spec: AttentionSpec, boundaries: np.ndarray, *, other: int) -> _Hidden:
    behind = _behind(spec, boundaries)
    ids = np.where(behind, np.int32(other), np.int32(0))
    return _Hidden(Layout(query_segment_ids=ids, key_value_segment_ids=ids), behind, ~behind, ~behind)


def _later(spec: AttentionSpec, boundaries: np.ndarray) -> _Hidden:
    behind = _behind(spec, boundaries)
    return _Hidden(Layout(), behind, ~behind)


def _before(spec: AttentionSpec, boundaries: np.ndarray) -> _Hidden:
    return _Hidden(Layout(), ~_behind(spec, boundaries), _behind(spec, boundaries + _WINDOW))


_STEP = {"query_length": 1, "needs_grad": False, "has_seq_lengths": True, "is_causal": True, "has_positions": True}
_WAYS = (
    _Way("behind lengths", {"has_seq_lengths": True, "is_causal": False}, _lengths),
    _Way("behind lengths in a decode step", _STEP, _lengths),
    _Way("in pages", {**_STEP, "page_size": _PAGE, "num_pages": LENGTHS[0] // _PAGE}, _lengths),
    _Way("in another document", {"has_segment_ids": True}, functools.partial(_documents, other=1)),
    _Way("in padding", {"has_segment_ids": True}, functools.partial(_documents, other=-1)),
    _Way("in later keys", {"is_causal": True}, _later, finite=True),
    _Way("before a window", {"is_causal": True, "local_window_size": (_WINDOW, 0)}, _before, finite=True),
)


def _filled(subject: Subject, spec: AttentionSpec, way: _Way, hidden: _Hidden) -> Iterator[Trial]:
    """Fill what is hidden, and compare the rows (output, dq) and the keys (dk, dv)."""
    whole = dataclasses.replace(spec, page_size=None, num_pages=None)
    query, key, value, cotangent = subject.drawn(whole)
    clean, others = None, subject.drawn(whole, another=True)[1:3]
    numbers = {"huge numbers": HUGE[spec.dtype], **({} if way.finite else {"infinity": np.inf, "NaN": np.nan})}
    fills = {"": (key, value), "other numbers": others, **{name: (x, x) for name, x in numbers.items()}}
    for name, fill in fills.items():
        filled = [
            np.where(hidden.slots[..., None, None], np.asarray(y, x.dtype), x)
            for x, y in zip((key, value), fill, strict=True)
        ]
        if (table := hidden.layout.page_table) is not None:
            rest = numbers.get(name, 0.0)
            filled = [pool(x, np.asarray(table), spec.num_pages or 0, rest) for x in filled]
        found = _compared(subject.run(spec, (query, *filled, cotangent), hidden.layout), hidden)
        if clean is None:
            clean = found
        else:
            yield Trial(way.description, name, spec.dtype, difference(clean, found))


def _compared(found: Arrays, hidden: _Hidden) -> Arrays:
    """The numbers that are compared."""
    of = {"output": hidden.rows, "dq": hidden.rows, "dk": hidden.keys, "dv": hidden.keys}
    return {name: x[chosen] for name, x in found.items() if (chosen := of[name]) is not None}
