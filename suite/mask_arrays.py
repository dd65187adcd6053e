"""Which arguments of ``attention`` replace a mask array, and what the array costs.

flax's layers describe every mask as an array of booleans. Many of these arrays equal a flag, lengths or segment ids, by
which a kernel can skip blocks. :func:`read` compares an array with each of these forms for the caller's batch;
:func:`cost` times one call both ways.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from attnsuite.backends import AttentionSpec, attention

from .statistics import Interval, paired_ratio
from .traced_calls import Call, Harvest

_ROUNDS = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """Arguments of ``attention`` that mean the same as a mask array on this batch, and how a caller writes them."""

    text: str
    arguments: dict[str, Any]


def read(mask: Bool[np.ndarray, "#batch #heads #q_len #kv_len"], spec: AttentionSpec) -> Description | None:
    """The first form that equals ``mask`` for every entry of the batch; None where none does."""
    batch, queries, keys = spec.batch, spec.query_length, spec.key_value_length
    if mask.shape[0] not in (1, batch) or (mask != mask[:, :1]).any():  # of a query with two axes in front
        return None
    whole = np.broadcast_to(mask[:, 0], (batch, queries, keys))
    return next((description for form, description in _forms(whole) if (form == whole).all()), None)


def _forms(mask: Bool[np.ndarray, "b t s"]) -> Iterator[tuple[np.ndarray, Description]]:
    """Masks that flags, lengths and segment ids make, each with its description; the plainest first."""
    _, queries, keys = mask.shape
    causal = np.arange(keys)[None] <= np.arange(queries)[:, None]
    slots, everything = np.arange(keys), np.ones((queries, keys), bool)
    lengths = mask.any(1).sum(-1).astype(np.int32)
    filled = (slots < lengths[:, None])[:, None]
    shapes = [(everything, "", {})]
    beside = [
        (everything, "", {}),
        (filled, f"key_value_seq_lengths={_shortened(lengths)}", {"key_value_seq_lengths": lengths}),
    ]
    if queries == keys:
        shapes += [(causal, "is_causal=True", {"is_causal": True})] if queries > 1 else []
        ids = _documents(mask)
        same = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
        names = ("query_segment_ids", "key_value_segment_ids")
        beside.append(
            (same, f"{' and '.join(names)} ({int(ids.max()) + 1} documents, padding -1)", dict.fromkeys(names, ids))
        )
    for others, words, arrays in beside:
        for shape, text, flags in shapes:
            description = ", ".join(filter(None, (text, words))) or "no mask"
            yield shape & others, Description(description, flags | arrays)


def _documents(mask: Bool[np.ndarray, "b t t"]) -> Int[np.ndarray, "b t"]:
    """Segment ids: a token that sees the one before it is of its document, one that does not see itself is padding."""
    sees_itself = np.diagonal(mask, axis1=1, axis2=2)
    begins = ~np.diagonal(mask, offset=-1, axis1=1, axis2=2)
    ids = np.concatenate([np.zeros((len(mask), 1), int), np.cumsum(begins, axis=1)], axis=1)
    real = np.cumsum(np.diff(ids, axis=1, prepend=-1) * sees_itself, axis=1) - 1  # padding counts no document
    return np.where(sees_itself, real, -1).astype(np.int32)


def sentences(found: Harvest) -> Iterator[str]:
    """For each place that passes such an array: what to write instead, and what the array costs on this machine.

    A place whose calls get different arrays is named too: no one argument is right for all of them.
    """
    places: dict[str, dict[str, tuple[Call, np.ndarray, Description | None]]] = {}
    for index, mask_array in sorted((found.masks or {}).items()):
        call, mask = found.calls[index], mask_array != 0  # flax makes masks of floats
        is_read = call.spec is not None and mask.ndim == 4 and index not in found.varying
        description = read(mask, call.spec) if call.spec is not None and is_read else None
        text = description.text if description else ""
        places.setdefault(call.place, {}).setdefault(text, (call, mask, description))
    varying = {found.calls[index].place for index in found.varying}
    for place, meanings in places.items():
        for call, mask, description in meanings.values():
            if call.spec is not None and description is not None:
                ratio = cost(mask, description, dataclasses.replace(call.spec, has_mask=False, is_causal=False))
                times = "" if ratio is None else f"; the array takes {ratio.value:.2f} times as long"
                took = times and f"{times} with auto on this machine"
                yield f"{place}: the mask array {list(mask.shape)} says {description.text} on this batch{took}."
        if len(meanings) > 1 or place in varying:
            yield f"{place}: not every call there gets the same mask array; what one says is not right for all."


def _shortened(lengths: Int[np.ndarray, " b"]) -> str:
    shortened = ", ".join(map(str, lengths[:4].tolist()))
    return f"[{shortened}{', ...' if len(lengths) > 4 else ''}]"


def cost(mask: Bool[np.ndarray, "..."], description: Description, spec: AttentionSpec) -> Interval | None:
    """The time of the call with the array relative to that with ``description``, both jitted, in the same rounds."""
    rng = np.random.default_rng(0)
    heads = {"query": (spec.query_length, spec.num_heads), "key": (spec.key_value_length, spec.num_kv_heads)}
    query, key = (
        jnp.asarray(rng.standard_normal((spec.batch, *shape, spec.head_dim), np.float32), spec.dtype)
        for shape in heads.values()
    )
    flags = {name: x for name, x in description.arguments.items() if isinstance(x, bool)}
    arrays = {name: jnp.asarray(x) for name, x in description.arguments.items() if name not in flags}
    ways = [({"mask": jnp.asarray(mask)}, {}), (arrays, flags)]
    calls = []
    for operands, fixed in ways:
        call = jax.jit(lambda q, k, x, fixed=fixed: attention(q, k, k, **x, **fixed, needs_grad=spec.needs_grad))
        calls.append((call, operands))
        jax.block_until_ready(call(query, key, operands))
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for taken, (call, operands) in zip(samples, calls, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call(query, key, operands))
            taken.append(time.perf_counter() - start)
    return paired_ratio(*samples)
