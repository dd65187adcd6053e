"""A whole transformer as a program: prefill, a run of decode steps, one train step.

Each program is one function of arrays under ``jax.jit`` (``nnx.jit`` costs more than a small model). Nothing is
donated, so that every sample starts from the same arrays. Decode runs ``new_tokens`` steps in one scan, over fixed
tokens behind a cache filled with noise: every backend decodes the same problem.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from attnsuite.backends.contract import SelectedShare, SelectsKeys
from attnsuite.models import KVCache, ModelConfig, Transformer
from attnsuite.models.cache import Slots, default_dtype
from attnsuite.models.config import AttentionType
from attnsuite.models.forward_pass import forward_cached
from attnsuite.models.parameters import parameter_shapes
from attnsuite.models.planning import Resolutions, attention_spec, resolve_attention
from attnsuite.models.training import Batch, loss_and_gradient, training_step

from ..measure.program import Program
from ..named_model import config_of, model_of
from . import extensions
from .formulas import attention_flops, visible_pairs
from .model_case import ModelCase
from .op_case import nearest_case, plain_spec

LEARNING_RATE = 1e-4


def model_config(case: Any) -> ModelConfig:
    """The configuration of a case's model, float32 where the case has no dtype.

    Raises InputError for an unknown name, listing the known ones.
    """
    return config_of(case.model, f"case {case.name}: model", **getattr(case, "dtypes", {"dtype": "float32"}))


def open_model(case: Any) -> Transformer:
    """The model of a case, with its weights. Raises InputError as :func:`model_config` does."""
    return model_of(case.model, f"case {case.name}: model", **getattr(case, "dtypes", {"dtype": "float32"}))


def resolutions_of_sequence(config: ModelConfig, length: int, backend: str) -> Resolutions:
    """The resolution of each attention type of ``config`` for one sequence, without gradients and without a cache."""
    return resolve_attention(config, batch=1, query_length=length, needs_grad=False, backend=backend)


def resolutions_of(case: ModelCase, config: ModelConfig, backend: str) -> Resolutions:
    """The resolution of each attention type of ``config`` in ``case``, with ``backend`` asked for."""
    options = options_of(case, config, backend)
    return resolve_attention(config, backend=backend, options=options, **problem_of_layer(case, config))


def problem_of_layer(case: ModelCase, config: ModelConfig) -> dict[str, Any]:
    """What the attention of each layer in ``case`` computes, as arguments of ``attention_spec``."""
    shape = {"batch": case.batch, "needs_grad": case.needs_grad}
    if not case.is_decode:
        return {**shape, "query_length": case.sequence}
    length = case.sequence + case.new_tokens
    return {**shape, "query_length": 1, "key_value_length": length, "dtype": default_dtype(config)}


def model_program(case: ModelCase, model: Transformer, backend: str) -> Program:
    """The program of a model case, attention computed by ``backend``."""
    found = resolutions_of(case, model.config, backend)
    if case.needs_grad:
        return _train(case, model, found)
    return (_decode if case.is_decode else _prefill)(case, model, found)


def options_of(case: ModelCase, config: ModelConfig, backend: str) -> Mapping[str, Any]:
    """The backend's options: those of the case, where it has some for this backend."""
    extension = extensions().get(backend)
    return {} if extension is None or case.top_k is None else extension.case_options(case, config)


def judged_program(case: ModelCase, model: Transformer, backend: str) -> Program:
    """The program whose outputs are judged: ``{"logits"}``, or ``{"loss", "gradient"}`` of a train step."""
    if case.needs_grad:
        of_batch = loss_and_gradient(model.config, resolutions_of(case, model.config, backend))

        def judged(params: Any, tokens: Any) -> dict[str, Any]:
            loss, gradient = of_batch(params, Batch(tokens[None]), None)
            return {"loss": loss, "gradient": jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)])}

        return Program(judged, (model.arrays(), case_tokens(case, model.config)), renewed=(1,))
    program = model_program(case, model, backend)
    return Program(
        lambda *inputs: judged_outputs(program.function(*inputs)), program.arguments, renewed=program.renewed
    )


