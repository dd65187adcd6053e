"""Kvax's own Triton kernels, unmodified, executed on a CPU from inside JAX: Triton's interpreter over NumPy buffers.

A launch becomes a ``jax.pure_callback``, without GPU, driver, torch or jax_triton. Triton's interpreter
(``triton.runtime.interpreter``, 3.6 and 3.7) is corrected where its result would silently differ from a GPU's. Each
correction has a test that fails without it (tests/backends/kvax/test_interpret.py):

- ``a and b`` on block tensors is Python's ``and`` there and keeps only ``b``, which drops Kvax's causal mask.
- ``tl.dot`` multiplies the bit patterns of bfloat16, which it holds as uint16.
- float32 to bfloat16 truncates; a GPU rounds to nearest even.
- NumPy 2.4 refuses the conversion by which Triton 3.6 takes a scalar as an index.

Products and sums are computed in float64 and rounded once, because a GPU's order of additions is not known here. The
interpreter verifies the kernels' algorithm and every cast in them.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import textwrap
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]
from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

from . import upstream

_POINTERS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}  # what Kvax's kernels take

_RUNNING = threading.RLock()  # the interpreter patches triton.language while it runs


@functools.cache
def interpreted() -> upstream.Upstream:
    """Kvax with every kernel launch executed by the interpreter. Raises the errors of importing Kvax."""
    return upstream.load(launch)


def launch(
    *args: Any,
    kernel: JITFunction,
    out_shape: Any,
    grid: tuple[int, ...],
    zeroed_outputs: Sequence[int] = (),
    **options: Any,
) -> Any:
    """Takes the place of ``jax_triton.triton_call``: the same arguments, executed on the host.

    Outputs that the kernel leaves unwritten are NaN, so that no test passes by luck. Launch parameters without a
    meaning on a CPU (``num_warps``, ``num_stages``, ``debug``) are ignored.
    """
    shapes, tree = jax.tree.flatten(out_shape)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes)
    is_array = [hasattr(x, "dtype") for x in args]
    scalars = [None if array else x for x, array in zip(args, is_array, strict=True)]

    def on_host(*arrays: Any) -> tuple[np.ndarray, ...]:
        rest = iter(arrays)
        arguments = [
            np.ascontiguousarray(next(rest)) if array else x for x, array in zip(scalars, is_array, strict=True)
        ]
        outputs = [_unwritten(shape, i in zeroed_outputs) for i, shape in enumerate(shapes)]
        execute(kernel, grid, [*arguments, *outputs], options)
        return tuple(outputs)

    arrays = [x for x, array in zip(args, is_array, strict=True) if array]
    return jax.tree.unflatten(tree, jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential"))


def execute(kernel: JITFunction, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Run every program of a launch, one after the other, writing into the NumPy arrays among ``arguments``.

    ``arguments`` are the kernel's run-time parameters in order, ``constants`` its ``tl.constexpr`` ones by name.
    """
    rest = iter(arguments)
    with _RUNNING, _interpreting() as rewritten, np.errstate(all="ignore"):
        named = {
            name: constants[name] if name in constants else _parameter(next(rest))
            for name in inspect.signature(kernel.fn).parameters
        }
        function = rewritten(kernel)
        builder = interpreter.interpreter_builder
        size = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*size)
        for index in itertools.product(*map(range, size)):
            builder.set_grid_idx(*index)
            function(**named)


def _unwritten(shape: jax.ShapeDtypeStruct, zeroed: bool) -> np.ndarray:
    floating = jnp.issubdtype(shape.dtype, jnp.floating)
    return np.full(shape.shape, np.nan if floating and not zeroed else 0, shape.dtype)


def _parameter(x: Any) -> tl.tensor:
    """A kernel parameter as the kernel sees it: a pointer to an array's memory, or a scalar."""
    if isinstance(x, np.ndarray):
        kind = tl.pointer_type(tl.str_to_ty(_POINTERS[x.dtype.name], None))
        return tl.tensor(interpreter.TensorHandle(np.array([x.ctypes.data], np.uint64), kind), kind)
    if isinstance(x, float):
        return tl.tensor(interpreter.TensorHandle(np.array([x], np.float64), tl.float64), tl.float64)  # as jax-triton
    kind, dtype = (tl.int32, np.int32) if -(2**31) <= x < 2**31 else (tl.int64, np.int64)
    return tl.tensor(interpreter.TensorHandle(np.array([x], dtype), kind), kind)


