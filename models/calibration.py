"""Calibration of Kascade: run a model over some text and compare the attention of its layers.

The statistics are those of arXiv 2512.16391, section 3: how well one layer's selection serves another (head by head,
least over query tiles, mean over prompts), and how much each layer's attention changes the stream. Prompts and query
tiles are processed one at a time, so memory grows with the length of a prompt, not with its square. A calibration
carries the fingerprint of its model and is refused for another.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnsuite.backends import AttentionSpec, Layout
from attnsuite.backends.kascade import Calibration, Places, Settings, Tiling, load_calibration
from attnsuite.backends.kascade.selection import candidates, choose, may_see

from .checkpoint import Checkpoint
from .config import ModelConfig
from .forward import forward
from .parameters import Params
from .planning import Resolutions, attention_spec, resolve_attention
from .transformer import Transformer

# The settings that decide the selection; the others (kernel, schedule, ...) decide its use.
_MEASURED = ("top_k", "min_keys", "granularity", "tile_size", "query_tile")


def calibrate(
    model: Transformer,
    prompts: Iterable[Any],
    options: Mapping[str, Any] | None = None,
    *,
    text: Mapping[str, Any] | None = None,
) -> Calibration:
    """The statistics for a schedule, measured over ``prompts``, each a 1-D array of tokens.

    ``options`` are those of the ``kascade`` backend that say how keys are selected (``top_k``, ``min_keys``,
    ``granularity``, ``tile_size``, ``query_tile``). Prompts of one length share a compiled program. ``text`` names the
    source of the prompts and is kept unchanged. Attention runs dense, by the best backend here. Raises ValueError if a
    layer's attention is not global, and if no prompt is long enough for its tiles to have a choice.
    """
    config, settings = model.config, Settings.of(options)
    other = sorted(set(config.layer_types) - {"global"})
    if other:
        raise ValueError(
            f"the model has layers with {', '.join(other)} attention; kascade is calibrated for global (causal) layers."
        )
    params, sums, masses, count = model.arrays(), None, [], 0
    for prompt in prompts:
        tokens = jnp.asarray(prompt)
        if tokens.ndim != 1:
            raise ValueError(f"a prompt has shape {tokens.shape}; expected one dimension, its tokens.")
        spec = attention_spec(config, "global", batch=1, query_length=len(tokens), needs_grad=False)
        found = resolve_attention(config, batch=1, query_length=len(tokens), needs_grad=False)
        tiling = Tiling.of(spec, settings)
        if tiling.slots >= len(tiling.budgets) - 1:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens leaves no choice: all {len(tiling.budgets) - 1} earlier units are "
                "selected; give longer prompts, or a lower top_k or min_keys."
            )
        parts = jax.tree.map(np.asarray, _measure(config, params, tokens[None], found, spec, tiling))
        masses.append(parts.pop("mass"))
        sums = parts if sums is None else jax.tree.map(np.add, sums, parts)
        count += 1
    if sums is None:
        raise ValueError("there is no prompt to calibrate with; give at least one.")
    means = {name: (total / count).astype(np.float32) for name, total in sums.items()}
    return Calibration(
        **means,
        mass=_mean_where_reached(masses),
        settings={name: getattr(settings, name) for name in _MEASURED},
        text=dict(text or {}) | {"prompts": count},
        fingerprint=fingerprint(model),
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
    similarity = _similarities(spec, tiling, jnp.stack(queries), jnp.stack(keys))
    return {"importance": jnp.stack(importance), **similarity}


def _turned(x: Float[Array, "1 length hidden"], attended: Float[Array, "1 length hidden"]) -> Float[Array, ""]:
    after = x + attended
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(after, axis=-1)
    return jnp.mean(1.0 - (x * after).sum(-1) / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))


def _similarities(
    spec: AttentionSpec,
    tiling: Tiling,
    queries: Float[Array, "layers length heads dim"],
    keys: Float[Array, "layers length kv_heads dim"],
) -> dict[str, Array]:
    """Over the query tiles, one after the other: the least kept mass and the mean overlap of every pair of heads."""
    layers, length, kv_heads = keys.shape[:3]
    places = Places.of(spec, Layout(), tiling)
    allowed = candidates(tiling, places)[0]
    rows = tiling.query_tile
    queries = jnp.pad(queries, ((0, 0), (0, tiling.padded_queries - length), (0, 0), (0, 0)))

    def one_tile(carry: tuple[Array, ...], tile: Array) -> tuple[tuple[Array, ...], Array]:
        least, overlaps, tiles = carry
        candidate = jnp.broadcast_to(allowed[tile], (kv_heads, tiling.units))

        def one_layer(layer: Array) -> tuple[Array, Array, Array]:
            query = jax.lax.dynamic_slice_in_dim(queries[layer], tile * rows, rows)
            positions = tile * rows + jnp.arange(rows, dtype=jnp.int32)
            mass = _tile_mass(spec, tiling, query, keys[layer], positions)
            selected, _ = choose(tiling, mass, candidate)
            member = (selected[..., None] == jnp.arange(tiling.units, dtype=jnp.int32).reshape(1, 1, -1)).any(1)
            # A row's probabilities sum to 1: the own region has the mass that no candidate has.
            total = jnp.float32(spec.group_size) * (positions < length).sum()
            return jnp.where(candidate, mass, 0.0), member.astype(jnp.float32), total

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
