"""Kascade in XLA, with sparse computation: a loop over the selected units of each query tile.

Prefill is one loop over (sequence, KV head, query tile), with the online softmax of FlashAttention-2 (arXiv 2307.08691)
over the local region and the selected units, each read in place. Gathering for all tiles at once, and masking dense
scores, are both slower than dense attention on a CPU. A selection by tiles needs one pass over the scores: each unit's
sum is kept with the maximum at that time and rescaled at the end. A selection by single keys needs two passes. A decode
step is one query row per head: see ``steps.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ..contract import AttentionSpec
from . import steps
from .kernels import Kernels
from .selection import Selection, TileLayout, candidates, choose, may_see
from .selection import select as select_by
from .settings import Ablation, Tiling

_MASKED = -1e30  # finite, so that a row with nothing visible gives no NaN
# Keys per step, in whole units; chosen on a Zen 5 with 2 cores, S 4096 and 8192.
_KEYS_PER_STEP, _KEYS_PER_SWEEP = 256, 512
_BY_HEAD, _BY_KV_HEAD = "head", "KV head"  # how an array, or a selection, is divided among devices
_FEW = 4  # with at most so many units per step, the units left over are visited one by one

_State = tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, "rows v_dim"] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """The devices along one axis of a mesh, each with its share of the KV heads."""

    mesh: Mesh
    axis: str

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.mesh.shape[self.axis]


@dataclasses.dataclass(frozen=True)
class XlaKernels(Kernels):
    """The functions of this module and of ``steps.py``. With ``heads`` each device computes its share of the KV heads.

    Only indices are exchanged.
    """

    heads: Heads | None = None

    def select(self, layout: TileLayout, query: Array, key: Array) -> Selection:
        """As :meth:`Kernels.select`."""
        return self._divided(lambda *of_share: self._choose(*of_share)[0], _BY_KV_HEAD, layout, query, key)

    def dense_layer(self, layout: TileLayout, query: Array, key: Array, value: Array) -> tuple[Array, Selection]:
        """As :meth:`Kernels.dense_layer`."""
        found = self._divided(self._choose, (_BY_KV_HEAD, _BY_HEAD), layout, query, key, value)
        return found[1], found[0]

    def attend_selected(
        self, layout: TileLayout, query: Array, key: Array, value: Array, selection: Selection
    ) -> Array:
        """As :meth:`Kernels.attend_selected`."""
        run = functools.partial(attend, self._share, self.tiling)
        return self._divided(run, _BY_HEAD, layout, query, key, value, selection)

    def _choose(
        self, layout: TileLayout, query: Array, key: Array, value: Array | None = None
    ) -> tuple[Selection, Any]:
        chosen_by = steps.select if self.spec.query_length == 1 else select
        return chosen_by(self._share, self.tiling, layout, query, key, value, self.settings.ablation)

    @property
    def _share(self) -> AttentionSpec:
        """The problem of one device."""
        spec, devices = self.spec, 1 if self.heads is None else self.heads.devices
        return dataclasses.replace(spec, num_heads=spec.num_heads // devices, num_kv_heads=spec.num_kv_heads // devices)

    def _divided(self, function: Callable[..., Any], results: Any, layout: TileLayout, *arrays: Any) -> Any:
        """``function(places, *arrays)`` of each device's heads; ``results`` say how what it returns is divided."""
        with jax.enable_x64(new_val=False):  # where a caller enables it, the loops' counters would be of two dtypes
            if self.heads is None:
                return function(layout, *arrays)
            axis = self.heads.axis
            specs = {_BY_HEAD: PartitionSpec(None, None, axis), _BY_KV_HEAD: PartitionSpec(None, axis)}
            array_specs = (specs[_BY_KV_HEAD if isinstance(x, Selection) else _BY_HEAD] for x in arrays)
            shared = jax.shard_map(
                function,
                mesh=self.heads.mesh,
                in_specs=(PartitionSpec(), *array_specs),
                out_specs=jax.tree.map(specs.get, results),
                check_vma=False,
            )
            return shared(layout, *arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class _Slots:
    """Keys or values of one KV head, read in place: a head that is sliced out would be copied for every query tile."""

    rows: Float[Array, "heads_length dim"]  # of all heads of all sequences
    first: Int[Array, ""]  # the row of slot 0

    def read(self, start: int | Array, width: int) -> Float[Array, "keys dim"]:
        """Slots from ``start`` on."""
        return lax.dynamic_slice_in_dim(self.rows, self.first + start, width)

    def read_units(self, units: Int[Array, " n"], unit: int) -> Float[Array, "keys dim"]:
        """Units one behind the other, as slices: XLA's gather is several times slower here."""
        if unit == 1:
            return self.rows.at[self.first + units].get(mode="promise_in_bounds")
        return jnp.concatenate([self.read(units[i] * unit, unit) for i in range(len(units))])


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill:
    """One planned prefill: its static choices and the places of queries and keys."""

    spec: AttentionSpec
    tiling: Tiling
    layout: TileLayout

    @property
    def masked(self) -> bool:
        """Whether a unit before the local region may hold keys that a row does not see."""
        return self.spec.has_segment_ids or self.spec.has_seq_lengths

    def batch_of(self, head: Int[Array, ""]) -> Int[Array, ""]:
        """The row of the places for KV head ``head`` of all sequences."""
        return head // self.spec.num_kv_heads if self.layout.batch > 1 else jnp.int32(0)

    def seen(self, batch: Array, tile: Array, slots: Int[Array, " keys"]) -> Bool[Array, "queries keys"]:
        """Which queries of a tile see which slots."""
        layout, size = self.layout, self.tiling.query_tile

        def rows(x: Any) -> Array:
            return lax.dynamic_slice(jnp.asarray(x), (batch, tile * size), (1, size))[0]

        ids = ()
        if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
            ids = rows(layout.query_segment_ids), jnp.asarray(layout.key_value_segment_ids)[batch, slots]
        return may_see(rows(layout.query_positions), slots, jnp.asarray(layout.lengths)[batch], *ids)

    def scores(
        self, query: Float[Array, "rows dim"], key: Float[Array, "keys dim"], value: Float[Array, "keys v_dim"] | None
    ) -> Float[Array, "rows keys"]:
        """Scaled logits, float32; a float32 query is scaled already. NaN for a value that :meth:`fold` sets to zero."""
        scores = jnp.einsum("qd,kd->qk", query, key, preferred_element_type=jnp.float32)
        if self.spec.dtype != "float32":
            scores = scores * self.spec.softmax_scale
        cap = self.spec.logits_soft_cap
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        if self.masked and value is not None:
            scores = jnp.where(jnp.isfinite(value).all(-1), scores, jnp.nan)
        return scores

    def mask(self, scores: Float[Array, "rows keys"], seen: Bool[Array, "queries keys"]) -> Float[Array, "rows keys"]:
        """Scores with those of unseen keys made very small; a row of scores per query head of the group."""
        wide = scores.reshape(self.spec.group_size, -1, scores.shape[-1])
        return jnp.where(seen[None], wide, _MASKED).reshape(scores.shape)

    def fold(
        self, state: _State, scores: Float[Array, "rows keys"], value: Float[Array, "keys v_dim"] | None
    ) -> tuple[_State, Float[Array, "rows keys"]]:
        """Online softmax: the state with these keys in it, and their exponentials below the new maximum.

        Zero times NaN is NaN: where keys may be hidden, a value that is not finite is zero, and its score is NaN, which
        the mask hides from the rows that may not see it.
        """
        top, total, out = state
        new_top = jnp.maximum(top, scores.max(-1))
        # A row that has seen nothing keeps top at _MASKED; half of that subtracted instead gives exp(-5e29) = 0.
        probs = jnp.exp(scores - jnp.maximum(new_top, _MASKED / 2)[:, None])
        decay = jnp.exp(top - new_top)
        if out is not None and value is not None:
            if self.masked:
                value = jnp.where(jnp.isfinite(value).all(-1, keepdims=True), value, 0)
            rounded = probs.astype(value.dtype)
            out = out * decay[:, None] + jnp.einsum("qk,kd->qd", rounded, value, preferred_element_type=jnp.float32)
        return (new_top, total * decay + probs.sum(-1), out), probs

    def start(self, *, with_output: bool) -> _State:
        """The state before any key."""
        rows = self.spec.group_size * self.tiling.query_tile
        out = jnp.zeros((rows, self.spec.value_head_dim or 0)) if with_output else None
        return jnp.full(rows, _MASKED), jnp.zeros(rows), out

    def local(
        self, state: _State, batch: Array, tile: Array, query: Array, key: _Slots, value: _Slots | None
    ) -> tuple[_State, Any]:
        """The state with the local region of a query tile in it."""
        width = min(self.tiling.local_units * self.tiling.unit, self.spec.key_value_length)
        first = jnp.asarray(self.layout.first_local)[batch, tile] * self.tiling.unit
        start = jnp.minimum(first, self.spec.key_value_length - width)  # as dynamic_slice would, but known to the mask
        slots = start + jnp.arange(width, dtype=jnp.int32)
        seen = self.seen(batch, tile, slots) & (slots >= first)[None]
        v = None if value is None else value.read(start, width)
        return self.fold(state, self.mask(self.scores(query, key.read(start, width), v), seen), v)

    def finish(self, state: _State) -> Float[Array, "rows v_dim"]:
        """Output rows in the dtype of the input; a row that saw nothing is zero."""
        _, total, out = state
        if out is None:
            raise TypeError("a state without values has no output")
        seen = total > 0.0
        return (out * jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)[:, None]).astype(self.spec.dtype)


