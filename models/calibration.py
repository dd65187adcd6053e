"""Calibration of Kascade: run a model over some text and compare the attention of its layers.

The statistics are those of arXiv 2512.16391, section 3: how well one layer's selection serves another (head by head,
least over query tiles, mean over prompts), and how much each layer's attention changes the stream. Prompts and query
tiles are processed one at a time, so memory grows with the length of a prompt, not with its square. A calibration
carries the fingerprint of its model and is refused for another. Of a model that is not this package's, a function that
gives each layer's queries and keys is enough.

A checkpoint is calibrated layer by layer, in the memory of one layer and the hidden states of all prompts: each layer
leaves behind the mass of its attention, pooled over query tiles and units of keys, and the masses of all layers are
compared at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnsuite.backends import AttentionSpec, Layout, Resolution
from attnsuite.backends.kascade import Calibration, Places, Settings, Tiling, load_calibration
from attnsuite.backends.kascade.selection import candidates, choose, may_see

from .checkpoint import Checkpoint
from .config import ModelConfig
from .forward import Hidden, forward, layer_forward, turns_of, whole_sequence
from .parameters import Params
from .planning import Resolutions, attention_spec, resolve_attention
from .streaming import embedded
from .transformer import Transformer

# Queries [length, heads, head_dim] and keys [length, kv_heads, head_dim] of each layer for a prompt, with all that is
# added to them by position.
QueriesAndKeys = Callable[[Int[Array, " length"]], Iterable[tuple[Any, Any]]]

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
    :class:`Checkpoint` is read once, for all prompts. ``progress`` is told what begins. Raises ValueError if a
    layer's attention is not global, for a soft cap or sinks, and if no prompt is long enough for its tiles to have a
    choice.

    ``model`` may be a function of a prompt that returns the pair of queries ``[length, heads, head_dim]`` and keys
    ``[length, kv_heads, head_dim]`` of each layer, rotated as for the product, whose scores are multiplied by
    ``scale`` (default ``1/sqrt(head_dim)``). All layers then have the importance 1, since what a layer adds to the
    stream is not known, and the fingerprint is that of the arrays of the first prompt.
    """
    settings = Settings.of(options)
    if not isinstance(model, Transformer | Checkpoint):
        measured, own = _measured_by_function(model, settings, prompts, scale, progress), None
    elif scale is not None:
        raise ValueError(f"scale={scale} is of a function; the configuration of a model has its own.")
    else:
        measured, own = _measured_by_model(model, settings, prompts, progress), fingerprint(model)
    return _calibration(measured, settings, text, own)


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
        return _measured_by_layer(model, list(problems), progress)
    return _measured_by_prompt(config, model.arrays(), problems, progress)


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
    own = fingerprint(model)
    if calibration.fingerprint != own:
        raise ValueError(
            f"{path} was calibrated on another model (fingerprint {calibration.fingerprint[:12]}, this one has "
            f"{own[:12]}); calibrate this one with attnsuite calibrate."
        )
    return calibration


