"""Attention as people call it: eagerly, in a jitted step, under ``vmap``, in a stack of layers, in flax's own layers.

Every row makes the same calls, each with new arrays (of a flax layer: a new token). The row ``library`` is what the
caller has without this project: ``jax.nn.dot_product_attention``, or the attention of flax's layer. Ratios are to this
row. The judge is the float64 oracle in place of the attention function; the error of ``library`` is the yardstick.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnsuite.backends import (
    AttentionSpec,
    Layout,
    Target,
    Terms,
    attention,
    attention_fn,
    kv_cache,
    make_spec,
    oracle,
    resolve,
)
from attnsuite.backends.kv_layout import swap
from attnsuite.models import TextFile

from ..cell import Cell, Means, Prepared, Request
from ..errors import InputError
from ..measure import execution
from ..measure.program import Draw, Program, named_outputs, renewed, with_gradients
from ..measure.tensor_errors import judge_tensors, save_reference
from ..record import TensorError
from ..typed import Count, Seed
from .kind import SHORT_DTYPE, Dtype, Kind, cell, check_fields, name_case, of_backends

Way = Literal["eager", "jit", "vmap", "layers", "nnx", "linen"]
Operand = Literal["none", "causal", "mask", "key_mask", "bias", "learned_bias", "lengths"]
LIBRARY = "library"
_FLAX = ("nnx", "linen")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallerCase:
    """One way to call attention.

    ``eager`` is a call outside of ``jit``, ``jit`` a jitted one, ``vmap`` one mapped over the batch. ``layers`` is a
    jitted chain of L = ``layers`` calls with the same keys and values, each with the sum of its query and 1/L of its
    output as the next one's query: rounding does not grow along the chain, and each row has a share in the gradient.
    ``nnx`` and ``linen`` are a decode step of flax's multi-head attention with its own cache, donated from step to
    step; flax passes an array as the mask. ``query_length`` is the number of query tokens (default: ``sequence``).
    ``operand`` is what comes beside the three arrays: ``is_causal=True``; a boolean ``mask`` [1, 1, T, S] that says the
    same; a ``key_mask`` [B, 1, 1, S] of padding; a ``bias`` [1, N, T, S], whose own gradient is asked for too if it is
    a ``learned_bias``; or ``lengths`` of the keys. A jitted decode step may read pages of ``page_size`` slots, in any
    order, and numbers of ``kv_dtype`` with a scale per slot and head; ``library`` gathers and multiplies them out
    first. Raises InputError for a field that does not fit.
    """

    kind: Literal["caller"] = "caller"
    way: Way
    sequence: Count
    name: str = ""
    batch: Count = 1
    query_length: Count | None = None
    heads: Count = 8
    kv_heads: Count = 8
    head_dim: Count = 64
    dtype: Dtype = "float32"
    operand: Operand = "none"
    gradient: bool = False
    layers: Count = 1
    kv_layout: Literal["NHD", "HND"] = "NHD"
    page_size: Count | None = None
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, _name(self))
        if self.way in _FLAX and (self.tokens != 1 or self.gradient or self.heads != self.kv_heads):
            raise InputError(
                f"case {self.name}: way = {self.way!r} is a decode step of flax's layer; use query_length = 1, "
                "gradient = false, and kv_heads equal to heads."
            )
        if self.way in _FLAX and self.operand != "none":
            raise InputError(f"case {self.name}: flax's layer makes the mask of its cache; leave operand at 'none'.")
        if self.way in _FLAX and self.kv_layout != "NHD":
            raise InputError(f"case {self.name}: flax's layer keeps its cache as 'NHD'; leave kv_layout out.")
        if self.way != "layers" and self.layers != 1:
            raise InputError(f"case {self.name}: layers = {self.layers} is for way = 'layers'; leave it at 1.")
        if self.way == "vmap" and self.gradient:
            raise InputError(f"case {self.name}: way = 'vmap' is a forward pass; leave gradient at false.")
        if self.operand == "learned_bias" and not self.gradient:
            raise InputError(f"case {self.name}: operand = 'learned_bias' needs gradient = true; or use 'bias'.")
        if self.is_cache and (self.way != "jit" or self.tokens != 1 or self.gradient or self.operand != "none"):
            raise InputError(
                f"case {self.name}: page_size and kv_dtype are of a decode step's cache; use way = 'jit', "
                "query_length = 1 and gradient = false, and leave operand at 'none'."
            )
        if self.page_size is not None and self.sequence % self.page_size:
            raise InputError(
                f"case {self.name}: page_size = {self.page_size} does not divide sequence = {self.sequence}."
            )
        if self.operand in ("causal", "mask") and self.tokens != self.sequence:
            raise InputError(
                f"case {self.name}: operand = {self.operand!r} needs as many queries as keys; leave query_length out."
            )

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.sequence if self.query_length is None else self.query_length

    @property
    def is_cache(self) -> bool:
        """Whether keys and values are paged or quantised."""
        return self.page_size is not None or self.kv_dtype is not None

    @property
    def pages(self) -> int | None:
        """Pages of the pool."""
        return None if self.page_size is None else self.batch * self.sequence // self.page_size


def _name(case: CallerCase) -> str:
    parts = [case.way, f"s{case.sequence}", f"h{case.heads}k{case.kv_heads}", f"d{case.head_dim}"]
    options = {
        f"b{case.batch}": case.batch != 1,
        f"q{case.tokens}": case.tokens != case.sequence,
        case.operand.replace("_", "-"): case.operand != "none",
        f"l{case.layers}": case.layers != 1,
        "gradient": case.gradient,
        "hnd": case.kv_layout == "HND",
        f"page{case.page_size}": case.page_size is not None,
        str(case.kv_dtype): case.kv_dtype is not None,
    }
    return "-".join([*parts, *(text for text, wanted in options.items() if wanted), SHORT_DTYPE[case.dtype]])


def caller_spec(case: CallerCase) -> AttentionSpec:
    """The attention problem that the call asks for."""
    return AttentionSpec(
        batch=1 if case.way == "vmap" else case.batch,
        query_length=case.tokens,
        key_value_length=case.sequence,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        is_causal=case.operand == "causal",
        has_mask=case.operand in ("mask", "key_mask") or case.way in _FLAX,
        has_bias=case.operand in ("bias", "learned_bias"),
        has_seq_lengths=case.operand == "lengths",
        needs_grad=case.gradient,
        kv_layout=case.kv_layout,
        page_size=case.page_size,
        num_pages=case.pages,
        kv_dtype=case.kv_dtype,
    )


def _exact(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> Array:
    """Attention in float64, as a function that flax's layers can call."""
    layout, terms = Layout(mask=None if mask is None else jnp.asarray(mask, bool)), Terms(bias=bias)
    causal = bool(options.get("is_causal"))
    spec = make_spec(query, key, value, layout, terms, needs_grad=False, is_causal=causal)
    return jnp.asarray(oracle.forward(spec, layout, query, key, value, terms), jnp.float32)


