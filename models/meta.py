"""Checkpoints as Meta publishes them: ``params.json`` and ``consolidated.*.pth``, one file per model-parallel rank.

They differ from Hugging Face's in three ways: in names (w1 is the gate, w3 is up), in the rows of the query and key
projections (dimension 2i is rotated with 2i + 1 there, i with i + dim/2 here), and in that matrices are divided among
ranks by rows or by columns. ``params.json`` says whether RoPE is scaled, but not by how much; the scaling is looked up
among the presets by the model's sizes.

``torch_file.py`` reads the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Float

from .config import MOST_LAYERS, PRESETS, ModelConfig
from .reading import CheckpointError, checked, is_file, read_json, refuse_unknown
from .rope_scaling import RopeScaling
from .shards import check_dtype
from .torch_file import TorchFile

PARAMS = "params.json"


class _Params(msgspec.Struct, kw_only=True):
    """The known keys of params.json; another key may change the computation. The last four change nothing here."""

    dim: int
    n_layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
    n_heads: int
    norm_eps: float
    n_kv_heads: int | None = None
    rope_theta: float | None = None
    use_scaled_rope: bool | None = None
    max_seq_len: int | None = None
    max_batch_size: Any = None
    vocab_size: Any = None  # -1 in Llama 2: the weights say it
    multiple_of: Any = None  # sizes that the weights say
    ffn_dim_multiplier: Any = None


# Hugging Face's name -> Meta's, and the axis along which ranks divide it (None: every rank holds all of it).
_OUTER = {
    "model.embed_tokens.weight": ("tok_embeddings.weight", 0),
    "model.norm.weight": ("norm.weight", None),
    "lm_head.weight": ("output.weight", 0),
}
_LAYER = {
    "input_layernorm.weight": ("attention_norm.weight", None),
    "self_attn.q_proj.weight": ("attention.wq.weight", 0),
    "self_attn.k_proj.weight": ("attention.wk.weight", 0),
    "self_attn.v_proj.weight": ("attention.wv.weight", 0),
    "self_attn.o_proj.weight": ("attention.wo.weight", 1),
    "post_attention_layernorm.weight": ("ffn_norm.weight", None),
    "mlp.gate_proj.weight": ("feed_forward.w1.weight", 0),
    "mlp.up_proj.weight": ("feed_forward.w3.weight", 0),
    "mlp.down_proj.weight": ("feed_forward.w2.weight", 1),
}
_TURNED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
_NAMES = {theirs: (ours, axis) for ours, (theirs, axis) in _LAYER.items()}
_IGNORED = "rope.freqs"  # Llama 2 carries what params.json says anyway


def is_meta(directory: Path) -> bool:
    """Whether ``directory`` holds a checkpoint in Meta's form."""
    return is_file(directory / PARAMS) and any(directory.glob("consolidated.*.pth"))