def fingerprint(model: Transformer | Checkpoint) -> str:
    """SHA-256 of configuration and parameters, hexadecimal. The dtype of activations does not count.

    One array of a checkpoint is read at a time.
    """
    config = dataclasses.asdict(model.config)
    config.pop("dtype")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path, array in model.leaves() if isinstance(model, Checkpoint) else _leaves(model):
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _leaves(model: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    for path, array in jax.tree_util.tree_leaves_with_path(model.arrays()):
        yield jax.tree_util.keystr(path), np.asarray(array)


def check_plain_logits(config: ModelConfig) -> None:
    """Raise ValueError for a model whose attention is more than a softmax of scaled scores.

    The attention mass here, and in the evidence for Kascade, is computed without a soft cap and without sinks.
    """
    for name, absent in (("logits_soft_cap", None), ("attention_sinks", False)):
        value = getattr(config, name)
        if value != absent:
            raise ValueError(f"the model has {name}={value}; attention mass is measured only with {name}={absent}.")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """A prompt, and what its attention and its selection are."""

    tokens: Int[Array, "1 length"]
    spec: AttentionSpec
    tiling: Tiling
    resolutions: Resolutions


def _problem(config: ModelConfig, settings: Settings, prompt: Any) -> _Problem:
    tokens = jnp.asarray(prompt)
    if tokens.ndim != 1:
        raise ValueError(f"a prompt has shape {tokens.shape}; expected one dimension, its tokens.")
    spec = attention_spec(config, "global", batch=1, query_length=len(tokens), needs_grad=False)
    found = resolve_attention(config, batch=1, query_length=len(tokens), needs_grad=False)
    return _Problem(tokens[None], spec, _tiling_with_a_choice(spec, settings), found)


def _tiling_with_a_choice(spec: AttentionSpec, settings: Settings) -> Tiling:
    """The tiles of a prompt. Raises ValueError where every earlier tile is selected."""
    tiling = Tiling.of(spec, settings)
    if tiling.slots >= len(tiling.budgets) - 1:
        raise ValueError(
            f"a prompt of {spec.query_length} tokens leaves no choice: all {len(tiling.budgets) - 1} earlier units are "
            "selected; give longer prompts, or a lower top_k or min_keys."
        )
    return tiling


def _measured_by_prompt(
    config: ModelConfig, params: Params, problems: Iterable[_Problem], progress: Callable[[str], None]
) -> Iterator[dict[str, np.ndarray]]:
    """Statistics of each prompt, by a model in memory."""
    for number, one in enumerate(problems, start=1):
        progress(f"prompt {number}")
        yield jax.tree.map(np.asarray, _measure(config, params, one.tokens, one.resolutions, one.spec, one.tiling))


def _measured_by_layer(
    checkpoint: Checkpoint, problems: Sequence[_Problem], progress: Callable[[str], None]
) -> Iterator[dict[str, np.ndarray]]:
    """Statistics of each prompt, by a checkpoint of which one layer at a time is in memory."""
    config = checkpoint.config
    hidden = embedded(checkpoint, [one.tokens for one in problems])
    masses: list[list[np.ndarray]] = [[] for _ in problems]
    importance: list[list[np.ndarray]] = [[] for _ in problems]
    for i in range(config.num_layers):
        progress(f"layer {i + 1} of {config.num_layers}")
        layer = checkpoint.layer(i)
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
        compared = _compare(one.spec, one.tiling, np.stack(masses[n]))
        yield {"importance": np.stack(importance[n]), **jax.tree.map(np.asarray, compared)}


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
        specs: list[AttentionSpec] = []
        tilings: list[Tiling] = []
        digest = hashlib.sha256()
        for pair in layers_of(jnp.asarray(prompt)):
            query, key = _checked_pair(pair, len(masses), len(prompt))
            specs.append(_spec_of(query, key, scale))
            tilings.append(_tiling_with_a_choice(specs[-1], settings))
            masses.append(np.asarray(_masses(specs[-1], tilings[-1], query, key)))
            digest.update(np.asarray(query).tobytes() + np.asarray(key).tobytes())
        if len(set(specs)) != 1:
            shapes = ", ".join(sorted({f"{one.num_heads}/{one.num_kv_heads} heads of {one.head_dim}" for one in specs}))
            raise ValueError(f"the layers have {shapes or 'no shape: there are none'}; expected layers of one shape.")
        compared = _compare(specs[0], tilings[0], np.stack(masses))
        importance = np.ones(len(masses), np.float32)
        yield {"importance": importance, "fingerprint": digest.hexdigest(), **jax.tree.map(np.asarray, compared)}


def _checked_pair(pair: Any, layer: int, length: int) -> tuple[Array, Array]:
    """Queries and keys of a layer. Raises ValueError for anything else."""
    try:
        query, key = map(jnp.asarray, pair)
    except (TypeError, ValueError) as error:
        raise ValueError(f"layer {layer} gave no pair of arrays, queries and keys: {error}") from error
    fits = query.ndim == key.ndim == 3 and query.shape[0] == key.shape[0] == length and query.shape[2] == key.shape[2]
    if not fits or query.shape[1] % key.shape[1] or query.dtype != key.dtype:
        raise ValueError(
            f"layer {layer} gave queries {query.dtype}{list(query.shape)} and keys {key.dtype}{list(key.shape)}; "
            f"expected [{length}, heads, head_dim] and [{length}, kv_heads, head_dim] of one dtype, for a prompt of "
            f"{length} tokens."
        )
    return query, key


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


@functools.partial(jax.jit, static_argnames=("spec", "tiling"))
def _masses(
    spec: AttentionSpec, tiling: Tiling, query: Float[Array, "length heads dim"], key: Float[Array, "length kv_heads d"]
) -> Float[Array, "tiles kv_heads units"]:
    """Pooled mass of a layer's attention in every query tile."""
    rows = _padded(tiling, query[None])[0]
    return jax.lax.map(lambda tile: _mass_of_tile(spec, tiling, rows, key, tile), jnp.arange(tiling.query_tiles))


@functools.partial(jax.jit, static_argnames=("config", "resolution", "spec", "tiling"), donate_argnames=("x",))
def _observed_layer(
    config: ModelConfig, layer: Params, x: Hidden, *, resolution: Resolution, spec: AttentionSpec, tiling: Tiling
) -> tuple[Hidden, Float[Array, "tiles kv_heads units"], Float[Array, ""]]:
    """One layer over a prompt: the hidden state behind it, the pooled mass of its attention, and its importance."""
    seen: list[tuple[Array, Array]] = []

    def observe(_: int, query: Array, key: Array, x: Array, attended: Array) -> None:
        seen.append(
            (_masses(spec, tiling, query[0], key[0]), _turned(x.astype(jnp.float32), attended.astype(jnp.float32)))
        )

    turns = turns_of(config, *whole_sequence(x.shape[1]))
    x, _ = layer_forward(config, layer, x, turns["global"], resolution.plan(Layout(), {}), 0, (), observe)
    ((mass, turned),) = seen
    return x, mass, turned


@functools.partial(jax.jit, static_argnames=("spec", "tiling"))
def _compare(
    spec: AttentionSpec, tiling: Tiling, masses: Float[Array, "layers tiles kv_heads units"]
) -> dict[str, Array]:
    return _similarities(spec, tiling, len(masses), lambda layer, tile: masses[layer, tile])


@functools.partial(jax.jit, static_argnames=("config", "resolutions", "spec", "tiling"))
def _measure(
    config: ModelConfig, params: Params, tokens: Array, resolutions: Resolutions, spec: AttentionSpec, tiling: Tiling
) -> dict[str, Array]:
    """Statistics of one prompt."""
    queries, keys, importance = [], [], []

    def observe(layer: int, query: Array, key: Array, x: Array, attended: Array) -> None:
        queries.append(query[0])
        keys.append(key[0])
        importance.append(_turned(x.astype(jnp.float32), attended.astype(jnp.float32)))

    forward(config, params, tokens, resolutions=resolutions, observe=observe)
    query, key = _padded(tiling, jnp.stack(queries)), jnp.stack(keys)

    def mass_of(layer: Array, tile: Array) -> Array:
        return _mass_of_tile(spec, tiling, query[layer], key[layer], tile)

    similarity = _similarities(spec, tiling, len(queries), mass_of)
    return {"importance": jnp.stack(importance), **similarity}


def _padded(tiling: Tiling, queries: Float[Array, "layers length heads dim"]) -> Float[Array, "layers rows heads dim"]:
    """Queries of whole query tiles."""
    return jnp.pad(queries, ((0, 0), (0, tiling.padded_queries - queries.shape[1]), (0, 0), (0, 0)))


def _turned(x: Float[Array, "1 length hidden"], attended: Float[Array, "1 length hidden"]) -> Float[Array, ""]:
    after = x + attended
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(after, axis=-1)
    return jnp.mean(1.0 - (x * after).sum(-1) / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))


