"""FLOPs, bytes and visible pairs of an attention call, by formula.

Only pairs that may attend are counted, so that computing masked tiles does not make a backend look faster. A
multiply-add is two operations. The backward pass counts five products (the scores again, dP, dV, dQ, dK) and leaves out
the softmax, as FlashAttention-2 does (arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from attnsuite.backends.features import DTYPES

from .op_case import Call, spec_of

ITEM_BYTES = {name: 4 if name == "float32" else 2 for name in DTYPES}


def document_ids(case: Call) -> Int[np.ndarray, " sequence"]:
    """The document of each position: ``case.documents`` contiguous runs of unequal length, from the case's seed."""
    rng = np.random.default_rng([case.seed, 1])
    cuts = np.sort(rng.choice(np.arange(1, case.sequence), case.documents - 1, replace=False))
    return np.searchsorted(cuts, np.arange(case.sequence), side="right").astype(np.int32)


def visible_pairs(case: Call) -> int:
    """Query-key pairs of one head of one batch entry that may attend; O(sequence) in memory.

    In time too, but for a mask that no interval describes: its pairs are counted.
    """
    positions = np.arange(case.sequence)
    query = positions[-1:] if case.is_decode and case.causal else positions[: case.query_length]
    ids = document_ids(case)
    starts = np.searchsorted(ids, ids, side="left")[query]
    stops = np.searchsorted(ids, ids, side="right")[query]
    mask = spec_of(case).positional_mask
    if mask is None:
        return int((stops - starts).sum())
    first, last, exact = mask.interval(query)
    if not exact:
        keys = positions[None]
        rows = zip(query, starts, stops, strict=True)
        return sum(int(np.count_nonzero(mask(np.full((1, 1), q), keys[:, a:b]))) for q, a, b in rows)
    starts = starts if first is None else np.maximum(starts, first)
    stops = stops if last is None else np.minimum(stops, last + 1)
    return int(np.maximum(stops - starts, 0).sum())


def attention_flops(pairs: int, heads: int, head_dim: int, value_head_dim: int, *, backward: bool) -> float:
    """FLOPs of ``heads`` heads over ``pairs`` visible pairs each; with ``backward``, of both passes together."""
    forward = 2 * (head_dim + value_head_dim)
    gradient = 2 * (3 * head_dim + 2 * value_head_dim) if backward else 0
    return float(pairs * heads * (forward + gradient))


def op_flops(case: Call) -> float:
    """FLOPs of one call of an op case."""
    value_dim = case.value_head_dim or case.head_dim
    pairs = visible_pairs(case) * case.batch
    return attention_flops(pairs, case.heads, case.head_dim, value_dim, backward=case.needs_grad)


def op_bytes(case: Call) -> float:
    """Bytes that any implementation must move: every input read once, every output written once.

    A decode step need not read the keys that its row may not see.
    """
    value_dim = case.value_head_dim or case.head_dim
    query = case.query_length * case.heads * case.head_dim
    out = case.query_length * case.heads * value_dim
    keys = visible_pairs(case) if case.is_decode else case.sequence
    key_value = keys * case.kv_heads * (case.head_dim + value_dim)
    read, written = query + key_value, out
    if case.needs_grad:
        read, written = read + out, written + query + key_value
    return float((read + written) * case.batch * ITEM_BYTES[case.dtype])


def op_tokens(case: Call) -> int:
    """Query tokens of one call."""
    return case.batch * case.query_length