class Builder(interpreter.InterpreterBuilder):
    """Triton's NumPy builder with a GPU's bfloat16; Triton holds bfloat16 as the uint16 of its bits."""

    def __init__(self) -> None:
        super().__init__()
        # Triton checks every sum and product of integers for overflow, and drops the answer unless in debug mode, on a
        # GPU too. The check took half of the interpreter's time.
        self.options = dataclasses.replace(self.options, sanitize_overflow=False)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """Conversions from and to bfloat16, rounding to nearest even."""
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target != tl.bfloat16:
            wide = src.data.view(ml_dtypes.bfloat16).astype(np.float32)
            return interpreter.TensorHandle(wide.astype(interpreter._get_np_dtype(target)), target)  # noqa: SLF001
        if target == tl.bfloat16 and source != tl.bfloat16:
            narrow = src.data.astype(np.float32).astype(ml_dtypes.bfloat16)
            return interpreter.TensorHandle(narrow.view(np.uint16), target)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """As :meth:`cast_impl`."""
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """The product of values, not of bit patterns; summed in float64 and rounded once."""

        def widen(x: Any) -> np.ndarray:
            data = self.cast_impl(x, tl.float32).data if x.dtype.scalar == tl.bfloat16 else x.data
            return np.ascontiguousarray(data, np.float64)  # contiguous, or NumPy multiplies without BLAS

        return interpreter.TensorHandle((widen(a) @ widen(b) + d.data).astype(d.data.dtype), d.dtype.scalar)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        """Refuses bfloat16, where Triton would compute with bit patterns; Kvax's kernels have no such operation."""
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise NotImplementedError(f"{op.__name__} on bfloat16 is not interpreted; convert to float32 first.")
        return super().binary_op(lhs, rhs, op)


def logical(both: bool, first: Any, *rest: Callable[[], Any]) -> Any:
    """Triton's ``and`` (``both``) and ``or``: element by element on tensors, short-circuit on compile-time values."""
    result = _value(first)
    for thunk in rest:
        if not isinstance(result, tl.tensor):
            if bool(result) != both:
                return result
            result = _value(thunk())
            continue
        other = _value(thunk())
        if isinstance(other, tl.tensor):
            result = result.logical_and(other) if both else result.logical_or(other)
        elif bool(other) != both:
            return other
    return result


def _index(self: Any) -> int:
    """A scalar tensor as an index; Triton 3.6 converts an array of one element, which NumPy 2.4 refuses."""
    return int(self.handle.data.item())


def _sum(self: Any, x: Any) -> Any:
    """``tl.sum``, in float64 and rounded once."""
    total = np.sum(x.handle.data, axis=self.axis, keepdims=self.keep_dims, dtype=np.float64)
    return self.to_tensor(total, x.dtype)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


class _Rewriter(interpreter.ASTTransformer):
    """Triton's rewriting of a kernel's source, and ``and``/``or`` as :func:`logical`."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:  # noqa: N802 (ast's name for it)
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        first, *others = node.values
        return ast.Call(
            func=ast.Name("logical", ast.Load()),
            args=[
                ast.Constant(isinstance(node.op, ast.And)),
                first,
                *(ast.Lambda(args=nothing, body=x) for x in others),
            ],
            keywords=[],
        )

    def visit_Assign(self, node: ast.Assign) -> ast.AST:  # noqa: N802 (as above)
        self.generic_visit(node)  # upstream does not visit the value
        return super().visit_Assign(node)


@contextlib.contextmanager
def _interpreting() -> Iterator[Callable[[JITFunction], Callable[..., Any]]]:
    """Patch ``triton.language`` for NumPy; yields the function that makes a kernel callable. Undone at the end."""
    builder = Builder()
    semantic = interpreter.TritonSemantic(builder)
    before = {name: getattr(interpreter, name) for name in ("interpreter_builder", "interpreter_semantic")}
    vars(interpreter).update(interpreter_builder=builder, interpreter_semantic=semantic)
    scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # noqa: SLF001
    scope.set_attr(tl.tensor, "__index__", _index)
    scope.set_attr(interpreter.ReduceOps, "sum", _sum)
    made: dict[Any, Callable[..., Any]] = {}

    def rewritten(kernel: JITFunction) -> Callable[..., Any]:
        return _rewrite(kernel.fn, semantic, made)

    try:
        for module in (tl, tl.standard, tl.core):  # tl.max, tl.sum, tl.zeros, ... are kernels themselves
            for name, member in list(vars(module).items()):
                if isinstance(member, JITFunction):
                    scope.set_attr(module, name, rewritten(member))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "tl.make_block_ptr is deprecated", UserWarning)  # Kvax uses it
            yield rewritten
    finally:
        scope.restore()
        vars(interpreter).update(before)


def _rewrite(function: Any, semantic: Any, made: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """A Python function from a kernel's source, in a copy of its globals where other kernels are functions too."""
    if function in made:
        return made[function]
    namespace = {**function.__globals__, "interpreter_semantic": semantic, "logical": logical}
    local: dict[str, Any] = {}
    exec(_code(function), namespace, local)  # noqa: S102 (the source of an installed package, which we run anyway)
    made[function] = local[function.__name__]  # before the others, which may call this one
    for name, member in namespace.items():
        if isinstance(member, JITFunction):
            namespace[name] = _rewrite(member.fn, semantic, made)
    return made[function]


@functools.cache
def _code(function: Any) -> types.CodeType:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"{function} is not defined by one function statement.")
    definition.decorator_list, definition.returns = [], None
    tree = ast.fix_missing_locations(_Rewriter().visit(tree))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    return compile(tree, function.__code__.co_filename, "exec")
