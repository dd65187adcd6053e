"""What is measured: one frozen dataclass per kind of case, each a complete problem.

A case is data (names, shapes, options, seed) and checks itself: types and bounds stand in the annotations, and whatever
cannot be measured raises InputError with one sentence when the case is made. ``inputs.py`` makes arrays from a case,
``formulas.py`` counts its FLOPs and bytes, ``op_cell.py`` and ``model_cell.py`` build its programs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from attnsuite.backends import AttentionSpec
from attnsuite.backends.kascade import Settings

from . import typed
from .errors import InputError
from .record import CaseKind
from .typed import Count, Real, Seed

OpKind = Literal["op_forward", "op_forward_backward", "op_decode"]
ModelKind = Literal["model_prefill", "model_decode", "model_train"]
SelectionKind = Literal["kascade_text", "kascade_retrieval", "kascade_gate"]
StackKind = Literal["kascade_prefill", "kascade_decode"]
Dtype = Literal["float32", "bfloat16", "float16"]
Share = Annotated[float, Meta(gt=0, le=1)]
Least = Annotated[int, Meta(ge=2, le=2**31 - 1)]
Long = Annotated[int, Meta(ge=64, le=2**31 - 1)]
Layers = Annotated[int, Meta(ge=1, le=2**16)]
Keys = Annotated[int, Meta(ge=0, le=2**31 - 1)]

_SHORT_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One attention call. ``op_decode`` is one query token at the end of ``sequence`` keys.

    ``window_size`` counts the token itself, as Hugging Face's ``sliding_window`` does: a causal row sees its own key
    and ``window_size - 1`` keys before it; without causality as many after it, too. ``documents`` packs that many
    documents of unequal length into the sequence (segment ids). Without a ``name`` one is made from the fields. Raises
    InputError for a field that does not fit.
    """

    kind: OpKind
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
    soft_cap: Real | None = None
    documents: Count = 1
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.name:
            object.__setattr__(self, "name", _op_name(self))
        _check_name(self.name)
        if self.documents > self.sequence or (self.documents > 1 and self.kind == "op_decode"):
            raise InputError(
                f"case {self.name}: documents={self.documents} does not fit; "
                f"use 1 to {self.sequence}, and 1 for a decode step."
            )
        if (
            self.kind == "op_decode"
            and (self.window_size is not None or self.chunk_size is not None)
            and not self.causal
        ):
            raise InputError(f"case {self.name}: a decode step with a window or chunks needs causal = true.")
        try:
            spec_of(self)
        except ValueError as error:
            raise InputError(f"case {self.name}: {error}") from error

    @property
    def query_length(self) -> int:
        """Query tokens: 1 in a decode step."""
        return 1 if self.kind == "op_decode" else self.sequence

    @property
    def needs_grad(self) -> bool:
        """Whether gradients are computed."""
        return self.kind == "op_forward_backward"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A pass of a whole transformer: prefill, decode of ``new_tokens`` after a prompt, or one train step.

    ``model`` is a checkpoint that ships here, or a preset with random weights. ``sequence`` counts prompt
    tokens per batch row; with ``ragged`` it is the longest prompt of the batch, and the others are shorter, down
    to a quarter of it, padded on the right. ``top_k``, ``tile_size`` (16) and ``anchors`` (a quarter of
    the layers) are for Kascade's row alone, whose anchors are spread evenly; without ``top_k`` it runs as it does
    without options. Raises InputError for a field that does not fit.
    """

    kind: ModelKind
    name: str = ""
    model: str = "text"
    sequence: Count = 1024
    new_tokens: Count = 32
    batch: Count = 1
    ragged: bool = False
    top_k: Share | None = None
    tile_size: Count | None = None
    anchors: Layers | None = None
    dtype: Dtype = "float32"
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.ragged and (self.batch == 1 or self.kind == "model_train"):
            raise InputError(
                f"case {self.name or self.kind}: ragged = true is about several prompts; use it in a prefill or a "
                "decode with batch of at least 2."
            )
        if not self.name:
            object.__setattr__(self, "name", _model_name(self))
        _check_name(self.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextCase:
    """Perplexity of a model on held-out text: ``sequences`` windows of ``sequence`` tokens each."""

    kind: Literal["perplexity"] = "perplexity"
    name: str = ""
    model: str = "text"
    sequence: Least = 512
    sequences: Least = 16
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.name:
            dtype = _SHORT_DTYPE[self.dtype]
            object.__setattr__(self, "name", f"perplexity-{_model_word(self.model)}-s{self.sequence}-{dtype}")
        _check_name(self.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalCase:
    """Recall at distance on the constructed checkpoint: ``prompts`` needles in ``sequence`` tokens."""

    kind: Literal["retrieval"] = "retrieval"
    name: str = ""
    sequence: Long = 1024
    prompts: Least = 64
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.name:
            object.__setattr__(self, "name", f"retrieval-s{self.sequence}")
        _check_name(self.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionCase:
    """What a model loses when each query attends to few keys, and who chose them: one row per way to choose.

    ``kascade_text``: a byte-level model on held-out text. ``kascade_retrieval``: the constructed checkpoint, needles at
    every distance. ``kascade_gate``: the same with the controls that have to fail. In all rows layer 0 is dense, and
    every other layer attends to the own region and the share ``top_k`` of the earlier keys. ``phase`` says where:
    "prefill" the whole sequence, "decode" the last tokens, one by one behind a cache that was filled densely.
    ``anchors`` is a number of layers for ``schedule`` "dp" and their list ("0,2") for "manual"; "greedy" goes by
    ``threshold`` and ``max_reuse_dist``. Raises InputError for a field that does not fit.
    """

    kind: SelectionKind
    name: str = ""
    model: str = "text"
    phase: Literal["prefill", "decode"] = "prefill"
    sequence: Long = 512
    sequences: Least = 12
    top_k: Share = 0.125
    min_keys: Keys = 0
    granularity: Literal["tile", "token"] = "tile"
    tile_size: Count = 16
    schedule: Literal["dp", "greedy", "manual"] = "dp"
    anchors: str = ""
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.65
    max_reuse_dist: Layers = 4
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.name:
            parts = [self.kind.replace("_", "-"), self.phase, f"s{self.sequence}", f"k{self.top_k:g}"]
            parts += [self.granularity] if self.granularity != "tile" else []
            object.__setattr__(self, "name", "-".join([*parts, f"t{self.tile_size}"]))
        _check_name(self.name)
        anchor_layers(self)
        settings_of(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackCase:
    """The attention of all layers of a Llama-shaped model, one after the other: what Kascade costs as a whole.

    ``layers`` with keys and values of their own, of which layer 0 is dense and ``anchors`` (layer 0 among them) select,
    evenly spread; the others reuse. With one layer its parts are timed: an anchor, a reuse layer. ``kascade_decode`` is
    one query token behind ``sequence`` cached keys. ``by_token``: selecting single keys is timed too.
    Raises InputError for a field that does not fit.
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
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.name:
            parts = [self.kind.replace("_", "-"), f"s{self.sequence}", f"l{self.layers}a{self.anchors}"]
            parts += [f"h{self.heads}k{self.kv_heads}", f"d{self.head_dim}", f"k{self.top_k:g}", f"t{self.tile_size}"]
            object.__setattr__(self, "name", "-".join([*parts, _SHORT_DTYPE[self.dtype]]))
        _check_name(self.name)
        if self.anchors > self.layers:
            raise InputError(
                f"case {self.name}: anchors = {self.anchors} must be at most {self.layers}, the number of layers."
            )
        settings_of(self)
        try:
            stack_spec(self)
        except ValueError as error:
            raise InputError(f"case {self.name}: {error}") from error


