"""The configuration of a model: sizes, positions, the attention of each layer.

:class:`ModelConfig` is frozen and hashable, so that it is a static argument under ``jax.jit``. The defaults describe
Llama (RoPE, grouped-query attention, RMSNorm, SwiGLU; arXiv 2302.13971, 2407.21783). The ``use_*`` switches replace one
part at a time, for ablations. ``presets.py`` has the sizes of the presets. ``huggingface.py`` reads and writes the
``config.json`` of a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self, get_args

from attnsuite.backends import names

from .checks import LARGEST_SIZE, require_positive_int, require_positive_real
from .other_names import our_name
from .presets import PRESETS as PRESETS
from .rope_scaling import AnyScaling, DynamicScaling, YarnScaling

AttentionType = Literal["global", "sliding", "chunked", "full", "latent", "nope"]
NormPlacement = Literal["before", "after", "both"]
Activation = Literal["silu", "gelu_tanh", "clipped_silu"]
DTYPES = ("float32", "bfloat16", "float16")
MOST_LAYERS = 10_000  # a layer costs Python objects, so that a number without bound would take all memory
MOST_EXPERTS = 10_000  # an expert of a published checkpoint is a tensor, and a tensor a Python object
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_WITH_LATENT = (
    ("use_rope", True),
    ("use_rmsnorm", True),
    ("qkv_bias", False),
    ("qk_norm", False),
    ("attention_sinks", False),
    ("attention_scale", None),
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "param_dtype": DTYPES,
    "norms": get_args(NormPlacement),
    "activation": get_args(Activation),
    "qk_norm_over": ("head", "projection", "rotated"),
}
_MOST = {"num_layers": MOST_LAYERS, "num_experts": MOST_EXPERTS}


class LatentSizes(NamedTuple):
    """Sizes of multi-head latent attention: of the latent, and of each head's parts; see ``models/latent.py``."""

    rank: int  # kv_lora_rank
    nope: int  # qk_nope_head_dim
    rope: int  # qk_rope_head_dim
    value: int  # v_head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A transformer without its weights. Raises ValueError with the field and the values it accepts.

    ``num_kv_heads=None`` means ``num_heads`` (multi-head), ``head_dim=None`` means ``hidden_size // num_heads``, and
    ``intermediate_size=None`` means ``hidden_size * 43 // 16``, the ratio of Llama 7B (11008 for 4096).
    ``attention`` is one type for all layers or one per layer, and is kept as one per layer: ``global`` (causal),
    ``sliding`` (causal, the last ``window_size`` tokens, itself included), ``chunked`` (causal within chunks of
    ``chunk_size``), ``full`` (both directions), ``latent`` (causal, multi-head latent attention) or ``nope`` (causal,
    without RoPE, beside layers that have it; arXiv 2305.19466).

    Sizes of ``latent`` layers have DeepSeek's names: ``kv_lora_rank``, ``qk_nope_head_dim``, ``qk_rope_head_dim``,
    ``v_head_dim``, and ``q_lora_rank`` if queries are compressed too. These layers do not use ``head_dim`` and
    ``num_kv_heads``. ``max_length`` is the longest input if positions are learned (``use_rope=False``); RoPE has no
    limit of its own. ``qkv_bias`` and ``output_bias`` add biases to the attention's projections (Qwen2: the former).
    ``qk_norm`` normalises queries and keys before they are rotated, per ``qk_norm_over``: each ``head`` (Qwen3) or the
    whole ``projection`` (OLMo 2). Over each ``rotated`` head it comes after RoPE, has no weights, and leaves layers
    without RoPE alone (Llama 4). ``attention_sinks`` gives each head a learned sink (gpt-oss). ``dtype`` is that of
    activations, ``param_dtype`` that of parameters; RoPE, norm statistics, softmax and logits are always float32.

    ``floor_scale`` and ``attn_scale`` sharpen the attention of ``nope`` layers at late positions (the temperature
    tuning of Llama 4, arXiv 2501.19399): the query at position ``p`` is multiplied by
    ``1 + attn_scale * log(1 + floor((p + 1) / floor_scale))``.

    Gemma's: ``logits_soft_cap`` of attention and ``final_soft_cap`` of the output's logits (``cap * tanh(x / cap)``),
    ``attention_scale`` (None: ``head_dim ** -0.5``), ``norm_plus_one`` (a norm multiplies by ``1 + weight``),
    ``scale_embeddings`` (by ``hidden_size ** 0.5``), ``norms`` ``before`` each part of a layer, ``after`` (OLMo 2) or
    ``both``, and ``sliding_rope_theta``: the base of RoPE in ``sliding`` layers, unscaled there (None: as elsewhere).

    ``activation`` is that of the gate: ``silu``, ``gelu_tanh`` (Gemma) or ``clipped_silu`` (gpt-oss). With
    ``num_experts`` each MLP is a mixture of experts, of which a token gets the ``experts_per_token`` with the highest
    router probabilities; see ``models/experts.py``.

    >>> config = ModelConfig.from_preset("debug", attention=("global", "sliding"), window_size=16)
    >>> config.head_dim, config.attention
    (32, ('global', 'sliding'))
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_length: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: AnyScaling | None = None
    sliding_rope_theta: float | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    attention: AttentionType | tuple[AttentionType, ...] = "global"
    window_size: int | None = None
    chunk_size: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    use_rope: bool = True
    use_rmsnorm: bool = True
    use_swiglu: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection", "rotated"] = "head"
    floor_scale: int | None = None
    attn_scale: float | None = None
    attention_sinks: bool = False
    attention_scale: float | None = None
    logits_soft_cap: float | None = None
    final_soft_cap: float | None = None
    norms: NormPlacement = "before"
    norm_plus_one: bool = False
    scale_embeddings: bool = False
    activation: Activation = "silu"
    num_experts: int | None = None
    experts_per_token: int | None = None
    normalise_experts: bool = True
    expert_bias: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __new__(cls, **fields: Any) -> Self:
        """Refuse unknown and missing names before the generated ``__init__`` does, which cannot say ours."""
        _check_names(fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        object.__setattr__(self, "hidden_size", require_positive_int("hidden_size", self.hidden_size))
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", max(self.hidden_size * 43 // 16, 1))
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field.name, str(field.type), getattr(self, field.name)))
        self._check_heads()
        self._check_scaling()
        if self.qk_norm and not self.use_rmsnorm:
            raise ValueError("qk_norm=True is an RMSNorm; it needs use_rmsnorm=True.")
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported; use one of {', '.join(accepted)}.")
        self._check_parts()
        self._check_attention()

    def _check_scaling(self) -> None:
        scaling = self.rope_scaling
        if not isinstance(scaling, AnyScaling | None):
            raise ValueError(  # noqa: TRY004  (a field of the wrong type is a wrong value: one error to catch)
                f"rope_scaling={scaling!r} must be a RopeScaling, LinearScaling, DynamicScaling, YarnScaling or None."
            )
        if isinstance(scaling, YarnScaling) and self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 1 with YarnScaling.")
        if isinstance(scaling, DynamicScaling) and self.dim == 2:
            raise ValueError("head_dim=2 has no slow frequency to stretch; it does not go with DynamicScaling.")

    def _check_parts(self) -> None:
        """What goes with what, outside of attention."""
        if not self.use_rmsnorm and (self.norm_plus_one or self.norms != "before"):
            raise ValueError("norm_plus_one=True and norms other than 'before' need use_rmsnorm=True.")
        if self.activation != "silu" and not self.use_swiglu:
            raise ValueError(f"activation={self.activation!r} is that of a gate; it needs use_swiglu=True.")
        if self.num_experts is None:
            if self.experts_per_token is not None or self.expert_bias:
                raise ValueError("experts_per_token and expert_bias need num_experts; it is None.")
            return
        require_positive_int("experts_per_token", self.experts_per_token)
        if self.chosen_experts > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is above num_experts={self.num_experts}.")
        if not self.use_swiglu:
            raise ValueError("use_swiglu=False does not go with num_experts: experts have a gate.")

    def _check_heads(self) -> None:
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each KV head serves the same number of query heads."
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}; "
                    "choose one that is, or give head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.use_rope and self.dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd; RoPE rotates pairs: use an even one, or use_rope=False."
            )

    def _check_attention(self) -> None:
        attention = self.attention
        types = (attention,) * self.num_layers if isinstance(attention, str) else attention
        accepted = get_args(AttentionType)
        if not isinstance(types, tuple | list) or any(kind not in accepted for kind in types):
            wrong = (
                next((kind for kind in types if kind not in accepted), attention)
                if isinstance(types, tuple)
                else attention
            )
            hint = f' {wrong} is a backend: model(tokens, backend="{wrong}").' if wrong in names() else ""
            raise ValueError(
                f"attention={wrong!r} must be one of {', '.join(accepted)}, or a tuple of one per layer.{hint}"
            )
        if len(types) != self.num_layers:
            raise ValueError(f"attention names {len(types)} layers, but num_layers={self.num_layers}.")
        object.__setattr__(self, "attention", tuple(types))
        needed = [("sliding", "window_size"), ("chunked", "chunk_size"), *(("latent", name) for name in _LATENT_SIZES)]
        for kind, name in needed:
            if kind in types and getattr(self, name) is None:
                raise ValueError(f"attention={kind!r} needs {name}, an integer of at least 1; it is None.")
        if "latent" in types:
            self._check_latent()
        self._check_rotation(types)

    def _check_rotation(self, types: tuple[AttentionType, ...]) -> None:
        """What goes with layers that are rotated, and with those that are not beside them."""
        if not self.use_rope and ("nope" in types or self.qk_norm_over == "rotated"):
            raise ValueError("attention='nope' and qk_norm_over='rotated' are about RoPE; they need use_rope=True.")
        if self.qk_norm_over == "rotated" and not self.qk_norm:
            raise ValueError("qk_norm_over='rotated' needs qk_norm=True.")
        if (self.floor_scale is None) != (self.attn_scale is None):
            raise ValueError(f"floor_scale={self.floor_scale} and attn_scale={self.attn_scale} go together; give both.")
        if self.floor_scale is not None and "nope" not in types:
            raise ValueError("floor_scale and attn_scale are for layers of attention='nope'; there is none.")

    def _check_latent(self) -> None:
        if self.latent.rope % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; RoPE rotates pairs: use an even one.")
        for name, wanted in _WITH_LATENT:
            if getattr(self, name) is not wanted:
                raise ValueError(
                    f"{name}={getattr(self, name)} does not go with attention='latent'; it needs {name}={wanted}."
                )

    @property
    def kv_heads(self) -> int:
        """``num_kv_heads``, which is never None after construction."""
        return self.num_kv_heads  # pyright: ignore[reportReturnType]  (normalised in __post_init__)

    @property
    def dim(self) -> int:
        """``head_dim``, which is never None after construction."""
        return self.head_dim  # pyright: ignore[reportReturnType]  (normalised in __post_init__)

    @property
    def inner_size(self) -> int:
        """``intermediate_size``, which is never None after construction."""
        return self.intermediate_size  # pyright: ignore[reportReturnType]  (normalised in __post_init__)

    @property
    def layer_types(self) -> tuple[AttentionType, ...]:
        """``attention``, which is always one type per layer after construction."""
        return self.attention  # pyright: ignore[reportReturnType]  (normalised in __post_init__)

    @property
    def attention_types(self) -> tuple[AttentionType, ...]:
        """The distinct attention types, in order of first use: each is planned once per forward pass."""
        return tuple(dict.fromkeys(self.layer_types))

    @property
    def latent(self) -> LatentSizes:
        """The sizes of the ``latent`` layers; only for a model that has some."""
        return LatentSizes(*(getattr(self, name) for name in _LATENT_SIZES))

    @property
    def chosen_experts(self) -> int:
        """``experts_per_token``, for a model that has experts."""
        return self.experts_per_token  # pyright: ignore[reportReturnType]  (checked in __post_init__)

    @staticmethod
    def from_preset(name: str = "", **overrides: Any) -> ModelConfig:
        """The preset of that name with some fields replaced. Raises ValueError listing the names that exist."""
        if not name:
            _check_names(overrides)
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is not known; use one of {', '.join(PRESETS)}.")
        return ModelConfig(**{**PRESETS[name], **overrides})

    def check_length(self, name: str, length: int) -> None:
        """Raise ValueError for a length beyond the positions that the model has learned; RoPE has no limit."""
        if not self.use_rope and length > self.max_length:
            raise ValueError(
                f"{name}={length} is more than the {self.max_length} positions that this model has learned; use at "
                f"most {self.max_length}."
            )

    def replace(self, **overrides: Any) -> ModelConfig:
        """A copy with some fields replaced, checked like a new one.

        Derived values stay (``head_dim`` does not follow ``num_heads``), but an ``attention`` that is the same in all
        layers follows ``num_layers``. An unknown name raises ValueError listing the fields.
        """
        if len(self.attention_types) == 1:
            overrides.setdefault("attention", self.attention_types[0])
        return dataclasses.replace(self, **overrides)


def _checked(name: str, kind: str, value: Any) -> Any:
    """The value, an integer as Python's. Raises ValueError for a number or a switch that is none.

    A field ``| None`` may be None, and no other.
    """
    if value is None and kind.endswith("| None"):
        return None
    match kind.removesuffix(" | None"):
        case "int":
            return require_positive_int(name, value, _MOST.get(name, LARGEST_SIZE))
        case "float":
            require_positive_real(name, value)
        case "bool" if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False.")  # a wrong type is a wrong value
    return value


def _check_names(overrides: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    unknown = [name for name in overrides if name not in names]
    missing = [name for name in ("vocab_size", "hidden_size", "num_layers", "num_heads") if name not in overrides]
    if not unknown and overrides and missing:  # a copy is made without fields
        raise ValueError(
            f"ModelConfig needs {', '.join(missing)}; give the sizes, or take those of a preset: "
            'ModelConfig.from_preset("debug", ...).'
        )
    if not unknown:
        return
    hints = [sentence for sentence in map(our_name, unknown) if sentence]
    raise ValueError(
        "; ".join([f"ModelConfig has no field {', '.join(map(repr, unknown))}", *hints, f"it has {', '.join(names)}."])
    )
