"""The rows of the ``kascade`` suite: Kascade, its ablations, its controls, and other ways to choose keys.

A row is a comparator, not a backend: only ``kascade`` itself is registered, and no backend falls back to a row. The
kind of a case decides its rows. A row that would repeat another is refused with the reason.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from attnsuite.backends.kascade import Settings

from ...errors import InputError

_QUALITY: tuple[str, ...] = ("kascade_text", "kascade_retrieval")
_GATE: tuple[str, ...] = ("kascade_gate",)
_CHOICES = (*_QUALITY, *_GATE)
_STACK: tuple[str, ...] = ("kascade_prefill", "kascade_decode")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to attend. ``control`` marks a row of the gate that has to fail. ``about`` describes the row on pages."""

    name: str
    about: str
    kinds: tuple[str, ...]
    exact: bool = False
    control: bool = False


METHODS = {
    method.name: method
    for method in (
        Method(name="dense", about="every layer dense (chunked in the speed cases)", kinds=(*_CHOICES, *_STACK),
               exact=True),
        Method(name="oracle_query", about="each query of each head attends to the tiles that hold most of its own "
               "attention", kinds=_QUALITY),
        Method(name="oracle_pooled", about="Kascade with every layer an anchor: nothing is reused", kinds=_QUALITY),
        Method(name="kascade", about="Kascade under the case's schedule (dp unless told), by tiles",
               kinds=(*_CHOICES, *_STACK)),
        Method(name="kascade_both_phases", about="Kascade that also fills the cache which its decode steps read; in "
               "the decode cases all other rows are decode-only, behind a cache that dense attention filled",
               kinds=_QUALITY),
        Method(name="kascade_greedy", about="Kascade, schedule by the greedy rule", kinds=_QUALITY),
        Method(name="kascade_all_heads", about="Kascade, one selection for all KV heads", kinds=_QUALITY),
        Method(name="kascade_no_remap", about="Kascade, each KV head reuses its own number", kinds=_QUALITY),
        Method(name="kascade_token", about="Kascade selecting single keys, as in the paper",
               kinds=(*_QUALITY, *_STACK)),
        Method(name="kascade_profitable", about="Kascade that may run dense where sparse would be slower",
               kinds=_STACK),
        Method(name="kascade_xla", about="Kascade computed by XLA's code", kinds=_STACK),
        Method(name="kascade_pallas", about="Kascade computed by its Pallas kernels", kinds=_STACK),
        Method(name="kascade_flash_cpu", about="Kascade computed by its native kernels for CPUs", kinds=_STACK),
        Method(name="quest", about="tiles with the largest upper bound from the minimum and maximum of their keys "
               "(Quest, arXiv 2406.10774), pooled over a query tile by its largest", kinds=_QUALITY),
        Method(name="omnikv", about="one selection for all heads, by the largest probability of any head (OmniKV, ICLR "
               "2025); layers that select attend to everything", kinds=_QUALITY),
        Method(name="lessismore", about="one selection for all heads: a quarter are the latest tiles, the others the "
               "heads' best in turn (LessIsMore, arXiv 2508.07101); layers that select attend to everything",
               kinds=_QUALITY),
        Method(name="sinks_window", about="the first tile and the latest ones", kinds=_CHOICES, control=True),
        Method(name="random_tiles", about="tiles drawn at random in every layer", kinds=_CHOICES, control=True),
        Method(name="wrong_anchors", about="each anchor one layer too late", kinds=_GATE, control=True),
        Method(name="swapped_heads", about="reuse layers read the selection of the other KV head", kinds=_GATE,
               control=True),
        Method(name="dropped_tiles", about="reuse layers lose the four heaviest selected tiles", kinds=_GATE,
               control=True),
        Method(name="stale_indices", about="reuse layers read the selection of another sequence", kinds=_GATE,
               control=True),
        Method(name="other_model", about="the tiles that the same layer of a model with other, random weights selects "
               "on the same text", kinds=()),
        Method(name="anchor_layer", about="one anchor layer: select, and attend to the selection", kinds=_STACK),
        Method(name="reuse_layer", about="one reuse layer: attend to a selection that is there", kinds=_STACK),
    )
}  # fmt: skip

# The rows of a sweep over schedules: what is swept, what it is compared with, and the control of the tables of quality.
SWEPT = ("dense", "kascade", "random_tiles")
# Rows that differ from kascade in who computes them: each with the backend's option kernel.
KERNELS = {"kascade_xla": "xla", "kascade_pallas": "pallas", "kascade_flash_cpu": "flash_cpu"}
# The rows that are trained before they are measured; those behind kascade_token are controls.
FINE_TUNED = ("dense", "kascade", "kascade_token", "sinks_window", "random_tiles", "wrong_anchors", "other_model")
CONTROLS = tuple(method.name for method in METHODS.values() if method.control)


def rows_of(kind: str) -> tuple[str, ...]:
    """The rows of a kind of case, in the order of the table."""
    return tuple(method.name for method in METHODS.values() if kind in method.kinds)


def settings_of(case: Any, **others: Any) -> Settings:
    """The settings of a selection or stack case, without a schedule; ``others`` replace some. Raises InputError.

    Query tiles are as long as key tiles even where single keys are selected, so that all rows share one local region.
    """
    names = ("top_k", "min_keys", "tile_size", "granularity")
    fields: dict[str, Any] = {name: getattr(case, name) for name in names if hasattr(case, name)}
    fields["kernel"] = case.kernel or None
    try:
        return Settings(**{**fields, "query_tile": case.tile_size, **others})
    except ValueError as error:
        raise InputError(f"case {case.name}: {str(error).removeprefix('kascade: ')}") from error
