"""How ``chunked`` lays out its operands in tiles, and in which form the loops carry them.

A tile is ``heads_per_tile`` KV heads with all query heads of their groups: queries
``[tiles * q_blocks, heads, group * block_q, dim]``, keys and values ``[tiles, heads, kv_len, dim]``. A :class:`Program`
holds all static choices. :func:`_in_cpu_bits` decides where XLA's CPU compiler needs special treatment.

A mask and a bias broadcast to ``[batch, heads, query, key]``. A block slices its part of the caller's own array, with
axes of size one where the array has them. The gradient of a bias has the bias's shape and is added up block by block.
The arrays are copied only to pad them where the blocks do not divide their lengths (``blocks.fitted``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .derivatives import first_derivative
from .operands import EitherArray
from .spec import AttentionSpec

Corner = tuple[Array, Array, Array]  # tile, first query and first key of a block


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of the blocks, and how many KV heads one step computes."""

    block_q: int
    block_kv: int
    block_backward: int
    heads_per_tile: int

    @property
    def keys(self) -> tuple[int, int, int]:
        """The sizes of blocks of keys: mixed blocks are as narrow as those of queries."""
        return self.block_q, self.block_kv, self.block_backward


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """All static choices of one planned attention. ``float32_results``: results are not rounded to the input dtype."""

    spec: AttentionSpec
    sizes: BlockSizes
    on_cpu: bool
    scale_query: float
    scale_scores: float
    float32_results: bool = False


def _in_cpu_bits(program: Program) -> bool:
    """Whether bfloat16 is rounded by integer arithmetic and carried as bits: only for XLA's CPU compiler.

    That compiler's float32 -> bfloat16 conversion is scalar code. It also widens bfloat16 loop operands to float32 and
    narrows them again at every slice.
    """
    return program.on_cpu and program.spec.dtype == "bfloat16"


def is_precise(program: Program) -> bool:
    """Whether weights are not rounded before they are summed: the gradient of a bias is float32 in every dtype."""
    return program.spec.has_bias and program.spec.needs_grad


def tile_queries(x: Array, spec: AttentionSpec, heads: int, block: int, fill: float = 0) -> Array:
    """[B, T, N, D] -> [tiles * q_blocks, heads, group * block, D], T padded with ``fill``."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)), constant_values=fill)
    b, t, _, d = x.shape
    kv_heads, group, n = spec.num_kv_heads, spec.group_size, t // block
    x = x.reshape(b, n, block, kv_heads, group, d).transpose(0, 3, 1, 4, 2, 5)
    x = x.reshape(b * kv_heads // heads, heads, n, group * block, d)
    return x.transpose(0, 2, 1, 3, 4).reshape(-1, heads, group * block, d)


def untile_queries(x: Array, spec: AttentionSpec, heads: int, block: int) -> Array:
    """The inverse: -> [B, T, N, D]."""
    b, kv_heads, group, d = spec.batch, spec.num_kv_heads, spec.group_size, x.shape[-1]
    n = x.shape[0] * heads // (b * kv_heads)
    x = x.reshape(-1, n, heads, group, block, d).transpose(0, 2, 3, 1, 4, 5).reshape(b, kv_heads, group, n * block, d)
    return x.transpose(0, 3, 1, 2, 4).reshape(b, n * block, kv_heads * group, d)[:, : spec.query_length]


def tile_keys(x: Array, heads: int, block: int) -> Array:
    """[B, S, K, D] -> [tiles, heads, S, D], S padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))
    b, s, kv_heads, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b * kv_heads // heads, heads, s, d)


def columns_of(x: Array, heads: int, block: int) -> Array:
    """[B, S, K, D] -> [tiles * kv_blocks, heads, block, D]: one entry per KV block, for the backward pass."""
    x = tile_keys(x, heads, block)
    tiles, _, _, d = x.shape
    return x.reshape(tiles, heads, -1, block, d).swapaxes(1, 2).reshape(-1, heads, block, d)


def uncolumns(x: Array, spec: AttentionSpec, tiles: int) -> Array:
    """The inverse: -> [B, S, K, D]."""
    _, heads, block, d = x.shape
    x = x.reshape(tiles, -1, heads, block, d).swapaxes(1, 2)
    x = x.reshape(spec.batch, spec.num_kv_heads, -1, d).transpose(0, 2, 1, 3)
    return x[:, : spec.key_value_length]


