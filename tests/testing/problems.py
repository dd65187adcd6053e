"""The named problems (``cases.py``) with their arrays and their oracle results.

:func:`problem` makes the arrays of a case (seeded by its name), the float64 results and the judge's verdict on the
standard backend, once per session.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import AttentionSpec, Backend, Layout, Target, Terms, make_spec, oracle, plan
from attnsuite.backends.contract import NO_TERMS
from attnsuite.backends.features import Mode
from attnsuite.backends.standard import STANDARD

from .caches import cached
from .cases import CASES as CASES
from .cases import Case

QUANTITIES = ("output", "dq", "dk", "dv")  # of every problem; some have log_sum_exp, or the gradient of a term, too
PER_HEAD = ("dsinks", "dalibi")  # gradients with one number per head
Inputs = tuple[Any, ...]  # query, key, value (None: in the keys), cotangent of the output


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A case with its arrays and the results to compare with, by quantity.

    The quantities are output, dq, dk and dv, log_sum_exp where the spec asks for it, and the gradient of each term.
    ``standard_run`` is the compiled standard backend, kept because compiling is where the suite's time goes.
    """

    spec: AttentionSpec
    layout: Layout
    terms: Terms
    inputs: Inputs
    expected: dict[str, np.ndarray]
    standard: dict[str, oracle.Verdict]
    standard_run: Callable[..., dict[str, jax.Array]]

    @functools.cached_property
    def unseen_rows(self) -> np.ndarray:
        """[batch, query length, heads]: rows that may attend to nothing."""
        return oracle.unseen_rows(self.spec, self.layout, self.terms)

    @functools.cached_property
    def unseen_keys(self) -> np.ndarray:
        """[batch, key length, KV heads]: keys that nobody attends to."""
        return oracle.unseen_keys(self.spec, self.layout, self.terms)

    @functools.cached_property
    def hidden_rows(self) -> np.ndarray:
        """Those of :attr:`unseen_rows` that see nothing by lengths, padding and documents alone."""
        return oracle.unseen_rows(*self._hiding)

    @functools.cached_property
    def hidden_keys(self) -> np.ndarray:
        """Those of :attr:`unseen_keys` that nobody sees by lengths, padding and documents alone."""
        return oracle.unseen_keys(*self._hiding)

    @property
    def _hiding(self) -> tuple[AttentionSpec, Layout]:
        """The problem with no other mask than lengths and segments."""
        bare = dataclasses.replace(
            self.spec,
            is_causal=False,
            local_window_size=None,
            chunk_size=None,
            mask_function=None,
            has_mask=False,
            has_bias=False,
        )
        return bare, dataclasses.replace(self.layout, mask=None)

    def verdict(self, name: str, result: jax.Array) -> oracle.Verdict:
        """The judge's verdict on one quantity; what nobody sees has to be exactly zero."""
        rows, keys = self.unseen_rows, self.unseen_keys
        zero = {"output": rows, "dq": rows, "dk": keys, "dv": keys}.get(name)
        return judge(name, result, self.expected[name], self.standard[name], self.spec, zero)


def arrays(case: Case, name: str, dtype: str | None = None, seed: int = 0) -> tuple[Layout, Terms, Inputs]:
    """The layout, the terms and (query, key, value, cotangent) of a case, drawn by its name and ``seed``."""
    of_name = zlib.crc32(name.encode())
    rng = np.random.default_rng((of_name, seed) if seed else of_name)
    B, T, S, N, K, H, Hv = case.sizes
    # jnp.asarray of JAX 0.12 would compile a copy for every shape.
    made = jax.device_put(case.layout(case.sizes, rng))
    terms = Terms(**{field.name: made.pop(field.name, None) for field in dataclasses.fields(Terms)})
    layout = Layout(**made)
    big = case.magnitude
    shapes = (((B, T, N, H), big), ((B, S, K, H), big), ((B, S, K, Hv), 1.0), ((B, T, N, Hv), 1.0))
    # NumPy converts: a conversion by JAX compiles for every shape.
    query, key, value, cotangent = (
        jax.device_put((rng.standard_normal(shape) * size).astype(jnp.dtype(dtype or case.dtype)))
        for shape, size in shapes
    )
    if case.cache is not None:
        layout, terms, key, value = cached(case.cache, layout, terms, key, value, rng)
    if case.options.get("kv_layout") == "HND":
        key, value, of_keys, of_values = (
            None if x is None else jnp.swapaxes(x, 1, 2) for x in (key, value, terms.key_scales, terms.value_scales)
        )
        terms = dataclasses.replace(terms, key_scales=of_keys, value_scales=of_values)
    if "value_head_dim" in case.options:
        value, terms = None, dataclasses.replace(terms, value_scales=None)
    return layout, terms, (query, key, value, cotangent)


