"""Checkpoints as Meta publishes them: ``params.json`` and ``consolidated.*.pth``, one file per model-parallel rank.

They differ from Hugging Face's in three ways: in names (w1 is the gate, w3 is up), in the rows of the query and key
projections (dimension 2i is rotated with 2i + 1 there, i with i + dim/2 here), and in that matrices are divided among
ranks by rows or by columns. ``params.json`` says whether RoPE is scaled, but not by how much; the scaling is looked up
among the presets by the model's sizes.

``torch_file.py`` reads the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float

from .checked_json import CheckpointError, checked, is_file, read_json, refuse_unknown, require_keys
from .config import MOST_LAYERS, PRESETS, ModelConfig
from .parameters import LAYER, TOP, Shape
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


_EMBEDDING, _HEAD = TOP["embed_tokens"], TOP["lm_head"]
_TURNED = (LAYER["q_proj"].stored, LAYER["k_proj"].stored)
_IGNORED = "rope.freqs"  # Llama 2 carries what params.json says anyway


def is_meta(directory: Path) -> bool:
    """Whether ``directory`` holds a checkpoint in Meta's form."""
    return is_file(directory / PARAMS) and any(directory.glob("consolidated.*.pth"))


class _Divided(NamedTuple):
    """A tensor in Meta's files: its name there, the shape of every rank's piece, and the axis that divides it."""

    name: str
    piece: Shape
    axis: int | None  # None: every rank holds all of it


class MetaSource:
    """The tensors of Meta's files under Hugging Face's names, and the configuration that follows from the files.

    ``rope_scaling`` is the scaling that params.json lacks; ``"preset"`` looks it up. Raises CheckpointError for a file
    that is missing, refused or does not fit.
    """

    def __init__(self, directory: Path, rope_scaling: RopeScaling | str | None = "preset") -> None:
        self._ranks = [TorchFile(path) for path in sorted(directory.glob("consolidated.*.pth"))]
        params = _read_params(directory / PARAMS)
        self._tensors = self._found(params)
        self.shapes = {
            name: tuple(size * (len(self._ranks) if i == axis else 1) for i, size in enumerate(piece))
            for name, (_, piece, axis) in self._tensors.items()
        }
        self.config = self._config(params, rope_scaling)

    def where(self, name: str) -> str:
        """The name of the (first) file that holds a tensor."""
        return self._ranks[0].path.name

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of these names, each with its own, in the dtype in which they are stored."""
        for name in names:
            theirs, _, axis = self._tensors[name]
            pieces = [rank.read(theirs) for rank in (self._ranks[:1] if axis is None else self._ranks)]
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis or 0)
            yield name, half_split(whole, self.config.dim) if name.endswith(_TURNED) else whole

    def _found(self, params: _Params) -> dict[str, _Divided]:
        """Hugging Face's name of every tensor -> how it lies in the files. Unknown tensors keep their names."""
        known = _known(params.n_layers)
        pieces: dict[str, list[Shape]] = {}
        for rank in self._ranks:
            for theirs, (dtype, shape) in rank.tensors.items():
                if theirs != _IGNORED:
                    check_dtype(theirs, rank, dtype)
                    pieces.setdefault(theirs, []).append(shape)
        found = {}
        for theirs, shapes in pieces.items():
            name, axis = known.get(theirs, (theirs, None))
            if len(shapes) != len(self._ranks) or len(set(shapes)) != 1 or not shapes[0] or name in found:
                raise CheckpointError(f"{theirs!r} is not in equal pieces in all of {len(self._ranks)} files.")
            if theirs == _EMBEDDING.meta and shapes[0][1:] != (params.dim,):
                axis = 1  # Llama 2 divides the embeddings by columns, Llama 3 by rows
            found[name] = _Divided(theirs, shapes[0], axis)
        return found

    def _config(self, params: _Params, rope_scaling: RopeScaling | str | None) -> ModelConfig:
        table, gate = _EMBEDDING.stored, f"model.layers.0.{LAYER['gate_proj'].stored}"
        needed = (table, TOP["norm"].stored, gate)
        missing = [theirs for theirs, (ours, _) in _known(1).items() if ours in needed and ours not in self.shapes]
        if missing:
            raise CheckpointError(f"the checkpoint lacks {', '.join(missing)}; Meta's have it.")
        stored, _ = self._ranks[0].tensors[self._tensors[table].name]
        sizes: dict[str, Any] = {
            "vocab_size": self.shapes[table][0],
            "hidden_size": params.dim,
            "intermediate_size": self.shapes[gate][0],
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
        head, table = self._tensors.get(_HEAD.stored), self._tensors[_EMBEDDING.stored]
        if head is None:
            return True
        if head.piece != table.piece:
            return False
        return all(np.array_equal(rank.read(head.name), rank.read(table.name)) for rank in self._ranks)


def _read_params(path: Path) -> _Params:
    fields = {key: value for key, value in read_json(path).items() if value is not None}
    refuse_unknown(fields, _Params.__struct_fields__, PARAMS)
    require_keys(fields, _Params, PARAMS, "Meta's have")
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


def _known(layers: int) -> dict[str, tuple[str, int | None]]:
    """Meta's name of each tensor -> Hugging Face's, and the axis along which ranks divide it."""
    known = {row.meta: (row.stored, row.divided) for row in TOP.values() if row.meta}
    for i in range(layers):
        known |= {f"layers.{i}.{r.meta}": (f"model.layers.{i}.{r.stored}", r.divided) for r in LAYER.values() if r.meta}
    return known
