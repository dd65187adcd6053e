"""Block sizes of Kascade's Pallas kernels, and whether a device can hold them, checked before anything is traced.

The algorithm's sizes are ``query_tile`` and ``tile_size``; this module decides how a kernel works through a tile. A
query tile is taken ``block_q`` queries at a time, with all heads of their group. A selected tile is loaded
``block_kv_sparse`` keys at a time and computed ``block_kv_compute`` keys at a time. All three are upper bounds: no
block is larger than its tile.

``attnsuite tune`` tries block sizes, and on a CPU the kernel itself (:func:`candidates`). ``tile_size``,
``query_tile``, ``top_k`` and the other options of the method decide what is selected: they are given, never tried. The
problem is one anchor layer, which runs both kernels: the mass of all earlier keys, then attention to what was selected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ..contract import AttentionSpec
from ..devices import KIB, MIB, SHARED_LIMITS, TPUS, Target
from ..tunable import KernelWork
from .settings import LEAST, KascadeBlockSizes, Settings, Tiling

LANES = 128  # of a TPU's vector unit: scores are computed so many keys wide
_GPU_ROWS = 128  # of one program: the paper's tile, 32 queries of 4 heads

# Seven eighths of what a kernel may have, since the sizes below are an estimate.
_VMEM = {kind: known.kernel_memory * 7 // 8 for kind, known in TPUS.items()}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LARGEST_STEP = 512  # keys computed with at a time: more are no longer one product of a device's matrix unit


@dataclasses.dataclass(frozen=True, slots=True)
class TileBlocks:
    """How a kernel cuts one problem. The sizes divide each other; all but the tile are powers of two.

    A query tile is padded to ``tile_q`` queries and taken in blocks of ``block_q``. A tile of ``tile_kv`` keys is taken
    in blocks of ``block_kv``, each in steps of ``step_kv``.
    """

    tile_q: int
    block_q: int
    tile_kv: int
    block_kv: int
    step_kv: int

    @staticmethod
    def of(tiling: Tiling, sizes: KascadeBlockSizes) -> TileBlocks:
        """The blocks of ``sizes`` in the tiles of ``tiling``."""
        tile_q = max(LEAST, 1 << (tiling.query_tile - 1).bit_length())
        block_kv = min(sizes.block_kv_sparse, tiling.unit & -tiling.unit)
        step_kv = min(sizes.block_kv_compute, block_kv)
        return TileBlocks(tile_q, min(sizes.block_q, tile_q), tiling.unit, block_kv, step_kv)

    @property
    def blocks_q(self) -> int:
        """Blocks of a query tile."""
        return self.tile_q // self.block_q

    @property
    def blocks_kv(self) -> int:
        """Blocks of a tile of keys."""
        return self.tile_kv // self.block_kv


def tpu_blocks(spec: AttentionSpec, tiling: Tiling, settings: Settings) -> TileBlocks:
    """The blocks that the options give. By default block_q is halved until every generation can hold the kernel."""
    blocks = TileBlocks.of(tiling, settings.block_sizes())
    if settings.block_q is None:
        while vmem_bytes(blocks, spec) > min(_VMEM.values()) and blocks.block_q > LEAST:
            blocks = dataclasses.replace(blocks, block_q=blocks.block_q // 2)
    return blocks


def gpu_blocks(spec: AttentionSpec, tiling: Tiling, settings: Settings) -> TileBlocks:
    """The blocks that the options give; by default those that the smallest shared memory holds.

    Here ``block_q`` counts rows of a query tile, of all heads of the group together.
    """
    blocks = TileBlocks.of(tiling, settings.block_sizes())
    rows = spec.group_size * blocks.tile_q
    largest = _GPU_ROWS if settings.block_q is None else settings.block_q
    blocks = dataclasses.replace(blocks, block_q=min(largest, rows & -rows))
    if settings.block_kv_compute is None:
        while shared_bytes(blocks, spec) > min(SHARED_LIMITS.values()) and blocks.step_kv > LEAST:
            blocks = dataclasses.replace(blocks, step_kv=blocks.step_kv // 2)
    if settings.block_q is None:
        while shared_bytes(blocks, spec) > min(SHARED_LIMITS.values()) and blocks.block_q > LEAST:
            blocks = dataclasses.replace(blocks, block_q=blocks.block_q // 2)
    return blocks


def tpu_reasons(spec: AttentionSpec, tiling: Tiling, settings: Settings, target: Target) -> Iterator[str]:
    """Why a TPU cannot compute in the dtype, or hold the blocks, a sentence each."""
    if spec.dtype == "float16":
        yield (
            "dtype=float16 is not supported by kascade's kernel for TPUs (float32 or bfloat16, as TPUs compute); cast "
            "the inputs, or use backend='chunked'."
        )
        return
    blocks = tpu_blocks(spec, tiling, settings)
    if tiling.unit % LANES:
        yield (
            f"kascade: tile_size={tiling.unit} is not supported by its kernel for {target}, which reads keys {LANES} "
            f"at a time; give a multiple of {LANES}, or kernel='xla'."
        )
    elif blocks.step_kv % LANES:
        yield (
            f"kascade: block_kv_compute={blocks.step_kv} is not accepted on {target}, whose scores are {LANES} keys "
            f"wide; give at least {LANES}."
        )
    need, has = vmem_bytes(blocks, spec), _VMEM.get(target.kind, min(_VMEM.values()))
    if need > has:
        yield (
            f"kascade: block_q={blocks.block_q} with {spec.group_size} heads in a group and head_dim={spec.head_dim} "
            f"needs about {need / MIB:.0f} MiB of vector memory; a kernel on {target} may have {has // MIB} MiB; "
            "give a smaller block_q."
        )


def gpu_reasons(spec: AttentionSpec, tiling: Tiling, settings: Settings, target: Target) -> Iterator[str]:
    """Why a GPU cannot hold the blocks, a sentence each."""
    blocks = gpu_blocks(spec, tiling, settings)
    if blocks.step_kv < LEAST:
        yield (
            f"kascade: tile_size={tiling.unit} is not supported by its kernel for {target}, which reads keys {LEAST} "
            f"at a time; give a multiple of {LEAST}, or kernel='xla'."
        )
    for name, dim in (("head_dim", spec.head_dim), ("value_head_dim", spec.value_head_dim or spec.head_dim)):
        if dim < LEAST or dim & (dim - 1):
            yield (
                f"kascade: {name}={dim} is not supported by its kernel for {target} (a power of two of at least "
                f"{LEAST}); use kernel='xla', or pad the head dimension."
            )
    need = shared_bytes(blocks, spec)
    has = SHARED_LIMITS.get(target.compute_capability or (0, 0), min(SHARED_LIMITS.values()))
    if need > has:
        yield (
            f"kascade: block_q={blocks.block_q} and block_kv_compute={blocks.step_kv} with head_dim={spec.head_dim} "
            f"in {spec.dtype} need about {need // KIB} KiB of shared memory; {target} has {has // KIB} KiB; "
            "give smaller ones."
        )


def vmem_bytes(blocks: TileBlocks, spec: AttentionSpec) -> int:
    """About the memory of the attention kernel: its blocks twice (the next is loaded meanwhile), and its state.

    With a gradient, the larger of both passes. Forward, output and log-sum-exp are float32 then. Backward, the block
    has two numbers of every row, float32 gradients, and the probabilities' gradients beside the scores.
    """
    rows, element = spec.group_size * blocks.block_q, BYTES[spec.dtype]
    dim, v_dim = (-(-size // LANES) * LANES for size in (spec.head_dim, spec.value_head_dim or spec.head_dim))
    loaded = 2 * element * (rows + blocks.block_kv) * (dim + v_dim)
    state = 4 * rows * (2 * LANES + v_dim)
    ids = 2 * 4 * blocks.block_q * LANES if spec.has_segment_ids else 0
    scores = 3 * 4 * rows * max(blocks.step_kv, LANES)  # scores, weights, what is seen
    if not spec.needs_grad:
        return loaded + state + ids + scores
    forward = state + scores + 2 * 4 * rows * (v_dim + LANES)
    sums = max(rows * dim, blocks.block_kv * (dim + v_dim))
    return loaded + ids + max(forward, 2 * scores + 2 * 4 * (rows * LANES + sums))


def shared_bytes(blocks: TileBlocks, spec: AttentionSpec) -> int:
    """About the shared memory of one program on a GPU: its queries, and the keys and values of one step.

    With a gradient also the outputs' gradients, and probabilities on their way into a product.
    """
    v_dim = spec.value_head_dim or spec.head_dim
    numbers = blocks.block_q * spec.head_dim + blocks.step_kv * (spec.head_dim + v_dim)
    if spec.needs_grad:
        numbers += blocks.block_q * (v_dim + blocks.step_kv)
    return BYTES[spec.dtype] * numbers


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
