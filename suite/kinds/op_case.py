"""The problem of one attention call, as a suite file or a record says it, and its spec."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from attnsuite.backends import AttentionSpec, masks

from ..errors import InputError, as_input
from ..typed import Count, Real, Seed
from .kind import SHORT_DTYPE, Dtype, check_fields, name_case

OpKind = Literal["op_forward", "op_forward_backward", "op_decode"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The problem of an attention call, alone or in a block; its fields mean what :class:`OpCase` says."""

    kind: str
    sequence: Count
    name: str = ""
    batch: Count = 1
    heads: Count = 8
    kv_heads: Count = 8
    head_dim: Count = 64
    value_head_dim: Count | None = None
    dtype: Dtype = "float32"
    causal: bool = True
    window_size: Count | None = None
    chunk_size: Count | None = None
    mask: str = ""
    soft_cap: Real | None = None
    documents: Count = 1
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, self.description)
        if self.documents > self.sequence or (self.documents > 1 and self.is_decode):
            raise InputError(
                f"case {self.name}: documents={self.documents} does not fit; "
                f"use 1 to {self.sequence}, and 1 for a decode step."
            )
        is_local = self.window_size is not None or self.chunk_size is not None or self.mask
        if self.is_decode and is_local and not self.causal:
            raise InputError(f"case {self.name}: a decode step with a window, chunks or a mask needs causal = true.")
        with as_input(f"case {self.name}: "):
            spec_of(self)

    @property
    def description(self) -> str:
        """The fields in short: the name of a case that has none."""
        return describe_call(self)

    @property
    def operation(self) -> str:
        """What the call does: its kind."""
        return self.kind

    @property
    def is_decode(self) -> bool:
        """Whether it is a decode step: one query token at the end of the keys."""
        return self.operation == "op_decode"

    @property
    def query_length(self) -> int:
        """Query tokens: 1 in a decode step."""
        return 1 if self.is_decode else self.sequence

    @property
    def needs_grad(self) -> bool:
        """Whether gradients are computed."""
        return self.operation.endswith("_backward")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpCase(Call):
    """One attention call. ``op_decode`` is one query token at the end of ``sequence`` keys.

    ``kv_layout`` is how its keys and values lie: ``"NHD"`` ([batch, sequence, kv_heads, head_dim]) or ``"HND"``.

    ``window_size`` counts the token itself, as Hugging Face's ``sliding_window`` does. A causal row sees its own key
    and the ``window_size - 1`` keys before it; a row that is not causal also sees as many after it. ``documents`` packs
    that many documents of unequal length into the sequence (segment ids). ``mask`` names a mask
    (:func:`attnsuite.backends.masks.parse`) that holds beside the others: ``causal = false`` with
    ``mask = "causal | prefix(64)"`` is a prefix language model. An empty ``name`` is replaced by one made from the
    fields. Raises InputError for a field that does not fit.
    """

    kind: OpKind
    kv_layout: Literal["NHD", "HND"] = "NHD"


def spec_of(case: Call) -> AttentionSpec:
    """The attention problem of a case. Raises ValueError for shapes and dtypes that do not fit."""
    window = None
    if case.window_size is not None:  # the contract's counts the keys to the left and to the right of a query's own
        window = case.window_size - 1, 0 if case.causal else case.window_size - 1
    return AttentionSpec(
        batch=case.batch,
        query_length=case.query_length,
        key_value_length=case.sequence,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        value_head_dim=case.value_head_dim,
        dtype=case.dtype,
        is_causal=case.causal,
        local_window_size=window,
        chunk_size=case.chunk_size,
        mask_function=masks.parse(case.mask) if case.mask else None,
        logits_soft_cap=case.soft_cap,
        has_segment_ids=case.documents > 1,
        has_positions=case.is_decode and case.causal,
        needs_grad=case.needs_grad,
        kv_layout=case.kv_layout if isinstance(case, OpCase) else "NHD",
    )


def plain_spec(spec: AttentionSpec) -> AttentionSpec:
    """The same problem as a case says it: a window that ends at the query's own key is causal."""
    window = spec.window
    if window is not None and (spec.is_causal or window[1] == 0):
        spec = dataclasses.replace(spec, is_causal=True, local_window_size=(window[0], 0))
    return dataclasses.replace(spec, scale=None) if spec.softmax_scale == spec.head_dim**-0.5 else spec


def nearest_case(spec: AttentionSpec, *, decode: bool, needs_grad: bool) -> OpCase:
    """The case that says as much of a :func:`plain_spec` as a case can. Raises InputError."""
    window = spec.window
    if window is not None and not spec.is_causal and window[0] != window[1]:
        window = None  # no case has such a window; a caller compares the spec of the case with its own
    return OpCase(
        kind="op_decode" if decode else "op_forward_backward" if needs_grad else "op_forward",
        sequence=spec.key_value_length,
        batch=spec.batch,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_head_dim=None if spec.value_head_dim == spec.head_dim else spec.value_head_dim,
        dtype=spec.dtype,  # pyright: ignore[reportArgumentType]  (the case checks it)
        causal=spec.is_causal,
        window_size=None if window is None else window[0] + 1,
        chunk_size=spec.chunk_size,
        mask=masks.description_of(spec.mask_function) or "",
        soft_cap=spec.logits_soft_cap,
        kv_layout=spec.kv_layout,  # pyright: ignore[reportArgumentType]  (the case checks it)
    )


# What a plain problem may differ in: a causal call of one document, of any size, in the default layout.
_SIZES = frozenset({"kind", "name", "sequence", "batch", "heads", "kv_heads", "head_dim", "dtype", "seed"})


def is_plain(problem: Mapping[str, Any]) -> bool:
    """Whether the problem of a record is causal attention of one document and nothing else, at any size."""
    fields = {field.name: field.default for field in dataclasses.fields(OpCase) if field.name not in _SIZES}
    return all(fields.get(name) == value for name, value in problem.items() if name not in _SIZES and value is not None)


def describe_call(case: Call) -> str:
    """The fields of a call in short, those that are left out unsaid."""
    kind = case.kind.partition("_")[2].replace("_", "-")
    parts = [kind, f"s{case.sequence}", f"h{case.heads}k{case.kv_heads}", f"d{case.head_dim}"]
    options = {
        f"v{case.value_head_dim}": case.value_head_dim is not None,
        f"b{case.batch}": case.batch != 1,
        "full": not case.causal,
        f"sliding{case.window_size}": case.window_size is not None,
        f"chunk{case.chunk_size}": case.chunk_size is not None,
        re.sub(r"\W+", "-", case.mask).strip("-"): bool(case.mask),
        f"cap{case.soft_cap}".replace("+", ""): case.soft_cap is not None,
        f"docs{case.documents}": case.documents > 1,
        "hnd": isinstance(case, OpCase) and case.kv_layout == "HND",
        f"seed{case.seed}": case.seed != 0,
    }
    parts += [text for text, wanted in options.items() if wanted]
    return "-".join([*parts, SHORT_DTYPE[case.dtype]])
