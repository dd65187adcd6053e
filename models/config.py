"""The configuration of a model: sizes, positions, the attention of each layer.

:class:`ModelConfig` is frozen and hashable, so that it is a static argument under ``jax.jit``. The defaults describe
Llama (RoPE, grouped-query attention, RMSNorm, SwiGLU; arXiv 2302.13971, 2407.21783). The ``use_*`` switches replace one
part at a time, for ablations. ``presets.py`` has the sizes of the presets. ``huggingface.py`` reads and writes the
``config.json`` of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self, get_args

from .other_names import our_name
from .presets import SIZES

AttentionType = Literal["global", "sliding", "chunked", "full", "latent"]
DTYPES = ("float32", "bfloat16", "float16")
MOST_LAYERS = 10_000  # a layer costs Python objects, so that a number without bound would take all memory
_MOST = 2**31 - 1  # of any other size: the largest int32 index of XLA
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_SWITCHES = ("tie_embeddings", "use_rope", "use_rmsnorm", "use_swiglu", "qkv_bias", "output_bias", "qk_norm")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of slow RoPE frequencies; see :func:`attnsuite.models.rope.inverse_frequencies`.

    Wavelengths above ``original_max_length / low_freq_factor`` are stretched by ``factor``, those below
    ``original_max_length / high_freq_factor`` stay, and those between are blended. Raises ValueError.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _require_positive_real(f"rope_scaling.{name}", getattr(self, name))
        _require_positive_int("rope_scaling.original_max_length", self.original_max_length)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}."
            )


class LatentSizes(NamedTuple):
    """Sizes of multi-head latent attention: of the latent, and of each head's parts; see ``models/latent.py``."""

    rank: int  # kv_lora_rank
    nope: int  # qk_nope_head_dim
    rope: int  # qk_rope_head_dim
    value: int  # v_head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A transformer without its weights. Raises ValueError with the field and the values it accepts.

    ``num_kv_heads=None`` means ``num_heads`` (multi-head), ``head_dim=None`` means ``hidden_size // num_heads``.
    ``attention`` is one type for all layers or one per layer, and is kept as one per layer: ``global`` (causal),
    ``sliding`` (causal, the last ``window_size`` tokens, itself included), ``chunked`` (causal within chunks of
    ``chunk_size``), ``full`` (both directions) or ``latent`` (causal, multi-head latent attention).

    Sizes of ``latent`` layers have DeepSeek's names: ``kv_lora_rank``, ``qk_nope_head_dim``, ``qk_rope_head_dim``,
    ``v_head_dim``, and ``q_lora_rank`` if queries are compressed too. These layers do not use ``head_dim`` and
    ``num_kv_heads``. ``max_length`` is the longest input if positions are learned (``use_rope=False``); RoPE has no
    limit of its own. ``qkv_bias`` and ``output_bias`` add biases to the attention's projections (Qwen2: the former).
    ``qk_norm`` normalises queries and keys per head before they are rotated (Qwen3). ``dtype`` is that of activations,
    ``param_dtype`` that of parameters; RoPE, norm statistics, softmax and logits are always float32.

    >>> config = ModelConfig.from_preset("debug", attention=("global", "sliding"), window_size=16)
    >>> config.num_parameters, config.attention
    (115520, ('global', 'sliding'))
    """

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 172
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_length: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
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
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __new__(cls, **fields: Any) -> Self:
        """Refuse unknown names before the generated ``__init__`` does, which cannot say ours."""
        _check_names(fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
            _require_positive_int(name, getattr(self, name))
        _require_positive_int("num_layers", self.num_layers, MOST_LAYERS)
        _require_positive_int("max_length", self.max_length)
        self._check_heads()
        for name in ("rope_theta", "norm_eps"):
            _require_positive_real(name, getattr(self, name))
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(  # noqa: TRY004  (a field of the wrong type is a wrong value: one error to catch)
                f"rope_scaling={self.rope_scaling!r} must be a RopeScaling or None."
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")  # noqa: TRY004  (as above)
        if self.qk_norm and not self.use_rmsnorm:
            raise ValueError("qk_norm=True is an RMSNorm; it needs use_rmsnorm=True.")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported; use one of {', '.join(DTYPES)}.")
        self._check_attention()

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
        _require_positive_int("head_dim", self.head_dim)
        if self.use_rope and self.dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd; RoPE rotates pairs: use an even one, or use_rope=False."
            )

    def _check_attention(self) -> None:
        given = self.attention
        types = (given,) * self.num_layers if isinstance(given, str) else given
        accepted = get_args(AttentionType)
        if not isinstance(types, tuple | list) or any(kind not in accepted for kind in types):
            wrong = next((kind for kind in types if kind not in accepted), given) if isinstance(types, tuple) else given
            raise ValueError(f"attention={wrong!r} must be one of {', '.join(accepted)}, or a tuple of one per layer.")
        if len(types) != self.num_layers:
            raise ValueError(f"attention names {len(types)} layers, but num_layers={self.num_layers}.")
        object.__setattr__(self, "attention", tuple(types))
        needed = [("sliding", "window_size"), ("chunked", "chunk_size"), *(("latent", name) for name in _LATENT_SIZES)]
        for kind, name in needed:
            value = getattr(self, name)
            if value is not None:
                _require_positive_int(name, value)
            elif kind in types:
                raise ValueError(f"attention={kind!r} needs {name}, an integer of at least 1; it is None.")
        if self.q_lora_rank is not None:
            _require_positive_int("q_lora_rank", self.q_lora_rank)
        if "latent" in types:
            self._check_latent()

    def _check_latent(self) -> None:
        if self.latent.rope % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; RoPE rotates pairs: use an even one.")
        for name, wanted in (("use_rope", True), ("use_rmsnorm", True), ("qkv_bias", False), ("qk_norm", False)):
            if getattr(self, name) is not wanted:
                raise ValueError(f"{name}={not wanted} does not go with attention='latent'; it needs {name}={wanted}.")

    @property
    def kv_heads(self) -> int:
        """``num_kv_heads``, which is never None after construction."""
        return self.num_kv_heads  # pyright: ignore[reportReturnType]  (normalised in __post_init__)

    @property
    def dim(self) -> int:
        """``head_dim``, which is never None after construction."""
        return self.head_dim  # pyright: ignore[reportReturnType]  (normalised in __post_init__)

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
    def num_parameters(self) -> int:
        """How many numbers the parameters hold; tied embeddings count once."""
        norm = self.hidden_size if self.use_rmsnorm else 2 * self.hidden_size
        attention = 2 * self.hidden_size * self.dim * (self.num_heads + self.kv_heads)
        attention += (
            self.qkv_bias * self.dim * (self.num_heads + 2 * self.kv_heads) + self.output_bias * self.hidden_size
        )
        attention += self.qk_norm * 2 * self.dim
        latent = self.layer_types.count("latent")
        attention = (self.num_layers - latent) * attention + (latent * self._latent_parameters if latent else 0)
        mlp = (3 if self.use_swiglu else 2) * self.hidden_size * self.intermediate_size
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size + (0 if self.use_rope else self.max_length)
        return attention + self.num_layers * (mlp + 2 * norm) + norm + tables * self.hidden_size

    @property
    def _latent_parameters(self) -> int:
        """Number of attention parameters of one ``latent`` layer."""
        rank, nope, rope, value = self.latent
        into, queries = self.hidden_size, self.num_heads * (nope + rope)
        count = into * queries
        if self.q_lora_rank is not None:
            count = self.q_lora_rank * (into + 1 + queries)
        count += into * (rank + rope) + rank + rank * self.num_heads * (nope + value)
        return count + self.num_heads * value * into + self.output_bias * into

    @staticmethod
    def from_preset(name: str, **overrides: Any) -> ModelConfig:
        """The preset of that name with some fields replaced. Raises ValueError listing the names that exist."""
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is not known; use one of {', '.join(PRESETS)}.")
        return ModelConfig(**{**PRESETS[name], **overrides})

    def replace(self, **overrides: Any) -> ModelConfig:
        """A copy with some fields replaced, checked like a new one.

        Derived values stay (``head_dim`` does not follow ``num_heads``), but an ``attention`` that is the same in all
        layers follows ``num_layers``. An unknown name raises ValueError listing the fields.
        """
        if len(self.attention_types) == 1:
            overrides.setdefault("attention", self.attention_types[0])
        return dataclasses.replace(self, **overrides)


def _check_names(overrides: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    unknown = [name for name in overrides if name not in names]
    if not unknown:
        return
    told = [sentence for sentence in map(our_name, unknown) if sentence]
    raise ValueError(
        "; ".join([f"ModelConfig has no field {', '.join(map(repr, unknown))}", *told, f"it has {', '.join(names)}."])
    )


def _require_positive_int(name: str, value: object, most: int = _MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
    if value > most:
        raise ValueError(f"{name} is above {most}, the most that is accepted.")


def _require_positive_real(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r} must be a finite number above 0.")


def _with_scaling(fields: dict[str, Any]) -> dict[str, Any]:
    scaling = fields.get("rope_scaling")
    return fields if scaling is None else fields | {"rope_scaling": RopeScaling(**scaling)}


PRESETS: dict[str, dict[str, Any]] = {name: _with_scaling(fields) for name, fields in SIZES.items()}
