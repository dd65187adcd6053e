"""The attention calls that a step makes: found while JAX traces the step, so that nothing is computed.

What is found: every plan of this package that runs (``backends.attention``, ``attention_fn``, the models),
``jax.nn.dot_product_attention``, and ``dot_product_attention`` of flax's nnx and linen, which their layers call.
Attention that is written out as products and a softmax is not found.

While :func:`harvest` is open, the *code* of these functions is replaced, not their names: a layer holds the function
that it was made with, and a new name in a module would not reach it. Each call passes its arrays through a marker, an
operation that changes nothing. In a traced program the markers say how often each call stands there, whether it is
differentiated, and under which batch axes of ``jax.vmap``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters import ad, batching, mlir

from attnsuite.backends import AttentionSpec
from attnsuite.backends.contract import Plan

_KEYWORD = "attnsuite_harvest"  # the keyword-only argument through which replaced code finds its harvest
_PASSED_THROUGH = frozenset({"jax", "jaxlib", "flax", "jaxtyping", "beartype"})  # packages between call and user


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One attention call: its problem, and where the user's code makes it.

    ``spec`` is None where the contract has no such problem; ``unsaid`` then says why, and otherwise what the call asks
    for beside the spec, as sentences. ``place`` is ``file:line``. ``dtype`` is that to compute in; None: the arrays'.
    """

    function: str
    place: str
    spec: AttentionSpec | None
    unsaid: tuple[str, ...] = ()
    dtype: Any = None


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a marker says of its call: its index in ``harvest.calls``, and how JAX transformed it."""

    owner: Harvest
    index: int
    differentiated: bool = False
    batch: int = 1


class Harvest:
    """The calls that were found, in the order in which Python made them, and how often each is made."""

    def __init__(self, instead: Callable[..., Any] | None = None) -> None:
        self.calls: list[Call] = []
        self.marks: dict[int, Mark] = {}  # of each call the last, which has gone through most transformations
        self.counts: Counter[Mark] | None = None  # of a traced program; None: one for each call of Python
        self.unsure: dict[Mark, dict[str, None]] = {}  # why the count of a mark is not that of a run, as sentences
        self.masks: dict[int, np.ndarray] | None = None  # of calls that ran (:func:`executed`): the first mask array
        self.varying: set[int] = set()  # calls that ran again with another one: in a scan, a vmap, a jitted layer
        self.instead = instead  # computes a call, or returns NotImplemented
        self._thread = threading.get_ident()
        self._inside = False  # an attention function that calls another one is one call

    def found(self) -> Counter[Mark]:
        """How often each marked call is made."""
        return Counter(self.marks.values()) if self.counts is None else self.counts

    def call(self, read: Callable[..., Call], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``original`` with marked arrays, and remember the call."""
        if self._inside or threading.get_ident() != self._thread:
            return original(*args, **kwargs)
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        names = [name for name in ("query", "key", "value") if arguments[name] is not None]
        arrays = [jnp.asarray(arguments[name]) for name in names]
        self.calls.append(read(arrays, arguments))
        self._inside, found = True, NotImplemented
        try:
            if self.instead is not None:
                found = self.instead(self.calls[-1], arrays, arguments)
            else:
                index = len(self.calls) - 1
                if self.masks is not None and arguments.get("mask") is not None:
                    jax.debug.callback(functools.partial(self._saw, index), arguments["mask"])
                arguments.update(zip(names, _mark(arrays, Mark(self, index)), strict=True))
            return original(*bound.args, **bound.kwargs) if found is NotImplemented else found
        finally:
            self._inside = False

    def _saw(self, index: int, mask: Any) -> None:
        if self.masks is not None and not np.array_equal(self.masks.setdefault(index, np.array(mask)), mask):
            self.varying.add(index)


