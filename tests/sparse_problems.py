"""Small problems of sparse attention, shared by the tests of Kascade."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from backends import AttentionSpec, Layout
from backends.kascade import Places, Selection, Settings, Tiling, reference

SETTINGS = Settings(top_k=0.3, min_keys=0, tile_size=16, query_tile=16)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """A problem, its tiles, and what the reference selects in it."""

    spec: AttentionSpec
    layout: Layout
    settings: Settings
    query: jax.Array
    key: jax.Array
    value: jax.Array

    @property
    def tiling(self) -> Tiling:
        return Tiling.of(self.spec, self.settings)

    @property
    def places(self) -> Places:
        return Places.of(self.spec, self.layout, self.tiling)

    @property
    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.query, self.key, self.value

    def selection(self) -> Selection:
        select = jax.jit(functools.partial(reference.select, self.spec, self.layout, self.tiling))
        return select(self.query, self.key)

    def expected(self, selection: Selection) -> np.ndarray:
        attend = functools.partial(reference.attend, self.spec, self.layout, self.tiling)
        return np.asarray(jax.jit(attend)(*self.inputs, selection))


def sparse(settings: Settings = SETTINGS, *, T: int = 96, S: int | None = None, layout=None, seed=0, **sizes) -> Sparse:
    layout = Layout() if layout is None else layout
    shape = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16} | sizes
    spec = AttentionSpec(
        query_length=T,
        key_value_length=S or T,
        is_causal=True,
        needs_grad=False,
        has_segment_ids=layout.query_segment_ids is not None,
        has_positions=layout.query_positions is not None,
        has_seq_lengths=layout.key_value_seq_lengths is not None,
        **shape,
    )
    rng = np.random.default_rng(seed)

    def normal(length: int, heads: int, dim: int) -> jax.Array:
        # Large queries and keys: flat attention would forgive a wrong selection.
        return jnp.asarray(2.0 * rng.standard_normal((spec.batch, length, heads, dim)).astype(spec.dtype))

    query = normal(T, spec.num_heads, spec.head_dim)
    key = normal(S or T, spec.num_kv_heads, spec.head_dim)
    value = normal(S or T, spec.num_kv_heads, spec.value_head_dim)
    return Sparse(spec, layout, settings, query, key, value)


def ids(*runs: int) -> jax.Array:
    """Segment ids as [id, count, ...]: the same for both sequences but that the second is shifted by one document."""
    row = np.repeat(runs[::2], runs[1::2])
    return jnp.asarray(np.stack([row, np.roll(row, runs[1])]), jnp.int32)


def packed(*runs: int) -> Layout:
    return Layout(query_segment_ids=ids(*runs), key_value_segment_ids=ids(*runs))


def cached(T: int, *filled: int) -> Layout:
    used = np.array(filled)
    positions = used[:, None] - T + np.arange(T)
    return Layout(query_positions=jnp.asarray(positions, jnp.int32), key_value_seq_lengths=jnp.asarray(used, jnp.int32))


def settings(**changes) -> Settings:
    return dataclasses.replace(SETTINGS, **changes)


PROBLEMS = {
    "tiles": sparse,
    "query tile of two tiles": lambda: sparse(settings(query_tile=32), T=100),
    "tile of four query tiles": lambda: sparse(settings(tile_size=32, query_tile=8), T=100),
    "one query per tile": lambda: sparse(settings(query_tile=1), T=40),
    "keys": lambda: sparse(settings(granularity="token"), T=100),
    "heads alone": lambda: sparse(num_kv_heads=4),
    "value dim of its own": lambda: sparse(value_head_dim=24),
    "soft cap": lambda: sparse(logits_soft_cap=3.0),
    "more queries than keys": lambda: sparse(T=100, S=56),
    "more keys than queries": lambda: sparse(T=50, S=90),
    "packed": lambda: sparse(layout=packed(4, 40, 2, 30, -1, 10, 7, 16)),
    "packed keys": lambda: sparse(settings(granularity="token"), layout=packed(4, 40, 2, 30, -1, 10, 7, 16)),
    "ragged": lambda: sparse(layout=Layout(key_value_seq_lengths=jnp.array([96, 37], jnp.int32))),
    "behind a cache": lambda: sparse(T=33, S=128, layout=cached(33, 128, 77)),
    "keys behind a cache": lambda: sparse(settings(granularity="token"), T=33, S=128, layout=cached(33, 128, 77)),
    "decode": lambda: sparse(T=1, S=200, layout=cached(1, 200, 77)),
    "decode keys": lambda: sparse(settings(granularity="token"), T=1, S=200, layout=cached(1, 200, 1)),
    "bfloat16": lambda: sparse(dtype="bfloat16"),
}
