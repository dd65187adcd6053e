"""Low-rank adaptation (LoRA, arXiv 2106.09685): train a small update of chosen projections and nothing else.

A projection ``x W^T`` gets ``(alpha / rank) x A^T B^T`` added. A ``[rank, in]`` is normal with variance 1/in and B
``[out, rank]`` is zero, so that training starts from the unchanged model. The base model is never changed: merging
makes new matrices and keeps the old ones. Unmerging puts the old ones back; subtracting the update would not restore
them exactly. On disk adapters have the names of Hugging Face's PEFT, in safetensors.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jaxtyping import Array, Float
from safetensors.flax import save_file

from .checked_json import CheckpointError, checked, read_json, refuse_other_values, refuse_unknown, require_keys
from .checks import require_positive_int, require_positive_real
from .config import ModelConfig
from .parameters import LAYER, Params, parameter_shapes
from .shards import SafetensorsFile, check_dtype, is_finite

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model.model.layers"  # as PEFT wraps a causal language model
# Keys of PEFT's adapter_config.json (peft/tuners/lora/config.py). Of these only plain LoRA is computed here; null is
# accepted beside the values. A dropout acts in training, which starts from the adapters and not from this file.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # the others change the base model too
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "loftq_config": ({},),
    "modules_to_save": ([],),
    "layers_to_transform": (),
    "layer_replication": (),
    "auto_mapping": (),
    "ensure_weight_tying": (False,),
}
_HARMLESS = (
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "revision",
    "peft_version",
)


class _Fields(msgspec.Struct):
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The projections that are adapted, and how. Raises ValueError with the field and the values it accepts.

    >>> LoraConfig(rank=4, alpha=8.0).scale
    2.0
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", require_positive_int("rank", self.rank))
        require_positive_real("alpha", self.alpha)
        object.__setattr__(self, "targets", tuple(self.targets))
        unknown = [name for name in self.targets if name not in PROJECTIONS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={self.targets!r} must name one or more of {', '.join(PROJECTIONS)}, each once.")

    @property
    def scale(self) -> float:
        """The factor on the update."""
        return self.alpha / self.rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """The update of one projection. A pytree of A and B; ``scale`` is static."""

    a: Float[Array, "rank in"]
    b: Float[Array, "out rank"]
    scale: float = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Float[Array, "batch length in"]) -> Float[Array, "batch length out"]:
        """What is added to the projection of ``x``, in the dtype of ``x``."""
        inner = jnp.einsum("bti,ri->btr", x, self.a.astype(x.dtype))
        return jnp.einsum("btr,or->bto", inner, (self.b * self.scale).astype(x.dtype))

    def matrix(self) -> Float[Array, "out in"]:
        """The matrix that is added to the weight, float32."""
        wide = jnp.float32
        product = jnp.matmul(self.b.astype(wide), self.a.astype(wide), precision=jax.lax.Precision.HIGHEST)
        return self.scale * product


Adapters = tuple[dict[str, Adapter], ...]  # of each layer, by projection


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """A model with its updates added to its weights, and the weights before."""

    params: Params
    replaced: tuple[Params, ...]
    adapters: Adapters


def initialise(config: ModelConfig, lora: LoraConfig, key: jax.Array) -> Adapters:
    """Fresh adapters in float32 that change nothing, for every layer that has the projection.

    Raises ValueError for a target that no layer of the model has.
    """
    shapes = parameter_shapes(config)["layers"]
    known = {name for layer in shapes for name in layer}
    for name in lora.targets:
        if name not in known:
            has = ", ".join(each for each in PROJECTIONS if each in known)
            raise ValueError(f"targets names {name!r}, which this model lacks; it has {has}.")
    keys = iter(jax.random.split(key, len(shapes) * len(lora.targets)))

    def adapter(shape: tuple[int, int]) -> Adapter:
        out, into = shape
        a = jax.random.normal(next(keys), (lora.rank, into), jnp.float32) * into**-0.5
        return Adapter(a, jnp.zeros((out, lora.rank), jnp.float32), lora.scale)

    return tuple({name: adapter(layer[name]) for name in lora.targets if name in layer} for layer in shapes)


def attach(params: Params, adapters: Adapters) -> Params:
    """The tree that the forward pass takes: the base model's arrays, shared, with the adapters beside them.

    Raises ValueError for adapters of another model, and where the model has adapters beside its arrays already.
    """
    _check_fit(params, adapters)
    layers = [
        {**layer, **{f"{name}_lora": adapter for name, adapter in added.items()}}
        for layer, added in zip(params["layers"], adapters, strict=True)
    ]
    return {**params, "layers": layers}


def merge(params: Params, adapters: Adapters) -> Merged:
    """Add the updates to the weights, in float32 and rounded once to their dtype; ``params`` stays as it is.

    Raises ValueError as :func:`attach` does.
    """
    _check_fit(params, adapters)
    layers, replaced = [], []
    for layer, added in zip(params["layers"], adapters, strict=True):
        sums = {name: layer[name].astype(jnp.float32) + adapter.matrix() for name, adapter in added.items()}
        sums = {name: total.astype(layer[name].dtype) for name, total in sums.items()}
        layers.append({**layer, **sums})
        replaced.append({name: layer[name] for name in added})
    return Merged({**params, "layers": layers}, tuple(replaced), adapters)


def unmerge(merged: Merged) -> tuple[Params, Adapters]:
    """The model and the adapters that were given to :func:`merge`, bit for bit."""
    layers = [{**layer, **old} for layer, old in zip(merged.params["layers"], merged.replaced, strict=True)]
    return {**merged.params, "layers": layers}, merged.adapters


def _check_fit(params: Params, adapters: Adapters) -> None:
    if len(adapters) != len(params["layers"]):
        raise ValueError(f"the adapters are for {len(adapters)} layers, and the model has {len(params['layers'])}.")
    for i, (layer, added) in enumerate(zip(params["layers"], adapters, strict=True)):
        if attached := [name for name in layer if name.endswith("_lora")]:  # they would be dropped, or count twice
            raise ValueError(f"layer {i} has adapters already ({', '.join(attached)}); give the model's own arrays.")
        for name, adapter in added.items():
            wanted, found = (adapter.b.shape[0], adapter.a.shape[1]), layer[name].shape if name in layer else None
            if found != wanted:
                raise ValueError(
                    f"the adapter of {name!r} in layer {i} is for a matrix {wanted}, and the model has {found}; give "
                    "adapters of this model."
                )


def save(adapters: Adapters, lora: LoraConfig, directory: str | Path, base: str = "") -> None:
    """Write the adapters in PEFT's form, making the directory. ``base`` names the model they belong to.

    Raises ValueError where ``lora`` is not what the adapters were made with: they would be scaled by it when read.
    """
    directory, tensors = Path(directory), {}
    for i, layer in enumerate(adapters):
        for name, adapter in layer.items():
            made = (adapter.a.shape[0], adapter.scale)
            if name not in lora.targets or made != (lora.rank, lora.scale):
                raise ValueError(
                    f"the adapter of {name!r} in layer {i} has (rank, alpha / rank) {made}, and {lora} says another."
                )
            tensors[_name(i, name, "A")], tensors[_name(i, name, "B")] = adapter.a, adapter.b
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.targets),
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load(directory: str | Path, config: ModelConfig) -> tuple[Adapters, LoraConfig]:
    """The adapters in ``directory`` for a model of ``config``, in float32.

    Raises CheckpointError for a file that cannot be read, for adapters other than plain LoRA, and for a tensor that is
    missing, unexpected, not finite, or of the wrong shape or dtype; ValueError if the model lacks a projection.
    """
    directory = Path(directory)
    lora = _read_config(directory / CONFIG)
    shapes = jax.eval_shape(lambda: initialise(config, lora, jax.random.key(0)))  # of any rank, without its memory
    wanted = {
        _name(i, name, part): array.shape
        for i, layer in enumerate(shapes)
        for name, adapter in layer.items()
        for part, array in (("A", adapter.a), ("B", adapter.b))
    }
    file, found = SafetensorsFile(directory / WEIGHTS), {}
    for name, (dtype, _) in file.tensors.items():
        check_dtype(name, file, dtype)
        found[name] = jnp.asarray(file.read(name), jnp.float32)
    if set(found) != set(wanted):
        odd = min(set(found) ^ set(wanted))
        raise CheckpointError(
            f"{WEIGHTS} {'holds' if odd in found else 'lacks'} {odd!r}, unlike what {CONFIG} describes."
        )
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{name!r} in {WEIGHTS} has shape {found[name].shape}; expected {shape} for this model."
            )
        if not is_finite(found[name]):
            raise CheckpointError(f"{name!r} in {WEIGHTS} holds NaN or infinity; what is computed has no meaning.")
    adapters = tuple(
        {name: Adapter(found[_name(i, name, "A")], found[_name(i, name, "B")], lora.scale) for name in layer}
        for i, layer in enumerate(shapes)
    )
    return adapters, lora


def _name(layer: int, projection: str, part: str) -> str:
    module = LAYER[projection].stored.removesuffix(".weight")
    return f"{_PREFIX}.{layer}.{module}.lora_{part}.weight"


def _read_config(path: Path) -> LoraConfig:
    entries = {key: value for key, value in read_json(path).items() if value is not None}
    refuse_other_values(entries, _ONLY, CONFIG)
    refuse_unknown(entries, {*_Fields.__struct_fields__, *_ONLY, *_HARMLESS}, CONFIG)
    require_keys(entries, _Fields, CONFIG, "that of a LoRA adapter has")
    fields = checked(entries, _Fields, CONFIG)
    try:
        return LoraConfig(rank=fields.r, alpha=fields.lora_alpha, targets=fields.target_modules)
    except ValueError as error:
        raise CheckpointError(f"{CONFIG}: {error}") from error
