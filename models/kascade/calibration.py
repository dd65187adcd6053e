"""Calibration of Kascade: run a model over some text and compare the attention of its layers (``similarity.py``).

A model is run layer by layer. Each layer leaves behind the mass of its attention, pooled over query tiles and units of
keys; the masses of all layers are compared at the end, and the statistics are averaged over prompts. Of a checkpoint
one layer is in memory, beside the hidden states of all prompts. A calibration carries the fingerprint of its model and
is refused for another. Of a model that is not this package's, a function that gives each layer's queries and keys is
enough.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnsuite.backends import AttentionSpec, Layout, Resolution
from attnsuite.backends.kascade import Calibration, Settings, Tiling, load_calibration
from attnsuite.models.checkpoint import Checkpoint
from attnsuite.models.config import ModelConfig
from attnsuite.models.forward_pass import Hidden, layer_forward, turns_of, whole_sequence
from attnsuite.models.parameters import Params
from attnsuite.models.planning import Resolutions, attention_spec, resolve_attention
from attnsuite.models.streaming import embedded
from attnsuite.models.transformer import Transformer, check_tokens

from .similarity import compared, direction_change, pooled_masses

# Queries [length, heads, head_dim] and keys [length, kv_heads, head_dim] of each layer for a prompt, with all that is
# added to them by position; then, if wanted, the stream and what attention adds to it, both [length, width].
QueriesAndKeys = Callable[[Int[Array, " length"]], Iterable[tuple[Any, ...]]]

# The settings that decide the selection; the others (kernel, schedule, ...) decide its use.
_MEASURED = ("top_k", "min_keys", "granularity", "tile_size", "query_tile")


def calibrate(
    model: Transformer | Checkpoint | QueriesAndKeys,
    prompts: Iterable[Any],
    options: Mapping[str, Any] | None = None,
    *,
    scale: float | None = None,
    text: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """The statistics for a schedule, measured over ``prompts``, each a 1-D array of tokens.

    ``options`` are those of the ``kascade`` backend that say how keys are selected (``top_k``, ``min_keys``,
    ``granularity``, ``tile_size``, ``query_tile``). Prompts of one length share a compiled program. ``text`` names the
    source of the prompts and is kept unchanged. Attention runs dense, by the best backend here. Each layer of a
    :class:`Checkpoint` is read once, for all prompts. ``progress`` gets the name of each step. Raises ValueError if a
    layer's attention is not global, for a soft cap or sinks, and if no prompt is long enough for its tiles to have a
    choice.

    ``model`` may be a function of a prompt that returns the pair of queries ``[length, heads, head_dim]`` and keys
    ``[length, kv_heads, head_dim]`` of each layer, rotated as for the product, whose scores are multiplied by
    ``scale`` (default ``1/sqrt(head_dim)``). The fingerprint is that of these arrays of the first prompt. Two more
    arrays, the stream before attention and what attention adds to it, both ``[length, width]``, give a layer its
    importance. Without them it is 1 for all layers, and dynamic programming weighs them alike.
    """
    settings = Settings.of(options)
    if not isinstance(model, Transformer | Checkpoint):
        measured, model_fingerprint = _measured_by_function(model, settings, prompts, scale, progress), None
    elif scale is not None:
        raise ValueError(f"scale={scale} is of a function; the configuration of a model has its own.")
    else:
        measured, model_fingerprint = _measured_by_model(model, settings, prompts, progress), fingerprint(model)
    return _calibration(measured, settings, text, model_fingerprint)


def _measured_by_model(
    model: Transformer | Checkpoint, settings: Settings, prompts: Iterable[Any], progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    config = model.config
    other = sorted(set(config.layer_types) - {"global"})
    if other:
        raise ValueError(
            f"the model has layers with {', '.join(other)} attention; kascade is calibrated for global (causal) layers."
        )
    check_plain_logits(config)
    problems = (_problem(config, settings, prompt) for prompt in prompts)
    if isinstance(model, Checkpoint):
        return _measured_by_layer(model, list(problems), progress)  # a layer is read once, for all prompts
    return itertools.chain.from_iterable(_measured_by_layer(model, [one], progress) for one in problems)


def _calibration(
    measured: Iterable[dict[str, Any]], settings: Settings, text: Mapping[str, Any] | None, fingerprint: str | None
) -> Calibration:
    sums, masses = None, []
    for parts in measured:
        found = parts.pop("fingerprint", "")
        fingerprint = found if fingerprint is None else fingerprint
        masses.append(parts.pop("mass"))
        sums = parts if sums is None else jax.tree.map(np.add, sums, parts)
    if sums is None:
        raise ValueError("there is no prompt to calibrate with; give at least one.")
    count = len(masses)
    means = {name: (total / count).astype(np.float32) for name, total in sums.items()}
    return Calibration(
        **means,
        mass=_mean_where_reached(masses),
        settings={name: getattr(settings, name) for name in _MEASURED},
        text=dict(text or {}) | {"prompts": count},
        fingerprint=fingerprint or "",
    )


def load(path: str | Path, model: Transformer | Checkpoint) -> Calibration:
    """The calibration in ``path``. Raises ValueError if it is not of ``model``, or cannot be read."""
    calibration = load_calibration(path)
    expected = fingerprint(model)
    if calibration.fingerprint != expected:
        raise ValueError(
            f"{path} was calibrated on another model (fingerprint {calibration.fingerprint[:12]}, this one has "
            f"{expected[:12]}); calibrate this one with attnsuite calibrate."
        )
    return calibration


def fingerprint(model: Transformer | Checkpoint) -> str:
    """SHA-256 of configuration and parameters, hexadecimal. The dtype of activations does not count.

    One array of a checkpoint is read at a time.
    """
    config = dataclasses.asdict(model.config)
    config.pop("dtype")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path, array in model.leaves():
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def check_plain_logits(config: ModelConfig) -> None:
    """Raise ValueError for a model whose attention is more than a softmax of scaled scores.

    The attention mass here, and in the evidence for Kascade, is computed without a soft cap and without sinks.
    """
    for name, disabled in (("logits_soft_cap", None), ("attention_sinks", False)):
        value = getattr(config, name)
        if value != disabled:
            raise ValueError(f"the model has {name}={value}; attention mass is measured only with {name}={disabled}.")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """A prompt, and what its attention and its selection are."""

    tokens: Int[Array, "1 length"]
    spec: AttentionSpec
    tiling: Tiling
    resolutions: Resolutions


def _problem(config: ModelConfig, settings: Settings, prompt: Any) -> _Problem:
    prompt = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
    if prompt.ndim != 1:
        raise ValueError(f"a prompt has shape {prompt.shape}; expected one dimension, its tokens.")
    tokens = check_tokens(prompt[None], config.vocab_size)
    spec = attention_spec(config, "global", batch=1, query_length=len(prompt), needs_grad=False)
    found = resolve_attention(config, batch=1, query_length=len(prompt), needs_grad=False)
    return _Problem(tokens, spec, _tiling_with_a_choice(spec, settings), found)


def _tiling_with_a_choice(spec: AttentionSpec, settings: Settings) -> Tiling:
    """The tiles of a prompt. Raises ValueError where every earlier tile is selected."""
    tiling = Tiling.of(spec, settings)
    if tiling.slots >= len(tiling.budgets) - 1:
        raise ValueError(
            f"a prompt of {spec.query_length} tokens leaves no choice: all {len(tiling.budgets) - 1} earlier units are "
            "selected; give longer prompts, or a lower top_k or min_keys."
        )
    return tiling


def _measured_by_layer(
    model: Transformer | Checkpoint, problems: Sequence[_Problem], progress: Callable[[str], None]
) -> Iterator[dict[str, np.ndarray]]:
    """Statistics of each prompt. One layer at a time is taken from the model and run over all prompts."""
    config = model.config
    hidden = embedded(model, [one.tokens for one in problems])
    masses: list[list[np.ndarray]] = [[] for _ in problems]
    importance: list[list[np.ndarray]] = [[] for _ in problems]
    for i in range(config.num_layers):
        progress(f"layer {i + 1} of {config.num_layers}")
        layer = model.layer(i)
        for n, one in enumerate(problems):
            ((_, resolution),) = one.resolutions
            hidden[n], mass, turned = _observed_layer(
                config, layer, hidden[n], resolution=resolution, spec=one.spec, tiling=one.tiling
            )
            masses[n].append(np.asarray(mass))
            importance[n].append(np.asarray(turned))
        del layer
    for n, one in enumerate(problems):
        progress(f"comparing the layers on prompt {n + 1} of {len(problems)}")
        found = compared(one.spec, one.tiling, np.stack(masses[n]))
        yield {"importance": np.stack(importance[n]), **jax.tree.map(np.asarray, found)}


def _measured_by_function(
    layers_of: QueriesAndKeys,
    settings: Settings,
    prompts: Iterable[Any],
    scale: float | None,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Statistics of each prompt, by the queries and keys of somebody's model."""
    for number, prompt in enumerate(prompts, start=1):
        progress(f"prompt {number}")
        masses: list[np.ndarray] = []
        importance: list[float] = []
        specs: list[AttentionSpec] = []
        tilings: list[Tiling] = []
        digest = hashlib.sha256()
        for arrays in layers_of(jnp.asarray(prompt)):
            query, key, *stream = _checked(arrays, len(masses), len(prompt))
            importance.append(float(direction_change(*(x.astype(jnp.float32) for x in stream))) if stream else 1.0)
            specs.append(_spec_of(query, key, scale))
            tilings.append(_tiling_with_a_choice(specs[-1], settings))
            masses.append(np.asarray(pooled_masses(specs[-1], tilings[-1], query, key)))
            digest.update(np.asarray(query).tobytes() + np.asarray(key).tobytes())
        if len(set(specs)) != 1:
            shapes = ", ".join(sorted({f"{one.num_heads}/{one.num_kv_heads} heads of {one.head_dim}" for one in specs}))
            raise ValueError(f"the layers have {shapes or 'no shape: there are none'}; expected layers of one shape.")
        found = compared(specs[0], tilings[0], np.stack(masses))
        measured = {"importance": np.asarray(importance, np.float32), "fingerprint": digest.hexdigest()}
        yield measured | jax.tree.map(np.asarray, found)