def timed_outputs(case: ModelCase, outputs: Any) -> dict[str, Any]:
    """What can be judged of the outputs of a timed call: the logits, or the loss of a train step."""
    return {"loss": outputs[2]} if case.needs_grad else judged_outputs(outputs)


def judged_outputs(outputs: Any) -> dict[str, Any]:
    """What is judged of the outputs of a prefill or a decode: the logits, without the cache."""
    return {"logits": outputs[0]}


def model_tokens(case: ModelCase) -> int:
    """Tokens that one call processes, without padding: of the prompts, the decode steps, or the training batch."""
    return case.batch * case.new_tokens if case.is_decode else int(prompt_lengths(case).sum())


def model_steps(case: ModelCase) -> int | None:
    """Forward passes that a call makes one after the other for its tokens; None for a train step."""
    return None if case.needs_grad else case.new_tokens if case.is_decode else 1


def cache_figures(config: ModelConfig) -> dict[str, Any]:
    """Bytes of the cache per token of one sequence, all layers together."""
    return {"kv_bytes_per_token": KVCache.create(config, 1, 1, default_dtype(config)).nbytes}


def prompt_lengths(case: ModelCase) -> Int[np.ndarray, " batch"]:
    """Valid tokens of each prompt: ``sequence``, or with ``ragged`` from a quarter of it upward.

    The first is the longest, so that the shapes are those of the case.
    """
    if not case.ragged:
        return np.full(case.batch, case.sequence, np.int32)
    rng = np.random.default_rng([case.seed, 2])
    lengths = rng.integers(max(1, case.sequence // 4), case.sequence, case.batch, endpoint=True)
    lengths[0] = case.sequence
    return lengths.astype(np.int32)


def selected_shares(resolutions: Resolutions, config: ModelConfig) -> tuple[SelectedShare, ...]:
    """What each attention type's backend selects, where it selects keys; empty where exact backends compute all."""
    return tuple(
        found.backend.selected_share(
            found.spec,
            dict(found.options),
            tuple(i for i, other in enumerate(config.layer_types) if other == kind),
            config.num_layers,
        )
        for kind, found in resolutions
        if isinstance(found.backend, SelectsKeys) and found.mode != "fallback"
    )


def notes(case: ModelCase, config: ModelConfig, backend: str) -> tuple[str, ...]:
    """Notes on how the case was run: what a sparse backend keeps, and the dtype of the cache."""
    selected = selected_shares(resolutions_of(case, config, backend), config)
    lines = tuple(line for one in selected for line in one.lines)
    held = default_dtype(config)
    if not case.is_decode or held == config.dtype:
        return lines
    return (
        *lines,
        f"{case.name}: the cache is {held} although the model is {config.dtype}, since a CPU reads it faster so.",
    )


def model_flops(case: ModelCase, config: ModelConfig) -> float:
    """FLOPs of one call: two per weight and token that a matmul uses (three times that in training), and attention."""
    layers = parameter_shapes(config)["layers"]
    weights = sum(math.prod(shape) for layer in layers for shape in layer.values() if len(shape) > 1)
    head = config.hidden_size * config.vocab_size
    tokens = model_tokens(case)
    head_tokens = tokens if case.is_decode or case.needs_grad else case.batch  # prefill projects its last token only
    matmul = 2.0 * (weights * tokens + head * head_tokens)
    training = case.needs_grad
    attention = 0.0
    for kind in config.layer_types:
        cached = case.sequence if case.is_decode else None
        spec = attention_spec(config, kind, batch=1, query_length=1, key_value_length=cached)
        pairs = sum(_pairs(case, config, kind, int(length)) for length in prompt_lengths(case))
        dims = spec.head_dim, spec.value_head_dim or spec.head_dim
        attention += attention_flops(pairs, config.num_heads, *dims, backward=training)
    return matmul * (3 if training else 1) + attention


def _pairs(case: ModelCase, config: ModelConfig, kind: AttentionType, prompt: int) -> int:
    """Visible pairs of a layer of this type in one sequence."""

    def count(length: int) -> int:
        queries = 1 if case.is_decode else length
        spec = attention_spec(config, kind, batch=1, query_length=queries, key_value_length=length)
        return visible_pairs(nearest_case(plain_spec(spec), decode=case.is_decode, needs_grad=False))

    if not case.is_decode:
        return count(prompt)
    return sum(count(prompt + step + 1) for step in range(case.new_tokens))


def prefill(config: ModelConfig, found: Resolutions) -> Callable[..., Any]:
    """``(params, tokens, held, end) -> (logits of the last token, held)``, behind an empty cache."""

    def run(params: Any, tokens: Any, held: Any, end: Any) -> Any:
        start = jnp.zeros_like(end)
        return forward_cached(config, params, tokens, held, start, end, resolutions=found, fresh=True, last_only=True)

    return run


def train_step(config: ModelConfig, found: Resolutions) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """``(params, state, tokens) -> (params, state, loss)``, one step of AdamW, and a function for its first state."""
    optimizer = optax.adamw(LEARNING_RATE)
    step = training_step(config, found, optimizer)

    def run(params: Any, state: Any, tokens: Any) -> Any:
        return step(params, state, Batch(tokens[None]), None)

    return run, optimizer.init


def _prefill(case: ModelCase, model: Transformer, found: Resolutions) -> Program:
    cache = model.new_cache(case.batch, case.sequence)
    end = jnp.asarray(prompt_lengths(case))
    tokens = case_tokens(case, model.config)
    arguments = (model.arrays(), tokens, (cache.keys, cache.values), end)
    return Program(prefill(model.config, found), arguments, renewed=(1,))


def _decode(case: ModelCase, model: Transformer, found: Resolutions) -> Program:
    cache = noisy_cache(case, model)

    def run(params: Any, tokens: Any, held: Any, start: Any) -> Any:
        def step(state: Any, token: Any) -> tuple[Any, Any]:
            held, start = state
            logits, held = forward_cached(
                model.config, params, token[:, None], held, start, start + 1, resolutions=found, last_only=True
            )
            return (held, start + 1), logits

        (held, _), logits = jax.lax.scan(step, (held, start), tokens)
        return logits, held

    tokens = decoded_tokens(case, model.config).T
    arguments = (model.arrays(), tokens, (cache.keys, cache.values), jnp.asarray(cache.lengths))
    return Program(run, arguments, renewed=(1,))


def _train(case: ModelCase, model: Transformer, found: Resolutions) -> Program:
    run, start = train_step(model.config, found)
    params = model.arrays()
    return Program(run, (params, start(params), case_tokens(case, model.config)), renewed=(2,))


def case_tokens(case: ModelCase, config: ModelConfig) -> jax.Array:
    """The prompt or training batch of a case, ``[batch, sequence]`` int32, from its seed."""
    rng = np.random.default_rng([case.seed, 0])
    return jnp.asarray(rng.integers(0, config.vocab_size, (case.batch, case.sequence)), jnp.int32)


def decoded_tokens(case: ModelCase, config: ModelConfig) -> jax.Array:
    """The fixed tokens that a decode case feeds in, ``[batch, new_tokens]`` int32."""
    return case_tokens(dataclasses.replace(case, sequence=case.new_tokens), config)


def noisy_cache(case: ModelCase, model: Transformer) -> KVCache:
    """A cache with ``sequence`` slots of noise and room for ``new_tokens`` more."""
    rng = np.random.default_rng([case.seed, 1])
    empty = model.new_cache(case.batch, case.sequence + case.new_tokens, default_dtype(model.config))

    def fill(slots: Slots) -> Slots:
        noise = rng.standard_normal(slots.shape, np.float32)
        noise[:, :, case.sequence :] = 0.0
        return jnp.asarray(noise, slots.dtype)

    keys, values = tuple(map(fill, empty.keys)), tuple(map(fill, empty.values))
    return KVCache(keys=keys, values=values, lengths=prompt_lengths(case))
