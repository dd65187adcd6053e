"""The ``flash_cpu`` backend: the contract by kernels that are compiled for the processor at hand.

Method: FlashAttention-2 (arXiv 2307.08691) with the layout that suits a CPU: transposed scores, one lane per query
(``products.py``), and lazy rescaling (``softmax.py``). The kernels are LLVM IR written from Python and compiled by
llvmlite; no C compiler is needed. Where anything of this does not work here, ``supports`` says so and ``chunked`` runs
instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from backends.contract import (
    NOTHING_SEEN,
    AttentionSpec,
    Carry,
    Layout,
    Part,
    Plan,
    check_options,
    forward_only,
)
from backends.devices import Target
from backends.features import FEATURES_0_1, Mode, Takes
from backends.flash_cpu.calls import Calls
from backends.flash_cpu.compiler import Processor
from backends.flash_cpu.forward import UNSEEN_TOP
from backends.flash_cpu.isa import Isa
from backends.flash_cpu.probe import why_not
from backends.flash_cpu.visibility import Visibility, visibility

_LOG2_E = math.log2(math.e)
_NO_GRADIENT = "planned with needs_grad=False; plan with needs_grad=True to differentiate."


@dataclasses.dataclass(frozen=True, slots=True)
class FlashCpu:
    """The ``flash_cpu`` backend."""

    name: str = "flash_cpu"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """All of the contract but array masks and biases."""
        linear = "whose memory is linear in the length"
        return Takes(
            features=frozenset({*FEATURES_0_1 - {"mask", "bias"}, "log_sum_exp"}),
            modes=("native", "compile"),
            parts=True,
            because={"mode": "which is native code without a kernel to interpret", "mask": linear, "bias": linear},
        )

    def refuses(
        self, spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any] | None
    ) -> tuple[str, ...]:
        """What is not a CPU, and a CPU where the kernels do not work."""
        if target.platform != "cpu":
            return (f"flash_cpu runs on CPUs, the target is {target}; use backend='auto'.",)
        missing = why_not()
        return () if missing is None else (missing,)

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Bring the mask into numbers once for all layers. There are no options; raises ValueError for any."""
        check_options(self.name, options, {})
        calls, seen = Calls(spec, _isa()), visibility(spec, layout)
        if calls.is_decode:
            return Plan(
                forward_only(lambda query, key, value, _, carry: (calls.decode(query, key, value, seen), carry))
            )
        differentiable, traced = _differentiable(calls, seen)

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
        """As :meth:`plan`, for keys that are one part of all."""
        check_options(self.name, options, {})
        calls, seen = Calls(spec, _isa(), float32_results=True), visibility(spec, layout)

        def forward(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
            out, top, total = calls.forward(query, key, value, seen)
            unseen = top == UNSEEN_TOP
            return out, jnp.where(unseen, NOTHING_SEEN, top / _LOG2_E), jnp.where(unseen, 0.0, jnp.log(total))

        def backward(
            query: Array, key: Array, value: Array, out: Array, top: Array, rest: Array, d_out: Array
        ) -> tuple[Array, Array, Array]:
            if not spec.needs_grad:
                raise ValueError(_NO_GRADIENT)
            top = jnp.where(top <= NOTHING_SEEN, UNSEEN_TOP, top * _LOG2_E)
            return calls.backward(query, key, value, seen, out, top, jnp.exp(rest), d_out, None)

        return Part(forward, backward)


def _log_sum_exp(top: Array, total: Array, unseen: float) -> Array:
    """Of a row's natural scores, from the kernel's two numbers; ``unseen`` for a row that sees nothing."""
    return jnp.where(top == UNSEEN_TOP, unseen, (top + jnp.log2(total)) / _LOG2_E)


def _isa() -> Isa:
    isa = Processor.here().isa()
    if isa is None:
        raise ValueError("flash_cpu: this processor has none of the instruction sets that the kernels are written for.")
    return isa


def _differentiable(calls: Calls, seen: Visibility) -> tuple[Callable[..., Any], Visibility | None]:
    """The attention with its own gradient, and what must be passed to it as a fourth argument.

    The numbers of a static mask are constants of the program; traced ones have to be arguments.
    """
    static = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(seen))

    def result(out: Array, top: Array, total: Array) -> Any:
        return (out, _log_sum_exp(top, total, -math.inf)) if calls.spec.return_log_sum_exp else out

    @jax.custom_vjp
    def attend(query: Array, key: Array, value: Array, traced: Visibility | None) -> Any:
        return result(*calls.forward(query, key, value, traced or seen))

    def forward(query: Array, key: Array, value: Array, traced: Visibility | None) -> Any:
        if not calls.spec.needs_grad:
            raise ValueError(_NO_GRADIENT)
        out, top, total = calls.forward(query, key, value, traced or seen)
        return result(out, top, total), (query, key, value, traced, out, top, total)

    def backward(residuals: Any, cotangents: Any) -> Any:
        query, key, value, traced, out, top, total = residuals
        d_out, d_lse = cotangents if calls.spec.return_log_sum_exp else (cotangents, None)
        return *calls.backward(query, key, value, traced or seen, out, top, total, d_out, d_lse), None

    attend.defvjp(forward, backward)
    return attend, None if static else seen


FLASH_CPU = FlashCpu()
