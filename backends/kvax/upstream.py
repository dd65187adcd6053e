"""Kvax as this project runs it: a private copy of the package, with kernel launches that this project handles.

Kvax 0.1.0 does not import beside a current JAX or Triton, and launches its kernels only through ``jax_triton``. This
module loads Kvax from its own unmodified files under a chosen ``jax_triton`` (the real one, the interpreter, a
recorder), and removes both from ``sys.modules`` again. Other code's ``import kvax`` or ``import jax_triton`` does not
change. Every adaptation is in :func:`_adaptations` and :func:`_divisible_scalars`, with the upstream version it is for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .. import triton_cache

Launch = Callable[..., Any]  # the signature of jax_triton.triton_call

_LOADING = threading.RLock()  # sys.modules has one copy of a name at a time
_PRIVATE = ("kvax", "jax_triton")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Upstream:
    """The functions of one private copy. ``specs_lock`` guards its module-wide ``attention_specs``."""

    flash_attention: Callable[..., jax.Array]  # over a mesh, [batch, length, heads, head_dim]
    flash_attention_one_device: Callable[..., jax.Array]  # [batch, heads, length, head_dim]
    create_attention_mask: Callable[..., tuple[Any, ...]]  # over a mesh
    mask_one_device: Callable[..., tuple[jax.Array, ...]]
    attention_specs: Callable[..., contextlib.AbstractContextManager[None]]
    permute_tokens: Callable[..., Any]
    unpermute_tokens: Callable[..., Any]
    parameters: Callable[..., Any]
    mask: Any  # the class AttentionMask
    specs_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


def load(launch: Launch) -> Upstream:
    """A private copy of Kvax that launches kernels by ``launch``. Raises the errors of its import."""
    standin = types.ModuleType("jax_triton")
    vars(standin).update(  # all functions that Kvax imports from jax_triton
        triton_call=launch,
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length(),
        strides_from_shape=_strides,
    )
    with _private_modules():
        sys.modules["jax_triton"] = standin
        with _importable():
            flash = importlib.import_module("kvax.ops.flash_attention_triton")
            masks = importlib.import_module("kvax.ops.mask_creator")
            utils = importlib.import_module("kvax.utils")
            typing = importlib.import_module("kvax.utils.typing")
        _adaptations(flash)
    return Upstream(
        flash_attention=flash.flash_attention_triton,
        flash_attention_one_device=flash.flash_attention_triton_single_device,
        create_attention_mask=masks.create_attention_mask,
        mask_one_device=masks.compute_attention_mask_single_device,
        attention_specs=utils.attention_specs,
        permute_tokens=utils.permute_tokens_context_parallelism,
        unpermute_tokens=utils.unpermute_tokens_context_parallelism,
        parameters=utils.FlashAttentionParamsConfig,
        mask=typing.AttentionMask,
    )


@functools.cache
def native(compute_capability: tuple[int, int] | None = None) -> Upstream:
    """Kvax on the real jax_triton. Raises ImportError and others if that does not import (no CUDA plugin).

    ``compute_capability`` is that of an absent GPU to compile for; None asks the driver.
    """
    with _private_modules(), triton_cache.preserved():
        jax_triton = importlib.import_module("jax_triton")
        library = importlib.import_module("jax_triton.triton_lib")
        _divisible_scalars(library)
    number = None if compute_capability is None else 10 * compute_capability[0] + compute_capability[1]
    launch = functools.partial(jax_triton.triton_call, compute_capability=number)
    return load(functools.partial(_launch_natively, launch))


def _launch_natively(triton_call: Launch, *args: Any, **options: Any) -> Any:
    """``triton_call``, which has no batching rule: the launches of a ``jax.vmap`` run one after the other."""
    is_array = [isinstance(x, jax.Array) for x in args]

    @jax.custom_batching.sequential_vmap
    def call(*arrays: jax.Array) -> Any:
        rest = iter(arrays)
        return triton_call(*(next(rest) if array else x for x, array in zip(args, is_array, strict=True)), **options)

    return call(*(x for x, array in zip(args, is_array, strict=True) if array))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous array."""
    sizes = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(reversed(list(sizes)))


@contextlib.contextmanager
def _private_modules() -> Iterator[None]:
    """Import kvax and jax_triton anew inside, and restore ``sys.modules`` afterwards."""

    def ours() -> dict[str, types.ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _PRIVATE}

    with _LOADING:
        before = ours()
        for name in before:
            del sys.modules[name]
        try:
            yield
        finally:
            for name in ours():
                del sys.modules[name]
            sys.modules.update(before)


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Kvax 0.1.0, utils/typing.py: an alias ``shard_map.Specs`` that JAX dropped in 0.8; it only annotates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jax.experimental.shard_map, which Kvax imports from
        module = importlib.import_module("jax.experimental.shard_map")
        missing = not hasattr(module, "Specs")
        if missing:
            module.Specs = Any  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            if missing:
                del module.Specs  # pyright: ignore[reportAttributeAccessIssue]


def _adaptations(flash: types.ModuleType) -> None:
    """Kvax 0.1.0, flash_attention_triton.py: Triton 3.2 and later refuse globals in kernels that are not constexpr."""
    constexpr = importlib.import_module("triton.language").constexpr
    for name in ("LOG2_CONST", "NEG_INF"):
        value = getattr(flash, name)
        if not isinstance(value, constexpr):
            setattr(flash, name, constexpr(value))


def _divisible_scalars(library: Any) -> None:
    """jax-triton 0.3: tell Triton again which integer scalars are divisible by 16, as jax-triton 0.2 did.

    Kvax's strides are such scalars; without the hint its loads are neither vectorised nor pipelined, and registers
    spill (``build.py`` shows both). Upstream asks Triton to specialise on each argument's type; here it is asked
    again with the scalar's value.
    """
    create, triton, lock = library.get_or_create_triton_kernel, library._triton, threading.Lock()  # noqa: SLF001

    def with_hint(init: Any, platform: str, fn: Any, arg_dtypes: Any, scalar_args: Any, **options: Any) -> Any:
        values, index = {i: value for i, _, value in scalar_args}, itertools.count()

        def specialize(backend: Any, arg: Any, is_const: bool, do_specialize: bool, align: bool) -> Any:
            value = values.get(next(index))
            if is_divisible(value):
                arg, align = value, True
            return triton.native_specialize_impl(backend, arg, is_const, do_specialize, align)

        with lock:
            library._triton = types.SimpleNamespace(native_specialize_impl=specialize, ir=triton.ir)  # noqa: SLF001
            try:
                return create(init, platform, fn, arg_dtypes, scalar_args, **options)
            finally:
                library._triton = triton  # noqa: SLF001

    library.get_or_create_triton_kernel = with_hint


def is_divisible(value: object) -> bool:
    """Whether Triton may be told that a scalar is divisible by 16 (1 is a constant of the kernel instead).

    >>> is_divisible(128), is_divisible(8), is_divisible(1), is_divisible(0.5)
    (True, False, False, False)
    """
    return type(value) is int and value != 1 and value % 16 == 0