def attend(
    spec: AttentionSpec,
    tiling: Tiling,
    layout: TileLayout,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k v"],
    selection: Selection,
) -> Float[Array, "b t n v"]:
    """Attention of every query tile to its local region and its selected units."""
    this = Prefill(spec, tiling, layout)
    keys, values = _rows(key), _rows(value)
    together = max(1, min(tiling.slots, _KEYS_PER_STEP // tiling.unit))
    selected = selection.selected.reshape(math.prod(selection.count.shape), tiling.slots)
    selected = jnp.pad(selected, ((0, 0), (0, -tiling.slots % together)), constant_values=-1)

    def one_tile(head: Array, tile: Array, q: Array, chosen: Array, count: Array) -> Array:
        batch = this.batch_of(head)
        k_head, v_head = (_Slots(x, head * spec.key_value_length) for x in (keys, values))
        state, _ = this.local(this.start(with_output=True), batch, tile, q, k_head, v_head)

        def step(first: Array, width: int, state: _State, *, all_real: bool) -> _State:
            units = lax.dynamic_slice_in_dim(chosen, first, width)
            k, v = (x.read_units(jnp.maximum(units, 0), tiling.unit) for x in (k_head, v_head))
            scores = this.scores(q, k, v)
            real = jnp.repeat(units >= 0, tiling.unit)[None]
            if this.masked:
                slots = (units[:, None] * tiling.unit + jnp.arange(tiling.unit, dtype=jnp.int32)[None]).reshape(-1)
                scores = this.mask(scores, this.seen(batch, tile, slots) & real)
            elif not all_real:
                scores = jnp.where(real, scores, _MASKED)
            return this.fold(state, scores, v)[0]

        if not tiling.slots:
            return this.finish(state)
        steps = count // together
        state = lax.fori_loop(0, steps, lambda n, x: step(n * together, together, x, all_real=True), state)
        if together <= _FEW:  # what is left one by one
            state = lax.fori_loop(steps * together, count, lambda n, x: step(n, 1, x, all_real=True), state)
        else:  # or in one masked step
            more = (count + together - 1) // together
            state = lax.fori_loop(steps, more, lambda n, x: step(n * together, together, x, all_real=False), state)
        return this.finish(state)

    out = _map(this, one_tile, query, selected, selection.count.reshape(-1))
    return untiled(out, spec, tiling)


def select(
    spec: AttentionSpec,
    tiling: Tiling,
    layout: TileLayout,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k v"] | None = None,
    ablation: Ablation | None = None,
) -> tuple[Selection, Float[Array, "b t n v"] | None]:
    """The selection of an anchor; with ``value``, also dense attention's output, from the same scores."""
    this = Prefill(spec, tiling, layout)
    keys = _rows(key)
    values = None if value is None else _rows(value)
    allowed = candidates(tiling, layout)
    sweep = _sweep_keys if tiling.unit == 1 else _sweep_units

    def one_tile(head: Array, tile: Array, q: Array) -> Any:
        batch = this.batch_of(head)
        first = head * spec.key_value_length
        v_head = None if values is None else _Slots(values, first)
        mass, state = sweep(this, batch, tile, q, _Slots(keys, first), v_head)
        chosen = mass if ablation == "all_heads" else choose(tiling, mass, allowed[batch, tile])
        return chosen, None if values is None else this.finish(state)

    chosen, out = _map(this, one_tile, query)
    lead = (spec.batch, spec.num_kv_heads, tiling.query_tiles)
    if ablation == "all_heads":
        selection = select_by(tiling, layout, chosen.reshape(*lead, tiling.units), ablation)
    else:
        selection = Selection(chosen[0].reshape(*lead, tiling.slots), chosen[1].reshape(lead))
    return selection, None if out is None else untiled(out, spec, tiling)


def _sweep_units(
    this: Prefill, batch: Array, tile: Array, q: Array, key: _Slots, value: _Slots | None
) -> tuple[Float[Array, " units"], _State]:
    """Pooled mass of the units before the local region, in one pass over all keys; and the final state."""
    tiling, group = this.tiling, max(1, _KEYS_PER_SWEEP // this.tiling.unit)
    rows = q.shape[0]
    earlier = jnp.asarray(this.layout.first_local)[batch, tile]

    def visit(units: int) -> Callable[..., Any]:
        width = units * tiling.unit

        def step(n: Array, carry: Any) -> Any:
            state, sums, tops = carry
            first = n * units
            v = None if value is None else value.read(first * tiling.unit, width)
            scores = this.scores(q, key.read(first * tiling.unit, width), v)
            if this.masked:
                slots = first * tiling.unit + jnp.arange(width, dtype=jnp.int32)
                scores = this.mask(scores, this.seen(batch, tile, slots))
            state, probs = this.fold(state, scores, v)
            parts = probs.reshape(rows, units, tiling.unit).sum(-1).T
            return (
                state,
                lax.dynamic_update_slice(sums, parts, (first, 0)),
                lax.dynamic_update_slice(tops, jnp.broadcast_to(state[0], parts.shape), (first, 0)),
            )

        return step

    shape = (tiling.units, rows)
    carry = this.start(with_output=value is not None), jnp.zeros(shape), jnp.full(shape, _MASKED)
    whole = this.spec.key_value_length // tiling.unit  # what the end cuts is never before a local region
    if group > 1 and whole >= group:
        carry = lax.fori_loop(0, earlier // group, visit(group), carry)
        carry = lax.fori_loop(earlier // group * group, earlier, visit(1), carry)
    elif whole:
        carry = lax.fori_loop(0, earlier, visit(1), carry)
    state, sums, tops = carry
    state, _ = this.local(state, batch, tile, q, key, value)
    top, total, _ = state
    mass = sums * jnp.exp(tops - jnp.maximum(top, _MASKED / 2)[None]) * (_real(this, tile) / total)[None]
    return jnp.where((total > 0.0)[None], mass, 0).sum(-1), state  # not of a row that sees nothing, or sees NaN


def _sweep_keys(
    this: Prefill, batch: Array, tile: Array, q: Array, key: _Slots, value: _Slots | None
) -> tuple[Float[Array, " units"], _State]:
    """The same key by key, in two passes: log-sums, then the mass of each key."""
    length = this.spec.key_value_length
    width = min(_KEYS_PER_SWEEP, length)
    first_local = jnp.asarray(this.layout.first_local)[batch, tile]
    steps = -(-first_local // width)

    def scores_of(n: Array) -> tuple[Array, Array, Any]:
        start = jnp.minimum(n * width, length - width)
        slots = start + jnp.arange(width, dtype=jnp.int32)
        v = None if value is None else value.read(start, width)
        scores = this.scores(q, key.read(start, width), v)
        # Inside the block's own share of the earlier keys: the last block may reach into the one before it.
        fresh = (slots >= n * width) & (slots < first_local)
        seen = (this.seen(batch, tile, slots) & fresh[None]) if this.masked else fresh[None]
        return start, this.mask(scores, jnp.broadcast_to(seen, (this.tiling.query_tile, width))), v

    def log_sums(n: Array, state: _State) -> _State:
        _, scores, v = scores_of(n)
        return this.fold(state, scores, v)[0]

    state = lax.fori_loop(0, steps, log_sums, this.start(with_output=value is not None))
    state, _ = this.local(state, batch, tile, q, key, value)
    top, total, _ = state
    sees = (total > 0.0)[:, None]  # not nothing, and no NaN

    def masses(n: Array, mass: Array) -> Array:
        start, scores, _ = scores_of(n)
        probs = jnp.exp(scores - jnp.maximum(top, _MASKED / 2)[:, None]) * (_real(this, tile) / total)[:, None]
        part = lax.dynamic_slice_in_dim(mass, start, width) + jnp.where(sees, probs, 0).sum(0)
        return lax.dynamic_update_slice_in_dim(mass, part, start, 0)

    return lax.fori_loop(0, steps, masses, jnp.zeros(length)), state


def _real(this: Prefill, tile: Array) -> Float[Array, " rows"]:
    """1 for rows that are queries, 0 for the padding of the last query tile."""
    at = tile * this.tiling.query_tile + jnp.arange(this.tiling.query_tile, dtype=jnp.int32)
    return jnp.tile((at < this.spec.query_length).astype(jnp.float32), this.spec.group_size)


def _map(this: Prefill, one_tile: Callable[..., Any], query: Array, *per_tile: Array) -> Any:
    """``one_tile(head, tile, rows of queries, ...)`` over every KV head of every sequence and every query tile."""
    if this.spec.dtype == "float32":
        query = query * jnp.float32(this.spec.softmax_scale)
    index = heads_and_tiles(this.spec, this.tiling)
    return lax.map(lambda x: one_tile(*x), (*index, tiled(query, this.spec, this.tiling), *per_tile))


def heads_and_tiles(spec: AttentionSpec, tiling: Tiling) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
    """The KV head (of all sequences) and the query tile of each row of :func:`tiled`."""
    tiles, heads = tiling.query_tiles, spec.batch * spec.num_kv_heads
    return jnp.repeat(jnp.arange(heads, dtype=jnp.int32), tiles), jnp.tile(jnp.arange(tiles, dtype=jnp.int32), heads)


def tiled(
    x: Float[Array, "b t n h"], spec: AttentionSpec, tiling: Tiling, tile: int = 0, block: int = 0
) -> Float[Array, "blocks rows h"]:
    """[B, T, N, H] -> [B * K * query_tiles * (tile / block), group * block, H], T padded with zeros.

    A query tile is padded to ``tile`` queries and cut into blocks of ``block``; by default it is whole.
    """
    tile = tile or tiling.query_tile
    block, kv_heads, group, (b, t, _, h) = block or tile, spec.num_kv_heads, spec.group_size, x.shape
    x = jnp.pad(x, ((0, 0), (0, tiling.padded_queries - t), (0, 0), (0, 0)))
    x = x.reshape(b, tiling.query_tiles, tiling.query_tile, kv_heads, group, h)
    if tile != tiling.query_tile:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, tile - tiling.query_tile), *((0, 0),) * 3))
    x = x.reshape(b, tiling.query_tiles, tile // block, block, kv_heads, group, h)
    return x.transpose(0, 4, 1, 2, 5, 3, 6).reshape(-1, group * block, h)


def untiled(
    x: Float[Array, "blocks rows h"], spec: AttentionSpec, tiling: Tiling, tile: int = 0, block: int = 0
) -> Float[Array, "b t n h"]:
    """The inverse."""
    tile = tile or tiling.query_tile
    block, h = block or tile, x.shape[-1]
    x = x.reshape(spec.batch, spec.num_kv_heads, tiling.query_tiles, tile // block, spec.group_size, block, h)
    x = x.transpose(0, 2, 3, 5, 1, 4, 6).reshape(spec.batch, tiling.query_tiles, tile, spec.num_heads, h)
    x = x[:, :, : tiling.query_tile].reshape(spec.batch, tiling.padded_queries, spec.num_heads, h)
    return x[:, : spec.query_length]


def _rows(x: Float[Array, "b s k d"]) -> Float[Array, "bks d"]:
    return x.swapaxes(1, 2).reshape(-1, x.shape[3])
