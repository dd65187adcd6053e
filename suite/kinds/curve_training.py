"""Train a model for its loss curve: the standard backend, its noise runs and controls, or another backend.

``loss_curve_case.py`` says how the curves are judged. Every run starts from the same parameters and sees the same
batches.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from attnsuite.backends import Takes, Target, attention, from_function, registry, support
from attnsuite.backends.features import BASIC_FEATURES, Mode
from attnsuite.backends.function import FunctionBackend
from attnsuite.models import ModelConfig, Transformer, load_text
from attnsuite.models.optimizer import make_optimizer
from attnsuite.models.parameters import Params
from attnsuite.models.planning import Resolutions, attention_spec, resolve_attention
from attnsuite.models.sharded_training import Placement, place_on
from attnsuite.models.text import random_windows
from attnsuite.models.training import Batch, Step, compiled_step, training_step

from ..cell import Cell, Outcome
from ..errors import InputError, as_input
from ..host_devices import parse_mesh
from .kind import of_backend, refused
from .loss_curve_case import LossCurve, Run, TrainingCase

# The axis of a parameter that runs over the hidden coordinates; those that are not named have none.
_HIDDEN_AXIS = {
    **dict.fromkeys(("embed_tokens", "embed_positions", "lm_head"), 1),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1),
    **dict.fromkeys(("o_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm"), 0),
}

# Blocks so small that a short row spans several of them; the defaults of the other backends are small enough.
BLOCKS: dict[str, dict[str, int]] = {
    "chunked": {"block_q": 64, "block_kv": 64, "block_backward": 64},
    "splash": dict.fromkeys(("block_q", "block_kv", "block_q_backward", "block_kv_backward"), 128),
}


def with_wrong_gradients(factors: tuple[float, float, float]) -> FunctionBackend:
    """The standard backend with its gradients multiplied: a negative control."""

    def attend(query: Array, key: Array, value: Array, **keywords: Any) -> Any:
        arrays = (_with_gradient(factor, x) for factor, x in zip(factors, (query, key, value), strict=True))
        return attention(*arrays, backend="standard", **keywords)

    takes = Takes(features=BASIC_FEATURES, modes=("native", "compile"))
    return from_function(attend, takes=takes, name="wrong-gradients")


def config_of(case: TrainingCase) -> ModelConfig:
    """The model that is trained. Raises InputError for a preset that does not exist or does not read bytes."""
    with as_input():
        config = ModelConfig.from_preset(case.preset, dtype="float32", param_dtype="float32")
    if config.vocab_size <= int(_text().max()):
        raise InputError(f"preset {case.preset} has a vocabulary of {config.vocab_size}; the text's bytes need 256.")
    return config


def cell_of(case: TrainingCase, run: Run) -> Cell:
    """The cell of a run on this machine."""
    found, reasons = _resolutions(case, run)
    if not found:
        return refused(case, run.name, reasons)
    devices = parse_mesh(run.mesh).count if run.mesh else 1
    return dataclasses.replace(of_backend(case, run.name, lambda _: found), devices=devices)


def trained(case: TrainingCase, run: Run) -> Outcome:
    """The outcome of a run: its curve, or why its mesh cannot train it. Raises InputError where devices are missing."""
    found, placement = _resolutions(case, run)[0], None
    if run.mesh:
        with as_input("mesh "):
            placement = place_on(parse_mesh(run.mesh))
        try:
            found = placement.resolutions(found)
        except ValueError as error:
            return Outcome(status="unsupported", reasons=(str(error),), error="refused before anything was traced.")
    return Outcome(facts=LossCurve(role=run.role, losses=losses(case, run, found, placement)))


def losses(
    case: TrainingCase, run: Run, found: Resolutions, placement: Placement | None = None
) -> tuple[float | None, ...]:
    """Nats before each update; None where a loss was not finite."""
    config = config_of(case)
    params = Transformer(config, rngs=nnx.Rngs(case.seed)).arrays()
    if run.order:
        params = reordered(params, np.random.default_rng(run.order).permutation(config.hidden_size))
    if placement is None:
        state, step = _update(case).init(params), _step(case, found)
    else:
        params = placement.put(params)
        state = placement.state(_update(case), params)
        whole = training_step(config, found, _update(case))
        step = placement.compiled_step(whole, params, state)
    nats = []
    for number in range(case.steps):
        rng = np.random.default_rng([case.seed, run.batches, number])
        rows = random_windows(_text(), case.length, case.batch, rng)
        batch = Batch(rows[None]) if placement is None else placement.batch(Batch(rows[None]))
        params, state, loss = step(params, state, batch, None)
        nats.append(float(loss) if np.isfinite(loss) else None)
    return tuple(nats)


def reordered(params: Params, order: np.ndarray) -> Params:
    """The same model, with its hidden coordinates stored in another order."""

    def move(path: Any, x: Array) -> Array:
        axis = _HIDDEN_AXIS.get(path[-1].key.removesuffix("_bias") if x.ndim == 1 else path[-1].key)
        return x if axis is None or axis >= x.ndim else jnp.take(x, jnp.asarray(order), axis=axis)

    return jax.tree_util.tree_map_with_path(move, params)


@functools.cache
def _text() -> np.ndarray:
    return load_text().train


@functools.cache
def _step(case: TrainingCase, resolutions: Resolutions) -> Step:
    """Compiled once for all runs that share it."""
    return compiled_step(training_step(config_of(case), resolutions, _update(case)))


def _update(case: TrainingCase) -> optax.GradientTransformation:
    return make_optimizer(case.optimizer, steps=case.steps, learning_rate=case.learning_rate, weight_decay=0.1)


def _resolutions(case: TrainingCase, run: Run) -> tuple[Resolutions, tuple[str, ...]]:
    """The resolutions on one device in the first mode that its backend takes; () and every reason if it takes none."""
    config, target, reasons = config_of(case), Target.here(), []
    options = BLOCKS.get(run.backend)
    specs = [
        attention_spec(config, kind, batch=case.batch, query_length=case.length) for kind in config.attention_types
    ]
    modes: tuple[Mode, ...] = ("native",) if run.mesh or case.setting == "native" else ("native", "interpret")
    for mode in modes:
        answers = [support(registry.get(run.backend), spec, target, mode, options) for spec in specs]
        if all(answers):
            found = resolve_attention(
                config,
                batch=case.batch,
                query_length=case.length,
                backend=run.backend,
                mode=mode,
                on_unavailable="raise",
                options=options,
            )
            if run.factors is None:
                return found, ()
            wrong = with_wrong_gradients(run.factors)
            return tuple((kind, dataclasses.replace(each, backend=wrong)) for kind, each in found), ()
        reasons += [reason for answer in answers for reason in answer.reasons]
    return (), tuple(dict.fromkeys(reasons))


def _with_gradient(factor: float, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``x``, whose gradient is multiplied."""
    stopped = jax.lax.stop_gradient(x)
    return stopped if factor == 0.0 else stopped + factor * (x - stopped)