def settings_of(case: SelectionCase | StackCase, **others: Any) -> Settings:
    """Kascade's settings as the case has them, without a schedule; ``others`` replace some. Raises InputError.

    Query tiles are as long as key tiles, also where single keys are selected: all rows share one own region.
    """
    fields: dict[str, Any] = {"top_k": case.top_k, "min_keys": case.min_keys, "tile_size": case.tile_size}
    fields |= {"query_tile": case.tile_size}
    if isinstance(case, SelectionCase):
        fields["granularity"] = case.granularity
    try:
        return Settings(**{**fields, **others})
    except ValueError as error:
        raise InputError(f"case {case.name}: {str(error).removeprefix('kascade: ')}") from error


def anchor_layers(case: SelectionCase) -> tuple[int, ...]:
    """The numbers in ``anchors``: one for "dp" (2 unless given), the layers for "manual". Raises InputError."""
    words = [word.strip() for word in case.anchors.split(",") if word.strip()]
    if case.schedule == "greedy" and words:
        raise InputError(
            f"case {case.name}: anchors = {case.anchors!r} has no place in a greedy schedule; leave it out."
        )
    if case.schedule == "dp" and not words:
        words = ["2"]
    whole = all(word.isdecimal() for word in words)
    if not whole or (case.schedule == "dp" and (len(words) != 1 or int(words[0]) < 1)):
        raise InputError(
            f"case {case.name}: anchors = {case.anchors!r} must be one number of layers for schedule dp, "
            "and layers separated by commas for schedule manual."
        )
    if case.schedule == "manual" and not words:
        raise InputError(f"case {case.name}: schedule manual needs anchors, such as 0,2.")
    return tuple(map(int, words))


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


