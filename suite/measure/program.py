"""The program that a cell times or compiles: a function of arrays, and the arrays or their shapes.

Inputs are new in every call (:class:`Draw`), so that no answer can be prepared, remembered or found. Each array is
rolled along its longest axis, which no device shares with others: what devices exchange would still be freed while the
next call is timed. The last axis of numbers is multiplied by signs. Both follow from a seed, which the process that
schedules draws and tells only when the program is compiled. A value keeps its bits but for the sign, so the arrays are
as hard as those that they are made from, and every process makes the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function of arrays, and the arrays. JAX compiles it, unless ``arrays`` is given.

    A program that is compiled alone has ``jax.ShapeDtypeStruct`` in their place, and ``donated`` are the positions of
    those arguments that a user donates.

    With ``arrays`` the function belongs to another framework. It is called as it stands and returns when it is done;
    ``arrays`` then converts its outputs to those of a compiled program. ``renewed`` are the positions of the arguments
    that are new in every timed call (:func:`renewer`).
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


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One set of inputs: a seed, and the number of a call among those that share it."""

    seed: int
    call: int = 0


def renewed(arrays: Sequence[Any], draw: Draw | None) -> tuple[Any, ...]:
    """The arrays of ``draw``; None leaves them as they are."""
    return tuple(arrays) if draw is None else _renew(tuple(arrays), *_choices(arrays, draw))


def renewer(program: Program) -> Callable[[Draw], tuple[Any, ...]]:
    """A function from a draw to the arguments of ``program``, which are on the device and ready."""
    chosen = [program.arguments[i] for i in program.renewed]
    if not chosen:
        return lambda _: program.arguments
    # Committed to a device only if those of the program are: what compiles itself would compile anew for them.
    renew = jax.jit(_renew, out_shardings=tuple(x.sharding if x.committed else None for x in chosen))

    def arguments(draw: Draw) -> tuple[Any, ...]:
        found = list(program.arguments)
        for i, x in zip(program.renewed, renew(tuple(chosen), *_choices(chosen, draw)), strict=True):
            found[i] = x
        return tuple(found)

    return arguments


def _choices(arrays: Sequence[Any], draw: Draw) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """How far each array is rolled, and the signs of its last axis."""
    shifts, signs = [], []
    for number, x in enumerate(arrays):
        rng = np.random.default_rng([draw.seed, draw.call, number])
        shifts.append(rng.integers(x.shape[_axis(x)]))
        signs.append(rng.choice(np.array([-1, 1], np.int8), x.shape[-1]))
    return np.array(shifts, np.int32), tuple(signs)


def _axis(x: Any) -> int:
    return int(np.argmax(x.shape))


@jax.jit
def _renew(arrays: tuple[jax.Array, ...], shifts: Any, signs: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    rolled = [jnp.roll(x, shift, axis=_axis(x)) for x, shift in zip(arrays, shifts, strict=True)]
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]
    return tuple(
        x * sign.astype(x.dtype) if is_signed else x for x, sign, is_signed in zip(rolled, signs, is_float, strict=True)
    )
