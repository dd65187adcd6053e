"""What Kascade keeps in a model: the layers that select, and the share of the causal pairs that each role computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..contract import SelectedShare
from ..spec import AttentionSpec
from .cost import kept_fraction, runs_dense
from .schedule import LayerRole
from .settings import Settings


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
