"""Layers that hand something on, in a model that is not this package's.

A backend such as ``kascade`` gives each layer a role and hands the selection of one layer to those behind it. A flax,
Keras or MaxText layer calls a function of query, key and value: it knows neither its number nor what came before.
:class:`LayerStack` knows both, for as long as one forward pass lasts.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array

from .contract import Carry

Number = int | Array  # traced in a scan over layers

_OUTSIDE = (
    "an attention call with layer= ran outside of its LayerStack; call the model by stack.run(model, x), one layer of "
    "it by stack.step(block, x, layer=i, carry=carry), or a scan over layers by stack.scan(block, x, stacked)."
)
_BETWEEN = (
    "layer {turn} runs inside of a transformation that lies within the forward pass (jax.jit, jax.checkpoint or "
    "jax.lax.scan around a part of the model), and what it hands on could not leave it. Compile around the whole pass, "
    "jax.jit(lambda x: stack.run(model, x)); use stack.scan for a scan over layers; call a part that has to be "
    "transformed by stack.step(block, x, layer=i, carry=carry), or leave the transformation out (MaxText: "
    "adapters.maxtext.decoder)."
)


@dataclasses.dataclass(slots=True)
class _Pass:
    """One forward pass: the layer whose turn it is, how many are left, and what the last one handed on."""

    turn: Number
    left: int
    carry: Carry = ()
    trace: Any = dataclasses.field(default_factory=lambda: get_opaque_trace_state(convention="nnx"))


class LayerStack:
    """The layers of one model, numbered from 0; ``stack[i]`` is layer ``i``, for ``attention(..., layer=stack[i])``.

    ``stack`` itself in place of ``stack[i]`` means the layer whose turn it is, for a library that makes all layers
    alike. One stack serves any number of forward passes; each runs in :meth:`run`, :meth:`step` or :meth:`scan`.

    >>> import jax.numpy as jnp
    >>> from attnsuite.backends import attention
    >>> from attnsuite.backends.kascade import manual
    >>> stack, x = LayerStack(3), jnp.ones((1, 256, 2, 8))
    >>> options = {"schedule": manual((0, 1), num_layers=3, kv_heads=2), "tile_size": 16, "min_keys": 16}
    >>> def model(x):
    ...     for i in range(3):
    ...         x = attention(x, x, x, is_causal=True, needs_grad=False, backend="kascade", backend_options=options,
    ...                       layer=stack[i])
    ...     return x
    >>> stack.run(model, x).shape
    (1, 256, 2, 8)
    """

    def __init__(self, num_layers: int) -> None:
        if not isinstance(num_layers, int) or num_layers < 1:
            raise ValueError(f"LayerStack({num_layers!r}): expected the number of layers, at least 1.")
        self.num_layers = num_layers
        self._pass: contextvars.ContextVar[_Pass | None] = contextvars.ContextVar("pass", default=None)

    def __getitem__(self, number: int) -> StackedLayer:
        """Layer ``number``. Raises IndexError for one that the stack does not have."""
        if not 0 <= number < self.num_layers:
            raise IndexError(f"layer {number} of a LayerStack of {self.num_layers} layers.")
        return StackedLayer(self, number)

    def __deepcopy__(self, *_: Any) -> LayerStack:
        """The stack itself: the layers of a copied model are run by the stack that the caller holds."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        """Pickled as a stack of as many layers: a pass that is running belongs to its process."""
        return LayerStack, (self.num_layers,)

    def run(self, model: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
        """The result of ``model(*args, **keywords)``, a whole forward pass.

        Compile around it: ``jax.jit(lambda x: stack.run(model, x))``. Raises ValueError unless every layer ran once
        and in order.
        """
        with self._entered(_Pass(0, self.num_layers)) as state:
            result = model(*args, **keywords)
        if state.left:
            raise ValueError(
                f"{self.num_layers - state.left} of the {self.num_layers} layers of the stack ran; expected each once, "
                "by an attention call with layer=stack[i] or layer=stack."
            )
        return result

    def step(
        self, block: Callable[..., Any], /, *args: Any, layer: Number, carry: Carry = (), **keywords: Any
    ) -> tuple[Any, Carry]:
        """The result of ``block(*args, **keywords)``, which holds layer ``layer`` alone, and what that layer hands on.

        ``carry`` is what the layer before handed on; ``()`` at the first. ``layer`` may be traced. Raises ValueError
        unless the block calls attention once.
        """
        with self._entered(_Pass(layer, 1, carry)) as state:
            result = block(*args, **keywords)
        if state.left:
            raise ValueError(f"the block of layer {layer} called no attention with layer=stack; expected one call.")
        return result, state.carry

    def scan(self, block: Callable[[Any, Any], Any], x: Any, stacked: Any) -> Any:
        """``x = block(x, one)`` for each layer's ``one`` of ``stacked``, in one ``jax.lax.scan``.

        ``stacked`` is a tree of arrays ``[layers, ...]``, such as the parameters of all blocks; the attention of the
        block is called with ``layer=stack``. Raises ValueError for another number of layers.
        """
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(stacked)}
        if lengths != {self.num_layers}:
            raise ValueError(f"stacked holds {sorted(lengths)} layers; expected {self.num_layers}, as the stack has.")

        def first(x: Any, stacked: Any) -> Carry:
            return self.step(block, x, jax.tree.map(lambda leaf: leaf[0], stacked), layer=0)[1]

        def one_layer(carried: tuple[Any, Carry], numbered: tuple[Array, Any]) -> tuple[tuple[Any, Carry], None]:
            x, carry = carried
            number, one = numbered
            return self.step(block, x, one, layer=number, carry=carry), None

        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(first, x, stacked))
        (x, _), _ = lax.scan(one_layer, (x, nothing), (jnp.arange(self.num_layers), stacked))
        return x

    def attend(self, call: Callable[[Number, Carry], tuple[Any, Carry]], number: int | None = None) -> Any:
        """The output of ``call(number, carry)``; what it hands on is kept for the next layer.

        ``number`` is that of the layer; None for the layer whose turn it is.
        """
        state = self._pass.get()
        if state is None:
            raise ValueError(_OUTSIDE)
        turn = state.turn
        if not state.left:
            raise ValueError(f"a layer ran behind layer {turn - 1}, the last one here; expected each layer once.")
        if number is not None and (not isinstance(turn, int) or number != turn):
            sentence = (
                f"layer {turn} was expected" if isinstance(turn, int) else "a scan computes all layers by one block"
            )
            raise ValueError(
                f"layer {number} ran where {sentence}; run the layers in the order of their numbers, or give "
                "layer=stack to a block that is every layer."
            )
        if get_opaque_trace_state(convention="nnx") != state.trace:
            raise ValueError(_BETWEEN.format(turn=turn))
        out, state.carry = call(turn, state.carry)
        state.turn, state.left = turn + 1, state.left - 1
        return out

    @contextlib.contextmanager
    def _entered(self, state: _Pass) -> Iterator[_Pass]:
        token = self._pass.set(state)
        try:
            yield state
        finally:
            self._pass.reset(token)


@dataclasses.dataclass(frozen=True, slots=True)
class StackedLayer:
    """One layer of a :class:`LayerStack`, by its number."""

    stack: LayerStack
    number: int

    @property
    def num_layers(self) -> int:
        """Layers of the whole stack."""
        return self.stack.num_layers

    def attend(self, call: Callable[[Number, Carry], tuple[Any, Carry]]) -> Any:
        """As :meth:`LayerStack.attend`. Raises ValueError if it is another layer's turn."""
        return self.stack.attend(call, self.number)


def check_layer(layer: Any) -> None:
    """Raise ValueError unless ``layer`` is None, a stack, or a layer of one."""
    if not isinstance(layer, LayerStack | StackedLayer | None):
        raise ValueError(  # noqa: TRY004 (one kind of error for every argument)
            f"layer={layer!r} is no layer of a LayerStack; make stack = backends.LayerStack(num_layers), give "
            "layer=stack[i] or layer=stack, and call the model by stack.run(model, x)."
        )
