"""The rows of a selection case as backends: each is planned like a backend and notes which keys its layers attend to.

The rows are not registered. Kascade's own rows run the real backend with the schedule or the selection that the row is
about. The other rows choose units by another score, with the same candidates and the same budget, and attend under an
explicit mask. Every layer but the dense first one also notes the share of its true attention that it retained.
Quadratic: for short input.

In OmniKV (ICLR 2025) and LessIsMore (arXiv 2508.07101) a few layers attend to everything and select, once for all heads
of the layer; the layers until the next of them attend to that selection. The authors' code selects in layers that are
named by hand, by single keys, in decoding alone. Here the anchors of the case's schedule select, by the case's unit, in
prefill too, and as many units as in every other row, beside the local region (:data:`SCORES`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnsuite.backends import AttentionSpec, Layout, Plan, Target, plan, support
from attnsuite.backends.contract import Carry, may_attend
from attnsuite.backends.features import Mode, Options
from attnsuite.backends.kascade import (
    KASCADE,
    LayerRole,
    Schedule,
    Selection,
    Settings,
    TileLayout,
    Tiling,
    manual,
    reference,
)
from attnsuite.backends.kascade.selection import candidates, choose, with_local
from attnsuite.backends.standard import STANDARD

_WITHOUT_KASCADE = frozenset({"dense", "oracle_query", "quest", "sinks_window", "random_tiles", "other_model"})
# The settings of Kascade that a row changes; some rows change the schedule too.
_CHANGES: dict[str, dict[str, Any]] = {
    "kascade_all_heads": {"ablation": "all_heads"},
    "kascade_no_remap": {"ablation": "no_remap"},
    "kascade_token": {"granularity": "token"},
}
_HEAVIEST = 4  # units that "dropped_tiles" leaves out: a KV head of the retrieval checkpoint serves four needles
_LARGE = jnp.iinfo(jnp.int32).max
Attend = Callable[[Array, Array, Array, int, Carry], tuple[Array, Carry, Bool[Array, "b n t s"]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Retained:
    """The share of attention and of pairs that one layer retained.

    ``mass [batch, kv_heads, query_tiles]`` is the share of dense attention, from the same queries and keys, on pairs
    that were computed; it is the mean over the rows and heads of a tile. ``pairs`` and ``causal`` count the pairs that
    were computed and those of causal attention.
    """

    mass: Float[Array, "batch kv_heads query_tiles"]
    pairs: Float[Array, ""]
    causal: Float[Array, ""]


jax.tree_util.register_dataclass(Retained)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """The row ``name`` as a backend. Its plan adds to ``retained`` one entry per layer that selects or reuses.

    ``retained`` is filled while JAX traces: return it from the function that is being traced; None: nothing is noted.
    ``schedule`` is Kascade's. ``others`` has the queries and keys of each layer of the model that selects in the row
    ``other_model``.
    """

    name: str
    settings: Settings
    schedule: Schedule
    retained: list[Retained] | None = dataclasses.field(default_factory=list)
    others: Sequence[tuple[Array, Array]] = ()
    exact: bool = False

    takes, refuses = staticmethod(KASCADE.takes), staticmethod(KASCADE.refuses)

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """The row's attention, layer by layer."""
        attend = self._attend(spec, layout, target)

        def run(query: Array, key: Array, value: Array, layer: int, carry: Carry) -> tuple[Array, Carry]:
            out, carry, mask = attend(query, key, value, layer, carry)
            if layer and self.retained is not None:
                tiling = Tiling.of(spec, self.settings)
                self.retained.append(_retained(spec, layout, tiling, query, key, mask))
            return out, carry

        return Plan(run)

    def _attend(self, spec: AttentionSpec, layout: Layout, target: Target) -> Attend:
        tiling = Tiling.of(spec, self.settings)
        if self.name in SCORES:
            return _shared(self.name, spec, layout, tiling, target, self.schedule)
        if not runs_kascade(self.name):
            return _chosen(self.name, spec, layout, tiling, target, self.others)
        schedule = _row_schedule(self.name, self.schedule, spec)
        settings = dataclasses.replace(row_settings(self.name, self.settings, spec, target)[0], schedule=schedule)
        return _kascade(self.name, spec, layout, Tiling.of(spec, settings), settings, target)