def _similarities(
    spec: AttentionSpec,
    tiling: Tiling,
    layers: int,
    mass_of: Callable[[Array, Array], Float[Array, "kv_heads units"]],
) -> dict[str, Array]:
    """Over the query tiles, one after the other: the least kept mass and the mean overlap of every pair of heads.

    ``mass_of(layer, tile)`` is the pooled mass of a layer's attention in a query tile.
    """
    length, kv_heads = spec.query_length, spec.num_kv_heads
    allowed = candidates(tiling, Places.of(spec, Layout(), tiling))[0]

    def one_tile(carry: tuple[Array, ...], tile: Array) -> tuple[tuple[Array, ...], Array]:
        least, overlaps, tiles = carry
        candidate = jnp.broadcast_to(allowed[tile], (kv_heads, tiling.units))
        rows = (tile * tiling.query_tile + jnp.arange(tiling.query_tile, dtype=jnp.int32) < length).sum()

        def one_layer(layer: Array) -> tuple[Array, Array, Array]:
            mass = mass_of(layer, tile)
            selected, _ = choose(tiling, mass, candidate)
            member = (selected[..., None] == jnp.arange(tiling.units, dtype=jnp.int32).reshape(1, 1, -1)).any(1)
            # A row's probabilities sum to 1: the own region has the mass that no candidate has.
            return jnp.where(candidate, mass, 0.0), member.astype(jnp.float32), jnp.float32(spec.group_size) * rows

        mass, member, total = jax.lax.map(one_layer, jnp.arange(layers))
        own = total[:, None] - mass.sum(-1)
        on = jnp.einsum("aku,bhu->abkh", member, mass)
        alone = (member * mass).sum(-1)
        kept = (on + own[None, :, None]) / (alone + own)[None, :, None]
        both = jnp.einsum("aku,bhu->abkh", member, member)
        sizes = member.sum(-1)
        union = sizes[:, None, :, None] + sizes[None, :, None] - both
        has_choice = sizes[0, 0] < allowed[tile].sum()
        overlap = jnp.where(has_choice, both / jnp.maximum(union, 1.0), 0.0)
        return (
            (jnp.minimum(least, kept), overlaps + overlap, tiles + has_choice),
            (alone + own) / total[:, None],
        )

    shape = (layers, layers, kv_heads, kv_heads)
    start = (jnp.ones(shape), jnp.zeros(shape), jnp.int32(0))
    (least, overlaps, tiles), mass = jax.lax.scan(one_tile, start, jnp.arange(tiling.query_tiles))
    earlier = jnp.triu(jnp.ones((layers, layers)))[:, :, None, None]
    return {
        "mass_similarity": least * earlier,
        "jaccard_similarity": overlaps / jnp.maximum(tiles, 1).astype(jnp.float32) * earlier,
        "mass": mass.transpose(1, 2, 0),
    }


