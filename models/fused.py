"""Checkpoints that store a model's matrices cut in another way: fused (Phi-3), or one tensor per expert.

:class:`FusedSource` gives the tensors of such a checkpoint under the names and shapes of ``parameters.py``. Inside it,
a :class:`Piece` says for each of our tensors which stored ones it is made of. Only the pieces of one tensor are in
memory at a time.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .config import ModelConfig
from .shards import ShardedSource, check_fit

Shape = tuple[int, ...]
_ATTENTION, _MLP = "self_attn.", "mlp."
_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A tensor made from ``stored`` ones of these shapes, by ``make`` from the list of their arrays."""

    stored: Mapping[str, Shape]
    make: Callable[[list[Any]], Any]
    shape: Shape


class FusedSource:
    """A source whose tensors are those of ``inner``, but for the ones that ``pieces`` make.

    Raises CheckpointError where a stored tensor that a piece needs is missing or of another shape.
    """

    def __init__(self, inner: ShardedSource, pieces: Mapping[str, Piece]) -> None:
        self._inner, self._pieces = inner, pieces
        used = {name: shape for piece in pieces.values() for name, shape in piece.stored.items()}
        rest = {name: shape for name, shape in inner.shapes.items() if name not in {*used, *pieces}}
        check_fit(used, {name: shape for name, shape in inner.shapes.items() if name not in rest}, inner.where)
        self.shapes: dict[str, Shape] = rest | {name: piece.shape for name, piece in pieces.items()}

    def where(self, name: str) -> str:
        """The name of the file that holds a tensor, or the first part of one."""
        piece = self._pieces.get(name)
        return self._inner.where(name if piece is None else next(iter(piece.stored)))

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """The tensors of these names, each with its own, in the dtype in which they are stored."""
        for name in names:
            piece = self._pieces.get(name)
            if piece is None:
                yield from self._inner.read([name])
            else:
                yield name, piece.make([np.asarray(value) for _, value in self._inner.read(list(piece.stored))])


def pieces_of(model_type: str, config: ModelConfig) -> dict[str, Piece]:
    """What a checkpoint of this ``model_type`` stores in another way; empty for most."""
    of_layer = {"phi3": _phi3, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss}.get(model_type)
    if of_layer is None:
        return {}
    return {name: piece for i in range(config.num_layers) for name, piece in of_layer(config, f"model.layers.{i}.")}


def _phi3(config: ModelConfig, layer: str) -> Iterator[tuple[str, Piece]]:
    d, f = config.hidden_size, config.inner_size
    q, kv = config.num_heads * config.dim, config.kv_heads * config.dim
    for fused, parts in (
        (_ATTENTION + "qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv}),
        (_MLP + "gate_up_proj", {"gate_proj": f, "up_proj": f}),
    ):
        room, start = fused.split(".")[0], 0
        stored = {f"{layer}{fused}.weight": (sum(parts.values()), d)}
        for name, rows in parts.items():
            yield f"{layer}{room}.{name}.weight", Piece(stored, _rows(start, start + rows), (rows, d))
            start += rows


def _rows(start: int, stop: int) -> Callable[[list[Any]], Any]:
    return lambda values: values[0][start:stop]


def _mixtral(config: ModelConfig, layer: str) -> Iterator[tuple[str, Piece]]:
    block = f"{layer}block_sparse_moe."
    theirs = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return _one_per_expert(config, layer, f"{block}gate.weight", lambda name, j: f"{block}experts.{j}.{theirs[name]}")


def _qwen3_moe(config: ModelConfig, layer: str) -> Iterator[tuple[str, Piece]]:
    return _one_per_expert(
        config, layer, f"{layer}{_MLP}gate.weight", lambda name, j: f"{layer}{_MLP}experts.{j}.{name}"
    )


def _one_per_expert(
    config: ModelConfig, layer: str, router: str, stored: Callable[[str, int], str]
) -> Iterator[tuple[str, Piece]]:
    experts, into, inner = config.num_experts or 0, config.hidden_size, config.inner_size
    yield f"{layer}{_MLP}router.weight", Piece({router: (experts, into)}, operator.itemgetter(0), (experts, into))
    for name in _PARTS:
        shape = (into, inner) if name == "down_proj" else (inner, into)
        parts = {f"{stored(name, j)}.weight": shape for j in range(experts)}
        yield f"{layer}{_MLP}experts.{name}", Piece(parts, np.stack, (experts, *shape))


def _gpt_oss(config: ModelConfig, layer: str) -> Iterator[tuple[str, Piece]]:
    """Matrices are stored as ``[experts, in, out]``; columns of gate and up take turns."""
    experts, d, f = config.num_experts or 0, config.hidden_size, config.inner_size
    block = f"{layer}{_MLP}experts."
    both, down = {f"{block}gate_up_proj": (experts, d, 2 * f)}, {f"{block}down_proj": (experts, f, d)}
    both_bias = {f"{block}gate_up_proj_bias": (experts, 2 * f)}
    for name, first in (("gate_proj", 0), ("up_proj", 1)):
        yield f"{block}{name}", Piece(both, _turned(first, 2), (experts, f, d))
        columns = slice(first, None, 2)
        bias = Piece(both_bias, lambda values, columns=columns: values[0][..., columns], (experts, f))
        yield f"{block}{name}_bias", bias
    yield f"{block}down_proj", Piece(down, _turned(0, 1), (experts, d, f))


def _turned(first: int, step: int) -> Callable[[list[Any]], Any]:
    return lambda values: np.swapaxes(values[0][..., first::step], 1, 2)
