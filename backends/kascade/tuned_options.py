"""What ``attnsuite tune`` tries of Kascade: block sizes of the Pallas kernels; on a CPU the kernel itself.

``tile_size``, ``query_tile``, ``top_k`` and the other options of the method decide what is selected. They are given,
never tried. The problem is one anchor layer, which runs both kernels: the mass of all earlier keys, then attention to
what was selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract import AttentionSpec
from ..devices import Target
from ..tunable import KernelWork
from .block_sizes import BYTES, LANES, TileBlocks, gpu_blocks, shared_bytes, tpu_blocks, vmem_bytes
from .settings import LEAST, Settings, Tiling

_LARGEST_STEP = 512  # keys computed with at a time: more are no longer one product of a device's matrix unit


def defaults(spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks of a kernel by rule; on a CPU XLA's code."""
    if target.platform == "cpu":
        return {"kernel": "xla"}
    blocks = _blocks(spec, target, options)
    return {"block_q": blocks.block_q, "block_kv_sparse": blocks.block_kv, "block_kv_compute": blocks.step_kv}


def candidates(spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Blocks that fit the given tiles; on a CPU the native kernel."""
    if target.platform == "cpu":
        return ({"kernel": "flash_cpu"},)
    tiles = _blocks(spec, target, options)
    gpu = target.platform == "cuda"
    rows = spec.group_size * tiles.tile_q if gpu else tiles.tile_q
    largest_kv = tiles.tile_kv & -tiles.tile_kv
    least_kv = LEAST if gpu else LANES
    return tuple(
        {"block_q": block_q, "block_kv_sparse": block_kv, "block_kv_compute": step}
        for block_q in _powers(max(LEAST, (rows & -rows) // 8), rows & -rows)
        # A program on a GPU loops over steps; the block that is loaded at a time says nothing there.
        for block_kv in ((largest_kv,) if gpu else _powers(least_kv, largest_kv))
        for step in _powers(least_kv, min(block_kv, _LARGEST_STEP))
    )


def work(spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> KernelWork:
    """Both kernels of an anchor layer together."""
    settings = Settings.of(options)
    tiling, blocks = Tiling.of(spec, settings), _blocks(spec, target, options)
    gpu = target.platform == "cuda"
    rows = spec.group_size * blocks.tile_q
    parts = rows // blocks.block_q if gpu else blocks.blocks_q
    step = blocks.step_kv if gpu else blocks.block_kv
    tiles = spec.batch * spec.num_kv_heads
    listed = earlier = 0
    for tile in range(tiling.query_tiles):
        candidates_of = min(_first(spec, tile, tiling) // tiling.unit, len(tiling.budgets) - 1)
        listed += (tiling.budgets[candidates_of] + tiling.local_units) * tiling.unit
        earlier += min(_first(spec, tile, tiling) + tiling.query_tile, spec.key_value_length)
    dim, v_dim, element = spec.head_dim, spec.value_head_dim or spec.head_dim, BYTES[spec.dtype]
    attended, pooled = tiles * parts * listed, 2 * tiles * parts * earlier  # keys; the mass takes two passes
    queries = 2 * tiles * tiling.query_tiles * rows * dim
    return KernelWork(
        steps=-(-attended // step) + -(-pooled // step),
        loaded_bytes=element * (attended * (dim + v_dim) + pooled * dim + queries),
        buffer_bytes=shared_bytes(blocks, spec) if gpu else vmem_bytes(blocks, spec),
    )


def _first(spec: AttentionSpec, tile: int, tiling: Tiling) -> int:
    """The position of a tile's first query; of new tokens behind a cache, the last that they can have."""
    behind = spec.key_value_length - spec.query_length if spec.has_positions else 0
    return behind + tile * tiling.query_tile


def _blocks(spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> TileBlocks:
    settings = Settings.of(options)
    tiling = Tiling.of(spec, settings)
    return gpu_blocks(spec, tiling, settings) if target.platform == "cuda" else tpu_blocks(spec, tiling, settings)


def _powers(least: int, most: int) -> list[int]:
    """Powers of two from ``least`` to ``most``, both powers of two."""
    return [1 << n for n in range(least.bit_length() - 1, most.bit_length())]
