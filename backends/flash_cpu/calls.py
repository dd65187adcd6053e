"""The kernels as functions of JAX arrays: forward, backward, and the two tied together for differentiation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..contract import AttentionSpec
from ..devices import usable_cores
from ..manual_axes import varying
from . import backward, decode, expression, forward, handler, targets
from .added import Arrays
from .backward_buffers import BLOCK_KEYS as BACKWARD_KEYS
from .decode_buffers import MOST_ROWS_PER_TILE, DecodeKernel
from .decode_listed import DecodeListed
from .decode_mass import DecodeMass
from .expression import Expression
from .forward import Kernel
from .isa import Isa
from .partitioned import by_shares
from .visibility import Visibility, by_interval

_NOTHING: Mapping[str, Any] = {}

_LOG2_E = math.log2(math.e)

# The decode kernel: the most query tokens and rows (tokens times the heads of a group), the fewest keys per range, and
# about how many items per thread.
DECODE_QUERIES, DECODE_ROWS = 16, 48
DECODE_LEAST_KEYS, DECODE_ITEMS = 256, 4
STAGE_ITEMS = 16  # of the forward pass, for each thread


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """One problem's kernels, on at most ``threads`` threads. ``float32_results``: not rounded to the input dtype.

    With ``whole`` the backward pass divides no head's keys, so that sums have one order on any number of threads.
    """

    spec: AttentionSpec
    isa: Isa
    float32_results: bool = False
    threads: int = dataclasses.field(default_factory=usable_cores)
    whole: bool = False

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        spec = self.spec
        out = "float32" if self.float32_results else spec.dtype
        return Kernel(spec.dtype, spec.head_dim, spec.value_head_dim or 0, spec.logits_soft_cap is not None, out)

    def adding(self, extra: Mapping[str, Any]) -> Kernel:
        """The kernel that takes these operands of ``added.py``, with the functions of the spec."""
        bias = str(extra["bias"].dtype) if "bias" in extra else ""
        arrays = Arrays("mask" in extra, bias, "alibi" in extra, *functions(self.spec))
        return dataclasses.replace(self.kernel, arrays=arrays)

    @property
    def numbers(self) -> Float[Array, " 4"]:
        """The factors of ``softmax.py``: SCALE, CAP_INNER, CAP_OUTER, GRADIENT_SCALE.

        Of operations, not a constant: a program for ``custom_partitioning`` has none.
        """
        scale, cap = self.spec.softmax_scale, self.spec.logits_soft_cap or 1.0
        factors = (scale * _LOG2_E, scale / cap, cap * _LOG2_E, scale)
        return jnp.concatenate([jnp.full(1, factor, jnp.float32) for factor in factors])

    def _sizes(self, seen: Visibility, **more: int) -> dict[str, int]:
        s = self.spec
        sizes = {"B": s.batch, "T": s.query_length, "S": s.key_value_length, "N": s.num_heads, "K": s.num_kv_heads}
        return {**sizes, "C": seen.first.shape[0], **more}

    def _per_row(self) -> Any:
        spec = self.spec
        return jax.ShapeDtypeStruct((spec.batch, spec.query_length, spec.num_heads), jnp.float32)

    def forward(
        self, query: Array, key: Array, value: Array, seen: Visibility, extra: Mapping[str, Any] = _NOTHING
    ) -> tuple[Float[Array, "b t n v"], Float[Array, "b t n"], Float[Array, "b t n"]]:
        """Output, and per row the maximum in powers of two (1e30: sees nothing) and the sum above it.

        ``extra`` maps operands of ``added.py`` to their arrays.
        """

        def of_share(spec: AttentionSpec, query: Array, key: Array, value: Array, *arrays: Any) -> Any:
            return dataclasses.replace(self, spec=spec).forward_here(query, key, value, *_given(extra, arrays))

        operands = (query, key, value, *seen.arrays, *_in_order(extra))
        return by_shares(of_share, self.spec, operands, (*_QKV, *_SEEN, *_dims(extra)), _FOUND)

    def forward_here(self, query: Array, key: Array, value: Array, seen: Visibility, extra: Mapping[str, Any]) -> Any:
        """:meth:`forward` on one device."""
        group = self._heads_per_stage()
        kernel, dims = self.adding(extra), self._sizes(seen, P=group)
        shared, worker = forward.packed(self.isa, kernel).shared_bytes(dims), forward.workspace_bytes(self.isa, kernel)
        size = handler.scratch_bytes(shared, worker, self.threads)
        out = jax.ShapeDtypeStruct((*query.shape[:3], kernel.value_head_dim), kernel.out_dtype)
        results = (out, self._per_row(), self._per_row(), jax.ShapeDtypeStruct((size,), jnp.uint8))
        arguments = (
            query,
            key,
            value,
            *seen.arrays,
            self.numbers,
            *_in_order(extra),
            jnp.zeros((1, group), jnp.float32),
        )
        return self._call("forward", kernel, results, *arguments)[:3]

    def backward(
        self,
        query: Array,
        key: Array,
        value: Array,
        seen: Visibility,
        out: Array,
        top: Array,
        total: Array,
        d_out: Array,
        d_lse: Array | None,
        extra: Mapping[str, Any] = _NOTHING,
    ) -> tuple[Array, ...]:
        """dq, dk and dv, from the results of :meth:`forward` and the cotangents of the output and the log-sum-exp.

        Then the gradients of the bias and of ALiBi's slopes, if ``extra`` has them.

        The kernel reads an output of the input dtype. A float32 output has its rounding error taken off the cotangent
        of the log-sum-exp: in rowsum(dO * O) it would be as large as the gradient of a key that has most of its row.
        """
        d_lse = jnp.zeros_like(top) if d_lse is None else d_lse.astype(jnp.float32)
        if "bias" in extra or "alibi" in extra:  # all sequences add to one gradient
            return self.backward_here(query, key, value, out, top, total, d_out, d_lse, seen, extra)

        def of_share(
            spec: AttentionSpec,
            q: Any,
            k: Any,
            v: Any,
            out: Any,
            top: Any,
            total: Any,
            d_out: Any,
            d_lse: Any,
            *more: Any,
        ) -> Any:
            own, (seen, added) = dataclasses.replace(self, spec=spec), _given(extra, more)
            return own.backward_here(q, k, v, out, top, total, d_out, d_lse, seen, added)

        operands = (query, key, value, out, top, total, d_out, d_lse, *seen.arrays, *_in_order(extra))
        dims = (*_QKV, *_FOUND, "btnv", "btn", *_SEEN, *_dims(extra))
        return by_shares(of_share, self.spec, operands, dims, _QKV)

    def backward_here(
        self,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        top: Array,
        total: Array,
        d_out: Array,
        d_lse: Array,
        seen: Visibility,
        extra: Mapping[str, Any],
    ) -> tuple[Array, ...]:
        """:meth:`backward` on one device."""
        kernel = self.adding(extra)
        parts = self._parts(extra.get("bias"))
        dims = self._sizes(seen, P=parts)
        size = handler.scratch_bytes(*backward.scratch(self.isa, kernel, dims), self.threads)
        gradients = tuple(jax.ShapeDtypeStruct(x.shape, kernel.out_dtype) for x in (query, key, value))
        more, bias = [], extra.get("bias")
        if bias is not None:
            more.append(jax.ShapeDtypeStruct(bias.shape, jnp.float32))
        if "alibi" in extra:
            more.append(jax.ShapeDtypeStruct((*query.shape[:3], parts), jnp.float32))
        results = (*gradients, *more, jax.ShapeDtypeStruct((size,), jnp.uint8))
        if out.dtype != query.dtype:
            lost = rounding_error(out, query.dtype)
            # Rows that see nothing have none, and one that is not finite is the kernel's to find.
            counts = (lost != 0) & jnp.isfinite(lost)
            d_lse = d_lse - jnp.where(counts, d_out.astype(jnp.float32) * lost, 0).sum(-1)
        cotangents = d_out.astype(query.dtype), d_lse
        arguments = (query, key, value, *seen.arrays, self.numbers, *_in_order(extra))
        arguments += (out.astype(query.dtype), top, total, *cotangents, jnp.zeros((1, parts), jnp.float32))
        if bias is None:
            found = self._call("backward", kernel, results, *arguments)[:-1]
        else:
            arguments += (jnp.zeros(bias.shape, jnp.float32),)
            # The kernel adds to the zeros, where they lie.
            found = call("backward", kernel, self.isa, results, *arguments, aliases={len(arguments) - 1: 3})[:-1]
        if "alibi" not in extra:
            return tuple(found)
        return *found[:-1], -found[-1].sum((0, 1, 3))

    @property
    def _side_by_side(self) -> int:
        """KV heads whose keys of a slot lie side by side; 0 where each head's keys lie together."""
        return 0 if self.spec.kv_layout == "HND" else self.spec.num_kv_heads

    def _decode_kernel(self, value_head_dim: int) -> DecodeKernel:
        spec = self.spec
        tile = min(spec.query_length * spec.group_size, MOST_ROWS_PER_TILE)
        soft_cap = spec.logits_soft_cap is not None
        out, sums = self.kernel.out_dtype, spec.return_log_sum_exp or spec.has_sinks
        return DecodeKernel(spec.dtype, spec.head_dim, value_head_dim, soft_cap, tile, self._side_by_side, out, sums)

    def decode_mass(
        self, query: Array, key: Array, value: Array | None, seen: Visibility, unit: int
    ) -> tuple[Float[Array, "b k units"], Float[Array, "b t n v"] | None]:
        """The attention of a few query rows to each unit of ``unit`` keys, summed over the rows of a KV head.

        With ``value``, also the output.
        """
        spec = self.spec
        kernel = self._decode_kernel(0 if value is None else value.shape[-1])
        units = -(-spec.key_value_length // unit)
        size = handler.scratch_bytes(*decode.scratch(self.isa, kernel, self._sizes(seen, P=units)), self.threads)
        mass = jax.ShapeDtypeStruct((spec.batch, spec.num_kv_heads, units), jnp.float32)
        out = () if value is None else (jax.ShapeDtypeStruct((*query.shape[:3], value.shape[-1]), spec.dtype),)
        results = (mass, *out, jax.ShapeDtypeStruct((size,), jnp.uint8))
        cache = (x for x in (key, value) if x is not None)
        this = DecodeMass(kernel, unit)
        mass, *out = self._call("decode_mass", this, results, query, *cache, *seen.arrays, self.numbers)[:-1]
        return mass, out[0] if out else None

    def decode(self, query: Array, key: Array, value: Array, seen: Visibility) -> tuple[Array, ...]:
        """The output of a few query rows; for a spec with a log-sum-exp or sinks all results of :meth:`forward`."""

        def of_share(spec: AttentionSpec, query: Array, key: Array, value: Array, *arrays: Any) -> Any:
            own, (seen, _) = dataclasses.replace(self, spec=spec), _given({}, arrays)
            return own.decode_here(query, key, value, seen)

        cache = ("bksh", "bksv") if self.spec.kv_layout == "HND" else _QKV[1:]
        operands = (query, key, value, *seen.arrays)
        results = _FOUND if self._decode_kernel(0).sums else _FOUND[:1]
        return by_shares(of_share, self.spec, operands, ("btnh", *cache, *_SEEN), results)

    def decode_here(self, query: Array, key: Array, value: Array, seen: Visibility) -> tuple[Array, ...]:
        """:meth:`decode` on one device."""
        kernel = self._decode_kernel(self.spec.value_head_dim or 0)
        return self._decode("decode", kernel, kernel, self.spec.key_value_length, (query, key, value), seen)

    def decode_listed(
        self, query: Array, key: Array, value: Array, seen: Visibility, listed: Int[Array, "b k units"], unit: int
    ) -> Float[Array, "b t n v"]:
        """The output of a few query rows that attend to the listed units of ``unit`` keys; -1 behind the last."""
        kernel = self._decode_kernel(self.spec.value_head_dim or 0)
        this, keys = DecodeListed(kernel, unit), listed.shape[-1] * unit
        return self._decode("decode_listed", this, kernel, keys, (query, key, value), seen, listed)[0]

    def _decode(
        self, kind: str, this: Any, kernel: DecodeKernel, keys: int, operands: Any, seen: Visibility, *more: Array
    ) -> tuple[Array, ...]:
        query, key, value = operands
        ranges = self._ranges(keys)
        size = handler.scratch_bytes(*decode.scratch(self.isa, kernel, self._sizes(seen, P=ranges)), self.threads)
        out = jax.ShapeDtypeStruct((*query.shape[:3], kernel.value_head_dim), kernel.out_dtype)
        sums = (self._per_row(), self._per_row()) if kernel.sums else ()
        results = (out, *sums, jax.ShapeDtypeStruct((size,), jnp.uint8))
        arguments = (query, key, value, *seen.arrays, self.numbers, jnp.zeros((1, ranges), jnp.float32), *more)
        return tuple(self._call(kind, this, results, *arguments)[:-1])

    def _ranges(self, keys: int) -> int:
        """Ranges of an item's ``keys``: several for every thread, and none so short that its overhead shows."""
        heads = self.spec.batch * self.spec.num_kv_heads // (self._side_by_side or 1)
        most = max(1, keys // DECODE_LEAST_KEYS)
        return max(1, min(most, -(-DECODE_ITEMS * self.threads // heads)))

    def _heads_per_stage(self) -> int:
        """KV heads of a stage of the forward pass: the fewest with enough items for every thread, else all."""
        spec, heads = self.spec, self.spec.batch * self.spec.num_kv_heads
        tiles = -(-spec.query_length * spec.group_size // forward.block_rows(self.isa))
        blocks = -(-spec.key_value_length // forward.BLOCK_KEYS)
        least = -(-STAGE_ITEMS * self.threads // (tiles + blocks))
        return least if 2 * least < heads else heads

    def _parts(self, bias: Array | None) -> int:
        """Parts of a head's key blocks: the fewest with an item for every thread and no second one for one alone.

        Heads that share a bias are one item, since they add to one gradient.
        """
        heads, threads = self.spec.batch * self.spec.num_kv_heads, self.threads
        if bias is not None:
            heads = bias.shape[0] * (1 if bias.shape[1] == 1 else self.spec.num_kv_heads)
            if bias.shape[3] == 1:  # all keys add to one number
                return 1
        if self.whole:
            return 1
        most = max(1, min(threads, -(-self.spec.key_value_length // BACKWARD_KEYS)))
        even = (p for p in range(1, most + 1) if heads * p >= 2 * threads or heads * p % threads == 0)
        return next(even, most)

    def _call(self, kind: str, kernel: Any, results: tuple[Any, ...], *arguments: Any) -> Any:
        return call(kind, kernel, self.isa, results, *arguments)


def is_decode(spec: AttentionSpec) -> bool:
    """Whether the decode kernel is used: a few rows per KV head, no gradient, and nothing but a mask of intervals.

    It reads a key for all tokens of a step, so they have to be of one document: NaN stays out of all others.
    """
    few = spec.query_length <= DECODE_QUERIES and spec.query_length * spec.group_size <= DECODE_ROWS
    one_document = spec.query_length == 1 or not spec.has_segment_ids
    more = spec.needs_grad or spec.has_bias or spec.has_alibi
    more = more or spec.score_function is not None or not by_interval(spec)
    return few and one_document and not more


@functools.lru_cache(maxsize=256)
def functions(spec: AttentionSpec) -> tuple[Expression | None, Expression | None]:
    """What the kernels evaluate for each pair: a mask function whose interval is not exact, and a score function.

    Raises ``expression.UnsupportedError``.
    """
    score = None if spec.score_function is None else expression.of_score(spec.score_function)
    return None if by_interval(spec) else expression.of_mask(spec.mask_function), score


def rounding_error(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """What float32 ``x`` loses in ``dtype``. XLA would leave out a conversion to it and back."""
    numbers = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, numbers.nexp, numbers.nmant)  # numbers below the normal ones become zero
    step = float(numbers.smallest_subnormal)
    below = jnp.round(x / step) * step if numbers.nexp < 8 else rounded
    return x - jnp.where(jnp.abs(x) < float(numbers.smallest_normal), below, rounded)


# Dimensions of operands and results, as ``partitioned.py`` writes them.
_QKV = ("btnh", "bskh", "bskv")
_FOUND = ("btnv", "btn", "btn")
_SEEN = ("bt", "bt", "bt", "bs", "bs")
_EXTRA = {
    "mask": "bnts",
    "bias": "bnts",
    "alibi": ".n",
    "query_position": "bt",
    "batch_index": "b",
    "head_index": ".n",
}


def _dims(extra: Mapping[str, Any]) -> list[str]:
    return [dims for name, dims in _EXTRA.items() if name in extra]


def _given(extra: Mapping[str, Any], arrays: tuple[Any, ...]) -> tuple[Visibility, dict[str, Any]]:
    """The mask's numbers and the operands of ``added.py``, of their arrays one behind the other."""
    seen, more = arrays[: len(_SEEN)], arrays[len(_SEEN) :]
    return Visibility(*seen), dict(zip((name for name in _EXTRA if name in extra), more, strict=True))


def _in_order(extra: Mapping[str, Any]) -> list[Any]:
    """As the kernels take them: JAX sorts a dict by its keys."""
    return [extra[name] for name in _EXTRA if name in extra]


def call(
    kind: str,
    kernel: Any,
    isa: Isa,
    results: tuple[Any, ...],
    *arguments: Any,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """A kernel of :data:`backends.flash_cpu.targets.BUILDERS` on these operands, with results of these shapes.

    ``aliases`` maps an operand to the result that takes its place.
    """
    name = targets.target(kind, kernel, isa).name
    run = jax.ffi.ffi_call(
        name, results, vmap_method="broadcast_all", input_output_aliases=None if aliases is None else dict(aliases)
    )
    return varying(run(*(jnp.asarray(x) for x in arguments)), arguments)
