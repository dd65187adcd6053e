"""How well one layer's selection serves another: the statistics of arXiv 2512.16391, section 3, for one prompt.

:func:`pooled_masses` gives the attention mass of a layer, pooled over query tiles and units of keys.
:func:`compared` compares those of all layers, head by head. Query tiles are processed one at a time, so memory grows
with the length of a prompt, not with its square.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnsuite.backends import AttentionSpec, Layout
from attnsuite.backends.kascade import TileLayout, Tiling
from attnsuite.backends.kascade.selection import candidates, choose, may_see


@functools.partial(jax.jit, static_argnames=("spec", "tiling"))
def pooled_masses(
    spec: AttentionSpec, tiling: Tiling, query: Float[Array, "length heads dim"], key: Float[Array, "length kv_heads d"]
) -> Float[Array, "tiles kv_heads units"]:
    """The mass of a layer's attention in every query tile, summed over the keys of a unit and the heads of a group."""
    rows, (length, kv_heads, dim) = tiling.query_tile, key.shape
    query = jnp.pad(query, ((0, tiling.padded_queries - len(query)), (0, 0), (0, 0)))

    def one_tile(tile: Array) -> Array:
        positions = tile * rows + jnp.arange(rows, dtype=jnp.int32)
        grouped = jax.lax.dynamic_slice_in_dim(query, tile * rows, rows).reshape(rows, kv_heads, -1, dim)
        scores = jnp.einsum("tkgh,skh->kgts", grouped, key, preferred_element_type=jnp.float32) * spec.softmax_scale
        seen = may_see(positions, jnp.arange(length, dtype=jnp.int32), jnp.int32(length))
        probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        # Rows beyond the length add nothing.
        mass = jnp.where((positions < length)[None, None, :, None], probs, 0.0).sum((1, 2))
        mass = jnp.pad(mass, ((0, 0), (0, tiling.units * tiling.unit - length)))
        return mass.reshape(kv_heads, tiling.units, tiling.unit).sum(-1)

    return jax.lax.map(one_tile, jnp.arange(tiling.query_tiles))


@functools.partial(jax.jit, static_argnames=("spec", "tiling"))
def compared(
    spec: AttentionSpec, tiling: Tiling, masses: Float[Array, "layers tiles kv_heads units"]
) -> dict[str, Array]:
    """Over the query tiles, one after the other: the least kept mass and the mean overlap of every pair of heads."""
    layers, length, kv_heads = len(masses), spec.query_length, spec.num_kv_heads
    allowed = candidates(tiling, TileLayout.of(spec, Layout(), tiling))[0]

    def one_tile(carry: tuple[Array, ...], tile: Array) -> tuple[tuple[Array, ...], Array]:
        least, overlaps, tiles = carry
        candidate = jnp.broadcast_to(allowed[tile], (kv_heads, tiling.units))
        rows = (tile * tiling.query_tile + jnp.arange(tiling.query_tile, dtype=jnp.int32) < length).sum()

        def one_layer(layer: Array) -> tuple[Array, Array, Array]:
            mass = masses[layer, tile]
            selected, _ = choose(tiling, mass, candidate)
            member = (selected[..., None] == jnp.arange(tiling.units, dtype=jnp.int32).reshape(1, 1, -1)).any(1)
            # A row's probabilities sum to 1: the local region has the mass that no candidate has.
            return jnp.where(candidate, mass, 0.0), member.astype(jnp.float32), jnp.float32(spec.group_size) * rows

        mass, member, total = jax.lax.map(one_layer, jnp.arange(layers))
        local = total[:, None] - mass.sum(-1)
        on = jnp.einsum("aku,bhu->abkh", member, mass)
        alone = (member * mass).sum(-1)
        retained = (on + local[None, :, None]) / (alone + local)[None, :, None]
        both = jnp.einsum("aku,bhu->abkh", member, member)
        sizes = member.sum(-1)
        union = sizes[:, None, :, None] + sizes[None, :, None] - both
        has_choice = sizes[0, 0] < allowed[tile].sum()
        overlap = jnp.where(has_choice, both / jnp.maximum(union, 1.0), 0.0)
        return (
            (jnp.minimum(least, retained), overlaps + overlap, tiles + has_choice),
            (alone + local) / total[:, None],
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


def direction_change(x: Float[Array, "1 length hidden"], attended: Float[Array, "1 length hidden"]) -> Float[Array, ""]:
    """How much attention changes the direction of the stream: 1 less the cosine, mean over tokens."""
    after = x + attended
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(after, axis=-1)
    return jnp.mean(1.0 - (x * after).sum(-1) / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))
