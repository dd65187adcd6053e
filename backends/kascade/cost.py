"""The cost of Kascade by formula: pairs and FLOPs of a whole model relative to *causal* dense attention.

Every layer counts: a reuse layer costs what it attends to, an anchor also its selection, a dense layer everything.
:func:`selected_share` says in sentences what is kept, and which layers select.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..contract import AttentionSpec, SelectedShare
from .schedule import LayerRole
from .settings import Settings, Tiling

# Products of the size queries x keys. Dense: scores and weighted values. A selection computes the scores of all earlier
# keys once by tiles (block sums are rescaled afterwards), twice by single keys (log-sums first).
_DENSE, _ATTEND = 2, 2
_SELECT = {"tile": 1, "token": 2}

# Share of dense attention's FLOPs from which dense is faster. Zen 5, 2 cores, float32: docs/explanation/kascade.md.
WORTHWHILE = 0.75


@dataclasses.dataclass(frozen=True, slots=True)
class KeptFraction:
    """Shares of the cost of causal dense attention over all layers (1.0: the same; anchors may bring it above).

    ``pairs``: query-key pairs attended to, on average over the layers. ``flops``: of both products, selection included.
    ``reuse``: pairs of one reuse layer. ``anchor`` and ``dense``: FLOPs of one such layer.
    """

    pairs: float
    flops: float
    reuse: float
    anchor: float
    dense: float


def kept_fraction(
    spec: AttentionSpec, settings: Settings, num_layers: int = 1, *, position: int | None = None
) -> KeptFraction:
    """The share of causal FLOPs that ``num_layers`` layers compute under ``settings`` for ``spec``, without padding.

    Without a schedule every layer is an anchor. ``position`` is that of the last query: by default the last key's
    where the queries are new tokens behind a cache, else ``query_length - 1``. Raises ValueError where the schedule
    is for another number of layers.

    >>> spec = AttentionSpec(batch=1, query_length=4096, key_value_length=4096, num_heads=8, num_kv_heads=8,
    ...                      head_dim=64, is_causal=True)
    >>> round(kept_fraction(spec, Settings(top_k=1.0)).pairs, 3)
    1.0
    """
    roles = (LayerRole("anchor", 0),) * num_layers if settings.schedule is None else settings.schedule.layers
    if len(roles) != num_layers:
        raise ValueError(f"the schedule is for {len(roles)} layers, the model has {num_layers}.")
    tiling = Tiling.of(spec, settings)
    behind_a_cache = spec.has_positions or spec.query_length == 1
    last = (spec.key_value_length if behind_a_cache else spec.query_length) - 1 if position is None else position
    rows = last + 1 - spec.query_length + np.arange(spec.query_length)
    starts = np.repeat(rows[:: tiling.query_tile], tiling.query_tile)[: len(rows)] // tiling.unit  # local region's unit
    visible = np.minimum(rows + 1, spec.key_value_length)
    earlier = np.minimum(starts, spec.key_value_length // tiling.unit) * tiling.unit
    chosen = np.asarray(tiling.budgets)[np.minimum(starts, len(tiling.budgets) - 1)] * tiling.unit
    attended_keys = np.minimum(chosen, earlier) + (visible - np.minimum(earlier, visible))
    causal, attended = float(visible.sum()), float(attended_keys.sum())
    select = _SELECT[settings.granularity]
    share = attended / causal
    cost = {
        "reuse": share,
        "anchor": share + select / _DENSE,
        "dense": 1.0 + (select - 1) / _DENSE,  # the scores of the dense layer serve the selection too
    }
    pairs = [1.0 if role.role == "dense" else share for role in roles]
    return KeptFraction(
        float(np.mean(pairs)),
        float(np.mean([cost[role.role] for role in roles])),
        share,
        cost["anchor"],
        cost["dense"],
    )


def runs_dense(spec: AttentionSpec, settings: Settings) -> str | None:
    """Why the option ``when`` runs this dense, as the beginning of a sentence; None if it runs sparse.

    ``when="decode"`` is the paper's decode-only variant: only a single query token is sparse.
    """
    if settings.when == "profitable":
        return not_profitable(spec, settings)
    if settings.when == "decode" and spec.query_length > 1:
        return f"kascade: query_length={spec.query_length}, and when='decode' runs several query tokens dense"
    return None


def not_profitable(spec: AttentionSpec, settings: Settings) -> str | None:
    """Why ``when="profitable"`` runs this dense, as the beginning of a sentence; None if it runs sparse.

    The shapes alone decide, by the share of FLOPs that is kept: of the whole schedule, or of an anchor if there is
    none. Fewer FLOPs do not mean less time; sparse attention pays only below :data:`WORTHWHILE`.
    """
    layers = 1 if settings.schedule is None else len(settings.schedule.layers)
    fraction = kept_fraction(spec, settings, layers).flops
    if fraction < WORTHWHILE:
        return None
    return (
        f"kascade: sparse attention would compute {fraction:.2f} of dense attention's causal FLOPs here, and "
        f"when='profitable' runs dense from {WORTHWHILE} on"
    )


def selected_share(
    spec: AttentionSpec, options: Mapping[str, Any], layers: tuple[int, ...], num_layers: int
) -> SelectedShare:
    """What ``layers`` of a model of ``num_layers`` attend to, by formula of lengths and settings. Raises ValueError."""
    settings = Settings.of(options)
    fraction = kept_fraction(spec, settings, num_layers)
    schedule = settings.schedule
    roles = {i: schedule.layers[i] if schedule else LayerRole("anchor", i) for i in layers}
    share = fraction.reuse if runs_dense(spec, settings) is None else 1.0
    shares = {role.role: 1.0 if role.role == "dense" else share for role in roles.values()}
    pairs = sum(shares[role.role] for role in roles.values()) / len(roles)
    figures = {"kept_pairs": pairs, **{f"kept_pairs_{role}": share for role, share in shares.items()}}
    return SelectedShare(pairs, figures, tuple(_lines(settings, roles, shares, pairs)))


def _lines(
    settings: Settings, roles: Mapping[int, LayerRole], shares: Mapping[str, float], pairs: float
) -> Iterator[str]:
    by_role = [
        f"{role} ({_numbers(i for i, one in roles.items() if one.role == role)}) {share:.4f}"
        for role, share in shares.items()
    ]
    yield f"kept: {pairs:.4f} of the causal pairs; by role of layers: {', '.join(by_role)}"
    if settings.schedule is None:
        yield "schedule: none; every layer selects for itself"
    else:
        selects = [i for i, role in roles.items() if role.role != "reuse"]
        reuses = [f"{i} from {role.anchor}" for i, role in roles.items() if role.role == "reuse"]
        yield (
            f"schedule: {settings.schedule.method}; layers that select: {_numbers(selects)}; that reuse: "
            f"{', '.join(reuses) or 'none'}"
        )
    if pairs == 1.0:
        remedy = "lower min_keys, or give longer sequences"
        if settings.when == "decode":
            remedy = "several query tokens at once run dense: leave out when, or decode token by token"
        yield (
            f"DENSE: every pair was kept, so that this is not a figure of sparse attention (min_keys="
            f"{settings.min_keys}, top_k={settings.top_k:g}, tile_size={settings.tile_size}, when="
            f"{settings.when!r}); {remedy}"
        )


def _numbers(layers: Any) -> str:
    return ", ".join(map(str, layers)) or "none"