def _checked(arrays: Any, layer: int, length: int) -> tuple[Array, ...]:
    """Queries and keys of a layer, and perhaps the stream and what is added to it. Raises ValueError for others."""
    try:
        query, key, *stream = map(jnp.asarray, arrays)
    except (TypeError, ValueError) as error:
        raise ValueError(f"layer {layer} gave no pair of arrays, queries and keys: {error}") from error
    if stream and [x.shape for x in stream] != [(length, stream[0].shape[-1])] * 2:
        raise ValueError(
            f"layer {layer} gave {', '.join(str(x.shape) for x in stream)} behind its queries and keys; expected the "
            f"stream and what attention adds to it, both [{length}, width], or nothing."
        )
    fits = query.ndim == key.ndim == 3 and query.shape[0] == key.shape[0] == length and query.shape[2] == key.shape[2]
    if not fits or query.shape[1] % key.shape[1] or query.dtype != key.dtype:
        raise ValueError(
            f"layer {layer} gave queries {query.dtype}{list(query.shape)} and keys {key.dtype}{list(key.shape)}; "
            f"expected [{length}, heads, head_dim] and [{length}, kv_heads, head_dim] of one dtype, for a prompt of "
            f"{length} tokens."
        )
    if not all(np.isfinite(np.asarray(x, np.float32)).all() for x in (query, key, *stream)):
        raise ValueError(f"layer {layer} gave numbers that are not finite.")
    return query, key, *stream


