"""The attention of all layers of a model in turn, which shows what Kascade costs: the case, its spec and schedule."""

from __future__ import annotations

import dataclasses
from typing import Literal

from attnsuite.backends import AttentionSpec
from attnsuite.backends.kascade import Schedule, manual

from ...errors import InputError, as_input
from ...typed import Count, Seed
from ..kind import SHORT_DTYPE, Dtype, Kernel, Keys, Layers, Share, check_fields, name_case
from .methods import settings_of

StackKind = Literal["kascade_prefill", "kascade_decode"]
PARTS = ("anchor_layer", "reuse_layer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackCase:
    """The attention of all layers of a Llama-shaped model, one after the other: what Kascade costs as a whole.

    There are ``layers`` layers, each with keys and values of its own. Layer 0 is dense; ``anchors`` layers, layer 0
    among them, select, evenly spread; the others reuse. With one layer its parts are timed: an anchor, a reuse layer.
    ``kascade_decode`` is one query token behind ``sequence`` cached keys. With ``by_token`` selecting single keys is
    timed too. ``kernel`` computes Kascade's rows; empty: the device's default. Raises InputError for a field that does
    not fit.
    """

    kind: StackKind
    sequence: Count
    name: str = ""
    layers: Layers = 16
    anchors: Layers = 5
    heads: Count = 32
    kv_heads: Count = 8
    head_dim: Count = 64
    dtype: Dtype = "float32"
    top_k: Share = 0.125
    min_keys: Keys = 0
    tile_size: Count = 128
    by_token: bool = True
    kernel: Kernel = ""
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        parts = [self.kind.replace("_", "-"), f"s{self.sequence}", f"l{self.layers}a{self.anchors}"]
        parts += [f"h{self.heads}k{self.kv_heads}", f"d{self.head_dim}", f"k{self.top_k:g}", f"t{self.tile_size}"]
        name_case(self, "-".join([*parts, SHORT_DTYPE[self.dtype]]))
        if self.anchors > self.layers:
            raise InputError(
                f"case {self.name}: anchors = {self.anchors} must be at most {self.layers}, the number of layers."
            )
        settings_of(self)
        with as_input(f"case {self.name}: "):
            stack_spec(self)


def stack_spec(case: StackCase) -> AttentionSpec:
    """The attention problem of each layer of a stack. Raises ValueError for shapes that do not fit."""
    decode = case.kind == "kascade_decode"
    return AttentionSpec(
        batch=1,
        query_length=1 if decode else case.sequence,
        key_value_length=case.sequence,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        is_causal=True,
        has_positions=decode,
        has_seq_lengths=decode,
        needs_grad=False,
    )


def schedule_of(case: StackCase) -> Schedule:
    """Layer 0 dense, anchors evenly spread, the others reuse. For the parts of a single layer: dense, anchor, reuse."""
    if case.layers == 1:
        return manual((0, 1), num_layers=3, kv_heads=case.kv_heads)
    anchors = tuple(i * case.layers // case.anchors for i in range(case.anchors))
    return manual(anchors, num_layers=case.layers, kv_heads=case.kv_heads)