Case = OpCase | ModelCase | TextCase | RetrievalCase | SelectionCase | StackCase

CLASS_OF_KIND: dict[str, type[Case]] = {
    **dict.fromkeys(get_args(OpKind), OpCase),
    **dict.fromkeys(get_args(ModelKind), ModelCase),
    "perplexity": TextCase,
    "retrieval": RetrievalCase,
    **dict.fromkeys(get_args(SelectionKind), SelectionCase),
    **dict.fromkeys(get_args(StackKind), StackCase),
}


def make_case(fields: dict[str, Any]) -> Case:
    """The case with these fields, ``kind`` among them. Raises InputError naming what is accepted.

    >>> make_case({"kind": "op_forward", "sequence": 512}).name
    'forward-s512-h8k8-d64-f32'
    """
    kind = fields.get("kind")
    fields = _without_window(fields)
    if not isinstance(kind, str) or kind not in CLASS_OF_KIND:
        accepted = ", ".join(get_args(CaseKind))
        raise InputError(f"kind = {typed.given(kind)} is not a kind of case; use one of {accepted}.")
    try:
        return typed.convert(fields, CLASS_OF_KIND[kind])
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{_label(fields)}: {error}.") from error


def _without_window(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without ``window`` of version 0.1, which counted the keys beside the token. Raises InputError."""
    if fields.get("window") is not None:
        given = typed.given(fields["window"])
        raise InputError(
            f"{_label(fields)}: window = {given} counted the keys beside the token and is gone; use window_size, which "
            "counts the token too (window_size = window + 1)."
        )
    return {name: value for name, value in fields.items() if name != "window"}


def problem_of(case: Case) -> dict[str, Any]:
    """The case as JSON scalars, from which :func:`make_case` makes it again."""
    return dataclasses.asdict(case)


def spec_of(case: OpCase) -> AttentionSpec:
    """The attention problem of an op case. Raises ValueError for shapes and dtypes that do not fit."""
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
        local_window_size=_window(case),
        chunk_size=case.chunk_size,
        logits_soft_cap=case.soft_cap,
        has_segment_ids=case.documents > 1,
        has_positions=case.kind == "op_decode" and case.causal,
        needs_grad=case.needs_grad,
    )


def _window(case: OpCase) -> tuple[int, int] | None:
    """Keys beside a query's own, left and right."""
    if case.window_size is None:
        return None
    return case.window_size - 1, 0 if case.causal else case.window_size - 1


def _op_name(case: OpCase) -> str:
    kind = case.kind.removeprefix("op_").replace("_", "-")
    parts = [kind, f"s{case.sequence}", f"h{case.heads}k{case.kv_heads}", f"d{case.head_dim}"]
    options = {
        f"v{case.value_head_dim}": case.value_head_dim is not None,
        f"b{case.batch}": case.batch != 1,
        "full": not case.causal,
        f"sliding{case.window_size}": case.window_size is not None,
        f"chunk{case.chunk_size}": case.chunk_size is not None,
        f"cap{case.soft_cap}": case.soft_cap is not None,
        f"docs{case.documents}": case.documents > 1,
        f"seed{case.seed}": case.seed != 0,
    }
    parts += [text for text, wanted in options.items() if wanted]
    return "-".join([*parts, _SHORT_DTYPE[case.dtype]])


def _model_name(case: ModelCase) -> str:
    parts = [case.kind.removeprefix("model_"), _model_word(case.model), f"s{case.sequence}"]
    parts += [f"b{case.batch}"] if case.batch != 1 else []
    parts += ["ragged"] if case.ragged else []
    return "-".join([*parts, _SHORT_DTYPE[case.dtype]])


def _model_word(model: str) -> str:
    """A preset's name, or of a directory its last part, in the letters that a case's name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(model).name)[:100]


def _label(fields: Mapping[str, Any]) -> str:
    name = fields.get("name")
    return f"case {name}" if isinstance(name, str) and _NAME.fullmatch(name) else f"a case of kind {fields['kind']}"


def _check_fields(case: Any) -> None:
    try:
        typed.check_fields(case)
    except ValueError as error:
        raise InputError(f"{_label({'name': case.name, 'kind': case.kind})}: {error}.") from error


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        accepted = "letters, digits, dots, dashes and underscores, at most 200"
        raise InputError(f"name = {typed.given(name)} cannot name a case; use {accepted}.")
