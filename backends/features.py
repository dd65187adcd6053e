"""The features of attention problems: those a spec asks for, those a backend takes, and the refusal of the rest.

Support is an allow-list. A spec names the features that it asks for (:func:`requested`), and a backend declares those
that it takes (:class:`Takes`). ``support.py`` writes one sentence for each of the others: the value given, the values
accepted, and what to use instead. Backends reject new features until they declare them. A spec is untyped here, because
its own module is above this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from .operands import OPERANDS, Learned

Mode = Literal["native", "interpret", "compile"]
Options = Mapping[str, Any] | None  # of a backend, by name; None: its defaults
_Basic = Literal[
    "causal",
    "bidirectional",
    "window",
    "chunk",
    "soft_cap",
    "scale",
    "segments",
    "positions",
    "lengths",
    "mask",
    "gradient",
    "grouped_queries",
    "cross_length",
    "value_head_dim",
]
Feature = (
    Learned
    | _Basic
    | Literal[
        "log_sum_exp",
        "mask_function",
        "score_function",
        "pages",
        "kv_dtype",
        "values_in_keys",
    ]
)
DTYPES = ("float32", "bfloat16", "float16", "float64")
KV_LAYOUTS = ("NHD", "HND")  # FlashInfer's words: slots before heads, heads before slots
KV_DTYPES = ("int8", "float8_e4m3fn")  # of keys and values in a quantised cache

# Masks, layouts and shapes that a backend written in terms of JAX has without work of its own.
BASIC_FEATURES: frozenset[Feature] = frozenset({*get_args(_Basic), "bias"})


# Everything in the contract.
ALL_FEATURES: frozenset[Feature] = frozenset(
    {
        *BASIC_FEATURES,
        *("log_sum_exp", "sinks", "alibi", "mask_function", "score_function", "pages", "kv_dtype", "values_in_keys"),
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class FeatureRequest:
    """How a spec asks for a feature.

    ``fields`` are the fields of :class:`~attnsuite.backends.contract.AttentionSpec` that ask for the feature. ``of``
    says whether a spec asks for it, ``describe`` writes its value, and ``accepted`` what a backend without the feature
    accepts.
    """

    fields: tuple[str, ...]
    of: Callable[[Any], bool]
    describe: Callable[[Any], str]
    accepted: str


def _is_set(field: str) -> FeatureRequest:
    return FeatureRequest(
        (field,),
        lambda spec: getattr(spec, field) is not None,
        lambda spec: f"{field}={getattr(spec, field)}",
        "None only",
    )


def _flag(field: str, description: str, accepted: str) -> FeatureRequest:
    return FeatureRequest((field,), lambda spec: getattr(spec, field), lambda _: description, accepted)


REQUESTS: Mapping[Feature, FeatureRequest] = {
    "causal": _flag("is_causal", "is_causal=True", "is_causal=False only"),
    "bidirectional": FeatureRequest(
        ("is_causal",), lambda spec: not spec.is_causal, lambda _: "is_causal=False", "is_causal=True only"
    ),
    "window": _is_set("local_window_size"),
    "chunk": _is_set("chunk_size"),
    "soft_cap": _is_set("logits_soft_cap"),
    "scale": FeatureRequest(
        ("scale",),
        lambda spec: spec.scale not in (None, spec.head_dim**-0.5),
        lambda spec: f"scale={spec.scale}",
        "None only, which is 1/sqrt(head_dim)",
    ),
    "segments": _flag("has_segment_ids", "an array of segment ids", "none"),
    "positions": _flag("has_positions", "an array of explicit positions", "none, or arange"),
    "lengths": _flag("has_seq_lengths", "an array of key_value_seq_lengths", "none"),
    "mask": _flag("has_mask", "an explicit mask array", "none; is_causal, windows, chunks, segments, lengths say most"),
    **{operand.name: _flag(f"has_{operand.name}", operand.description, "none") for operand in OPERANDS},
    "gradient": _flag("needs_grad", "needs_grad=True", "needs_grad=False only"),
    "grouped_queries": FeatureRequest(
        ("num_heads", "num_kv_heads"),
        lambda spec: spec.num_heads != spec.num_kv_heads,
        lambda spec: f"num_heads={spec.num_heads} with num_kv_heads={spec.num_kv_heads}",
        "as many of one as of the other",
    ),
    "cross_length": FeatureRequest(
        ("query_length", "key_value_length"),
        lambda spec: spec.query_length != spec.key_value_length,
        lambda spec: f"query_length={spec.query_length} with key_value_length={spec.key_value_length}",
        "equal lengths",
    ),
    "value_head_dim": FeatureRequest(
        ("value_head_dim", "head_dim"),
        lambda spec: spec.value_head_dim != spec.head_dim,
        lambda spec: f"value_head_dim={spec.value_head_dim} with head_dim={spec.head_dim}",
        "equal head dimensions",
    ),
    "log_sum_exp": _flag("return_log_sum_exp", "return_log_sum_exp=True", "return_log_sum_exp=False only"),
    "mask_function": _is_set("mask_function"),
    "score_function": _is_set("score_function"),
    "pages": FeatureRequest(
        ("page_size", "num_pages"),
        lambda spec: spec.page_size is not None,
        lambda spec: f"page_size={spec.page_size}",
        "None only, which is contiguous keys and values",
    ),
    "kv_dtype": _is_set("kv_dtype"),
    "values_in_keys": _flag("values_in_keys", "values_in_keys=True", "values_in_keys=False only"),
}


FEATURES: tuple[Feature, ...] = tuple(REQUESTS)


def requested(spec: Any) -> frozenset[Feature]:
    """The features that ``spec`` asks for."""
    return frozenset(feature for feature, request in REQUESTS.items() if request.of(spec))


INSTEAD = "use backend='chunked'"


def refusal(name: str, requested: str, why: str, accepted: str, instead: str = INSTEAD) -> str:
    """Why the backend ``name`` does not take what is ``requested``: a sentence that ends in what to do ``instead``."""
    return f"{requested} is not supported by {name}{why and ', '}{why} (accepted: {accepted}); {instead}."


Sizes = range | tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """What a backend takes. Everything that is not named here is refused.

    ``head_dims`` bounds the head dimension of queries and keys, ``value_head_dims`` that of values (None: any), and
    ``least_length`` both sequence lengths. ``because`` explains refusals: it maps a feature, "mode", "dtype" or the
    name of a bound to a clause ("which masks by slot"). ``parts``: the backend has
    :meth:`~attnsuite.backends.contract.PartBackend.part`. ``carries``: its layers pass data on to later layers.
    ``kv_layouts``: how keys and values may lie; from another layout :func:`~attnsuite.backends.plan` swaps the axes.
    """

    features: frozenset[Feature] = frozenset()
    dtypes: tuple[str, ...] = DTYPES[:3]
    head_dims: Sizes | None = None
    value_head_dims: Sizes | None = None
    least_length: int = 1
    modes: tuple[Mode, ...] = get_args(Mode)
    parts: bool = False
    carries: bool = False
    kv_layouts: tuple[str, ...] = ("NHD",)
    because: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.features) - set(FEATURES)):
            raise ValueError(f"features {unknown} are not known; the features are {', '.join(FEATURES)}.")
        if unknown := sorted(set(self.dtypes) - set(DTYPES)):
            raise ValueError(f"dtypes {unknown} are not known; the dtypes are {', '.join(DTYPES)}.")
        if "NHD" not in self.kv_layouts or set(self.kv_layouts) - set(KV_LAYOUTS):
            raise ValueError(f"kv_layouts={self.kv_layouts!r} must hold 'NHD', and may hold 'HND'.")
