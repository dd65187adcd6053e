"""The program that a cell times or compiles: a function of arrays, and the arrays or their shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function of arrays, and the arrays. JAX compiles it, unless ``arrays`` is given.

    A program that is compiled alone has ``jax.ShapeDtypeStruct`` in their place, and ``donated`` are the positions of
    those arguments that a user donates.

    With ``arrays`` the function belongs to another framework. It is called as it stands and returns when it is done;
    ``arrays`` then converts its outputs to those of a compiled program. ``renewed`` are the positions of the arguments
    that are new in every timed call (``fresh.py``).
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    arrays: Callable[[Any], Any] | None = None
    renewed: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()


def with_gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """``(query, key, value, d_out) -> (out, dq, dk, dv)`` of an attention; a bias behind the value has its gradient."""

    def forward_backward(*arrays: Any) -> Any:
        *operands, d_out = arrays
        out, pull_back = jax.vjp(attend, *operands)
        return out, *pull_back(d_out)

    return forward_backward


def named_outputs(outputs: Any) -> dict[str, Any]:
    """The outputs of an attention call by name."""
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return dict(zip(("out", "dq", "dk", "dv", "dbias")[: len(values)], values, strict=True))
