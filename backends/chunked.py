"""Exact attention over blocks with an online softmax: memory linear in sequence length, forward and backward.

The recurrence is FlashAttention-2's (arXiv 2307.08691), written in XLA so that it runs on every platform;
it is the fallback for long sequences. Blocks that hold nothing visible are skipped, blocks that are all
visible are not masked (``blocks.py``). The backward pass recomputes the probabilities from the saved
log-sum-exp, which is kept in two parts: the row's largest score, and the logarithm of the sum of what is
left of each score below it. Added up, they would round at the size of the logits. A score that is recomputed
differs in its last bits, because XLA sums in another order in blocks of another shape. A key with more than
half of its row is the row's largest, so its probability is taken from the saved sum and not from its score.
Short queries against long keys (decoding) take the plain formula, whose scores are linear in the key length
there (``decode.py`` on a CPU, ``standard.py`` elsewhere).

What XLA needs on a CPU and nowhere else is decided in :func:`_in_cpu_bits`; ``attnsuite run`` measures the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from . import blocks, decode, standard, tuned
from .blocks import BlockTable, PaddedLayout
from .contract import (
    NOTHING_SEEN,
    AttentionSpec,
    Carry,
    Layout,
    Part,
    Plan,
    check_options,
)
from .devices import Target
from .features import FEATURES_0_1, Mode, Takes
from .tuned import Entry

# Where the plain formula runs instead: few query rows (its scores are linear in the key length then), or a
# score matrix so small that it stays in the cache (128 x 128 is about where the two cross on a 2-core CPU).
SHORT_QUERY = 16
SMALL_SCORES = 128 * 128

_MASKED = -1e30  # finite, so that a row with nothing visible gives no NaN
# The largest key of a row has the whole row, but for rounding, where the log-sum-exp is this little above its score.
_ALONE = 2.0**-21
_UNSEEN = 1e30  # largest score of a row with nothing visible: its probabilities come out as zero

OPTIONS = {
    "block_q": "query rows per block (a multiple of 8)",
    "block_kv": "keys per block (a multiple of 8)",
    "block_backward": "rows and keys per block in the backward pass (a multiple of 8)",
    "heads_per_tile": "KV heads computed together (at least 1)",
    "tuned": "path of a table that attnsuite tune wrote, in place of the one that ships",
}


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of the blocks, and how many KV heads one step computes."""

    block_q: int
    block_kv: int
    block_backward: int
    heads_per_tile: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """Everything static about one planned attention. ``float32_results``: not rounded to the input dtype."""

    spec: AttentionSpec
    sizes: BlockSizes
    on_cpu: bool
    scale_query: float
    scale_scores: float
    float32_results: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Chunked:
    """The ``chunked`` backend."""

    name: str = "chunked"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """All of the contract but array masks and biases, on every platform."""
        linear = "whose memory is linear in the length"
        return Takes(
            features=frozenset({*FEATURES_0_1 - {"mask", "bias"}, "log_sum_exp"}),
            modes=("native", "compile"),
            parts=True,
            because={"mode": "which is plain XLA without a kernel to interpret", "mask": linear, "bias": linear},
        )

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Sort the blocks once for all layers. Options: see :data:`OPTIONS`; raises ValueError for others."""
        given = check_options(self.name, options, OPTIONS)
        path = given.pop("tuned", None)
        small = spec.query_length * spec.key_value_length <= SMALL_SCORES
        if spec.query_length <= SHORT_QUERY and not spec.needs_grad and target.platform == "cpu":
            return decode.plan(spec, layout)
        if spec.query_length <= SHORT_QUERY or (small and not given):
            return standard.STANDARD.plan(spec, layout, target=target)
        program = self._program(spec, layout, target, path, given)
        differentiable, traced = _differentiable(program, _tables(program, layout))

        def attend(query: Array, key: Array, value: Array, layer: int, carry: Carry) -> tuple[Any, Carry]:
            return differentiable(query, key, value, traced), carry

        return Plan(attend)

    def part(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Part:
        """As :meth:`plan`, for keys that are one part of all; always by blocks."""
        given = check_options(self.name, options, OPTIONS)
        program = self._program(spec, layout, target, given.pop("tuned", None), given)
        program = dataclasses.replace(program, float32_results=True)
        forward_tables, backward_tables = _tables(program, layout)

        def forward(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
            out, top, rest = _forward(program, query, key, value, *forward_tables)
            return out, jnp.where(top == _UNSEEN, NOTHING_SEEN, top), rest

        def backward(
            query: Array, key: Array, value: Array, out: Array, top: Array, rest: Array, d_out: Array
        ) -> tuple[Array, Array, Array]:
            if backward_tables is None:
                raise ValueError("planned with needs_grad=False; plan with needs_grad=True to differentiate.")
            top = jnp.where(top <= NOTHING_SEEN, _UNSEEN, top)
            return _backward(program, query, key, value, out, top, rest, d_out, None, *backward_tables)

        return Part(forward, backward)

    def _program(
        self, spec: AttentionSpec, layout: Layout, target: Target, path: str | None, given: dict[str, Any]
    ) -> _Program:
        """Sizes by rule, then by the table that ships, then by the file at ``path``, then as given."""
        named = {} if path is None else tuned.from_file(path, self.name, target, spec)
        sizes = default_sizes(spec, target, tuned.shipped())
        sizes = _fit(dataclasses.replace(sizes, **_checked({**named, **given})), spec, layout)
        return _Program(spec, sizes, target.platform == "cpu", *_scales(spec))

    def defaults(self, spec: AttentionSpec, target: Target) -> Mapping[str, int]:
        """The rule's block sizes, which ``attnsuite tune`` holds the candidates against."""
        rule = _rule(spec, target)
        if spec.needs_grad:
            return {"block_backward": rule.block_backward}
        return {"block_q": rule.block_q, "block_kv": rule.block_kv, "heads_per_tile": rule.heads_per_tile}

    def candidates(self, spec: AttentionSpec, target: Target) -> tuple[Mapping[str, int], ...]:
        """Block sizes for ``attnsuite tune`` to try: of the backward pass where there is one, else of the forward."""
        if spec.needs_grad:
            return tuple({"block_backward": block} for block in (64, 128, 256, 512))
        rows = [max(64, block // spec.group_size) for block in (128, 256, 512, 1024)]
        return tuple(
            {"block_q": block_q, "block_kv": block_kv, "heads_per_tile": heads}
            for block_q in dict.fromkeys(rows)
            for block_kv in (128, 256, 512, 1024)
            for heads in (2, 4)
            if block_q <= block_kv <= max(8 * block_q, 256)
        )


def default_sizes(spec: AttentionSpec, target: Target, entries: tuple[Entry, ...] = ()) -> BlockSizes:
    """Block sizes where the user gives none: a rule by platform, length and group, and what tuning found better."""
    sizes = _rule(spec, target)
    for gradient in (False, True):
        sizes = dataclasses.replace(sizes, **tuned.options_for(entries, "chunked", target, spec, gradient=gradient))
    # Each device works on its own heads: more of them than two at once only make its tiles larger than its cache.
    return dataclasses.replace(sizes, heads_per_tile=min(sizes.heads_per_tile, 2)) if target.count > 1 else sizes


def _rule(spec: AttentionSpec, target: Target) -> BlockSizes:
    """The prototype's rule; cells of ``backends/tuned.json`` hold how much better was found for each problem."""
    length, group = min(spec.query_length, spec.key_value_length), spec.group_size
    if target.platform != "cpu":  # few large steps; not tuned on an accelerator yet
        return BlockSizes(512, 512, 512, spec.batch * spec.num_kv_heads)
    block_q = 256 if length >= 1024 else 128
    if group > 1:  # a tile has group * block_q rows: 256 to 512 of them fill the cache without spilling it
        block_q = max(64, min(block_q, 512 // group))
    block_kv = 512 if length >= 2048 else 256 if length >= 1024 else 128
    block_backward = block_q if length >= 2048 else min(block_q, 128 if group == 1 else 64)
    return BlockSizes(block_q, max(block_q, block_kv), block_backward, 4)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        step = 1 if name == "heads_per_tile" else 8
        if not isinstance(value, int) or value < step or value % step:
            raise ValueError(f"chunked: {name}={value!r} is not accepted; {name} is {OPTIONS[name]}.")
    return options


def _fit(sizes: BlockSizes, spec: AttentionSpec, layout: Layout) -> BlockSizes:
    """No block longer than its sequence, and tiles whose heads all share one layout."""

    def shrink(block: int, length: int) -> int:
        return min(block, -(-length // 8) * 8)

    rows = ("query_segment_ids", "query_positions", "key_value_positions", "key_value_seq_lengths")
    per_sequence = any(getattr(layout, name) is not None for name in rows)
    heads = spec.num_kv_heads * (1 if per_sequence else spec.batch)
    longest = max(spec.query_length, spec.key_value_length)
    return BlockSizes(
        shrink(sizes.block_q, spec.query_length),
        shrink(sizes.block_kv, spec.key_value_length),
        shrink(sizes.block_backward, longest),
        max(n for n in range(1, min(sizes.heads_per_tile, heads) + 1) if heads % n == 0),
    )


def _in_cpu_bits(program: _Program) -> bool:
    """Whether bfloat16 is rounded by integer arithmetic and carried as bits: only where XLA's CPU compiler needs it.

    Its float32 -> bfloat16 conversion is scalar code, and it widens bfloat16 loop operands to float32 and
    narrows them again at every slice.
    """
    return program.on_cpu and program.spec.dtype == "bfloat16"


def _scales(spec: AttentionSpec) -> tuple[float, float]:
    """Factors on the query and on the scores; their product is the softmax scale.

    Scaling the query costs nothing but rounds it once more in a short dtype, unless by a power of two.
    """
    scale = spec.softmax_scale
    if spec.dtype == "float32":
        return scale, 1.0
    if spec.dtype == "bfloat16" and math.frexp(scale)[0] == 0.5:
        return scale, 1.0
    return 1.0, scale


_Tables = tuple[tuple[PaddedLayout, tuple[BlockTable, ...]], tuple[PaddedLayout, tuple[BlockTable, ...]] | None]


def _tables(program: _Program, layout: Layout) -> _Tables:
    """Blocks to visit per query block (forward) and, transposed, per KV block (backward)."""
    spec, sizes = program.spec, program.sizes
    padded = blocks.pad_layout(spec, layout, sizes.block_q, sizes.block_kv)
    narrow = sizes.block_q if sizes.block_kv % sizes.block_q == 0 else sizes.block_kv
    kinds = blocks.classify(spec, padded, sizes.block_q, narrow)
    if narrow == sizes.block_kv:
        forward = padded, (blocks.table(kinds, narrow),)
    else:
        kinds, wide = blocks.coarsen(kinds, sizes.block_kv // narrow)
        forward = padded, (blocks.table(kinds, narrow), blocks.table(wide, sizes.block_kv))
    if not spec.needs_grad:
        return forward, None
    b = sizes.block_backward
    padded = blocks.pad_layout(spec, layout, b, b)
    return forward, (padded, (blocks.table(blocks.classify(spec, padded, b, b).swapaxes(1, 2), b),))


def _differentiable(program: _Program, tables: _Tables) -> tuple[Callable[..., Array], _Tables | None]:
    """The attention with its own gradient, and what must be passed to it as a fourth argument.

    Tables of a static layout are captured as constants, from which XLA leaves out loops that never run;
    traced ones have to be arguments.
    """
    static = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(tables))

    def result(out: Array, top: Array, rest: Array) -> Any:
        if not program.spec.return_log_sum_exp:
            return out
        return out, jnp.where(top == _UNSEEN, -jnp.inf, top + rest)

    @jax.custom_vjp
    def attend(query: Array, key: Array, value: Array, traced: _Tables | None) -> Any:
        return result(*_forward(program, query, key, value, *(traced or tables)[0]))

    def forward(query: Array, key: Array, value: Array, traced: _Tables | None) -> Any:
        if (traced or tables)[1] is None:  # asked at trace time
            raise ValueError("planned with needs_grad=False; plan with needs_grad=True to differentiate.")
        unrounded = dataclasses.replace(program, float32_results=True)
        exact, top, rest = _forward(unrounded, query, key, value, *(traced or tables)[0])
        out = _round(exact, program)
        # What rounding took from the output. The backward pass subtracts rowsum(dO * O), whose rounding would otherwise
        # be as large as the gradient of a key that has nearly all of its row.
        lost = None if program.spec.dtype == "float32" else (exact - out.astype(jnp.float32)).astype(jnp.bfloat16)
        return result(out, top, rest), (query, key, value, out, lost, top, rest, traced)

    def backward(residuals: Any, cotangents: Any) -> Any:
        query, key, value, out, lost, top, rest, traced = residuals
        layout, columns = (traced or tables)[1] or ()
        if lost is not None:
            out = out.astype(jnp.float32) + lost.astype(jnp.float32)
        d_out, d_lse = cotangents if program.spec.return_log_sum_exp else (cotangents, None)
        return *_backward(program, query, key, value, out, top, rest, d_out, d_lse, layout, columns), None

    attend.defvjp(forward, backward)
    return attend, None if static else tables


# Tiles. A tile is `heads_per_tile` KV heads with all query heads of their groups:
# queries [tiles * q_blocks, heads, group * block_q, dim], keys and values [tiles, heads, kv_len, dim].


def _tile_queries(x: Array, spec: AttentionSpec, heads: int, block: int, fill: float = 0) -> Array:
    """[B, T, N, D] -> [tiles * q_blocks, heads, group * block, D], T padded with ``fill``."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)), constant_values=fill)
    b, t, _, d = x.shape
    kv_heads, group, n = spec.num_kv_heads, spec.group_size, t // block
    x = x.reshape(b, n, block, kv_heads, group, d).transpose(0, 3, 1, 4, 2, 5)
    x = x.reshape(b * kv_heads // heads, heads, n, group * block, d)
    return x.transpose(0, 2, 1, 3, 4).reshape(-1, heads, group * block, d)


def _untile_queries(x: Array, spec: AttentionSpec, heads: int, block: int) -> Array:
    """The inverse: -> [B, T, N, D]."""
    b, kv_heads, group, d = spec.batch, spec.num_kv_heads, spec.group_size, x.shape[-1]
    n = x.shape[0] * heads // (b * kv_heads)
    x = x.reshape(-1, n, heads, group, block, d).transpose(0, 2, 3, 1, 4, 5).reshape(b, kv_heads, group, n * block, d)
    return x.transpose(0, 3, 1, 2, 4).reshape(b, n * block, kv_heads * group, d)[:, : spec.query_length]


def _tile_keys(x: Array, heads: int, block: int) -> Array:
    """[B, S, K, D] -> [tiles, heads, S, D], S padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))
    b, s, kv_heads, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b * kv_heads // heads, heads, s, d)


def _untile_keys(x: Array, spec: AttentionSpec) -> Array:
    """The inverse: -> [B, S, K, D]."""
    x = x.reshape(spec.batch, spec.num_kv_heads, -1, x.shape[-1]).transpose(0, 2, 1, 3)
    return x[:, : spec.key_value_length]


def _columns(x: Array, heads: int, block: int) -> Array:
    """[B, S, K, D] -> [tiles * kv_blocks, heads, block, D]: each KV block by itself, for the backward pass."""
    x = _tile_keys(x, heads, block)
    tiles, _, _, d = x.shape
    return x.reshape(tiles, heads, -1, block, d).swapaxes(1, 2).reshape(-1, heads, block, d)


def _uncolumns(x: Array, spec: AttentionSpec, tiles: int) -> Array:
    """The inverse: -> [B, S, K, D]."""
    _, heads, block, d = x.shape
    return _untile_keys(x.reshape(tiles, -1, heads, block, d).swapaxes(1, 2), spec)


def _round(x: Float[Array, "..."], program: _Program) -> Array:
    """float32 -> the input dtype; on a CPU to bfloat16 by adding half an ulp and cutting (ties away from 0)."""
    if not _in_cpu_bits(program):
        return x.astype(program.spec.dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16), jnp.bfloat16)


def _pack(x: Array, program: _Program) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if _in_cpu_bits(program) else x


def _unpack(x: Array, program: _Program) -> Array:
    return lax.bitcast_convert_type(x, jnp.bfloat16) if _in_cpu_bits(program) else x


def _result(x: Float[Array, "..."], program: _Program) -> Array:
    """A result as it is carried out of a loop; :func:`_delivered` is its other end."""
    return x if program.float32_results else _pack(_round(x, program), program)


def _delivered(x: Array, program: _Program) -> Array:
    return x if program.float32_results else _unpack(x, program)


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _scores(rows: Float[Array, "h r d"], columns: Float[Array, "h c d"]) -> Float[Array, "h r c"]:
    """Products of every row with every column, where one pass has queries for rows and the other has keys.

    XLA's CPU kernels add up in an order that depends on the number of columns, but for multiples of 64. A score has
    to have the same bits in both passes: with logits of 100 the last one is 64 epsilons of a probability.
    """
    width = columns.shape[1]
    columns = jnp.pad(columns, ((0, 0), (0, -width % 64), (0, 0)))
    return _dot("hrd,hcd->hrc", rows, columns)[..., :width]


def _soft_cap(scores: Array, spec: AttentionSpec) -> Array:
    return scores if spec.logits_soft_cap is None else spec.logits_soft_cap * jnp.tanh(scores / spec.logits_soft_cap)


def _visit(
    tables: tuple[BlockTable, ...], batch: Array, row: Array, step: Callable[[Array, int, Any, bool], Any], carry: Any
) -> Any:
    """Fold ``step(start, width, carry, mixed)`` over the blocks of one row: mixed ones, then all-visible ones."""
    for table in tables:
        order, partial, full = (jnp.asarray(x)[batch, row] for x in (table.order, table.partial, table.full))

        def visit(n: Array, carry: Any, *, mixed: bool, order: Array = order, width: int = table.width) -> Any:
            return step(order[n] * width, width, carry, mixed)

        if not _never(table.partial):
            carry = lax.fori_loop(0, partial, functools.partial(visit, mixed=True), carry)
        if not _never(table.full):
            carry = lax.fori_loop(partial, partial + full, functools.partial(visit, mixed=False), carry)
    return carry


def _never(counts: Any) -> bool:
    """Whether no row has any such block, known at trace time: the loop is left out of the program."""
    return isinstance(counts, np.ndarray) and not counts.any()


def _scaled_query(query: Array, program: _Program) -> Array:
    if program.scale_query == 1.0:
        return query
    return (query.astype(jnp.float32) * program.scale_query).astype(query.dtype)


def _forward(
    program: _Program, query: Array, key: Array, value: Array, layout: PaddedLayout, tables: tuple[BlockTable, ...]
) -> tuple[Array, Array, Array]:
    """Output [B, T, N, Hv], and the log-sum-exp as largest score and rest, [B, T, N] each."""
    spec, sizes = program.spec, program.sizes
    heads, block_q, block_kv, group = sizes.heads_per_tile, sizes.block_q, sizes.block_kv, spec.group_size
    keys = _tile_keys(_pack(key, program), heads, block_kv)
    values = _tile_keys(_pack(value, program), heads, block_kv)
    queries = _tile_queries(_pack(_scaled_query(query, program), program), spec, heads, block_q)
    tiles, rows = keys.shape[0], queries.shape[0] // keys.shape[0]

    def one_row(x: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tile, row, q = x
        q = _unpack(q, program)
        batch = tile * heads // spec.num_kv_heads if layout.batch > 1 else jnp.int32(0)

        def step(start: Array, width: int, carry: tuple[Array, ...], mixed: bool) -> tuple[Array, ...]:
            top, total, out = carry
            k = _unpack(lax.dynamic_slice_in_dim(keys[tile], start, width, 1), program)
            v = _unpack(lax.dynamic_slice_in_dim(values[tile], start, width, 1), program)
            scores = _soft_cap(_scores(q, k) * program.scale_scores, spec)
            if mixed:
                mask = blocks.visible(spec, layout, batch, row * block_q, start, block_q, width)
                scores = jnp.where(mask, scores.reshape(heads, group, block_q, width), _MASKED)
                scores = scores.reshape(heads, group * block_q, width)
            new_top = jnp.maximum(top, scores.max(-1))
            # A row that has seen nothing keeps top at _MASKED; half of that subtracted instead gives exp(-5e29) = 0.
            probs = jnp.exp(scores - jnp.maximum(new_top, _MASKED / 2)[..., None])
            rounded = _round(probs, program)
            decay = jnp.exp(top - new_top)
            # Of what is rounded, so that rounding cancels in the output; but not where the sum itself is asked for.
            summed = probs if spec.return_log_sum_exp else rounded.astype(jnp.float32)
            total = total * decay + summed.sum(-1)
            return new_top, total, out * decay[..., None] + _dot("hqk,hkd->hqd", rounded, v)

        shape = (heads, group * block_q)
        start = jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, spec.value_head_dim))
        top, total, out = _visit(tables, batch, row, step, start)
        seen = total > 0.0
        out = out * jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)[..., None]
        rest = jnp.log(jnp.where(seen, total, 1.0))
        return _result(out, program), jnp.where(seen, top, _UNSEEN), rest

    index = jnp.repeat(jnp.arange(tiles), rows), jnp.tile(jnp.arange(rows), tiles)
    out, top, rest = lax.map(one_row, (*index, queries))
    return (
        _delivered(_untile_queries(out, spec, heads, block_q), program),
        _untile_queries(top[..., None], spec, heads, block_q)[..., 0],
        _untile_queries(rest[..., None], spec, heads, block_q)[..., 0],
    )


def _backward(
    program: _Program,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    top: Array,
    rest: Array,
    d_out: Array,
    d_lse: Array | None,
    layout: PaddedLayout,
    tables: tuple[BlockTable, ...],
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in their dtype (float32 where the program says so).

    ``d_lse [B, T, N]`` is the cotangent of the log-sum-exp, whose gradient by a score is the probability.

    Scores are kept transposed (keys by queries), so that every product contracts the last dimension of its
    left operand: the orientation for which XLA's CPU backend has a fast kernel.
    """
    spec, sizes = program.spec, program.sizes
    heads, block, group = sizes.heads_per_tile, sizes.block_backward, spec.group_size
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    tops = _tile_queries(top[..., None], spec, heads, block, _UNSEEN)[..., 0]
    rests = _tile_queries(rest[..., None], spec, heads, block)[..., 0]
    largest = jnp.exp(-rests)  # probability of the largest key
    deltas = _tile_queries(delta[..., None], spec, heads, block)[..., 0]
    d_lses = None if d_lse is None else _tile_queries(d_lse[..., None], spec, heads, block)[..., 0]
    queries = _tile_queries(_pack(_scaled_query(query, program), program), spec, heads, block)
    d_outs = _tile_queries(_pack(d_out, program), spec, heads, block)

    keys, values = (_columns(_pack(x, program), heads, block) for x in (key, value))
    # Transposed out here: inside the loop XLA folds the transpose into the product, for which it has no kernel then.
    keys_transposed = keys.swapaxes(2, 3)
    tiles = spec.batch * spec.num_kv_heads // heads
    q_blocks, kv_blocks = queries.shape[0] // tiles, keys.shape[0] // tiles

    def one_column(d_queries: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        tile, column, *kv = x
        k, k_transposed, v = (_unpack(part, program) for part in kv)
        batch = tile * heads // spec.num_kv_heads if layout.batch > 1 else jnp.int32(0)

        def step(start: Array, width: int, carry: tuple[Array, ...], mixed: bool) -> tuple[Array, ...]:
            d_k, d_v, d_queries = carry
            at = tile * q_blocks + start // width
            q, d_o = _unpack(queries[at], program), _unpack(d_outs[at], program)
            raw = _scores(k, q) * program.scale_scores
            scores = _soft_cap(raw, spec)
            probs = jnp.exp((scores - tops[at][:, None]) - rests[at][:, None])
            heavy = probs > 0.5
            probs = jnp.where(heavy, largest[at][:, None], probs)
            if mixed:
                mask = blocks.visible(spec, layout, batch, start, column * block, block, block).T[:, None]
                probs = jnp.where(mask, probs.reshape(heads, block, group, block), 0.0).reshape(probs.shape)
            d_scores = probs * (_dot("hkd,hqd->hkq", v, d_o) - deltas[at][:, None])
            # A key that has the whole row moves nothing: its two terms cancel, and only their rounding would be left.
            d_scores = jnp.where(heavy & (rests[at][:, None] < _ALONE), 0.0, d_scores)
            if d_lses is not None:
                d_scores = d_scores + probs * d_lses[at][:, None]
            if spec.logits_soft_cap is not None:
                d_scores = d_scores * (1.0 - (scores / spec.logits_soft_cap) ** 2)
            probs, d_scores = _round(probs, program), _round(d_scores * program.scale_scores, program)
            d_v = d_v + _dot("hkq,hqd->hkd", probs, d_o)
            d_k = d_k + _dot("hkq,hqd->hkd", d_scores, q)
            d_q = lax.dynamic_index_in_dim(d_queries, at, 0, keepdims=False) + _dot(
                "hdk,hkq->hdq", k_transposed, d_scores
            )
            return d_k, d_v, lax.dynamic_update_index_in_dim(d_queries, d_q, at, 0)

        start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32), d_queries
        d_k, d_v, d_queries = _visit(tables, batch, column, step, start)
        return d_queries, (_result(d_k, program), _result(d_v, program))

    d_queries = jnp.zeros((tiles * q_blocks, heads, spec.head_dim, group * block))
    index = jnp.repeat(jnp.arange(tiles), kv_blocks), jnp.tile(jnp.arange(kv_blocks), tiles)
    d_queries, (d_keys, d_values) = lax.scan(one_column, d_queries, (*index, keys, keys_transposed, values))
    d_query = _result(d_queries.swapaxes(2, 3) * program.scale_query, program)
    d_key, d_value = (_uncolumns(_delivered(x, program), spec, tiles) for x in (d_keys, d_values))
    return _delivered(_untile_queries(d_query, spec, heads, block), program), d_key, d_value


CHUNKED = Chunked()