def exact(spec: AttentionSpec, layout: Layout, inputs: Inputs, terms: Terms) -> dict[str, np.ndarray]:
    """The oracle's results, by quantity."""
    query, key, value, cotangent = inputs
    found = {"output": oracle.forward(spec, layout, query, key, value, terms)}
    d_lse = None
    if spec.return_log_sum_exp:
        found["log_sum_exp"] = oracle.log_sum_exp(spec, layout, query, key, terms)
        d_lse = cotangent_of_log_sum_exp(cotangent)
    if not spec.needs_grad:
        return found
    return found | oracle.gradients(spec, layout, *inputs, d_log_sum_exp=d_lse, terms=terms)


def solve(spec: AttentionSpec, layout: Layout, inputs: Inputs, terms: Terms = NO_TERMS) -> Problem:
    """The problem of these arrays: the oracle's results and its verdict on the standard backend."""
    query, key, value, cotangent = inputs
    expected = exact(spec, layout, inputs, terms)
    standard_run = functools.partial(traced(STANDARD, spec, Target("cpu")), layout, terms)
    results = standard_run(*inputs)
    standard = {name: judge(name, results[name], expected[name], None, spec) for name in expected}
    return Problem(spec, layout, terms, (query, key, value, cotangent), expected, standard, standard_run)


@functools.cache
def problem(name: str, dtype: str | None = None, seed: int = 0) -> Problem:
    """The named problem, in its own dtype or another."""
    case = CASES[name]
    layout, terms, inputs = arrays(case, name, dtype, seed)
    return solve(spec_of(case, layout, terms, inputs), layout, inputs, terms)


def spec_of(case: Case, layout: Layout, terms: Terms, inputs: Inputs) -> AttentionSpec:
    """The spec of a case and its arrays."""
    query, key, value, _ = inputs
    return make_spec(query, key, value, layout, terms, **case.options)


def judge(
    name: str,
    actual: jax.Array,
    expected: np.ndarray,
    standard: oracle.Verdict | None,
    spec: AttentionSpec,
    zero: np.ndarray | None = None,
) -> oracle.Verdict:
    """The oracle's verdict on one quantity; the log-sum-exp and the gradient of a bias are float32 in every dtype.

    Where the log-sum-exp is -inf the result has to be so too; the rest of it is judged as a number. A gradient with one
    number per head is judged in the dtype of the input, whose rounding it carries. It is judged by its largest error
    alone, since the root-mean-square error of so few numbers varies as much.
    """
    if name in PER_HEAD:
        largest = None if standard is None else standard.max_error
        actual = actual.astype(spec.dtype) if str(actual.dtype) == "float32" else actual
        return oracle.judge(actual, expected, largest, spec.dtype, "gradient")
    dtype = "float32" if name in ("log_sum_exp", "dbias") else spec.dtype
    kind: oracle.Kind = "forward" if name in ("output", "log_sum_exp") else "gradient"
    if name == "log_sum_exp":
        zero, expected = np.isneginf(expected), np.where(np.isneginf(expected), 0.0, expected)
        result = np.asarray(actual)
        if result.shape == expected.shape:
            zero_or_one = np.where(np.isneginf(result), result.dtype.type(0.0), result.dtype.type(1.0))
            result = np.where(zero, zero_or_one, result)
        return oracle.judge(result, expected, standard, dtype, kind, zero=zero)
    return oracle.judge(actual, expected, standard, dtype, kind, zero=zero)


def cotangent_of_log_sum_exp(cotangent: jax.Array) -> jax.Array:
    """That of the output, as far as the log-sum-exp has entries, float32."""
    return cotangent[..., 0].astype(jnp.float32)


