"""JAX's Pallas kernel for TPUs, "splash" (sparse flash) attention, behind the contract.

The kernel is ``jax.experimental.pallas.ops.tpu.splash_attention``: FlashAttention-2's recurrence (arXiv 2307.08691)
over a static block mask, so that blocks with nothing visible cost nothing. It runs natively on TPUs, in Pallas'
interpreter anywhere, and compiles for absent TPUs. This file adds what the kernel leaves to its caller: batch, scale,
lengths that are no multiple of a block, key lengths and padding (as segment ids), one query token (any mask of one row
is a segmentation of the keys), and zero output for rows that see nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as kernel
from jaxtyping import Array, Bool, Float, Int

from . import tuned
from .contract import (
    AttentionSpec,
    Carry,
    Layout,
    Part,
    Plan,
    check_options,
    forward_only,
    may_attend,
)
from .devices import KIB, TPUS, Target
from .features import FEATURES_0_1, Mode, Takes
from .splash_mask import Masking, kernel_of, pull_back, visited_blocks, with_log_sum_exp
from .tunable import KernelWork

LANES = 128  # of a TPU's vector unit; every block is a multiple of it

OPTIONS = {
    "block_q": "query rows per block, a multiple of 128",
    "block_kv": "keys per block, a multiple of 128",
    "block_kv_compute": "keys per step inside a block, a multiple of 128 that divides block_kv",
    "block_q_backward": "query rows per block in the backward pass, a multiple of 128",
    "block_kv_backward": "keys per block in the backward pass, a multiple of 128",
    "fused_backward": "whether one kernel computes dq, dk and dv (True or False)",
    "tuned": "path of a table that attnsuite tune wrote; the options given beside it hold over the table's",
}
_TUNED = (256, 512, 1024, 2048)  # sizes that are tried: of 128 a grid has too many steps, 4096 fit no core

# Ids that match nothing: real ones are not negative, and these two differ from each other.
_UNSEEING_QUERY, _UNSEEN_KEY = -1, -2
# An attention sink (a logit without a value). It is so small that it changes no row that sees a key, and larger than
# the kernel's mask value (-2.4e38). A row that sees nothing attends to the sink alone: its output and gradients are 0.
_NO_SINK = -1e30
_INSTEAD = "use backend='chunked'"


@dataclasses.dataclass(frozen=True, slots=True)
class Splash:
    """The ``splash`` backend."""

    name: str = "splash"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """Masks that slots and segment ids can express."""
        linear = "whose memory is linear in the length"
        return Takes(
            features=FEATURES_0_1 - {"mask", "bias"},
            dtypes=("float32", "bfloat16"),
            parts=True,
            because={"dtype": "whose kernel computes as TPUs do", "mask": linear, "bias": linear},
        )

    def refuses(
        self, spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any] | None
    ) -> tuple[str, ...]:
        """Devices that are no TPU, and positions that affect the mask of more than one query token."""
        return *_device_reasons(target, mode), *_position_reasons(spec)

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Make the block masks once for all layers. Options: see :data:`OPTIONS`; raises ValueError for others."""
        grid = _grid(spec, target, read_options(spec, target, options))
        masking = Masking.of(spec, *grid.lengths)
        run = kernel_of(masking, grid.blocks, spec.logits_soft_cap, mode == "interpret")
        ids = _segment_ids(spec, layout, grid.lengths)
        alone = _one_key_is_seen(ids) if spec.needs_grad else None
        sinks = _no_sinks(spec)
        call = jax.vmap(lambda q, k, v, ids: run(q, k, v, ids, sinks), (0, 0, 0, None if ids is None else 0))
        call = call if spec.dtype == "float32" else _in_default_precision(call)

        def attend(
            query: Float[Array, "b t n h"],
            key: Float[Array, "b s k h"],
            value: Float[Array, "b s k v"],
            layer: int,
            carry: Carry,
        ) -> tuple[Float[Array, "b t n v"], Carry]:
            if alone is not None:
                query, key = (jnp.where(alone, jax.lax.stop_gradient(x), x) for x in (query, key))
            q, k, v = _to_kernel(spec, grid.lengths, query, key, value)
            return _from_kernel(spec, call(q, k, v, ids)), carry

        return Plan(attend if spec.needs_grad else forward_only(attend))

    def defaults(self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rule's block sizes, with which ``attnsuite tune`` compares the candidates."""
        return _as_options(spec, _grid(spec, target, _checked(dict(given))).blocks)

    def candidates(
        self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Block sizes for ``attnsuite tune``: of the backward pass if there is one, else of the forward pass."""
        longest = [_round_up(length, LANES) for length in (spec.query_length, spec.key_value_length)]
        q, kv = (tuple(dict.fromkeys(min(size, length) for size in _TUNED)) for length in longest)
        if spec.needs_grad:
            return tuple(
                {"block_q_backward": block_q, "block_kv_backward": block_kv, "fused_backward": fused}
                for block_q in q
                for block_kv in kv
                for fused in (False, True)
            )
        return tuple(
            {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": step}
            for block_q in q
            for block_kv in kv
            for step in dict.fromkeys((min(block_kv, 512), block_kv))
            if block_kv % step == 0
        )

    def work(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> KernelWork:
        """The blocks that the kernel visits, and what it loads for them."""
        return _work(spec, _grid(spec, target, _checked(dict(options))))

    def part(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Part:
        """As :meth:`plan`, for keys that are one part of all. The kernel rounds each part's results to its dtype.

        If a row sees one key only, over all devices, this part cannot know it: that key's gradient is zero but for
        rounding.
        """
        grid = _grid(spec, target, read_options(spec, target, options))
        kernel = kernel_of(Masking.of(spec, *grid.lengths), grid.blocks, spec.logits_soft_cap, mode == "interpret")
        ids = _segment_ids(spec, layout, grid.lengths)
        axes, sinks = None if ids is None else 0, _no_sinks(spec)
        # See _in_default_precision. Neither of a Part's two functions is differentiated.
        exactly = contextlib.nullcontext if spec.dtype == "float32" else _default_precision

        def forward(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
            q, k, v = _to_kernel(spec, grid.lengths, query, key, value)
            run = jax.vmap(lambda q, k, v, ids: with_log_sum_exp(kernel, q, k, v, ids, sinks), (0, 0, 0, axes))
            with exactly():
                out, lse = run(q, k, v, ids)
            lse = _from_kernel(spec, lse[..., None])[..., 0]
            return _from_kernel(spec, out).astype(jnp.float32), lse, jnp.zeros_like(lse)

        def backward(
            query: Array, key: Array, value: Array, out: Array, top: Array, rest: Array, d_out: Array
        ) -> tuple[Array, Array, Array]:
            q, k, v = _to_kernel(spec, grid.lengths, query, key, value)
            lse = (top + rest)[..., None]
            out, d_out, lse = (_rows_to_kernel(spec, grid.lengths[0], x) for x in (out, d_out, lse))
            run = jax.vmap(
                lambda q, k, v, ids, out, lse, d_out: pull_back(kernel, q, k, v, ids, sinks, out, lse, d_out),
                (0, 0, 0, axes, 0, 0, 0),
            )
            with exactly():
                gradients = run(q, k, v, ids, out, lse[..., 0], d_out)
            dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
            length = spec.key_value_length
            dk, dv = dk[:, :, :length].swapaxes(1, 2), dv[:, :, :length].swapaxes(1, 2)
            return _from_kernel(spec, dq) * spec.softmax_scale, dk, dv

        return Part(forward, backward)


def read_options(spec: AttentionSpec, target: Target, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options, over those of the file that ``tuned`` names. Raises ValueError."""
    given = check_options("splash", options, OPTIONS)
    path = given.pop("tuned", None)
    return _checked({**({} if path is None else tuned.from_file(path, "splash", target, spec)), **given})


def default_block(target: Target) -> int:
    """Rows and keys per block where none are given, for head dims up to 256.

    Not tuned on a TPU, where nothing of this project has run: half of what overflows a kernel's memory is taken
    (``attnsuite compile``; tests/suite/test_compiling.py). An unknown kind gets the size that fits all.
    """
    memory = {kind: known.kernel_memory for kind, known in TPUS.items()}
    return memory.get(target.kind, min(memory.values())) // (32 * KIB)


@dataclasses.dataclass(frozen=True, slots=True)
class _Grid:
    """Block sizes, and the query and key lengths padded to whole blocks."""

    blocks: kernel.BlockSizes
    lengths: tuple[int, int]


def _grid(spec: AttentionSpec, target: Target, given: dict[str, Any]) -> _Grid:
    rows = spec.group_size if spec.query_length == 1 else spec.query_length
    largest = default_block(target)
    while largest > LANES and largest * max(spec.head_dim, spec.value_head_dim or 0) > 512 * 256:
        largest //= 2
    q, kv = (_even_block(length, largest) for length in (rows, spec.key_value_length))
    q, kv = given.get("block_q", q), given.get("block_kv", kv)
    q_back, kv_back = given.get("block_q_backward", q), given.get("block_kv_backward", kv)
    compute = given.get("block_kv_compute", kv)
    if kv % compute:
        raise ValueError(f"splash: block_kv_compute={compute} does not divide block_kv={kv}; give one that does.")
    fused = given.get("fused_backward", False)
    backward: dict[str, Any] = {}
    if spec.needs_grad:
        backward = {"block_q_dkv": q_back, "block_kv_dkv": kv_back, "use_fused_bwd_kernel": fused}
        backward |= {} if fused else {"block_q_dq": q_back, "block_kv_dq": kv_back}
    blocks = kernel.BlockSizes(block_q=q, block_kv=kv, block_kv_compute=compute, **backward)
    step_q, step_kv = (q, kv) if not spec.needs_grad else (math.lcm(q, q_back), math.lcm(kv, kv_back))
    return _Grid(blocks, (_round_up(rows, step_q), _round_up(spec.key_value_length, step_kv)))


def _as_options(spec: AttentionSpec, blocks: kernel.BlockSizes) -> dict[str, Any]:
    """The block sizes of the pass that is tuned, as options."""
    if spec.needs_grad:
        sizes = {"block_q_backward": blocks.block_q_dkv, "block_kv_backward": blocks.block_kv_dkv}
        return sizes | {"fused_backward": blocks.use_fused_bwd_kernel}
    return {"block_q": blocks.block_q, "block_kv": blocks.block_kv, "block_kv_compute": blocks.block_kv_compute}


def _work(spec: AttentionSpec, grid: _Grid) -> KernelWork:
    """Of the forward pass, in which a block of queries stays while blocks of keys and values pass it.

    If there is a backward pass, of that: a block of keys stays while blocks of queries and of the output's gradient
    pass it. Without the fused kernel every block is visited twice.
    """
    blocks, (rows, keys) = grid.blocks, grid.lengths
    q, kv, step, kernels = blocks.block_q, blocks.block_kv, blocks.block_kv_compute or blocks.block_kv, 1
    if spec.needs_grad and blocks.block_q_dkv and blocks.block_kv_dkv:
        q, kv, step = blocks.block_q_dkv, blocks.block_kv_dkv, blocks.block_kv_dkv
        kernels = 1 if blocks.use_fused_bwd_kernel else 2
    visited = visited_blocks(Masking.of(spec, rows, keys), q, kv) * spec.batch * spec.num_heads * kernels
    dims = spec.head_dim + (spec.value_head_dim or spec.head_dim)
    element = 4 if spec.dtype == "float32" else 2
    moving, staying = (q, kv) if spec.needs_grad else (kv, q)
    return KernelWork(
        steps=visited,
        loaded_bytes=element * dims * visited * moving,
        buffer_bytes=2 * element * dims * (moving + staying) + 4 * (staying * dims + q * (step + 2 * LANES)),
    )


def _even_block(length: int, largest: int) -> int:
    """The block that covers ``length`` in as few blocks as ``largest`` allows, with as little padding."""
    return _round_up(-(-length // -(-length // largest)), LANES)


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= LANES and value % LANES == 0
        if not (isinstance(value, bool) if name == "fused_backward" else is_size):
            raise ValueError(f"splash: {name}={value!r} is not accepted; {name} is {OPTIONS[name]}.")
    return options


def _segment_ids(spec: AttentionSpec, layout: Layout, lengths: tuple[int, int]) -> kernel.SegmentIds | None:
    """Segment ids for the part of the mask that depends on data: lengths, padding, segments, one query's positions."""
    rows, keys = spec.query_length, spec.key_value_length
    if rows == 1:
        mask = may_attend(spec, layout)
        seen = jnp.ones((1, keys), bool) if mask is None else mask[:, 0, 0]
        ids = jnp.zeros((spec.batch, lengths[0]), jnp.int32)
        keys_seen = jnp.broadcast_to(seen, (spec.batch, keys))
        return kernel.SegmentIds(ids, _pad_ids(jnp.where(keys_seen, 0, _UNSEEN_KEY), lengths[1], _UNSEEN_KEY))
    # Under a causal mask no row sees the padding behind the last key, if there are no more rows than keys.
    padding_shows = keys < lengths[1] and not (spec.is_causal and rows <= keys)
    if not (spec.has_segment_ids or spec.has_seq_lengths or padding_shows):
        return None
    q = jnp.zeros((spec.batch, rows), jnp.int32)
    k = jnp.zeros((spec.batch, keys), jnp.int32)
    if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
        q, k = layout.query_segment_ids, layout.key_value_segment_ids
        q, k = jnp.where(q < 0, _UNSEEING_QUERY, q), jnp.where(k < 0, _UNSEEN_KEY, k)
    if layout.key_value_seq_lengths is not None:
        slots = jnp.arange(keys, dtype=jnp.int32)[None, :]
        k = jnp.where(slots < layout.key_value_seq_lengths[:, None], k, _UNSEEN_KEY)
    return kernel.SegmentIds(_pad_ids(q, lengths[0], _UNSEEING_QUERY), _pad_ids(k, lengths[1], _UNSEEN_KEY))


def _pad_ids(ids: Int[Array, "b s"], length: int, fill: int) -> Int[Array, "b padded"]:
    return jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])), constant_values=fill)


