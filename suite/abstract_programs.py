"""Programs without data: the same calls and passes that are measured, over shapes instead of arrays.

What is compiled for a device that is not here may be larger than this machine: no weight, cache or input is made.
Programs donate what a user donates (parameters and optimizer state of a train step, the cache of prefill and decode),
so that the compiler's peak is that of real use. Attention is planned for the target in mode ``compile``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from backends import AttentionSpec, Backend, Layout, Target
from backends.contract import HasRoles
from models import PRESETS, ModelConfig, next_token_loss
from models.forward import forward, forward_cached
from models.parameters import initialise
from models.planning import Resolutions, attention_spec, resolve_attention
from suite.cases import ModelCase, OpCase, spec_of
from suite.errors import InputError
from suite.program import with_gradients

_LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True, slots=True)
class AbstractProgram:
    """A function, ``jax.ShapeDtypeStruct`` arguments, and the places of those that are donated."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def op_program(case: OpCase, backend: Backend, target: Target, role: str | None = None) -> AbstractProgram:
    """The output of one attention call, with gradients ``(out, dq, dk, dv)``; the layout is an argument.

    With a ``role`` (of a backend that has roles) the output and the carry of a layer that plays it; the carry that it
    takes from the layer before it is the last argument.
    """
    spec = spec_of(case)
    options, layer = backend.roles(spec)[role] if role is not None and isinstance(backend, HasRoles) else ({}, 0)

    def run(layer: int, layout: Layout, query: Any, key: Any, value: Any, carry: Any = ()) -> Any:
        plan = backend.plan(spec, layout, target=target, mode="compile", options=options)
        return plan.run(query, key, value, layer=layer, carry=carry)

    def attend(*arguments: Any) -> Any:
        out, carry = run(layer, *arguments)
        return out if role is None else (out, carry)

    def forward_backward(layout: Layout, query: Any, key: Any, value: Any, d_out: Any) -> Any:
        return with_gradients(lambda q, k, v: attend(layout, q, k, v))(query, key, value, d_out)

    def decode(layout: Layout, query: Any, keys: Any, values: Any, *carry: Any) -> Any:
        return attend(layout, query, keys.swapaxes(1, 2), values.swapaxes(1, 2), *carry)

    def shape(length: int, heads: int, dim: int) -> Any:
        return jax.ShapeDtypeStruct((case.batch, length, heads, dim), jnp.dtype(case.dtype))

    value_dim = case.value_head_dim or case.head_dim
    query = shape(case.query_length, case.heads, case.head_dim)
    key, value = shape(case.sequence, case.kv_heads, case.head_dim), shape(case.sequence, case.kv_heads, value_dim)
    layout = _layout(case)
    # What the layer before hands on has a shape that only the backend knows.
    carry = () if layer == 0 else (jax.eval_shape(functools.partial(run, layer - 1), layout, query, key, value)[1],)
    if case.kind == "op_decode":  # as a cache holds them, see models.KVCache
        keys, values = (jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:0:-1], x.shape[3]), x.dtype) for x in (key, value))
        return AbstractProgram(decode, (layout, query, keys, values, *carry))
    if case.needs_grad:
        d_out = shape(case.query_length, case.heads, value_dim)
        return AbstractProgram(forward_backward, (layout, query, key, value, d_out))
    return AbstractProgram(attend, (layout, query, key, value, *carry))


def _layout(case: OpCase) -> Layout:
    if case.kind == "op_decode":
        return Layout(query_positions=_integers(case.batch, 1)) if case.causal else Layout()
    if case.documents == 1:
        return Layout()
    ids = _integers(case.batch, case.sequence)
    return Layout(query_segment_ids=ids, key_value_segment_ids=ids)


def model_config(case: ModelCase) -> ModelConfig:
    """The preset of a case. Raises InputError for a name that is none: nothing else has shapes without weights."""
    if case.model not in PRESETS:
        raise InputError(f"model {case.model!r} is not a preset; use one of {', '.join(PRESETS)}.")
    return ModelConfig.from_preset(case.model, dtype=case.dtype)


def attention_specs(case: OpCase | ModelCase) -> tuple[AttentionSpec, ...]:
    """The attention problem of a call, or of each type of layer of a model."""
    if isinstance(case, OpCase):
        return (spec_of(case),)
    config, asked = model_config(case), _asked(case)
    return tuple(attention_spec(config, kind, **asked) for kind in config.attention_types)


def resolutions(case: ModelCase, backend: str, target: Target) -> Resolutions:
    """What computes the attention of each type of layer. Raises BackendUnavailableError where the backend refuses."""
    return resolve_attention(
        model_config(case), **_asked(case), backend=backend, mode="compile", on_unavailable="raise", target=target
    )


def _asked(case: ModelCase) -> dict[str, Any]:
    decoding = case.kind == "model_decode"
    return {
        "batch": case.batch,
        "query_length": 1 if decoding else case.sequence,
        "key_value_length": case.sequence if decoding else None,
        "needs_grad": case.kind == "model_train",
    }


def model_program(case: ModelCase, found: Resolutions) -> AbstractProgram:
    """A prefill of ``sequence`` tokens, one decode step against as many cached, or one AdamW step on as many."""
    config = model_config(case)
    params = jax.eval_shape(lambda key: initialise(config, key), jax.random.key(0))
    if case.kind == "model_train":
        return _train(case, config, params, found)
    decoding = case.kind == "model_decode"

    def run(params: Any, tokens: Any, keys: Any, values: Any, end: Any) -> Any:
        start = end - 1 if decoding else jnp.zeros_like(end)
        return forward_cached(
            config, params, tokens, keys, values, start, end, resolutions=found, fresh=not decoding, last_only=True
        )

    slots = jax.ShapeDtypeStruct((case.batch, config.kv_heads, case.sequence, config.dim), jnp.dtype(config.dtype))
    cache = (slots,) * config.num_layers
    tokens = _integers(case.batch, 1 if decoding else case.sequence)
    return AbstractProgram(run, (params, tokens, cache, cache, _integers(case.batch)), donated=(2, 3))


def _train(case: ModelCase, config: ModelConfig, params: Any, found: Resolutions) -> AbstractProgram:
    optimizer = optax.adamw(_LEARNING_RATE)

    def run(params: Any, state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            return next_token_loss(forward(config, params, tokens, resolutions=found), tokens)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(optimizer.init, params)
    return AbstractProgram(run, (params, state, _integers(case.batch, case.sequence)), donated=(0, 1))


def _integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