def _attend(case: CallerCase, row: str) -> Callable[..., Any]:
    """The function that is called: of JAX or of this project."""
    if row == LIBRARY:
        return functools.partial(_library, case)
    options: dict[str, Any] = {"needs_grad": case.gradient, "kv_layout": case.kv_layout}
    return functools.partial(attention, backend=row, on_unavailable="raise", **options)


def _library(
    case: CallerCase,
    query: Any,
    key: Any,
    value: Any,
    *,
    page_table: Any = None,
    key_scales: Any = None,
    value_scales: Any = None,
    **options: Any,
) -> Array:
    """JAX's function, on contiguous keys and values with slots before heads."""

    def whole(x: Any, scales: Any) -> Any:
        x = x if scales is None else (x.astype(jnp.float32) * scales[..., None]).astype(case.dtype)
        x = swap(x) if case.kv_layout == "HND" else x
        return x if page_table is None else x[page_table].reshape(case.batch, case.sequence, *x.shape[2:])

    key, value = whole(key, key_scales), whole(value, value_scales)
    return jax.nn.dot_product_attention(query, key, value, implementation="xla", **options)


@dataclasses.dataclass(frozen=True, slots=True)
class _Inputs:
    """Query, key, value and the output's cotangent, and what comes ``beside`` them by its keyword."""

    arrays: tuple[Array, Array, Array, Array]
    beside: dict[str, Any]