def compiled(run: Callable[..., Any], problem: Problem) -> Callable[..., dict[str, jax.Array]]:
    """``run`` as one compiled function of (query, key, value, cotangent) to all quantities of the problem."""
    spec, terms = problem.spec, problem.terms
    if spec.needs_grad:
        return forward_and_backward(run, terms, log_sum_exp=spec.return_log_sum_exp)
    return jax.jit(lambda *inputs: forward_alone(run, inputs, terms))


def forward_and_backward(
    run: Callable[..., Any], terms: Terms = NO_TERMS, *, log_sum_exp: bool = False
) -> Callable[..., dict[str, jax.Array]]:
    """``run(query, key, value)`` as one compiled function of (query, key, value, cotangent) to all quantities.

    Where there are ``terms``, ``run`` takes them as a fourth argument; with ``log_sum_exp`` it returns that too.
    """

    @jax.jit
    def compute(
        query: jax.Array, key: jax.Array, value: jax.Array | None, cotangent: jax.Array
    ) -> dict[str, jax.Array]:
        return differentiate(run, (query, key, value, cotangent), terms, log_sum_exp=log_sum_exp)

    return compute


def forward_alone(run: Callable[..., Any], inputs: Inputs, terms: Terms = NO_TERMS) -> dict[str, Any]:
    """The output of ``run``, and the log-sum-exp where it returns one: no gradient is taken."""
    found = run(*inputs[:3], terms)
    return dict(zip(("output", "log_sum_exp"), found, strict=True)) if isinstance(found, tuple) else {"output": found}


def differentiate(
    run: Callable[..., Any], inputs: Inputs, terms: Terms = NO_TERMS, *, log_sum_exp: bool = False
) -> dict[str, jax.Array]:
    """All quantities of ``run``, not compiled; arguments as of :func:`forward_and_backward`."""
    *operands, cotangent = inputs
    names = terms.given()
    result, pullback = jax.vjp(run, *operands, *((terms,) if names else ()))
    d_lse = cotangent_of_log_sum_exp(cotangent)
    gradients = pullback((cotangent, d_lse) if log_sum_exp else cotangent)
    found = dict(zip(("output", "log_sum_exp"), result, strict=True)) if log_sum_exp else {"output": result}
    found |= {name: x for name, x in zip(("dq", "dk", "dv"), gradients, strict=False) if x is not None}
    return found | {f"d{name}": getattr(gradients[3], name) for name in names}


def planned(
    backend: Backend, problem: Problem, target: Target, mode: Mode = "native", options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """``run(query, key, value, *terms)`` of a plan that is made here, outside of jit, as a model does."""
    made = plan(backend, problem.spec, problem.layout, target=target, mode=mode, options=options)
    return lambda q, k, v, terms=NO_TERMS: made.run(q, k, v, terms=terms)[0]


def planning(
    backend: Backend,
    spec: AttentionSpec,
    target: Target,
    mode: Mode = "native",
    options: Mapping[str, Any] | None = None,
) -> Callable[..., dict[str, jax.Array]]:
    """A function of (layout, terms, query, key, value, cotangent) to all quantities, which plans when it is called."""

    def compute(layout: Layout, terms: Terms, *inputs: jax.Array) -> dict[str, jax.Array]:
        made = plan(backend, spec, layout, target=target, mode=mode, options=options)

        def run(q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms = NO_TERMS) -> Any:
            return made.run(q, k, v, terms=terms)[0]

        if not spec.needs_grad:
            return forward_alone(run, inputs, terms)
        return differentiate(run, inputs, terms, log_sum_exp=spec.return_log_sum_exp)

    return compute


@functools.cache
def traced(
    backend: Backend,
    spec: AttentionSpec,
    target: Target,
    mode: Mode = "native",
    options: tuple[tuple[str, Any], ...] = (),
) -> Callable[..., dict[str, jax.Array]]:
    """:func:`planning`, compiled: it plans while it is traced."""
    return jax.jit(planning(backend, spec, target, mode, dict(options)))


def drawn(spec: AttentionSpec, seed: int | Sequence[int] = 0) -> tuple[np.ndarray, ...]:
    """(query, key, value, cotangent) of the spec's shapes, standard normal."""
    rng = np.random.default_rng(seed)
    B, T, S = spec.batch, spec.query_length, spec.key_value_length
    N, K, H, Hv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_head_dim or spec.head_dim
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv))
    return tuple(rng.standard_normal(shape, np.float32).astype(jnp.dtype(spec.dtype)) for shape in shapes)
