"""What JAX may differentiate: a sentence in place of its error where a backend has no such derivative."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import Array

_NO_FORWARD_MODE = (
    "this backend has a gradient of its own, by kernels and loops that forward mode (jax.jvp, jax.jacfwd) and second "
    "derivatives cannot follow; use backend='standard', which JAX differentiates in every way."
)

NO_GRADIENT = "this asks for a gradient where needs_grad=False was given; give needs_grad=True, which is the default."


@contextlib.contextmanager
def forward_mode_explained() -> Iterator[None]:
    """Turn JAX's refusal of forward mode into a TypeError that says what to use."""
    try:
        yield
    except TypeError as error:
        if "forward-mode autodiff" in str(error):
            raise TypeError(_NO_FORWARD_MODE) from error
        raise


def traced_apart(tree: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """The JAX arrays of a tree, and the tree from such arrays. NumPy arrays stay in it, as constants of a program.

    A function with a gradient of its own has to take what may be traced as an argument, and in a list: JAX builds the
    tree of an argument from placeholders too, which are no arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    known = [None if isinstance(x, jax.Array) else x for x in leaves]  # no traced array: a program keeps `restored`

    def restored(traced: list[Array]) -> Any:
        rest = iter(traced)
        return structure.unflatten([next(rest) if x is None else x for x in known])

    return [x for x in leaves if isinstance(x, jax.Array)], restored


def first_derivative(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes gradients by a kernel. Differentiating it raises TypeError with what to use."""
    run = jax.custom_jvp(gradients)

    @run.defjvp
    def no_second_derivative(*_: Any) -> Any:
        raise TypeError(_NO_FORWARD_MODE)

    return run


def forward_only(attend: Callable[..., Any]) -> Callable[..., Any]:
    """The ``attend`` of a plan without gradients. Differentiating it raises ValueError with what to plan instead."""

    def run(query: Any, key: Any, value: Any, layer: Any, *rest: Any) -> Any:
        query, key, value, rest = _without_gradient((query, key, value, rest))
        return attend(query, key, value, layer, *rest)

    return run


@jax.custom_vjp
def _without_gradient(operands: Any) -> Any:
    return operands


def _no_gradient(*_: Any) -> Any:
    raise ValueError(NO_GRADIENT)


_without_gradient.defvjp(_no_gradient, _no_gradient)