def _inputs(case: CallerCase, draw: Draw | None = None) -> _Inputs:
    """The arguments of a call, drawn from the case's seed. The arrays are renewed by ``draw``."""
    rng = np.random.default_rng([case.seed, 3])

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)

    b, t, s, h = case.batch, case.tokens, case.sequence, case.head_dim
    slots = (b, s) if case.page_size is None else (b * s // case.page_size, case.page_size)
    query, *cache = normal(b, t, case.heads, h), normal(*slots, case.kv_heads, h), normal(*slots, case.kv_heads, h)
    scales: list[Array] = []
    if case.kv_dtype is not None:
        cache, scales = map(list, zip(*(kv_cache.quantize(x, case.kv_dtype) for x in cache), strict=True))
    key, value, *scales = map(swap, (*cache, *scales)) if case.kv_layout == "HND" else (*cache, *scales)
    lengths = np.linspace(s, (s + 1) // 2, b + 1)[1:].astype(np.int32)
    d_out = normal(b, t, case.heads, h)
    operands: dict[str, Callable[[], dict[str, Any]]] = {
        "none": lambda: dict(zip(("key_scales", "value_scales"), scales, strict=False)),
        "causal": lambda: {"is_causal": True},
        "mask": lambda: {"mask": jnp.tril(jnp.ones((1, 1, t, s), bool))},
        "key_mask": lambda: {"mask": jnp.asarray(np.arange(s) < lengths[:, None, None, None])},
        **dict.fromkeys(("bias", "learned_bias"), lambda: {"bias": normal(1, case.heads, t, s)}),
        "lengths": lambda: {"key_value_seq_lengths": jnp.asarray(lengths)},
    }
    beside = operands[case.operand]()
    if case.pages is not None:
        beside["page_table"] = jnp.asarray(rng.permutation(case.pages).astype(np.int32).reshape(b, -1))
    query, key, value, d_out = renewed((query, key, value, d_out), draw)
    return _Inputs((query, key, value, d_out), beside)


def caller_program(case: CallerCase, row: str) -> Program:
    """The program of a row (initialises JAX). An eager call and a step of flax's layer bring their own compilation."""
    if case.way in _FLAX:
        function = None if row == LIBRARY else attention_fn(row, on_unavailable="raise")
        return Program(*_flax_step(case, function), arrays=lambda outputs: outputs, renewed=(0,))
    return _attention_program(case, row, _inputs(case))


def _attention_program(case: CallerCase, row: str, inputs: _Inputs) -> Program:
    query, key, value, d_out = inputs.arrays
    flags = {name: x for name, x in inputs.beside.items() if isinstance(x, bool)}
    operands = {name: x for name, x in inputs.beside.items() if name not in flags}
    attend = functools.partial(_attend(case, row), **flags)
    if case.way == "vmap":
        mapped = lambda q, k, v, x: attend(q[None], k[None], v[None], **x)[0]  # noqa: E731 (as a caller writes it)
        axis = None
        if case.operand in ("key_mask", "lengths"):  # one for each entry
            axis, operands = 0, {name: x[:, None] for name, x in operands.items()}
        return Program(jax.vmap(mapped, in_axes=(0, 0, 0, axis)), (query, key, value, operands), renewed=(0, 1, 2))

    def call(query: Any, key: Any, value: Any, operands: Any) -> Any:
        out = attend(query, key, value, **operands)
        for _ in range(1, case.layers):
            query = query + out / case.layers
            out = attend(query, key, value, **operands)
        return out

    compiles_itself = (lambda outputs: outputs) if case.way == "eager" else None
    if not case.gradient:
        return Program(call, (query, key, value, operands), compiles_itself, renewed=(0, 1, 2))

    def both(query: Any, key: Any, value: Any, d_out: Any, operands: Any) -> Any:
        if case.operand == "learned_bias":
            return with_gradients(lambda q, k, v, x: call(q, k, v, {"bias": x}))(
                query, key, value, operands["bias"], d_out
            )
        return with_gradients(lambda q, k, v: call(q, k, v, operands))(query, key, value, d_out)

    return Program(both, (query, key, value, d_out, operands), compiles_itself, renewed=(0, 1, 2, 3))


def _flax_step(
    case: CallerCase, attend: Callable[..., Any] | None, draw: Draw | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A decode step of flax's layer at the last slot of a full cache, and its token."""
    features, layer_args = case.heads * case.head_dim, {} if attend is None else {"attention_fn": attend}
    rng = np.random.default_rng([case.seed, 3])
    cached = (case.batch, case.sequence, case.heads, case.head_dim)
    keys, values = (jnp.asarray(rng.standard_normal(cached, np.float32), case.dtype) for _ in range(2))
    token = jnp.asarray(rng.standard_normal((case.batch, 1, features), np.float32), case.dtype)
    dtypes: dict[str, Any] = {"dtype": jnp.dtype(case.dtype), "param_dtype": jnp.dtype(case.dtype)}
    make = {"nnx": _nnx_step, "linen": _linen_step}[case.way]
    step, state = make(case, {**layer_args, **dtypes}, keys, values)
    step = step if attend is _exact else jax.jit(step, donate_argnums=0)
    state = [state]

    def run(token: Array) -> Array:
        out, state[0] = step(state[0], token)
        return out

    return run, renewed((token,), draw)


def _nnx_step(case: CallerCase, options: dict[str, Any], keys: Array, values: Array) -> tuple[Any, Any]:
    from flax import nnx  # noqa: PLC0415 (only these cells need it)

    features = case.heads * case.head_dim
    layer = nnx.MultiHeadAttention(
        num_heads=case.heads, in_features=features, decode=True, rngs=nnx.Rngs(case.seed), **options
    )
    layer.init_cache((case.batch, case.sequence, features), dtype=options["dtype"])
    held: Any = layer  # flax declares the cache of a layer as absent
    held.cached_key[...], held.cached_value[...] = keys, values
    graph, state = nnx.split(layer)

    def step(state: Any, token: Array) -> tuple[Array, Any]:
        layer: Any = nnx.merge(graph, state)
        layer.cache_index[...] = jnp.asarray(case.sequence - 1, layer.cache_index[...].dtype)
        return layer(token), nnx.state(layer)

    return step, state


def _linen_step(case: CallerCase, options: dict[str, Any], keys: Array, values: Array) -> tuple[Any, Any]:
    from flax import linen  # noqa: PLC0415 (as above)

    layer = linen.MultiHeadDotProductAttention(num_heads=case.heads, decode=True, **options)
    shape = jnp.zeros((case.batch, case.sequence, case.heads * case.head_dim), options["dtype"])
    made: Any = layer.init(jax.random.key(case.seed), shape)
    index = jnp.asarray(case.sequence - 1, made["cache"]["cache_index"].dtype)
    cache = {"cached_key": keys, "cached_value": values}

    def step(cache: Any, token: Array) -> tuple[Array, Any]:
        variables = {"params": made["params"], "cache": {**cache, "cache_index": index}}
        out, changed = layer.apply(variables, token, mutable=["cache"])
        return out, {name: changed["cache"][name] for name in cache}

    return step, cache


def _expected(case: CallerCase, inputs: _Inputs) -> dict[str, Any]:
    """Output and gradients in float64, through all layers."""
    query, key, value, d_out = inputs.arrays
    spec = dataclasses.replace(caller_spec(case), batch=case.batch)
    of_layout, of_terms = (
        {name: inputs.beside.get(name) for name in names}
        for names in (("mask", "key_value_seq_lengths", "page_table"), ("bias", "key_scales", "value_scales"))
    )
    layout, terms, queries = Layout(**of_layout), Terms(**of_terms), list[Any]([query])
    out = oracle.forward(spec, layout, query, key, value, terms)
    for _ in range(1, case.layers):
        queries.append(queries[-1] + out / case.layers)
        out = oracle.forward(spec, layout, queries[-1], key, value, terms)
    found: dict[str, Any] = {"out": out}
    if case.gradient:
        others = ("dk", "dv", "dbias") if case.operand == "learned_bias" else ("dk", "dv")
        of_query: Any = 0
        of_others: dict[str, Any] = dict.fromkeys(others, 0)
        for layer in reversed(queries):  # of the last layer the output alone, of the others a sum, has a gradient
            of_out = d_out if layer is queries[-1] else of_query / case.layers
            slopes = oracle.gradients(spec, layout, layer, key, value, of_out, terms=terms)
            of_query, of_others = of_query + slopes["dq"], {n: x + slopes[n] for n, x in of_others.items()}
        found |= {"dq": of_query, **of_others}
    return found


def _expected_whole(case: CallerCase, draw: Draw | None) -> dict[str, Any]:
    """Of the whole call; of flax's layer its output around attention in float64."""
    if case.way not in _FLAX:
        return _expected(case, _inputs(case, draw))
    function, arguments = _flax_step(case, _exact, draw)
    return {"out": np.asarray(function(*arguments)).astype(np.float64)}


def _of_one_head(case: CallerCase, inputs: _Inputs, choice: int) -> tuple[CallerCase, _Inputs, dict[str, Any]]:
    """A sequence and the heads of one KV head as a call of their own; and where they are in each output.

    A learned bias has one gradient for the batch, which stays whole then.
    """
    entry, kv_head = choice % case.batch, choice // case.batch % case.kv_heads
    group = case.heads // case.kv_heads
    batch, heads, kv = (
        slice(None) if case.operand == "learned_bias" else slice(entry, entry + 1),
        slice(kv_head * group, (kv_head + 1) * group),
        slice(kv_head, kv_head + 1),
    )
    of_keys = (batch, kv) if case.kv_layout == "HND" else (batch, slice(None), kv)
    at = {"out": (batch, slice(None), heads), "dq": (batch, slice(None), heads), "dk": of_keys, "dv": of_keys}
    at["dbias"] = slice(None), heads
    query, key, value, d_out = inputs.arrays
    cut = {"bias": (slice(None), heads), "mask": (slice(None) if case.operand == "mask" else batch,)}
    cut["key_value_seq_lengths"] = (batch,)
    beside = {name: x[cut[name]] if name in cut else x for name, x in inputs.beside.items()}
    arrays = query[at["out"]], key[of_keys], value[of_keys], d_out[at["out"]]
    return dataclasses.replace(case, batch=len(arrays[0]), heads=group, kv_heads=1), _Inputs(arrays, beside), at


class Caller(Kind):
    """The kind of :class:`CallerCase`."""

    titles: ClassVar = {"caller": "as people call it"}
    case: ClassVar = CallerCase
    judges_in_subprocess: ClassVar = True
    baseline: ClassVar = LIBRARY

    def rows(self, case: CallerCase) -> tuple[str, ...]:
        """The row of the library."""
        return (LIBRARY,)

    def cells(self, case: CallerCase, request: Request) -> Iterable[Cell]:
        """The library's cell, and one per backend."""
        spec, target = caller_spec(case), Target.here()
        found = of_backends(case, request, lambda row: [("attention", resolve(row, spec, target))])
        if LIBRARY not in request.rows:
            return found
        return [cell(case, LIBRARY, resolved=LIBRARY, mode="native", exact=True), *found]

    def write_reference(self, case: CallerCase, path: Path, text: TextFile | None, draw: Draw | None) -> None:
        """The outputs in float64, and the library's errors."""
        outputs = named_outputs(execution.outputs_of(caller_program(case, LIBRARY), draw))
        save_reference(path, _expected_whole(case, draw), outputs, case.dtype)

    def recheck(self, case: CallerCase, outputs: Mapping[str, Any], draw: Draw, choice: int) -> dict[str, TensorError]:
        """The heads of one KV head, by the oracle; of a cache, and of flax's layer that mixes heads, everything."""
        if case.way in _FLAX or case.is_cache:
            expected, found = _expected_whole(case, draw), outputs
            library = execution.outputs_of(caller_program(case, LIBRARY), draw)
        else:
            part, inputs, at = _of_one_head(case, _inputs(case, draw), choice)
            expected, found = _expected(part, inputs), {name: outputs[name][at[name]] for name in outputs}
            library = execution.outputs_of(_attention_program(part, LIBRARY, inputs))
        return judge_tensors(found, expected, named_outputs(library), case.dtype)

    def prepare(self, cell: Cell, case: CallerCase, means: Means) -> Prepared:
        """Compile the cell and run it once."""
        _, timed, outcome = execution.execute(caller_program(case, cell.row), means)
        return Prepared(outcome, timed, lambda seed: named_outputs(timed.outputs(Draw(seed))), named_outputs)


CALLER = Caller()
