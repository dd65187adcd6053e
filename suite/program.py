"""What a cell times: a function of arrays, and the arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function of arrays, and the arrays. JAX compiles it, unless ``arrays`` is given.

    With ``arrays`` the function belongs to another framework: it is called as it stands, returns when it is
    done, and ``arrays`` makes of its outputs what a compiled program would have returned.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    arrays: Callable[[Any], Any] | None = None


def with_gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """``(query, key, value, d_out) -> (out, dq, dk, dv)`` of an attention."""

    def forward_backward(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, *pull_back(d_out)

    return forward_backward