class MetaSource:
    """The tensors of Meta's files under Hugging Face's names, and the configuration that follows from the files.

    ``rope_scaling`` is the scaling that params.json lacks; ``"preset"`` looks it up. Raises CheckpointError for a file
    that is missing, refused or does not fit.
    """

    def __init__(self, directory: Path, rope_scaling: RopeScaling | str | None = "preset") -> None:
        self._ranks = [TorchFile(path) for path in sorted(directory.glob("consolidated.*.pth"))]
        params = _read_params(directory / PARAMS)
        self._width = params.dim
        self._pieces = self._piece_shapes()
        self.shapes = {name: self._whole_shape(name) for name in self._pieces}
        self.config = self._config(params, rope_scaling)

    def where(self, name: str) -> str:
        """The name of the (first) file that holds a tensor."""
        return self._ranks[0].path.name

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of these names, each with its own, in the dtype in which they are stored."""
        for name in names:
            theirs, axis = _meta_name(name), self._axis(name)
            pieces = [rank.read(theirs) for rank in (self._ranks[:1] if axis is None else self._ranks)]
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis or 0)
            yield name, half_split(whole, self.config.dim) if name.endswith(_TURNED) else whole

    def _piece_shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """Hugging Face's name of every tensor -> the shape of its piece in each file."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for rank in self._ranks:
            for theirs, (dtype, shape) in rank.tensors.items():
                if theirs != _IGNORED:
                    check_dtype(theirs, rank, dtype)
                    shapes.setdefault(_our_name(theirs), []).append(shape)
        for name, pieces in shapes.items():
            if len(pieces) != len(self._ranks) or len(set(pieces)) != 1 or not pieces[0]:
                raise CheckpointError(
                    f"{_meta_name(name)!r} is not in equal pieces in all of {len(self._ranks)} files."
                )
        return shapes

    def _axis(self, name: str) -> int | None:
        known = _OUTER.get(name) or _LAYER.get(re.sub(r"^model\.layers\.\d+\.", "", name))
        axis = known[1] if known else None
        if name == "model.embed_tokens.weight" and self._pieces[name][0][1:] != (self._width,):
            return 1  # Llama 2 divides the embeddings by columns, Llama 3 by rows
        return axis

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        shape, axis = list(self._pieces[name][0]), self._axis(name)
        if axis is not None and axis < len(shape):
            shape[axis] *= len(self._ranks)
        return tuple(shape)

    def _config(self, params: _Params, rope_scaling: RopeScaling | str | None) -> ModelConfig:
        needed = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate_proj.weight")
        missing = [_meta_name(name) for name in needed if name not in self.shapes]
        if missing:
            raise CheckpointError(f"the checkpoint lacks {', '.join(missing)}; Meta's have it.")
        stored, _ = self._ranks[0].tensors["tok_embeddings.weight"]
        sizes: dict[str, Any] = {
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": params.dim,
            "intermediate_size": self.shapes["model.layers.0.mlp.gate_proj.weight"][0],
            "num_layers": params.n_layers,
            "num_heads": params.n_heads,
            "num_kv_heads": params.n_kv_heads or params.n_heads,
        }
        if rope_scaling == "preset":
            rope_scaling = _scaling_of_preset(sizes) if params.use_scaled_rope else None
        is_tied = self._is_tied()
        try:
            return ModelConfig(
                **sizes,
                max_length=params.max_seq_len or (131072 if rope_scaling else 8192),
                rope_theta=params.rope_theta or 10000.0,
                rope_scaling=rope_scaling,  # pyright: ignore[reportArgumentType]  (checked there)
                norm_eps=params.norm_eps,
                tie_embeddings=is_tied,
                dtype=stored,
                param_dtype=stored,
            )
        except ValueError as error:
            raise CheckpointError(f"{PARAMS}: {error}") from error

    def _is_tied(self) -> bool:
        """Whether the output projection is missing, or equal to the embeddings (Llama 3.2): compared file by file."""
        if "lm_head.weight" not in self.shapes:
            return True
        if self._pieces["lm_head.weight"] != self._pieces["model.embed_tokens.weight"]:
            return False
        return all(
            np.array_equal(rank.read("output.weight"), rank.read("tok_embeddings.weight")) for rank in self._ranks
        )


def _read_params(path: Path) -> _Params:
    fields = {key: value for key, value in read_json(path).items() if value is not None}
    refuse_unknown(fields, _Params.__struct_fields__, PARAMS)
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps") if key not in fields]
    if missing:
        raise CheckpointError(f"{PARAMS} lacks {', '.join(missing)}; Meta's have it.")
    return checked(fields, _Params, PARAMS)


def half_split(weight: Float[np.ndarray, "rows in"], head_dim: int) -> Float[np.ndarray, "rows in"]:
    """Rows of a query or key projection from interleaved pairs to halves, head by head.

    >>> half_split(np.arange(8.0)[:, None], 4).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _scaling_of_preset(sizes: dict[str, Any]) -> RopeScaling:
    for preset in PRESETS.values():
        if preset.get("rope_scaling") and all(preset.get(name) == value for name, value in sizes.items()):
            return preset["rope_scaling"]
    shapes = ", ".join(f"{name} {value}" for name, value in sizes.items())
    raise CheckpointError(
        f"{PARAMS} says use_scaled_rope, but not by which factor, and no preset has these sizes ({shapes}); "
        "give rope_scaling, or on the command line --preset with the name of one that is scaled alike."
    )


def _meta_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name][0]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return f"layers.{match[1]}.{_LAYER[match[2]][0]}" if match and match[2] in _LAYER else name


def _our_name(theirs: str) -> str:
    for ours, (name, _) in _OUTER.items():
        if theirs == name:
            return ours
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", theirs)
    return f"model.layers.{match[1]}.{_NAMES[match[2]][0]}" if match and match[2] in _NAMES else theirs
