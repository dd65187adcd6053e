"""Exact attention over blocks with an online softmax: memory linear in sequence length, forward and backward.

The recurrence is FlashAttention-2's (arXiv 2307.08691), written in XLA so that it runs on every platform. It is the
fallback for long sequences. Blocks without a visible pair are skipped; all-visible blocks are not masked
(``blocks.py``). The passes themselves are in ``chunked_passes.py``; ``attnsuite run`` measures the whole.

The backward pass recomputes the probabilities from the saved log-sum-exp. The log-sum-exp is kept as two numbers: the
row's largest score, and the logarithm of the sum of the exponentials relative to it. Their float32 sum would lose the
low bits of the second number when the logits are large. A recomputed score differs in its last bits, because XLA sums
in another order in blocks of another shape. A key with more than half of its row is the row's largest, so its
probability is taken from the saved sum, not from its score.

Short queries against long keys (decoding) use the plain formula, whose scores are linear in the key length there
(``decode_step.py`` on a CPU, ``standard.py`` elsewhere), and so do problems with few scores. The plan's notes say so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from . import blocks, choices, chunked_shares, chunked_tiles, decode_step, kv_cache, sinks, standard
from . import chunked_passes as passes
from .blocks import BlockTable, PaddedLayout
from .chunked_tiles import BlockSizes, Program
from .contract import NOTHING_SEEN, Part, Plan, check_options, is_whole
from .derivatives import NO_GRADIENT, traced_apart
from .devices import Target
from .features import ALL_FEATURES, KV_LAYOUTS, Mode, Options, Takes
from .kv_layout import turned
from .layout import ARRAYS, Layout
from .operands import NO_TERMS, Terms
from .spec import AttentionSpec

# The plain formula runs for few query rows (its scores are then linear in the key length), and for a score
# matrix so small that it stays in the cache (the two cross at about 128 x 128 on a 2-core CPU).
SMALL_SCORES = 128 * 128

_PLAIN_NOTE = (
    f"chunked takes XLA's plain formula for {decode_step.SHORT_QUERY} or fewer queries, whose scores are linear in the "
    f"number of keys, and for at most {SMALL_SCORES} scores a head, which stay in the cache."
)

OPTIONS = {
    "block_q": "query rows per block (a multiple of 8)",
    "block_kv": "keys per block (a multiple of 8)",
    "block_backward": "rows and keys per block in the backward pass (a multiple of 8)",
    "heads_per_tile": "KV heads computed together (at least 1)",
    "tuned": "path of a policy that attnsuite tune wrote; its options come before those of the one that ships",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Chunked:
    """The ``chunked`` backend."""

    name: str = "chunked"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """All of the contract, on every platform."""
        return Takes(
            features=ALL_FEATURES,
            modes=("native", "compile"),
            parts=True,
            kv_layouts=KV_LAYOUTS,
            because={"mode": "which is plain XLA without a kernel to interpret"},
        )

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """Sort the blocks once for all layers. Options: see :data:`OPTIONS`; raises ValueError for others."""
        checked = check_options(self.name, options, OPTIONS)
        _checked({name: value for name, value in checked.items() if name != "tuned"})  # of the plain formula, too
        cached, step = kv_cache.is_cache(spec), decode_step.takes(spec, target)
        if spec.kv_layout == "HND" and (cached or not step):
            return turned(spec, lambda spec: self.plan(spec, layout, target=target, mode=mode, options=options))
        if cached:
            return kv_cache.unrounded(
                spec, lambda wide: self._of_cache(wide, layout, self._program(wide, layout, target, checked))
            )
        if step:
            made, differentiated = functools.partial(decode_step.plan, spec), decode_step.differentiated
            return _plainly(differentiated(spec, layout, made, target) if spec.needs_grad else made(layout))
        small = spec.query_length * spec.key_value_length <= SMALL_SCORES
        if spec.query_length <= decode_step.SHORT_QUERY or (small and not checked.keys() - {"tuned"}):
            return _plainly(standard.STANDARD.plan(spec, layout, target=target))
        program = self._program(spec, layout, target, checked)
        traced, tables_of = traced_apart(_tables(program, layout))
        differentiable = _differentiable(program, tables_of)

        def attend(query: Array, key: Array, value: Array | None, terms: Terms) -> Any:
            return differentiable(query, key, value, jax.tree.map(jnp.asarray, terms.given()), traced)

        return Plan.stateless(attend, key_blocks=program.sizes.keys)

    def part(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Part:
        """As :meth:`plan`, for keys that are one part of all; never by the plain formula."""
        program = self._program(spec, layout, target, check_options(self.name, options, OPTIONS))
        program = dataclasses.replace(program, float32_results=True)
        forward_tables, backward_tables = _tables(program, layout)

        def forward(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
            out, top, rest = passes.forward(program, query, (key, value), NO_TERMS, *forward_tables)
            return out, jnp.where(top == passes.UNSEEN, NOTHING_SEEN, top), rest

        def backward(
            query: Array, key: Array, value: Array, out: Array, top: Array, rest: Array, d_out: Array
        ) -> tuple[Array, Array, Array]:
            assert backward_tables is not None  # noqa: S101 (a ring asks for gradients only with needs_grad)
            top = jnp.where(top <= NOTHING_SEEN, passes.UNSEEN, top)
            seen, cotangents = (out, top, rest), (d_out, None)
            operands = query, key, value
            d_query, d_key, d_value, _ = passes.backward(
                program, operands, seen, cotangents, NO_TERMS, *backward_tables, requested=()
            )
            return d_query, d_key, cast("Array", d_value)  # None only with values in keys, which have no parts

        return Part(forward, backward)

    def _of_cache(self, spec: AttentionSpec, layout: Layout, program: Program) -> Plan:
        """The plan that reads pages and quantised numbers block by block, and writes no contiguous copy."""
        tables = _tables(program, layout)[0]

        def attend(query: Array, key: Array, value: Array | None, terms: Terms) -> Any:
            heads = program.sizes.heads_per_tile
            read = (
                kv_cache.block_reader(spec, layout, key, terms.key_scales, heads),
                None if value is None else kv_cache.block_reader(spec, layout, value, terms.value_scales, heads),
            )
            return _result(program, *passes.forward(program, query, read, terms, *tables))

        return Plan.stateless(attend, gradient=False, key_blocks=program.sizes.keys)

    def _program(self, spec: AttentionSpec, layout: Layout, target: Target, options: dict[str, Any]) -> Program:
        """Sizes by rule, replaced by the shipped policy, then by the file of ``tuned``, then by the other options."""
        named, _ = choices.with_tuned(options, self.name, OPTIONS, target, spec)
        sizes = default_sizes(spec, target, choices.load_policy(choices.SHIPPED))
        sizes = _fit(dataclasses.replace(sizes, **_checked(named)), spec, layout)
        return Program(spec, sizes, target.platform == "cpu", *_scales(spec))

    def defaults(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rule's block sizes, with which ``attnsuite tune`` compares the candidates."""
        rule = _rule(spec, target)
        if spec.needs_grad:
            return {"block_backward": rule.block_backward}
        return {"block_q": rule.block_q, "block_kv": rule.block_kv, "heads_per_tile": rule.heads_per_tile}

    def candidates(
        self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Block sizes for ``attnsuite tune``: of the backward pass if there is one, else of the forward pass."""
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


def _plainly(made: Plan) -> Plan:
    return dataclasses.replace(made, notes=(*made.notes, _PLAIN_NOTE))


def default_sizes(spec: AttentionSpec, target: Target, policy: choices.Policy) -> BlockSizes:
    """Block sizes if the user gives none: a rule by platform, length, group and arrays, and the policy's options."""
    sizes = _rule(spec, target)
    if not (spec.has_mask or spec.has_bias):  # the options were measured without
        for found in choices.tuned(policy, "chunked", target, spec):
            sizes = dataclasses.replace(sizes, **(found.choice.options or {}))
    # Each device works on its own heads: more than two at once make its tiles larger than its cache.
    return dataclasses.replace(sizes, heads_per_tile=min(sizes.heads_per_tile, 2)) if target.count > 1 else sizes


def _rule(spec: AttentionSpec, target: Target) -> BlockSizes:
    """The prototype's rule. Cells of ``backends/choices.json`` show how much faster the tuned sizes are."""
    length, group = min(spec.query_length, spec.key_value_length), spec.group_size
    if target.platform != "cpu":  # few large steps; not tuned on an accelerator yet
        return BlockSizes(512, 512, 512, spec.batch * spec.num_kv_heads)
    if spec.has_mask or spec.has_bias:  # few large blocks (attnsuite run --suite caller)
        return BlockSizes(max(64, 512 // group), 512, 256, 4)
    block_q = 256 if length >= 1024 else 128
    if group > 1:  # a tile has group * block_q rows: 256 to 512 of them fill the cache without spilling it
        block_q = max(64, min(block_q, 512 // group))
    block_kv = 512 if length >= 2048 else 256 if length >= 1024 else 128
    block_backward = block_q if length >= 2048 else min(block_q, 128 if group == 1 else 64)
    return BlockSizes(block_q, max(block_q, block_kv), block_backward, 4)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        step = 1 if name == "heads_per_tile" else 8
        if not is_whole(value, step) or value % step:
            raise ValueError(f"chunked: {name}={value!r} is not accepted; {name} is {OPTIONS[name]}.")
    return options


def _fit(sizes: BlockSizes, spec: AttentionSpec, layout: Layout) -> BlockSizes:
    """Sizes with no block longer than its sequence, and with tiles whose heads all share one layout."""

    def shrink(block: int, length: int) -> int:
        return min(block, -(-length // 8) * 8)

    of_tokens = any(getattr(layout, name) is not None for name in _SORTED_BY)
    per_sequence = kv_cache.is_cache(spec) or spec.has_bias or of_tokens
    heads = spec.num_kv_heads * (1 if per_sequence else spec.batch)
    longest = max(spec.query_length, spec.key_value_length)
    return BlockSizes(
        shrink(sizes.block_q, spec.query_length),
        shrink(sizes.block_kv, spec.key_value_length),
        shrink(sizes.block_backward, longest),
        max(n for n in range(1, min(sizes.heads_per_tile, heads) + 1) if heads % n == 0),
    )


def _scales(spec: AttentionSpec) -> tuple[float, float]:
    """Factors on the query and on the scores; their product is the softmax scale.

    Scaling the query is free, but rounds it once more in a short dtype unless the factor is a power of two.
    """
    scale = spec.softmax_scale
    if spec.dtype == "float32":
        return scale, 1.0
    if spec.dtype == "bfloat16" and math.frexp(scale)[0] == 0.5:
        return scale, 1.0
    return 1.0, scale


_Tables = tuple[tuple[PaddedLayout, tuple[BlockTable, ...]], tuple[PaddedLayout, tuple[BlockTable, ...]] | None]


def _tables(program: Program, layout: Layout) -> _Tables:
    """Blocks to visit per query block (forward) and, transposed, per KV block (backward).

    NumPy sorts the blocks of a layout whose arrays are known and lie on a CPU: with ``jax.numpy`` each step would be a
    program of its own to compile. What follows from an array is a JAX array all the same, and no constant of a program.
    """
    arrays = {name: x for name in _SORTED_BY if isinstance(x := getattr(layout, name), jax.Array)}
    if not arrays or not all(_is_known_on_a_cpu(x) for x in arrays.values()):
        return _sorted(program, layout)
    host = dataclasses.replace(layout, **{name: np.asarray(x) for name, x in arrays.items()})
    found = _sorted(program, host)
    return jax.tree.map(lambda x: layout.mask if x is host.mask else jnp.asarray(x), found)  # no copy of the mask


# What the visible blocks follow from. A page table says where keys lie.
_SORTED_BY = tuple(name for name in ARRAYS if name != "page_table")


def _is_known_on_a_cpu(x: Array) -> bool:
    known = not isinstance(x, Tracer) and x.is_fully_addressable
    return known and all(device.platform == "cpu" for device in x.devices())


def _sorted(program: Program, layout: Layout) -> _Tables:
    """The tables, as NumPy arrays where the layout's are."""
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


def _differentiable(program: Program, tables_of: Callable[[list[Array]], _Tables]) -> Callable[..., Any]:
    """The attention with its own gradient. Its last argument are the traced arrays of the tables.

    Tables of a static layout are constants, so that XLA removes loops that never run.
    """

    @jax.custom_vjp
    def attend(  # ``learned``: the terms by their names in Terms, which JAX's placeholders do not fit
        query: Array, key: Array, value: Array | None, learned: dict[str, Array], traced: list[Array]
    ) -> Any:
        tables = tables_of(traced)[0]
        return _result(program, *chunked_shares.forward(program, query, (key, value), Terms(**learned), tables))

    def forward(*primals: Any) -> Any:
        query, key, value, learned, traced = jax.tree.map(lambda x: x.value, primals)
        tables, of_gradient = tables_of(traced)
        if of_gradient is None:  # asked at trace time
            raise ValueError(NO_GRADIENT)
        # The names of the terms whose gradient is requested are keys of a tree, so that they are static.
        requested = {name: None for name, x in primals[3].items() if x.perturbed}
        unrounded = dataclasses.replace(program, float32_results=True)
        exact, top, rest = chunked_shares.forward(unrounded, query, (key, value), Terms(**learned), tables)
        out = chunked_tiles.narrowed(exact, program)
        # The rounding error of the output. The backward pass subtracts rowsum(dO * O); without the correction its
        # rounding would be as large as the gradient of a key that has nearly all of its row.
        lost = None if program.spec.dtype == "float32" else exact - out.astype(jnp.float32)
        lost = lost if lost is None or chunked_tiles.is_precise(program) else lost.astype(jnp.bfloat16)
        return _result(program, out, top, rest), ((query, key, value), learned, requested, traced, out, lost, top, rest)

    def backward(residuals: Any, cotangents: Any) -> Any:
        operands, learned, requested, traced, out, lost, top, rest = residuals
        tables: Any = tables_of(traced)[1]  # forward has refused a plan without
        d_out, d_lse = cotangents if program.spec.return_log_sum_exp else (cotangents, None)
        d_out = jnp.zeros_like(out) if isinstance(d_out, SymbolicZero) else d_out
        d_lse = None if isinstance(d_lse, SymbolicZero) else d_lse
        if lost is not None:
            out = out.astype(jnp.float32) + lost.astype(jnp.float32)
        seen, terms = (out, top, rest), Terms(**learned)
        *gradients, d_terms = chunked_shares.backward(program, operands, seen, (d_out, d_lse), terms, tables, requested)
        if "sinks" in requested:
            d_terms = dataclasses.replace(d_terms, sinks=sinks.gradient(learned["sinks"], seen, d_out, d_lse))
        return *gradients, {name: getattr(d_terms, name) for name in learned}, None

    attend.defvjp(forward, backward, symbolic_zeros=True)
    return attend


def _result(program: Program, out: Array, top: Array, rest: Array) -> Any:
    """What a plan returns: the output, and the log-sum-exp where the spec asks for it."""
    if not program.spec.return_log_sum_exp:
        return out
    return out, jnp.where(top == passes.UNSEEN, -jnp.inf, top + rest)


CHUNKED = Chunked()