@contextlib.contextmanager
def harvest(into: Harvest | None = None) -> Iterator[Harvest]:
    """Collect the attention calls that this thread makes inside the ``with`` block, in a new harvest or ``into`` one.

    The block computes what it would compute anyway; ``jax.eval_shape(step, ...)`` inside computes nothing. A call is
    counted as often as Python makes it: once where a layer is scanned, or jitted and called again. :func:`traced`
    counts these too. Functions that JAX compiled before are traced anew, once for each harvest. Other threads run what
    they always run, and are not collected. At the end of the block, also after an exception, everything is as it was.
    Raises RuntimeError where a harvest is open already.

    >>> x = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
    >>> with harvest() as found:
    ...     _ = jax.eval_shape(jax.nn.dot_product_attention, x, x, x)
    >>> found.calls[0].spec.query_length
    8
    """
    from flax import linen, nnx  # noqa: PLC0415 (a second of time, for a harvest alone)

    new = into or Harvest()
    functions: list[tuple[Any, Callable[..., Call]]] = [
        (Plan.run, _read_plan),
        (jax.nn.dot_product_attention, _read_jax),
        (nnx.dot_product_attention, functools.partial(_read_flax, "flax.nnx.dot_product_attention")),
        (linen.dot_product_attention, functools.partial(_read_flax, "flax.linen.dot_product_attention")),
    ]
    if any(_KEYWORD in (function.__kwdefaults__ or {}) for function, _ in functions):
        raise RuntimeError("a harvest is open already, perhaps in another thread; close it first.")
    with contextlib.ExitStack() as stack:
        for function, read in functions:
            stack.enter_context(_replaced(function, functools.partial(new.call, read)))
        stack.enter_context(_context()(new))  # nothing that was traced outside is used inside, nor the other way round
        yield new


def traced(step: Callable[..., Any], *args: Any) -> Harvest:
    """The attention calls of ``step(*args)``, counted in its traced program. Nothing is computed.

    Arrays among the arguments may be ``jax.ShapeDtypeStruct``; everything that is no array stays as it is. The body of
    a scan counts as often as it runs, that of a while loop once, and each branch of a condition once; ``unsure`` says
    of which calls. What ``jax.checkpoint`` computes again in the backward pass does not count again. Inside
    ``shard_map`` shapes and counts are those of one device. Raises what ``step`` raises.
    """
    leaves, tree = jax.tree.flatten(args)
    traced_at = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def of_arrays(*arrays: Any) -> list[Any]:
        inputs = list(leaves)
        for i, array in zip(traced_at, arrays, strict=True):
            inputs[i] = array
        return [leaf for leaf in jax.tree.leaves(step(*jax.tree.unflatten(tree, inputs))) if _is_array(leaf)]

    with harvest() as found:
        program = jax.make_jaxpr(of_arrays)(*(leaves[i] for i in traced_at))
    found.counts = Counter()
    _count(program.jaxpr, 1, found)
    return found


