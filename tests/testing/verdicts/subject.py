"""The kernel that a verdict is about: which problems it takes, and its results as NumPy arrays.

A verdict compares a kernel with itself. It needs no oracle, so that its problems may be of any size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import AttentionSpec, Backend, Layout, Target, Terms, plan, support
from attnsuite.backends.contract import NO_TERMS
from attnsuite.backends.features import DTYPES, Mode

from .. import problems, shapes

Arrays = dict[str, np.ndarray]
_HEADS = ((4, 2), (4, 4))
_HEAD_DIMS = (64, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A backend on a device, in a mode, and the ``seed`` of the arrays that it gets."""

    backend: Backend
    target: Target
    mode: Mode = "native"
    seed: int = 0

    @property
    def length(self) -> int:
        """Tokens of a sequence. A multiple of every usual block; fewer for an interpreter."""
        return 256 if self.mode == "interpret" else 512

    @property
    def few_heads(self) -> dict[str, int]:
        """One KV head, if that is taken: a kernel that divides keys among processors does so there."""
        few = {"num_heads": 4, "num_kv_heads": 1}
        return few if self.spec(**few) is not None else {}

    def spec(self, *, length: int | None = None, **fields: Any) -> AttentionSpec | None:
        """The first problem with these fields that the backend takes, or None.

        What ``fields`` leaves open is chosen: gradients before none, causal before not, grouped heads before equal.
        """
        length = length or self.length
        fields = {"batch": 1, "query_length": length, "key_value_length": length, **fields}
        choices = itertools.product((True, False), (True, False), _HEADS, _HEAD_DIMS)
        for needs_grad, is_causal, (heads, kv_heads), head_dim in choices:
            open_ones = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
            spec = AttentionSpec(**{"needs_grad": needs_grad, "is_causal": is_causal, **open_ones, **fields})
            if self.takes(spec):
                return spec
        return None

    def takes(self, spec: AttentionSpec) -> bool:
        """Whether the backend takes the problem."""
        return bool(support(self.backend, spec, self.target, self.mode))

    def dtypes(self, **fields: Any) -> Iterator[tuple[str, AttentionSpec]]:
        """float32 and bfloat16 with the problem of these fields, as far as they are taken; float16 if neither is."""
        found = {dtype: spec for dtype in DTYPES[:3] if (spec := self.spec(dtype=dtype, **fields)) is not None}
        if len(found) > 1:
            found.pop("float16", None)
        yield from found.items()

    def fault(self, spec: AttentionSpec) -> str:
        """One sentence where the output has not the contract's shape or dtype; else empty."""
        made = plan(self.backend, spec, target=self.target, mode=self.mode)
        return shapes.fault(lambda *x: made.run(*x[:3])[0], spec, self.drawn(spec), NO_TERMS)

    def drawn(self, spec: AttentionSpec, *, another: bool = False) -> tuple[np.ndarray, ...]:
        """(query, key, value, cotangent) of the spec's shapes; ``another`` draw has other numbers."""
        return problems.drawn(spec, [self.seed, int(another)])

    def key_blocks(self, spec: AttentionSpec, layout: Layout) -> tuple[int, ...]:
        """How many keys each of the kernel's blocks holds, if it says so (``Plan.key_blocks``)."""
        return plan(self.backend, spec, layout, target=self.target, mode=self.mode).key_blocks

    def run(
        self,
        spec: AttentionSpec,
        inputs: tuple[Any, ...],
        layout: Layout = Layout(),  # noqa: B008 (a frozen value)
        terms: Terms = NO_TERMS,
    ) -> Arrays:
        """Output and gradients of (query, key, value, cotangent), by quantity."""
        layout, terms = jax.tree.map(jnp.asarray, (layout, terms))
        inputs = tuple(map(jnp.asarray, inputs))
        compute = problems.traced(self.backend, spec, self.target, self.mode)
        try:
            found = compute(layout, terms, *inputs)
        except jax.errors.JAXTypeError:  # it reads its layout while it plans
            problem = problems.Problem(spec, layout, terms, inputs, {}, {}, compute)
            run = problems.planned(self.backend, problem, self.target, self.mode)
            found = problems.compiled(run, problem)(*inputs)
        return {name: np.asarray(found[name]) for name in problems.QUANTITIES if name in found}  # jit sorts its names


def difference(results: Mapping[str, np.ndarray], again: Mapping[str, np.ndarray]) -> str:
    """Which numbers differ, and by how many units in the last place; empty where every bit is the same."""
    for name, x in results.items():
        y = again[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name}: another shape or dtype"
        differ = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        if differ.any():
            a, b = x[differ], y[differ]
            finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
            far = f"by at most {np.abs(_ordered(a) - _ordered(b)).max()} ulp" if finite else "some to NaN or infinity"
            return f"{name}: {differ.sum()} of {x.size} numbers differ, {far}"
    return ""


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats, one apart where the floats are neighbours."""
    bits = x.view(np.dtype(f"i{x.dtype.itemsize}")).astype(np.int64)
    return np.where(bits < 0, -(2 ** (8 * x.dtype.itemsize - 1)) - bits, bits)
