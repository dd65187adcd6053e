"""What Kascade keeps in a model: the layers that select, and the share of the causal pairs that each role computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attnsuite.backends import AttentionSpec
from attnsuite.backends.kascade import LayerRole, Settings, kept_fraction
from attnsuite.backends.kascade.cost import runs_dense
from attnsuite.models import ModelConfig
from attnsuite.models.planning import Resolutions


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Shares of the causal pairs that are computed, by formula from lengths and settings.

    ``roles`` maps the number of each layer that Kascade computes to its role, ``shares`` each of these roles to its
    share. ``pairs`` is the mean over these layers. ``settings`` are the settings that were asked for.
    """

    roles: Mapping[int, LayerRole]
    shares: Mapping[str, float]
    pairs: float
    settings: Settings

    @staticmethod
    def of(spec: AttentionSpec, options: Mapping[str, Any], layers: tuple[int, ...], num_layers: int) -> Kept:
        """What ``layers`` of a model of ``num_layers`` keep under ``options`` of the backend. Raises ValueError."""
        settings = Settings.of(options)
        fraction = kept_fraction(spec, settings, num_layers)
        schedule = settings.schedule
        roles = {i: schedule.layers[i] if schedule else LayerRole("anchor", i) for i in layers}
        share = fraction.reuse if runs_dense(spec, settings) is None else 1.0
        shares = {role.role: 1.0 if role.role == "dense" else share for role in roles.values()}
        return Kept(roles, shares, sum(shares[role.role] for role in roles.values()) / len(roles), settings)

    @property
    def figures(self) -> dict[str, float]:
        """The same as figures of a record."""
        return {"kept_pairs": self.pairs, **{f"kept_pairs_{role}": share for role, share in self.shares.items()}}

    @property
    def lines(self) -> tuple[str, ...]:
        """The same as sentences."""
        by_role = [
            f"{role} ({_numbers(i for i, one in self.roles.items() if one.role == role)}) {share:.4f}"
            for role, share in self.shares.items()
        ]
        told = [f"kept: {self.pairs:.4f} of the causal pairs; by role of layers: {', '.join(by_role)}"]
        schedule, settings = self.settings.schedule, self.settings
        if schedule is None:
            told.append("schedule: none; every layer selects for itself")
        else:
            selects = [i for i, role in self.roles.items() if role.role != "reuse"]
            reuses = [f"{i} from {role.anchor}" for i, role in self.roles.items() if role.role == "reuse"]
            told.append(
                f"schedule: {schedule.method}; layers that select: {_numbers(selects)}; that reuse: "
                f"{', '.join(reuses) or 'none'}"
            )
        if self.pairs == 1.0:
            remedy = "lower min_keys, or give longer sequences"
            if settings.when == "decode":
                remedy = "several query tokens at once run dense: leave out when, or decode token by token"
            told.append(
                f"DENSE: every pair was kept, so that this is not a figure of sparse attention (min_keys="
                f"{settings.min_keys}, top_k={settings.top_k:g}, tile_size={settings.tile_size}, when="
                f"{settings.when!r}); {remedy}"
            )
        return tuple(told)


def kept_of(resolutions: Resolutions, options: Mapping[str, Any], config: ModelConfig) -> tuple[Kept, ...]:
    """The :class:`Kept` of each attention type that Kascade computes; empty where exact backends compute all."""
    return tuple(
        Kept.of(found.spec, options, _layers(config, kind), config.num_layers)
        for kind, found in resolutions
        if found.backend.name == "kascade" and found.mode != "fallback"
    )


def _layers(config: ModelConfig, kind: str) -> tuple[int, ...]:
    return tuple(i for i, other in enumerate(config.layer_types) if other == kind)


def _numbers(layers: Any) -> str:
    return ", ".join(map(str, layers)) or "none"