def executed(step: Callable[..., Any], *args: Any) -> Harvest | None:
    """The attention calls of ``step(*args)`` with the mask arrays that they are given, from one run of the step.

    None where an argument has a shape and no numbers. Raises what ``step`` raises.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        return None
    with harvest() as found:
        found.masks = {}
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(step(*args)) if _is_array(leaf)])
        jax.effects_barrier()
    return found


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


# Operations whose bodies run as often as the numbers say.
_BY_NUMBERS = {
    "while": "how often its while loop runs (counted once)",
    "cond": "which branch of its condition runs (each is counted once)",
}


def _count(jaxpr: Any, times: int, found: Harvest, unsure: tuple[str, ...] = ()) -> None:
    """Add the marks in a program that runs ``times`` times, as far as that is sure."""
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive is _MARKER:
            if params["mark"].owner is found:
                assert found.counts is not None  # noqa: S101 (for the type checker)
                found.counts[params["mark"]] += times
                found.unsure.setdefault(params["mark"], {}).update(dict.fromkeys(unsure))
        elif "prevent_cse" in params and params.get("differentiated"):
            continue  # jax.checkpoint in a backward pass: the calls of the forward pass again
        else:
            name = equation.primitive.name
            inner = times * params.get("length", 1) if name == "scan" else times
            reasons = (*unsure, _BY_NUMBERS[name]) if name in _BY_NUMBERS else unsure
            for value in params.values():
                for each in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(each, ClosedJaxpr | core.Jaxpr):
                        _count(getattr(each, "jaxpr", each), inner, found, reasons)


def _mark(arrays: Sequence[Any], mark: Mark) -> list[Any]:
    mark.owner.marks[mark.index] = mark
    return _MARKER.bind(*arrays, mark=mark)


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], *, mark: Mark) -> tuple[Any, Any]:
    return _mark(primals, dataclasses.replace(mark, differentiated=True)), list(tangents)


def _batched(arrays: Sequence[Any], axes: Sequence[Any], *, mark: Mark) -> tuple[Any, Any]:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    return _mark(arrays, dataclasses.replace(mark, batch=mark.batch * size)), list(axes)


def _marker() -> core.Primitive:
    """The marker: gives back the arrays that it gets."""
    marker = core.Primitive("attention_call")
    marker.multiple_results = True
    marker.def_impl(lambda *arrays, **_: list(arrays))
    marker.def_abstract_eval(lambda *arrays, **_: list(arrays))
    ad.primitive_jvps[marker] = _differentiated
    batching.primitive_batchers[marker] = _batched
    mlir.register_lowering(marker, lambda _, *arrays, **__: list(arrays))
    return marker


_MARKER = _marker()


@functools.cache
def _context() -> Any:
    """A part of the key under which JAX keeps what it traced."""
    return jax.make_user_context()


@contextlib.contextmanager
def _replaced(function: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Inside the block ``function`` runs ``call(original, *args, **kwargs)``, whoever holds it."""
    names = ("__code__", "__defaults__", "__kwdefaults__")
    before = {name: getattr(function, name) for name in names}
    original = type(function)(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(function)  # flax's linen passes what it finds there
    function.__kwdefaults__ = {_KEYWORD: functools.partial(call, original)}
    function.__defaults__ = None
    function.__code__ = _pass_on.__code__
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(function, name, value)
        del function.__signature__


def _pass_on(*args: Any, attnsuite_harvest: Any, **kwargs: Any) -> Any:
    return attnsuite_harvest(*args, **kwargs)


def _read_plan(arrays: Sequence[Any], arguments: dict[str, Any]) -> Call:
    return Call("attnsuite", _place(), arguments["self"].spec)


def _read_jax(arrays: Sequence[Any], arguments: dict[str, Any]) -> Call:
    scale = arguments["scale"]
    computed = isinstance(scale, Tracer)  # such as 1 / jnp.sqrt(d) inside of jax.jit
    fields = {
        "scale": None if scale is None or computed else float(scale),
        "is_causal": arguments["is_causal"],
        "local_window_size": arguments["local_window_size"],
        "has_seq_lengths": arguments["key_value_seq_lengths"] is not None,
        "has_mask": arguments["mask"] is not None,
        "has_bias": arguments["bias"] is not None,
        "return_log_sum_exp": arguments["return_residual"],
    }
    unsaid = {
        "lengths of the queries": arguments["query_seq_lengths"] is not None,
        "a scale that the program computes": computed,
    }
    return _call("jax.nn.dot_product_attention", arrays, fields, unsaid)


def _read_flax(function: str, arrays: Sequence[Any], arguments: dict[str, Any]) -> Call:
    rate = arguments["dropout_rate"]
    dropout = f"dropout of {rate:g} on the attention weights"
    sown = "attention weights that are sown"
    unsaid = {dropout: rate > 0 and not arguments["deterministic"], sown: arguments["module"] is not None}
    fields = {
        "is_causal": arguments.get("is_causal", False),
        "has_mask": arguments["mask"] is not None,
        "has_bias": arguments["bias"] is not None,
    }
    return _call(function, arrays, fields, unsaid, arguments["dtype"])


def _call(
    function: str, arrays: Sequence[Any], fields: dict[str, Any], asked: dict[str, bool], dtype: Any = None
) -> Call:
    """The call of these arrays; ``fields`` are those of its spec beside shapes and dtype.

    ``asked`` has a sentence for what no field says, and whether the call asks for it.
    """
    unsaid = tuple(sentence for sentence, is_asked in asked.items() if is_asked)
    query, key, value = (x.shape for x in arrays)
    try:
        spec = AttentionSpec(
            batch=math.prod(query[:-3]),
            query_length=query[-3],
            key_value_length=key[-3],
            num_heads=query[-2],
            num_kv_heads=key[-2],
            head_dim=query[-1],
            value_head_dim=value[-1],
            dtype=str(jnp.result_type(*arrays) if dtype is None else jnp.dtype(dtype)),
            **fields,
        )
    except ValueError as error:
        spec, unsaid = None, (*unsaid, str(error))
    return Call(function, _place(), spec, unsaid, dtype)


def _place() -> str:
    """File and line of the innermost frame that is neither this package's interface nor a library around the call."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and _is_passed_through(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    if frame is None:
        return "unknown place"
    if str(frame.f_globals.get("__name__", "")).startswith("attnsuite.suite"):  # a method of a library is the step
        return "the step itself"
    path, here = Path(frame.f_code.co_filename).resolve(), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{frame.f_lineno}"


def _is_passed_through(module: str) -> bool:
    top, _, _ = module.partition(".")
    inside = module == __name__ or module.startswith("attnsuite.backends")
    return inside or top in _PASSED_THROUGH or (top in sys.stdlib_module_names and top != "__main__")