def _mass_of_tile(
    spec: AttentionSpec,
    tiling: Tiling,
    queries: Float[Array, "rows heads dim"],
    key: Float[Array, "length kv_heads dim"],
    tile: Array,
) -> Float[Array, "kv_heads units"]:
    """Pooled mass of the query tile ``tile`` of one layer; ``queries`` are :func:`_padded`."""
    rows = tiling.query_tile
    query = jax.lax.dynamic_slice_in_dim(queries, tile * rows, rows)
    return _tile_mass(spec, tiling, query, key, tile * rows + jnp.arange(rows, dtype=jnp.int32))


def _tile_mass(
    spec: AttentionSpec, tiling: Tiling, query: Array, key: Array, positions: Array
) -> Float[Array, "kv_heads units"]:
    """Pooled mass of one query tile over all units; rows beyond the length add nothing."""
    length, kv_heads, dim = key.shape
    grouped = query.reshape(len(positions), kv_heads, -1, dim)
    scores = jnp.einsum("tkgh,skh->kgts", grouped, key, preferred_element_type=jnp.float32) * spec.softmax_scale
    seen = may_see(positions, jnp.arange(length, dtype=jnp.int32), jnp.int32(length))
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mass = jnp.where((positions < length)[None, None, :, None], probs, 0.0).sum((1, 2))
    mass = jnp.pad(mass, ((0, 0), (0, tiling.units * tiling.unit - length)))
    return mass.reshape(kv_heads, tiling.units, tiling.unit).sum(-1)


def _mean_where_reached(masses: list[np.ndarray]) -> np.ndarray:
    """Mean over prompts of different lengths, each query tile over those that have it."""
    longest = max(mass.shape[-1] for mass in masses)
    total, reached = np.zeros((*masses[0].shape[:-1], longest)), np.zeros(longest)
    for mass in masses:
        total[..., : mass.shape[-1]] += mass
        reached[: mass.shape[-1]] += 1
    return (total / reached).astype(np.float32)