def _spec_of(query: Array, key: Array, scale: float | None) -> AttentionSpec:
    length, heads, dim = query.shape
    return AttentionSpec(
        batch=1,
        query_length=length,
        key_value_length=length,
        num_heads=heads,
        num_kv_heads=key.shape[1],
        head_dim=dim,
        dtype=query.dtype.name,
        scale=scale,
        is_causal=True,
        needs_grad=False,
    )


@functools.partial(jax.jit, static_argnames=("config", "resolution", "spec", "tiling"), donate_argnames=("x",))
def _observed_layer(
    config: ModelConfig, layer: Params, x: Hidden, *, resolution: Resolution, spec: AttentionSpec, tiling: Tiling
) -> tuple[Hidden, Float[Array, "tiles kv_heads units"], Float[Array, ""]]:
    """One layer over a prompt: the hidden state behind it, the pooled mass of its attention, and its importance."""
    seen: list[tuple[Array, Array]] = []

    def observe(_: int, query: Array, key: Array, x: Array, attended: Array) -> None:
        seen.append(
            (
                pooled_masses(spec, tiling, query[0], key[0]),
                direction_change(x.astype(jnp.float32), attended.astype(jnp.float32)),
            )
        )

    turns = turns_of(config, *whole_sequence(x.shape[1]))
    x, _ = layer_forward(config, layer, x, turns["global"], resolution.plan(Layout()), 0, (), observe)
    ((mass, turned),) = seen
    return x, mass, turned


def _mean_where_reached(masses: list[np.ndarray]) -> np.ndarray:
    """Mean over prompts of different lengths, each query tile over those that have it."""
    longest = max(mass.shape[-1] for mass in masses)
    total, reached = np.zeros((*masses[0].shape[:-1], longest)), np.zeros(longest)
    for mass in masses:
        total[..., : mass.shape[-1]] += mass
        reached[: mass.shape[-1]] += 1
    return (total / reached).astype(np.float32)