def narrowed(x: Float[Array, "..."], program: Program) -> Array:
    """float32 -> the input dtype; on a CPU to bfloat16 by adding half an ulp and cutting (ties away from 0)."""
    if not _in_cpu_bits(program):
        return x.astype(program.spec.dtype)
    bits = _bits(x, jnp.uint32)
    return lax.bitcast_convert_type(((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16), jnp.bfloat16)


def pack(x: Array, program: Program) -> Array:
    """The form in which loops carry arrays of the input dtype."""
    return _bits(x, jnp.uint16) if _in_cpu_bits(program) else x


def _bits(x: Array, dtype: Any) -> Array:
    """The bits of ``x``. JAX's derivative of them is zero, so that of the gradient is refused."""
    return first_derivative(lambda x: lax.bitcast_convert_type(x, dtype))(x)


def unpack(x: Array, program: Program) -> Array:
    """The inverse of :func:`pack`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if _in_cpu_bits(program) else x


def result(x: Float[Array, "..."], program: Program) -> Array:
    """A result in the form in which loops carry it; :func:`delivered` converts it back."""
    return x if program.float32_results else pack(narrowed(x, program), program)


def delivered(x: Array, program: Program) -> Array:
    """The inverse of :func:`result`."""
    return x if program.float32_results else unpack(x, program)


def tile_per_head(x: Float[EitherArray, " n"], program: Program) -> Float[Array, "tiles heads group 1 1"]:
    """ALiBi's slopes or the sinks of each tile: one number per KV head and query head of its group."""
    spec = program.spec
    grouped = jnp.asarray(x, jnp.float32).reshape(spec.num_kv_heads, spec.group_size)
    return jnp.tile(grouped, (spec.batch, 1)).reshape(-1, program.sizes.heads_per_tile, spec.group_size, 1, 1)


def untile_slopes(x: Float[Array, "columns heads group"], spec: AttentionSpec, tiles: int) -> Float[Array, " n"]:
    """The gradient of the slopes, from that of each column of blocks."""
    return x.reshape(tiles, -1, *x.shape[1:]).sum(1).reshape(spec.batch, spec.num_heads).sum(0)


def part(x: Array, spec: AttentionSpec, heads: int, corner: Corner, rows: int, columns: int) -> Array:
    """One block of a fitted array for a tile of ``heads`` KV heads: [heads or 1, group or 1, rows or 1, columns or 1].

    A tile of heads belongs to one batch entry where there is such an array.
    """
    found = lax.dynamic_slice(x, _starts(x, spec, heads, corner), _sizes(x, spec, heads, rows, columns))
    return found.reshape(*((1, 1) if x.shape[1] == 1 else (heads, spec.group_size)), *found.shape[2:])


def added(total: Array, x: Array, spec: AttentionSpec, corner: Corner) -> Array:
    """``total``, the gradient of a fitted bias, with that of one block of logits: [heads, group, rows, columns]."""
    heads, group, rows, columns = x.shape
    x = x.reshape(1, heads * group, rows, columns)
    x = x.sum([axis for axis in (1, 2, 3) if total.shape[axis] == 1], keepdims=True)
    starts, sizes = _starts(total, spec, heads, corner), _sizes(total, spec, heads, rows, columns)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, sizes) + x, starts)


def not_finite(k: Array, v: Array) -> Bool[Array, "heads width"]:
    """Slots of a block whose key or value holds NaN or infinity."""
    return ~(jnp.isfinite(k).all(-1) & jnp.isfinite(v).all(-1))


def _starts(x: Array, spec: AttentionSpec, heads: int, corner: Corner) -> list[Any]:
    tile, query_start, key_start = corner
    first = tile * heads  # KV head, counted over all batch entries
    at = (first // spec.num_kv_heads, first % spec.num_kv_heads * spec.group_size, query_start, key_start)
    return [jnp.int32(0) if n == 1 else jnp.asarray(i, jnp.int32) for i, n in zip(at, x.shape, strict=True)]


def _sizes(x: Array, spec: AttentionSpec, heads: int, rows: int, columns: int) -> tuple[int, ...]:
    return tuple(min(n, size) for n, size in zip(x.shape, (1, heads * spec.group_size, rows, columns), strict=True))
