"""The kernels as functions of JAX arrays: forward, backward, and the two tied together for differentiation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..contract import AttentionSpec
from ..devices import usable_cores
from ..manual_axes import varying
from ..partitioned import by_shares
from . import expression, forward, targets
from .added import Arrays
from .backward_buffers import BLOCK_KEYS as BACKWARD_KEYS
from .decode_buffers import BLOCK_KEYS, MOST_ROWS, MOST_ROWS_PER_TILE, DecodeKernel
from .expression import Expression
from .forward import Kernel
from .isa import Isa
from .softmax import LOG2_E
from .visibility import Visibility, by_interval

_NOTHING: Mapping[str, Any] = {}


# The decode kernel: the most query tokens, the fewest keys per range, and about how many items per thread.
DECODE_QUERIES = 16
DECODE_LEAST_KEYS, DECODE_MOST_KEYS, DECODE_ITEMS = 256, 2048, 4
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
        factors = (scale * LOG2_E, scale / cap, cap * LOG2_E, scale)
        return jnp.concatenate([jnp.full(1, factor, jnp.float32) for factor in factors])

    def call(
        self,
        kind: str,
        kernel: Any,
        arrays: Mapping[str, Any],
        **sizes: int,
    ) -> dict[str, Array]:
        """The results of a kernel of :data:`attnsuite.backends.flash_cpu.targets.KINDS` by name, from its operands.

        ``sizes`` are dimensions of results that no operand has, and those whose operand is but an array of that length.
        """
        signature = targets.KINDS[kind].signature(self.isa, kernel)
        by_name = {"numbers": self.numbers, **{name: jnp.asarray(x) for name, x in arrays.items()}}
        for x in signature.operands:
            if x.name not in by_name:
                by_name[x.name] = jnp.zeros((1, sizes[str(x.dims[1])]), jnp.float32)
        operands = [by_name[x.name] for x in signature.operands]
        dims: dict[Any, int] = dict(sizes)
        for x, array in zip(signature.operands, operands, strict=True):
            dims |= dict(zip(x.dims, array.shape, strict=True))
        dims["bytes"] = signature.scratch_bytes(dims, self.threads)
        results = [jax.ShapeDtypeStruct([dims.get(d, d) for d in x.dims], x.dtype) for x in signature.results]
        order = [[x.name for x in side] for side in (signature.operands, signature.results)]
        run = jax.ffi.ffi_call(
            targets.target(kind, kernel, self.isa).name,
            results,
            # A pool of pages is one array: under vmap each problem has its own.
            vmap_method="sequential" if "pages" in by_name else "broadcast_all",
        )
        return dict(zip(order[1], varying(run(*operands), operands), strict=True))

    def _by_shares(
        self, compute: Callable[[Calls, dict[str, Array]], dict[str, Array]], arrays: Mapping[str, Any], *results: str
    ) -> tuple[Array, ...]:
        """These of the results of ``compute``, which each device may call with its share of the arrays."""
        names = tuple(arrays)  # the program keeps this function, and would keep the arrays with it

        def of_share(spec: AttentionSpec, *operands: Any) -> tuple[Array, ...]:
            found = compute(dataclasses.replace(self, spec=spec), dict(zip(names, operands, strict=True)))
            return tuple(found[name] for name in results)

        row, slot = ".." if self.spec.page_size else "bs"
        slots = f"{row}k{slot}" if self.spec.kv_layout == "HND" else f"{row}{slot}k"
        letters = _LETTERS | {"key": f"{slots}h", "value": f"{slots}v", "key_scale": slots, "value_scale": slots}
        dims, found = ([letters[name] for name in side] for side in (names, results))
        return by_shares(of_share, self.spec, tuple(arrays.values()), dims, found)

    def forward(
        self, query: Array, key: Array, value: Array, seen: Visibility, extra: Mapping[str, Any] = _NOTHING
    ) -> tuple[Float[Array, "b t n v"], Float[Array, "b t n"], Float[Array, "b t n"]]:
        """Output, and per row the maximum in powers of two (UNSEEN_TOP: sees nothing) and the sum above it.

        ``extra`` maps operands of ``added.py`` to their arrays.
        """
        kernel = self.adding(extra)

        def compute(calls: Calls, arrays: dict[str, Array]) -> dict[str, Array]:
            return calls.call("forward", kernel, arrays, P=calls._heads_per_stage())

        arrays = {"query": query, "key": key, "value": value, **seen.by_name, **extra}
        out, top, total = self._by_shares(compute, arrays, "out", "top", "total")
        return out, top, total

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
        learned: tuple[str, ...] = (),
    ) -> tuple[Array, ...]:
        """dq, dk and dv, from the results of :meth:`forward` and the cotangents of the output and the log-sum-exp.

        Then the gradients of the operands that are ``learned``: of ``bias`` and ``alibi`` in this order.

        The kernel reads an output of the input dtype. A float32 output has its rounding error taken off the cotangent
        of the log-sum-exp: in rowsum(dO * O) it would be as large as the gradient of a key that has most of its row.
        """
        d_lse = jnp.zeros_like(top) if d_lse is None else d_lse.astype(jnp.float32)
        arrays = {"query": query, "key": key, "value": value, "out": out, "top": top, "total": total}
        arrays |= {"d_out": d_out, "d_lse": d_lse, **seen.by_name, **extra}
        names = ("d_query", "d_key", "d_value", *({"bias": "d_bias", "alibi": "d_slope"}[name] for name in learned))
        kernel = self.adding(extra)
        kernel = dataclasses.replace(kernel, arrays=dataclasses.replace(kernel.arrays, learned=learned))
        if learned:  # all sequences add to one gradient
            found = self.gradients("backward", kernel, arrays, learned)
            return tuple(found[name] for name in names)

        def compute(calls: Calls, arrays: dict[str, Array]) -> dict[str, Array]:
            return calls.gradients("backward", kernel, arrays)

        return self._by_shares(compute, arrays, *names)

    def gradients(
        self, kind: str, kernel: Any, arrays: Mapping[str, Array], learned: tuple[str, ...] = (), **sizes: int
    ) -> dict[str, Array]:
        """The results of a backward kernel on one device; ``d_slope`` is the gradient of ALiBi's slopes."""
        dtype, out, d_out, d_lse = arrays["query"].dtype, *(arrays[name] for name in ("out", "d_out", "d_lse"))
        if out.dtype != dtype:
            lost = rounding_error(out, dtype)
            # Rows that see nothing have none, and one that is not finite is the kernel's to find.
            counts = (lost != 0) & jnp.isfinite(lost)
            d_lse = d_lse - jnp.where(counts, d_out.astype(jnp.float32) * lost, 0).sum(-1)
        operands = {**arrays, "out": out.astype(dtype), "d_out": d_out.astype(dtype), "d_lse": d_lse}
        parts = self._parts(arrays["bias"] if "bias" in learned else None)
        found = self.call(kind, kernel, operands, P=parts, **sizes)
        return found | {"d_slope": -found["d_slope"].sum((0, 1, 3))} if "alibi" in learned else found

    @property
    def _side_by_side(self) -> int:
        """KV heads whose keys of a slot lie side by side; 0 where each head's keys lie together."""
        return 0 if self.spec.kv_layout == "HND" else self.spec.num_kv_heads

    def _decode_kernel(self, value_head_dim: int, **more: Any) -> DecodeKernel:
        spec = self.spec
        tile = min(spec.query_length * spec.group_size, MOST_ROWS_PER_TILE)
        soft_cap = spec.logits_soft_cap is not None
        out, sums = self.kernel.out_dtype, spec.return_log_sum_exp or spec.has_sinks
        return DecodeKernel(
            spec.dtype, spec.head_dim, value_head_dim, soft_cap, tile, self._side_by_side, out, sums,
            page=spec.page_size or 0, kv_dtype=spec.kv_dtype or "", **more,
        )  # fmt: skip

    def decode_mass(
        self, query: Array, key: Array, value: Array | None, seen: Visibility, unit: int
    ) -> tuple[Float[Array, "b k units"], Float[Array, "b t n v"] | None]:
        """The attention of a few query rows to each unit of ``unit`` keys, summed over the rows of a KV head.

        With ``value``, also the output.
        """
        kernel = self._decode_kernel(0 if value is None else value.shape[-1], units="mass", unit=unit)
        arrays = {"query": query, "key": key, **({} if value is None else {"value": value}), **seen.by_name}
        found = self.call("decode", kernel, arrays, P=-(-self.spec.key_value_length // unit))
        return found["mass"], found.get("out")

    def decode(
        self,
        query: Array,
        key: Array,
        value: Array,
        seen: Visibility,
        extra: Mapping[str, Any] = _NOTHING,
        cache: Mapping[str, Any] = _NOTHING,
    ) -> tuple[Array, ...]:
        """The output of a few query rows; for a spec with a log-sum-exp or sinks all results of :meth:`forward`.

        ``cache`` has the operands of a paged or quantised cache: ``pages``, ``key_scale``, ``value_scale``.
        """
        arrays_ = self.adding(extra).arrays
        kernel = self._decode_kernel(self.spec.value_head_dim or 0, arrays=arrays_)

        def compute(calls: Calls, arrays: dict[str, Array]) -> dict[str, Array]:
            share_kernel = calls._decode_kernel(kernel.value_head_dim, arrays=arrays_)
            return calls.call("decode", share_kernel, arrays, P=calls._ranges(self.spec.key_value_length))

        if "pages" in cache:  # a fetch may look up slots of two blocks behind the last
            behind = 2 * BLOCK_KEYS // kernel.page + 1
            cache = {**cache, "pages": jnp.pad(cache["pages"], ((0, 0), (0, behind)))}
        arrays = {"query": query, "key": key, "value": value, **seen.by_name, **extra, **cache}
        return self._by_shares(compute, arrays, *(x.name for x in kernel.results))

    def decode_listed(
        self, query: Array, key: Array, value: Array, seen: Visibility, listed: Int[Array, "b k units"], unit: int
    ) -> Float[Array, "b t n v"]:
        """The output of a few query rows that attend to the listed units of ``unit`` keys; -1 behind the last."""
        kernel = self._decode_kernel(self.spec.value_head_dim or 0, units="listed", unit=unit)
        arrays = {"query": query, "key": key, "value": value, **seen.by_name, "listed": listed}
        return self.call("decode", kernel, arrays, P=self._ranges(listed.shape[-1] * unit))["out"]

    def _ranges(self, keys: int) -> int:
        """Ranges of an item's ``keys``: several for every thread, and none so short that its overhead shows.

        None is so long that its sums lose digits: with 32768 keys in one, float32 errors are about three times those
        of ``standard`` (tests/backends/flash_cpu/test_long_sums.py).
        """
        heads = self.spec.batch * self.spec.num_kv_heads // (self._side_by_side or 1)
        most = max(1, keys // DECODE_LEAST_KEYS)
        return max(1, min(most, -(-DECODE_ITEMS * self.threads // heads)), -(-keys // DECODE_MOST_KEYS))

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


def is_decode(spec: AttentionSpec) -> bool:
    """Whether the decode kernel is used: a few rows per KV head, and no gradient.

    It reads a key for all tokens of a step, so they have to be of one document: NaN stays out of all others.
    """
    few = spec.query_length <= DECODE_QUERIES and spec.query_length * spec.group_size <= MOST_ROWS
    one_document = spec.query_length == 1 or not spec.has_segment_ids
    return few and one_document and not spec.needs_grad


def reads_in_place(spec: AttentionSpec) -> bool:
    """Whether the decode kernel reads the cache of a step where it lies.

    What it does not: float8 numbers, values that are a part of the keys, and pages beside arrays or functions, which
    hide more than positions and ids say.
    """
    if spec.page_size is None and spec.kv_dtype is None:
        return True
    hides_more = spec.has_mask or spec.has_bias or spec.has_alibi or functions(spec) != (None, None)
    return spec.kv_dtype in (None, "int8") and not spec.values_in_keys and not (spec.page_size and hides_more)


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
_LETTERS = {
    "query": "btnh",
    "pages": "b.",
    **dict.fromkeys(("first", "last", "query_id", "query_position"), "bt"),
    **dict.fromkeys(("position", "key_id"), "bs"),
    **dict.fromkeys(("mask", "bias"), "bnts"),
    **dict.fromkeys(("alibi", "head_index"), ".n"),
    "batch_index": "b",
    **dict.fromkeys(("out", "d_out"), "btnv"),
    **dict.fromkeys(("top", "total", "d_lse"), "btn"),
    "d_query": "btnh",
    "d_key": "bskh",
    "d_value": "bskv",
}