def row_settings(
    method: str, settings: Settings, spec: AttentionSpec, target: Target
) -> tuple[Settings, tuple[str, ...]]:
    """A row's settings, and notes on who computes it.

    The loss of a selection does not depend on who computes it. If the target's kernel does not take a row's tiles (a
    TPU's takes no tiles of 16 keys, no kernel takes single keys), XLA's code computes the row, and a note says so. A
    row that is timed is refused instead, see :func:`attnsuite.suite.kinds.kascade.stack_case.refusals`.
    """
    changed = dataclasses.replace(settings, **_CHANGES.get(method, {}))
    reasons = support(KASCADE, spec, target, options=changed.as_options()).reasons
    by_xla = dataclasses.replace(changed, kernel="xla")
    if not reasons or not support(KASCADE, spec, target, options=by_xla.as_options()):
        return changed, ()
    return by_xla, (f"{method}: XLA's code computed this row, not the kernel of {target}: {' '.join(reasons)}",)


def refusals(method: str, settings: Settings, spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Why the row does not run ``spec`` on ``target``: the real backend's reasons, if the row runs the real backend."""
    if not runs_kascade(method):
        return ()
    options = row_settings(method, settings, spec, target)[0].as_options()
    return support(KASCADE, spec, target, options=options).reasons


def runs_kascade(method: str) -> bool:
    """Whether a row runs the real backend; the other rows choose and attend on their own."""
    return method not in _WITHOUT_KASCADE and method not in SCORES


def _row_schedule(method: str, schedule: Schedule, spec: AttentionSpec) -> Schedule:
    layers, heads = len(schedule.layers), spec.num_kv_heads
    if method == "oracle_pooled":
        return manual(range(layers), num_layers=layers, kv_heads=heads)
    if method == "wrong_anchors":
        late = {0, *(min(a + 1, layers - 1) for a in schedule.anchors if a)}
        return manual(tuple(late), num_layers=layers, kv_heads=heads)
    if method == "swapped_heads":
        return Schedule(tuple(_swapped(role, heads) for role in schedule.layers), schedule.method)
    return schedule


def _swapped(role: LayerRole, heads: int) -> LayerRole:
    if role.role != "reuse":
        return role
    right = role.head_map or tuple(range(heads))
    return dataclasses.replace(role, head_map=tuple((head + 1) % heads for head in right))


def _kascade(
    method: str, spec: AttentionSpec, layout: Layout, tiling: Tiling, settings: Settings, target: Target
) -> Attend:
    """The real backend. A control of the gate changes the selection that its reuse layers receive."""
    planned = plan(KASCADE, spec, layout, target=target, options=settings.as_options())
    schedule = settings.schedule
    if schedule is None:
        raise ValueError(f"{method} needs a schedule.")

    def attend(query: Array, key: Array, value: Array, layer: int, carry: Carry) -> tuple[Array, Carry, Array]:
        role = schedule.layers[layer]
        if role.role != "reuse":
            out, carry = planned.run(query, key, value, layer=layer, carry=carry)
            return out, carry, reference.attended(spec, layout, tiling, carry)
        handed = carry
        if method == "stale_indices":
            handed = Selection(jnp.roll(carry.selected, 1, 0), jnp.roll(carry.count, 1, 0))
        if method == "dropped_tiles":
            handed = _without_heaviest(tiling, carry, reference.pooled_mass(spec, layout, tiling, query, key))
        out, _ = planned.run(query, key, value, layer=layer, carry=handed)
        used = handed if settings.ablation == "no_remap" or not role.head_map else handed.remapped(role.head_map)
        return out, carry, reference.attended(spec, layout, tiling, used)

    return attend


def _without_heaviest(tiling: Tiling, selection: Selection, mass: Float[Array, "b k q units"]) -> Selection:
    """The selection without the units that hold the most of this layer's own attention."""
    listed = selection.selected
    if not listed.shape[-1]:
        return selection
    weight = jnp.take_along_axis(mass, jnp.maximum(listed, 0), axis=-1)
    order = jnp.argsort(jnp.where(listed < 0, -1.0, weight), axis=-1, descending=True)
    rank = jnp.argsort(order, axis=-1)
    left = jnp.where((rank >= _HEAVIEST) & (listed >= 0), listed, _LARGE)
    ascending = jnp.sort(left, axis=-1)
    return Selection(
        jnp.where(ascending == _LARGE, -1, ascending), jnp.maximum(selection.count - _HEAVIEST, 0).astype(jnp.int32)
    )


def _shared(
    method: str, spec: AttentionSpec, layout: Layout, tiling: Tiling, target: Target, schedule: Schedule
) -> Attend:
    """Rows whose heads share a selection: the schedule's anchors are dense and select, the other layers reuse it."""
    dense = plan(STANDARD, spec, layout, target=target)
    candidate = candidates(tiling, TileLayout.of(spec, layout, tiling).of_all(spec.batch))

    def attend(query: Array, key: Array, value: Array, layer: int, carry: Carry) -> tuple[Array, Carry, Array]:
        if schedule.layers[layer].role == "reuse":
            mask = reference.attended(spec, layout, tiling, carry)
            return reference.under_mask(spec, query, key, value, mask, target), carry, mask
        score = SCORES[method](tiling, reference.probabilities(spec, layout, query, key), candidate)
        lead = (spec.batch, spec.num_kv_heads, *score.shape[1:-1])
        selected, count = choose(tiling, score, candidate)
        selection = Selection(
            jnp.broadcast_to(selected[:, None], (*lead, tiling.slots)), jnp.broadcast_to(count[:, None], lead)
        )
        return dense.run(query, key, value)[0], selection, _causal(spec, layout)

    return attend


def omnikv(
    tiling: Tiling,
    probabilities: Float[Array, "batch heads q_len kv_len"],
    candidate: Bool[Array, "batch query_tiles units"],
) -> Float[Array, "batch query_tiles units"]:
    """Per pair of query and key the largest probability of any head, summed over query tile and unit."""
    del candidate
    return reference.pooled(tiling, probabilities.max(1))


def lessismore(
    tiling: Tiling,
    probabilities: Float[Array, "batch heads q_len kv_len"],
    candidate: Bool[Array, "batch query_tiles units"],
) -> Float[Array, "batch query_tiles units"]:
    """The latest quarter of the budget comes first, then every head's best unit, every head's second best, and so on.

    Heads rank the candidates before the latest ones by their attention mass. Ties go to the earlier unit.
    """
    heads = probabilities.shape[1]
    budget = jnp.asarray(tiling.budgets, jnp.int32)[jnp.minimum(candidate.sum(-1), len(tiling.budgets) - 1)]
    by_heads = budget * 3 // 4
    from_end = jnp.cumsum(candidate[..., ::-1], axis=-1)[..., ::-1]  # 1: the latest candidate
    recent = candidate & (from_end <= (budget - by_heads)[..., None])
    mass = jnp.where((candidate & ~recent)[:, None], reference.pooled(tiling, probabilities), -1.0)
    rank = jnp.argsort(jnp.argsort(mass, axis=-1, descending=True), axis=-1)
    turn = (rank * heads + jnp.arange(heads).reshape(1, -1, 1, 1)).min(1)
    turns = tiling.units * heads
    return jnp.where(recent, turns + 1, turns - turn).astype(jnp.float32)


SCORES = {"omnikv": omnikv, "lessismore": lessismore}


def _chosen(
    method: str,
    spec: AttentionSpec,
    layout: Layout,
    tiling: Tiling,
    target: Target,
    others: Sequence[tuple[Array, Array]],
) -> Attend:
    """Rows whose layers choose for themselves: layer 0 is dense, the others attend under the mask of their choice."""
    causal = _causal(spec, layout)
    dense = plan(STANDARD, spec, layout, target=target)
    tile_layout = TileLayout.of(spec, layout, tiling)
    candidate = candidates(tiling, tile_layout.of_all(spec.batch))

    def attend(query: Array, key: Array, value: Array, layer: int, carry: Carry) -> tuple[Array, Carry, Array]:
        if layer == 0:
            return *dense.run(query, key, value), causal
        if method == "oracle_query":
            mask = _oracle_mask(spec, layout, tiling, tile_layout, candidate, query, key)
        else:
            if method == "other_model":
                score = reference.pooled_mass(spec, layout, tiling, *others[layer])
            else:
                score = _score(method, spec, tiling, query, key, layer)
            spread = jnp.broadcast_to(candidate[:, None], score.shape)
            selection = Selection(*choose(tiling, score, spread))
            mask = reference.attended(spec, layout, tiling, selection)
        return reference.under_mask(spec, query, key, value, mask, target), carry, mask

    return attend


def _score(
    method: str, spec: AttentionSpec, tiling: Tiling, query: Array, key: Array, layer: int
) -> Float[Array, "batch kv_heads query_tiles units"]:
    """The score by which units are chosen; not negative."""
    shape = (spec.batch, spec.num_kv_heads, tiling.query_tiles, tiling.units)
    if method == "sinks_window":
        at = jnp.arange(tiling.units, dtype=jnp.float32)
        return jnp.broadcast_to(at.at[0].set(tiling.units), shape)
    if method == "random_tiles":
        return jax.random.uniform(jax.random.fold_in(jax.random.key(0), layer), shape)
    bound = quest_bound(spec, tiling, query, key)
    return bound - bound.min() + 1.0


def quest_bound(
    spec: AttentionSpec, tiling: Tiling, query: Array, key: Array
) -> Float[Array, "batch kv_heads query_tiles units"]:
    """An upper bound of the unscaled logits of a query tile with the keys of a unit (Quest, arXiv 2406.10774).

    It follows from the least and the largest value of each channel among the unit's keys. The bound is the largest over
    the tile's rows and heads.
    """
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    pad = ((0, 0), (0, tiling.units * tiling.unit - s), (0, 0), (0, 0))
    keys = jnp.pad(key, pad, mode="edge").reshape(b, tiling.units, tiling.unit, k, h)
    low, high = keys.min(2), keys.max(2)  # [b, units, k, h]
    grouped = query.reshape(b, t, k, n // k, h)
    # max(q * low, q * high) is q+ * high + q- * low.
    bound = jnp.einsum("btkgh,bukh->bkgtu", jnp.maximum(grouped, 0), high)
    bound = bound + jnp.einsum("btkgh,bukh->bkgtu", jnp.minimum(grouped, 0), low)
    rows = jnp.pad(bound, ((0, 0),) * 3 + ((0, tiling.padded_queries - t), (0, 0)), mode="edge").max(2)
    return rows.reshape(b, k, tiling.query_tiles, tiling.query_tile, tiling.units).max(3)


def _oracle_mask(
    spec: AttentionSpec,
    layout: Layout,
    tiling: Tiling,
    tile_layout: TileLayout,
    candidate: Bool[Array, "batch query_tiles units"],
    query: Array,
    key: Array,
) -> Bool[Array, "batch heads q_len kv_len"]:
    """Each row of each query head sees its own best units, as many as its query tile may have, and its local region."""
    probs = reference.probabilities(spec, layout, query, key)
    b, n, t, s = probs.shape
    mass = jnp.pad(probs, ((0, 0),) * 3 + ((0, tiling.units * tiling.unit - s),))
    mass = mass.reshape(b, n, t, tiling.units, tiling.unit).sum(-1)
    by_row = jnp.repeat(candidate, tiling.query_tile, 1)[:, None, :t]
    selected, _ = choose(tiling, mass, jnp.broadcast_to(by_row, mass.shape))
    units = jnp.arange(tiling.units, dtype=jnp.int32)
    chosen = (selected[..., None] == units.reshape(1, 1, 1, 1, -1)).any(-2)
    none = Selection(
        jnp.zeros((b, 1, tiling.query_tiles, 0), jnp.int32), jnp.zeros((b, 1, tiling.query_tiles), jnp.int32)
    )
    local = (with_local(tiling, tile_layout, none)[..., None] == units.reshape(1, 1, 1, 1, -1)).any(-2)
    chosen = chosen | jnp.repeat(local, tiling.query_tile, 2)[:, :, :t]
    chosen = jnp.repeat(chosen, tiling.unit, 3)[..., :s]
    causal = _causal(spec, layout)
    return chosen if causal is None else chosen & causal


def _retained(spec: AttentionSpec, layout: Layout, tiling: Tiling, query: Array, key: Array, mask: Array) -> Retained:
    probs = reference.probabilities(spec, layout, query, key)
    mask = jnp.broadcast_to(mask, probs.shape)
    rows = (probs * mask).sum(-1)
    b, _, t = rows.shape
    grouped = rows.reshape(b, spec.num_kv_heads, -1, t).mean(2)
    padded = jnp.pad(grouped, ((0, 0), (0, 0), (0, tiling.padded_queries - t)))
    counts = jnp.minimum(t - jnp.arange(tiling.query_tiles) * tiling.query_tile, tiling.query_tile)
    mass = padded.reshape(b, spec.num_kv_heads, tiling.query_tiles, tiling.query_tile).sum(-1) / counts
    causal = jnp.broadcast_to(_causal(spec, layout), probs.shape)
    return Retained(mass, mask.sum(dtype=jnp.float32), causal.sum(dtype=jnp.float32))


def _causal(spec: AttentionSpec, layout: Layout) -> Bool[Array, "#b #n t s"]:
    mask = may_attend(spec, layout)
    return jnp.ones((1, 1, spec.query_length, spec.key_value_length), bool) if mask is None else mask