def _one_key_is_seen(ids: kernel.SegmentIds | None) -> Bool[Array, "b 1 1 1"] | None:
    """Where query and key get no gradient: a softmax over one key is 1 whatever the scores. None: nowhere.

    The kernel's gradient is 0 there up to rounding. The rounding errors of all rows of a batch entry add up in its one
    key, which has no other gradient to hide them.
    """
    return None if ids is None else ((ids.kv != _UNSEEN_KEY).sum(1) == 1)[:, None, None, None]


def _no_sinks(spec: AttentionSpec) -> Float[Array, " heads"]:
    """A sink per head of the kernel, too small to change a row. One query token has its group's heads as rows."""
    return jnp.full(spec.num_kv_heads if spec.query_length == 1 else spec.num_heads, _NO_SINK, jnp.float32)


def _to_kernel(
    spec: AttentionSpec, lengths: tuple[int, int], query: Array, key: Array, value: Array
) -> tuple[Float[Array, "b n t h"], Float[Array, "b k s h"], Float[Array, "b k s v"]]:
    """Heads before length, lengths padded, the query scaled. One query token has its group's heads as rows."""
    query = (query.astype(jnp.float32) * spec.softmax_scale).astype(query.dtype)
    key, value = (_pad_length(x.swapaxes(1, 2), lengths[1]) for x in (key, value))
    return _rows_to_kernel(spec, lengths[0], query), key, value


