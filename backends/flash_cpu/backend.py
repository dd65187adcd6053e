"""The ``flash_cpu`` backend: attention by kernels that are compiled for this processor.

The method is FlashAttention-2 (arXiv 2307.08691) in a layout for CPUs: transposed scores, one lane per query
(``products.py``), and lazy rescaling (``softmax.py``). The kernels are LLVM IR written from Python and compiled by
llvmlite, without a C compiler. If the kernels do not work on a machine, the backend refuses with the reason, and
``chunked`` runs instead.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from .. import decode_step, kv_cache, sinks
from ..contract import (
    NO_TERMS,
    NOTHING_SEEN,
    AttentionSpec,
    EitherArray,
    Layout,
    Part,
    Plan,
    Terms,
    check_options,
    positions,
)
from ..derivatives import NO_GRADIENT, first_derivative, traced_apart
from ..devices import Target
from ..features import ALL_FEATURES, DTYPES, KV_LAYOUTS, Mode, Options, Takes
from ..kv_layout import turned
from ..layout import key_rows
from ..merging import Seen, put_together
from ..standard import STANDARD
from .availability import why_not
from .backward_buffers import BLOCK_KEYS as BACKWARD_KEYS
from .calls import Calls, functions, is_decode, reads_in_place, rounding_error
from .compiler import Processor
from .decode_buffers import BLOCK_KEYS as DECODE_KEYS
from .expression import UnsupportedError
from .forward import BLOCK_KEYS, UNSEEN_TOP
from .isa import AVX512, KNOWN, Isa
from .softmax import LOG2_E
from .visibility import Visibility, pairs, visibility, without

_LOG2_E_HIGH = 23 / 16  # its product with an integer below 2**19 is exact in float32
_LOG2_E_LOW = LOG2_E - _LOG2_E_HIGH
# Of a maximum above 1e9 more is lost than an exponential holds; that is less than the maximum's own rounding error.
_MOST_LOST = 64.0
_WEIGHTLESS = 128.0  # so far below the maximum of its row a sink is lost in the sum
# Gradients of so few queries or keys take XLA's plain formula, whose scores are linear in the other length. If every
# row has one key with nearly all of its weight, the rounding of rowsum(dO * O) is larger than the slopes.
SHORT = 16

_SHORT_NOTE = (
    f"flash_cpu takes XLA's plain formula for a problem with a gradient and {SHORT} or fewer queries or keys: its "
    "scores are linear in the other length."
)

OPTIONS = {
    "isa": (
        "the instruction set of the kernels, 'amx_bf16' (bfloat16 is multiplied in tile registers), 'avx512_bf16' "
        "(bfloat16 is multiplied as such), 'avx512', 'avx2' or 'neon' (default: the best that the processor has)"
    ),
    "batch_invariant": (
        "True or False; True gives sums one order, whatever else is in the batch and on any number of threads: decode "
        "steps take the kernel of a prefill, and no head's keys are divided (default: False)"
    ),
}
_ACCEPTED = {"isa": (None, *(isa.name for isa in KNOWN)), "batch_invariant": (False, True)}


@dataclasses.dataclass(frozen=True, slots=True)
class FlashCpu:
    """The ``flash_cpu`` backend."""

    name: str = "flash_cpu"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """All of the contract; of functions those that :meth:`refuses` can trace to operations of its kernels."""
        return Takes(
            features=ALL_FEATURES,
            modes=("native", "compile"),
            parts=True,
            kv_layouts=KV_LAYOUTS,
            because={"mode": "which is native code without a kernel to interpret"},
        )

    def refuses(self, spec: AttentionSpec, target: Target, mode: Mode, options: Options) -> tuple[str, ...]:
        """Refuses devices that are no CPU, CPUs where the kernels do not work, and functions that they do not have."""
        if target.platform != "cpu":
            return (f"flash_cpu runs on CPUs, the target is {target}; use backend='auto'.",)
        try:
            checked = _checked(options)
        except ValueError:  # plan raises it; an invalid option is not a reason of support
            return ()
        found = [] if (missing := why_not(checked["isa"])) is None else [missing]
        try:
            functions(spec)
        except UnsupportedError as error:
            found.append(f"{error}; use backend='chunked'.")
        return tuple(found)

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """Compute the mask's numbers once for all layers. Options: :data:`OPTIONS`; raises ValueError for others."""
        checked = _checked(options)
        how: dict[str, Any] = {"target": target, "mode": mode, "options": checked}
        cached, mask = kv_cache.is_cache(spec), pairs(layout.mask)
        decodes = not checked["batch_invariant"]
        undifferentiated = dataclasses.replace(spec, needs_grad=False)
        if spec.needs_grad and decodes and is_decode(undifferentiated):
            return decode_step.differentiated(
                spec, layout, lambda layout: self.plan(undifferentiated, layout, **how), target
            )
        by_decode = decodes and is_decode(spec) and reads_in_place(spec)
        if spec.kv_layout == "HND" and not by_decode:  # the decode kernel alone reads it in place
            return turned(spec, lambda spec: self.plan(spec, layout, **how))
        if cached and not by_decode:
            return kv_cache.gathered(spec, layout, functools.partial(self.plan, **how))
        if spec.needs_grad and decodes and min(spec.query_length, spec.key_value_length) <= SHORT:
            short = STANDARD.plan(spec, layout, target=target)
            return dataclasses.replace(short, notes=(*short.notes, _SHORT_NOTE))
        seen = visibility(spec, layout)
        operands = functools.partial(_extra, spec, layout, seen, mask)
        if by_decode:
            return kv_cache.unrounded(
                spec, lambda spec: _decoding(Calls(spec, _isa(checked["isa"], spec)), layout, seen, operands)
            )
        calls = Calls(spec, _isa(checked["isa"], spec), whole=checked["batch_invariant"])
        traced, seen_of = traced_apart(seen)
        differentiable = _differentiable(calls, seen_of)

        def attend(query: Array, key: Array, value: Array | None, terms: Terms) -> Any:
            return differentiable(query, key, _values(spec, key, value), _sunk(terms), operands(terms), traced)

        return Plan.stateless(attend, key_blocks=(calls.isa.strip, BLOCK_KEYS, BACKWARD_KEYS))

    def part(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Part:
        """As :meth:`plan`, for keys that are one part of all."""
        isa = _isa(_checked(options)["isa"], spec)
        calls, seen = Calls(spec, isa, float32_results=True), visibility(spec, layout)
        extra = _extra(spec, layout, seen, None, NO_TERMS)

        def forward(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
            return _natural(*calls.forward(query, key, value, seen, extra))

        def backward(
            query: Array, key: Array, value: Array, out: Array, top: Array, rest: Array, d_out: Array
        ) -> tuple[Array, Array, Array]:
            unseen, (top, total) = top <= NOTHING_SEEN, of_two(top, rest)
            top = jnp.where(unseen, UNSEEN_TOP, top)
            operands = query, key, value, seen, out, top, total, d_out
            d_query, d_key, d_value = calls.backward(*operands, None, extra)
            return d_query, d_key, d_value

        return Part(forward, backward)


def _values(spec: AttentionSpec, key: Array, value: Array | None) -> Array:
    """The values; those that are a part of the keys are copied out."""
    return key[..., : spec.value_head_dim] if value is None else value


def _decoding(calls: Calls, layout: Layout, seen: Visibility, operands: Callable[[Terms], dict[str, Array]]) -> Plan:
    """The plan of a decode step, by the decode kernel. Rows that see a page outside the pool are NaN."""
    spec, lost = calls.spec, None
    pages, outside = kv_cache.pages_in_pool(spec, layout)
    if outside is not None:
        seen, lost = without(seen, outside)

    def attend(query: Array, key: Array, value: Array | None, terms: Terms) -> Any:
        cache: dict[str, Any] = {} if pages is None else {"pages": pages.astype(jnp.int32)}
        if spec.kv_dtype is not None:
            for name, scales in (("key_scale", terms.key_scales), ("value_scale", terms.value_scales)):
                cache[name] = jnp.broadcast_to(jnp.asarray(scales, jnp.float32), key_rows(spec))
        sunk = _sunk(terms)
        merged = calls if sunk is None else dataclasses.replace(calls, float32_results=True)
        found = merged.decode(query, key, _values(spec, key, value), seen, operands(terms), cache)
        if lost is not None:
            found = tuple(jnp.where(lost.reshape(*lost.shape, *[1] * (x.ndim - 2)), jnp.nan, x) for x in found)
        if not (spec.return_log_sum_exp or spec.has_sinks):
            return found[0]
        out, top, total = _with_sinks(sunk, (found[0], found[1], found[2]))[0]
        return _result(calls, out, top, total)

    return Plan.stateless(attend, gradient=False, key_blocks=(DECODE_KEYS,))


def _sunk(terms: Terms) -> Array | None:
    return None if terms.sinks is None else jnp.asarray(terms.sinks)


def _with_sinks(sunk: Array | None, found: Seen) -> tuple[Seen, Array | None]:
    """Output and a kernel's two numbers over keys and sinks; with sinks also which rows see no key."""
    if sunk is None:
        return found, None
    of_keys = _natural(*found)
    of_sinks = sinks.part(sunk, of_keys)
    out, *both = put_together(of_keys, of_sinks)
    # Without weight a sink changes nothing, and the way to natural numbers and back would round large maxima.
    weightless = of_sinks[1] < of_keys[1] - _WEIGHTLESS
    top, total = (jnp.where(weightless, own, new) for own, new in zip(found[1:], of_two(*both), strict=True))
    return (out, top, total), found[1] == UNSEEN_TOP


def _result(calls: Calls, out: Array, top: Array, total: Array) -> Any:
    """What a plan returns: the output, and the log-sum-exp where the spec asks for it."""
    out = out.astype(calls.kernel.out_dtype)
    if not calls.spec.return_log_sum_exp:
        return out
    return out, jnp.where(top == UNSEEN_TOP, -math.inf, sum(natural(top, total)))


def _extra(
    spec: AttentionSpec, layout: Layout, seen: Visibility, mask: EitherArray | None, terms: Terms
) -> dict[str, Array]:
    """The operands of ``added.py``."""
    found: dict[str, Array] = {}
    if mask is not None:
        found["mask"] = jnp.asarray(mask)
    if terms.bias is not None:
        bias = jnp.asarray(terms.bias)
        found["bias"] = bias if bias.dtype.name in DTYPES[:3] else bias.astype(jnp.float32)
    if terms.alibi is not None:
        found["alibi"] = jnp.asarray(terms.alibi, jnp.float32)[None]
    if terms.alibi is not None or functions(spec) != (None, None):
        query_positions = jnp.asarray(positions(spec, layout)[0], jnp.int32)
        found["query_position"] = jnp.broadcast_to(query_positions, seen.first.shape)
    if spec.score_function is not None:
        found["batch_index"] = jnp.arange(spec.batch, dtype=jnp.int32)
        found["head_index"] = jnp.arange(spec.num_heads, dtype=jnp.int32)[None]
    return found


def _natural(out: Array, top: Array, total: Array) -> Seen:
    """A kernel's results as those of a part."""
    unseen, (top, rest) = top == UNSEEN_TOP, natural(top, total)
    return out, jnp.where(unseen, NOTHING_SEEN, top), jnp.where(unseen, 0.0, rest)


def natural(top: Array, total: Array) -> tuple[Array, Array]:
    """``top`` and ``rest``, whose sum is the log-sum-exp, from a kernel's two numbers: ``log(total * 2**top)``.

    The new ``top`` is an integer. Its product with the high part of log2(e) is exact, so ``rest`` keeps the low bits
    that a quotient of the size of the logits would round away.
    """
    whole = jnp.round(top / LOG2_E)
    lost = ((top - whole * _LOG2_E_HIGH) - whole * _LOG2_E_LOW) / LOG2_E
    return whole, jnp.log(total) + jnp.clip(lost, -_MOST_LOST, _MOST_LOST)


def of_two(top: Array, rest: Array) -> tuple[Array, Array]:
    """The inverse: a power of two and a sum for the kernel, from an integer ``top`` and ``rest``."""
    power = top * LOG2_E
    lost = (top * _LOG2_E_HIGH - power) + top * _LOG2_E_LOW
    return power, jnp.exp(rest + jnp.clip(lost / LOG2_E, -_MOST_LOST, _MOST_LOST))


def _checked(options: Options) -> dict[str, Any]:
    """All options. Raises ValueError for an unknown name or an invalid value."""
    checked = {"isa": None, "batch_invariant": False, **check_options("flash_cpu", options, OPTIONS)}
    for name, value in checked.items():
        if value not in _ACCEPTED[name]:
            raise ValueError(f"flash_cpu: {name}={value!r} is not accepted; {name} is {OPTIONS[name]}.")
    return checked


def _isa(name: str | None, spec: AttentionSpec) -> Isa:
    isa = Processor.here().isa(name)
    if isa is None:
        raise ValueError("flash_cpu: this processor has none of the instruction sets that the kernels are written for.")
    if isa.multiplies_bfloat16 and _float32_gradients(spec):
        # Their kernels round the probabilities to bfloat16 before the product with the values, and with it
        # rowsum(dO * O). Gradients of that dtype hide it, those of a bias and of slopes are float32 and show it.
        return AVX512
    return isa.of(spec.dtype)


def _float32_gradients(spec: AttentionSpec) -> bool:
    """Whether an operand has a gradient that is more exact than the input dtype."""
    return spec.needs_grad and (spec.has_bias or spec.has_alibi)


def _differentiable(calls: Calls, seen_of: Callable[[list[Array]], Visibility]) -> Callable[..., Any]:
    """The attention with its own gradient.

    Behind query, key and value it takes the sinks, the operands of ``added.py``, and the traced arrays of the mask.
    """
    unrounded = dataclasses.replace(calls, float32_results=True)

    def compute(
        calls: Calls,
        query: Array,
        key: Array,
        value: Array,
        sunk: Array | None,
        extra: dict[str, Array],
        traced: list[Array],
    ) -> tuple[Seen, Array | None]:
        """Output and a kernel's two numbers; with sinks a float32 output, and which rows see no key."""
        by = calls if sunk is None else unrounded
        return _with_sinks(sunk, by.forward(query, key, value, seen_of(traced), extra))

    @jax.custom_vjp
    def attend(*operands: Any) -> Any:
        return _result(calls, *compute(calls, *operands)[0])

    def forward(*primals: Any) -> tuple[Any, Any]:
        if not calls.spec.needs_grad:
            raise ValueError(NO_GRADIENT)
        operands = jax.tree.map(lambda x: x.value, primals)
        # The names of those whose gradient is asked are keys of a tree, so that they are static.
        learned = {name: None for name in ("bias", "alibi") if name in primals[4] and primals[4][name].perturbed}
        (out, top, total), unseen = first_derivative(functools.partial(compute, unrounded))(*operands)
        lost = None if calls.spec.dtype == "float32" else rounding_error(out, calls.spec.dtype)
        if lost is not None and not _float32_gradients(calls.spec):
            lost = lost.astype(jnp.bfloat16)
        out = out.astype(calls.kernel.out_dtype)
        return _result(calls, out, top, total), (operands, (out, lost, top, total), unseen, learned)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (query, key, value, sunk, extra, traced), (out, lost, top, total), unseen, names = residuals
        learned = tuple(name for name in ("bias", "alibi") if name in names)
        if lost is not None:
            out = out.astype(jnp.float32) + lost.astype(jnp.float32)
        d_out, d_lse = cotangents if calls.spec.return_log_sum_exp else (cotangents, None)
        d_out = jnp.zeros_like(out) if isinstance(d_out, SymbolicZero) else d_out
        d_lse = None if isinstance(d_lse, SymbolicZero) else d_lse
        d_sinks = None
        if unseen is not None:
            spoilt = jnp.isnan(total)
            out, d_out = (jnp.where((unseen | spoilt)[..., None], 0, x) for x in (out, d_out))
            d_lse = jnp.zeros_like(top) if d_lse is None else jnp.where(spoilt, 0, d_lse)
            d_sinks = sinks.gradient(sunk, (out, *natural(top, jnp.where(spoilt, 1, total))), d_out, d_lse)
            top = jnp.where(unseen, UNSEEN_TOP, top)
        operands = query, key, value, seen_of(traced), out, top, total, d_out, d_lse, extra
        found = first_derivative(functools.partial(calls.backward, learned=learned))(*operands)
        of_learned = {
            n: x.reshape(extra[n].shape).astype(extra[n].dtype) for n, x in zip(learned, found[3:], strict=True)
        }
        return *found[:3], d_sinks, dict.fromkeys(extra) | of_learned, None

    attend.defvjp(forward, backward, symbolic_zeros=True)
    return attend


FLASH_CPU = FlashCpu()
