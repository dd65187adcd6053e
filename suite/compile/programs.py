"""Programs without data: the calls and passes that are measured elsewhere, over shapes instead of arrays.

A program for an absent device may need more memory than this machine has, so no weight, cache or input is made.
Programs donate the arguments that a user donates: parameters and optimizer state of a train step, the cache of prefill
and decode. The compiler's peak is then that of real use. Attention is planned for the target in mode ``compile``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from attnsuite.backends import AttentionSpec, Backend, Layout, Plan, Target, plan
from attnsuite.backends.contract import BackendWithRoles
from attnsuite.backends.features import Options
from attnsuite.models import ModelConfig
from attnsuite.models.cache import slot_shapes
from attnsuite.models.forward_pass import forward_cached
from attnsuite.models.parameters import initialise
from attnsuite.models.planning import Resolutions, attention_spec, resolve_attention

from ..kinds.attention_call import OpCase, op_function, spec_of
from ..kinds.inputs import layout_of
from ..kinds.model_case import ModelCase
from ..kinds.model_program import options_of, prefill, train_step
from ..measure.program import Program
from ..named_model import config_of


def op_program(case: OpCase, backend: Backend, target: Target, options: Options = None) -> Program:
    """One attention call, see :func:`attnsuite.suite.kinds.attention_call.op_function`."""
    spec, (layout, query, key, value) = spec_of(case), _arrays(case)

    def planned(layout: Layout) -> Plan:
        return plan(backend, spec, layout, target=target, mode="compile", options=options)

    d_out = (_cotangent(query, value),) if case.needs_grad else ()
    return Program(op_function(case, planned), (layout, query, key, value, *d_out))


def role_program(
    case: OpCase, backend: BackendWithRoles, target: Target, role: str, fixed: Mapping[str, Any] = MappingProxyType({})
) -> Program:
    """Output and carry of one layer that plays ``role``; ``fixed`` are options beside the role's.

    With gradients the output is a tuple, with those of query, key and value behind it. The last argument is the carry
    of the layer before it.
    """
    spec, (layout, query, key, value) = spec_of(case), _arrays(case)
    of_role, layer = backend.roles(spec)[role]
    options = {**of_role, **fixed}

    def run(layer: int, layout: Layout, query: Any, key: Any, value: Any, carry: Any = ()) -> Any:
        planned = plan(backend, spec, layout, target=target, mode="compile", options=options)
        return planned.run(query, key, value, layer=layer, carry=carry)

    def with_gradients(layout: Layout, query: Any, key: Any, value: Any, d_out: Any, *carry: Any) -> Any:
        out, pullback, carried = jax.vjp(
            lambda *arrays: run(layer, layout, *arrays, *carry), query, key, value, has_aux=True
        )
        return (out, *pullback(d_out)), carried

    # Only the backend knows the shape of the carry.
    carry = () if layer == 0 else (jax.eval_shape(functools.partial(run, layer - 1), layout, query, key, value)[1],)
    if case.needs_grad:
        return Program(with_gradients, (layout, query, key, value, _cotangent(query, value), *carry))
    return Program(functools.partial(run, layer), (layout, query, key, value, *carry))


def _cotangent(query: Any, value: Any) -> Any:
    return jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)


def _arrays(case: OpCase) -> tuple[Layout, Any, Any, Any]:
    """Layout, query, key and value."""

    def shape(length: int, heads: int, dim: int) -> Any:
        return jax.ShapeDtypeStruct((case.batch, length, heads, dim), jnp.dtype(case.dtype))

    query, slots, heads = shape(case.query_length, case.heads, case.head_dim), case.sequence, case.kv_heads
    slots, heads = (slots, heads) if case.kv_layout == "NHD" else (heads, slots)
    return (
        jax.eval_shape(functools.partial(layout_of, case)),
        query,
        shape(slots, heads, case.head_dim),
        shape(slots, heads, case.value_head_dim or case.head_dim),
    )


def model_config(case: ModelCase) -> ModelConfig:
    """The configuration of a case's model. Raises InputError for an unknown name, listing the known ones."""
    return config_of(case.model, "model", **case.dtypes)


def attention_specs(case: OpCase | ModelCase) -> tuple[AttentionSpec, ...]:
    """The attention problem of a call, or of each type of layer of a model."""
    if isinstance(case, OpCase):
        return (spec_of(case),)
    config, cells = model_config(case), _attention_sizes(case)
    return tuple(attention_spec(config, kind, **cells) for kind in config.attention_types)


def resolutions(case: ModelCase, backend: str, target: Target) -> Resolutions:
    """The backend of each type of layer. Raises BackendUnavailableError where ``backend`` refuses."""
    config = model_config(case)
    return resolve_attention(
        config,
        **_attention_sizes(case),
        backend=backend,
        options=options_of(case, config, backend),
        mode="compile",
        on_unavailable="raise",
        target=target,
    )


def _attention_sizes(case: ModelCase) -> dict[str, Any]:
    decoding = case.is_decode
    return {
        "batch": case.batch,
        "query_length": 1 if decoding else case.sequence,
        "key_value_length": case.sequence if decoding else None,
        "needs_grad": case.needs_grad,
    }


def model_program(case: ModelCase, found: Resolutions) -> Program:
    """A prefill of ``sequence`` tokens, one decode step behind as many cached tokens, or one AdamW step on as many."""
    config = model_config(case)
    params = jax.eval_shape(lambda key: initialise(config, key), jax.random.key(0))
    if case.needs_grad:
        step, start = train_step(config, found)
        state = jax.eval_shape(start, params)
        return Program(step, (params, state, _integers(case.batch, case.sequence)), donated=(0, 1))
    decoding = case.is_decode

    def decode(params: Any, tokens: Any, held: Any, end: Any) -> Any:
        return forward_cached(config, params, tokens, held, end - 1, end, resolutions=found, last_only=True)

    held = tuple(
        tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype)) for shape in shapes)
        for shapes in slot_shapes(config, case.batch, case.sequence)
    )
    tokens = _integers(case.batch, 1 if decoding else case.sequence)
    run = decode if decoding else prefill(config, found)
    return Program(run, (params, tokens, held, _integers(case.batch)), donated=(2,))


def _integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