def _rows_to_kernel(spec: AttentionSpec, length: int, x: Float[Array, "b t n d"]) -> Float[Array, "b n padded d"]:
    if spec.query_length == 1:
        return _pad_length(x.reshape(spec.batch, spec.num_kv_heads, spec.group_size, x.shape[-1]), length)
    return _pad_length(x.swapaxes(1, 2), length)


def _pad_length(x: Float[Array, "b n s d"], length: int) -> Float[Array, "b n padded d"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))


def _from_kernel(spec: AttentionSpec, out: Float[Array, "b n t v"]) -> Float[Array, "b t n v"]:
    if spec.query_length == 1:
        return out[:, :, : spec.group_size].reshape(spec.batch, 1, spec.num_heads, -1)
    return out[:, :, : spec.query_length].swapaxes(1, 2)


def _in_default_precision(call: Callable[..., Array]) -> Callable[..., Array]:
    """``call(q, k, v, ids)`` whatever ``jax_default_matmul_precision`` says, forward and backward.

    Products of bfloat16 are exact in float32 as they are, and Mosaic rejects a higher precision for them ("Bad lhs
    type"). A gradient is traced after the call has returned, hence its own rule.
    """

    def forward(q: Array, k: Array, v: Array, ids: Any) -> tuple[Array, Any]:
        with jax.default_matmul_precision("default"):
            out, pull_back = jax.vjp(lambda q, k, v: call(q, k, v, ids), q, k, v)
        return out, pull_back

    def backward(pull_back: Any, d_out: Array) -> tuple[Any, ...]:
        with jax.default_matmul_precision("default"):
            return *pull_back(d_out), None

    @jax.custom_vjp
    def run(q: Array, k: Array, v: Array, ids: Any) -> Array:
        with jax.default_matmul_precision("default"):
            return call(q, k, v, ids)

    run.defvjp(forward, backward)
    return run


def _default_precision() -> Any:
    return jax.default_matmul_precision("default")


def _device_reasons(target: Target, mode: Mode) -> Iterator[str]:
    if mode != "interpret" and target.platform != "tpu":
        yield (
            f"splash is a kernel for TPUs, not for {target}; {_INSTEAD}, which runs on every platform, "
            "or mode='interpret' to check its numbers."
        )


def _position_reasons(spec: AttentionSpec) -> Iterator[str]:
    by_position = spec.is_causal or spec.window is not None or spec.chunk_size is not None
    if spec.has_positions and by_position and spec.query_length > 1:
        yield (
            f"an array of explicit positions with query_length={spec.query_length} is not supported by splash, whose "
            f"mask is by slot (accepted: one query token, or positions that are arange); {_INSTEAD}."
        )


SPLASH = Splash()
