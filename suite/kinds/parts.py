"""A part of an attention problem that the oracle takes at any length: some rows of the heads of one KV head.

With it a timed call is held to float64 after the fact. The rows of a part see all of their keys, so that its outputs
and the gradients of its queries are those of the whole. The gradients of keys and values are whole for the keys that no
other row sees: in a part of the last rows, if no row sees what comes after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from attnsuite.backends import AttentionSpec, Layout, Target, oracle, plan, registry

from ..measure.program import Draw, named_outputs, with_gradients
from .inputs import Inputs, make_inputs
from .op_case import OpCase, spec_of

ENTRIES = 2**21  # score entries of a part: the oracle needs about 0.1 s for them with gradients, on 2 cores


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Query rows of a batch entry and the heads of one KV head.

    ``keys`` is the first key whose gradients are whole; None where none are.
    """

    batch: int
    kv_head: int
    rows: np.ndarray
    keys: int | None


def choose(case: OpCase, rng: np.random.Generator) -> Part:
    """A part of at most ENTRIES entries, or of one row. With gradients every second part has those of keys.

    Rows are drawn from the whole length, so that a block of wrong ones is met; those of a part with keys are the last.
    """
    length, group = case.query_length, case.heads // case.kv_heads
    count = min(length, max(1, ENTRIES // (group * case.sequence)))
    batch, kv_head = int(rng.integers(case.batch)), int(rng.integers(case.kv_heads))
    rows = np.sort(rng.choice(length, count, replace=False))
    if case.needs_grad and rng.integers(2):
        rows = np.arange(length - count, length)
    first = int(rows[0])
    whole = count == length or (first == length - count and _sees_no_later_key(spec_of(case), length))
    return Part(batch, kv_head, rows, first if whole else None)


def expected(case: OpCase, part: Part, draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
    """The oracle's tensors of a part and the standard backend's, for the inputs of ``draw``."""
    spec, layout, arrays = _problem(case, part, make_inputs(case, draw))
    query, key, value, d_out = map(np.asarray, arrays)
    found: dict[str, Any] = {"out": oracle.forward(spec, layout, query, key, value)}
    if case.needs_grad:
        found |= oracle.gradients(spec, layout, query, key, value, d_out)
    return _with_whole_keys(found, part), _with_whole_keys(_standard(spec, layout, *arrays), part)


def outputs_in(case: OpCase, part: Part, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a call's outputs."""
    found = {}
    for name, x in outputs.items():
        if name in ("dk", "dv"):
            turned = x.swapaxes(1, 2) if case.kv_layout == "HND" else x
            found[name] = turned[part.batch : part.batch + 1, :, part.kv_head : part.kv_head + 1]
        else:
            group = case.heads // case.kv_heads
            heads = slice(part.kv_head * group, (part.kv_head + 1) * group)
            found[name] = x[part.batch : part.batch + 1, part.rows, heads]
    return _with_whole_keys(found, part)


def _problem(case: OpCase, part: Part, inputs: Inputs) -> tuple[AttentionSpec, Layout, tuple[Any, ...]]:
    """The part as a problem of its own, in the layout ``NHD``; positions say where its rows stand."""
    spec, group = spec_of(case), case.heads // case.kv_heads
    entry, rows = slice(part.batch, part.batch + 1), part.rows
    heads, kv_head = slice(part.kv_head * group, (part.kv_head + 1) * group), slice(part.kv_head, part.kv_head + 1)
    key, value = (x.swapaxes(1, 2) if case.kv_layout == "HND" else x for x in (inputs.key, inputs.value))
    query, d_out = (x[entry, rows, heads] for x in (inputs.query, inputs.d_out))
    whole = inputs.layout
    positions = None
    if spec.positional_mask is not None:
        standing = np.arange(case.query_length)[None] if whole.query_positions is None else whole.query_positions[entry]
        positions = np.asarray(standing[:, rows], np.int32)
    layout = Layout(
        query_positions=positions,
        query_segment_ids=None if whole.query_segment_ids is None else whole.query_segment_ids[entry, rows],
        key_value_segment_ids=None if whole.key_value_segment_ids is None else whole.key_value_segment_ids[entry],
    )
    spec = dataclasses.replace(
        spec,
        batch=1,
        query_length=len(part.rows),
        num_heads=group,
        num_kv_heads=1,
        has_positions=positions is not None,
        kv_layout="NHD",
    )
    return spec, layout, (query, key[entry, :, kv_head], value[entry, :, kv_head], d_out)


def _with_whole_keys(tensors: Mapping[Any, Any], part: Part) -> dict[str, Any]:
    """The tensors, those of keys cut to the keys whose gradients are whole, or left out."""
    rows = {name: x for name, x in tensors.items() if name not in ("dk", "dv")}
    if part.keys is None:
        return rows
    return rows | {name: tensors[name][:, part.keys :] for name in ("dk", "dv") if name in tensors}


def _sees_no_later_key(spec: AttentionSpec, length: int) -> bool:
    if spec.positional_mask is None:
        return False
    positions = np.arange(length)
    last = spec.positional_mask.interval(positions).last
    return last is not None and bool(np.all(last <= positions))


@functools.partial(jax.jit, static_argnums=0)
def _standard(spec: AttentionSpec, layout: Layout, query: Any, key: Any, value: Any, d_out: Any) -> dict[str, Any]:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return plan(registry.get("standard"), spec, layout, target=Target.here()).run(query, key, value)[0]

    if not spec.needs_grad:
        return {"out": attend(query, key, value)}
    return named_outputs(with_gradients(attend)(query, key, value, d_out))
