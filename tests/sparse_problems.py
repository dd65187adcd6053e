"""Small problems of sparse attention, shared by the tests of Kascade."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import AttentionSpec, Layout, Target, plan
from attnsuite.backends.kascade import KASCADE, Selection, Settings, TileLayout, Tiling, reference
from attnsuite.backends.kascade.selection import select
from attnsuite.backends.standard import STANDARD
from attnsuite.testing import problems

SETTINGS = Settings(top_k=0.3, min_keys=0, tile_size=16, query_tile=16)


def runs_here(kernels, spec, sparse_settings) -> bool:
    """Whether these kernels are of the device that is here, which can hold their blocks."""
    here = Target.here()
    return here.platform == getattr(kernels, "platform", None) and not list(
        kernels.refuses(spec, sparse_settings, here)
    )


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
    def tile_layout(self) -> TileLayout:
        return TileLayout.of(self.spec, self.layout, self.tiling)

    @property
    def options(self) -> dict[str, Any]:
        """The settings as options of a plan."""
        names = ("top_k", "min_keys", "granularity", "tile_size", "query_tile")
        return {name: getattr(self.settings, name) for name in names}

    @property
    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.query, self.key, self.value

    def selection(self, ablation: str | None = None) -> Selection:
        return _select(self.spec, self.tiling, self.layout, self.query, self.key, ablation)

    def expected(self, selection: Selection) -> np.ndarray:
        return np.asarray(_attend(self.spec, self.tiling, self.layout, *self.inputs, selection))

    def mask(self, selection: Selection) -> jax.Array:
        return _attended(self.spec, self.tiling, self.layout, selection)

    def dense(self) -> np.ndarray:
        """A dense layer's output."""
        return np.asarray(_dense(self.spec, self.layout, *self.inputs))

    def layer(self, number: int = 0, carry=(), inputs=None, **options):
        """A layer of Kascade, output and carry, under ``options`` beside the problem's own settings."""
        given = tuple((self.options | options).items())
        return _layer(self.spec, given, number, self.layout, inputs or self.inputs, carry)


# Compiled once for all tests that compute the same: an eager call would compile its loops anew each time.


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def _select(spec, tiling, layout, query, key, ablation):
    mass = reference.pooled_mass(spec, layout, tiling, query, key)
    return select(tiling, TileLayout.of(spec, layout, tiling), mass, ablation)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(spec, tiling, layout, query, key, value, selection):
    mask = reference.attended(spec, layout, tiling, selection)
    return reference.under_mask(spec, query, key, value, mask, Target("cpu"))


@functools.partial(jax.jit, static_argnums=0)
def _dense(spec, layout, query, key, value):
    return plan(STANDARD, spec, layout, target=Target("cpu")).run(query, key, value)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attended(spec, tiling, layout, selection):
    return reference.attended(spec, layout, tiling, selection)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(spec, options, number, layout, inputs, carry):
    plan = KASCADE.plan(spec, layout, target=Target("cpu"), options=dict(options))
    return plan.run(*inputs, layer=number, carry=carry)


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
        numbers = 2.0 * rng.standard_normal((spec.batch, length, heads, dim))
        return jax.device_put(numbers.astype(jnp.dtype(spec.dtype)))

    query = normal(T, spec.num_heads, spec.head_dim)
    key = normal(S or T, spec.num_kv_heads, spec.head_dim)
    value = normal(S or T, spec.num_kv_heads, spec.value_head_dim)
    return Sparse(spec, layout, settings, query, key, value)


@functools.cache
def cotangent(problem: Sparse) -> jax.Array:
    """A gradient of the output."""
    shape = (*problem.query.shape[:3], problem.value.shape[3])
    return jax.device_put(np.random.default_rng(5).standard_normal(shape).astype(problem.query.dtype))


@functools.cache
def solved(problem: Sparse) -> problems.Problem:
    """The pairs that the problem's selection keeps as an explicit mask, solved by the oracle, with gradients."""
    bare = ("is_causal", "has_segment_ids", "has_positions", "has_seq_lengths")
    spec = dataclasses.replace(problem.spec, needs_grad=True, has_mask=True, **dict.fromkeys(bare, False))
    layout = Layout(mask=problem.mask(problem.selection()))
    return problems.solve(spec, layout, (*problem.inputs, cotangent(problem)))


def ids(*runs: int) -> jax.Array:
    """Segment ids as [id, count, ...]: the same for both sequences but that the second is shifted by one document."""
    row = np.repeat(runs[::2], runs[1::2])
    return jax.device_put(np.stack([row, np.roll(row, runs[1])]).astype(np.int32))


def packed(*runs: int) -> Layout:
    return Layout(query_segment_ids=ids(*runs), key_value_segment_ids=ids(*runs))


def cached(T: int, *filled: int) -> Layout:
    used = np.array(filled)
    positions = used[:, None] - T + np.arange(T)
    return jax.device_put(
        Layout(query_positions=positions.astype(np.int32), key_value_seq_lengths=used.astype(np.int32))
    )


def inner_jaxprs(equation):
    """The programs that one step of a program runs: bodies of loops, branches, kernels."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            program = getattr(part, "jaxpr", part)
            if hasattr(program, "eqns"):
                yield program


def settings(**changes) -> Settings:
    return dataclasses.replace(SETTINGS, **changes)


_PROBLEMS = {
    "tiles": sparse,
    "query tile of two tiles": lambda: sparse(settings(query_tile=32), T=100),
    "tile of four query tiles": lambda: sparse(settings(tile_size=32, query_tile=8), T=100),
    "one query per tile": lambda: sparse(settings(query_tile=1), T=40),
    "keys": lambda: sparse(settings(granularity="token"), T=100),
    "heads alone, soft cap, value dim of its own": lambda: sparse(
        num_kv_heads=4, logits_soft_cap=3.0, value_head_dim=24
    ),
    "more queries than keys": lambda: sparse(T=100, S=56),
    "more keys than queries": lambda: sparse(T=50, S=90),
    "packed": lambda: sparse(layout=packed(4, 40, 2, 30, -1, 10, 7, 16)),
    "packed keys": lambda: sparse(settings(granularity="token"), layout=packed(4, 40, 2, 30, -1, 10, 7, 16)),
    "ragged": lambda: sparse(layout=Layout(key_value_seq_lengths=jnp.array([96, 37], jnp.int32))),
    "behind a cache": lambda: sparse(T=33, S=128, layout=cached(33, 128, 77)),
    "keys behind a cache": lambda: sparse(settings(granularity="token"), T=33, S=128, layout=cached(33, 128, 77)),
    "keys that nobody selects": lambda: sparse(settings(top_k=0.2), T=32, S=160, layout=cached(32, 160, 160)),
    "decode": lambda: sparse(T=1, S=200, layout=cached(1, 200, 77)),
    "decode keys": lambda: sparse(settings(granularity="token"), T=1, S=200, layout=cached(1, 200, 1)),
    "bfloat16": lambda: sparse(dtype="bfloat16"),
}
# Of a sweep over problems, those before a change lands.
FIRST = (
    *("heads alone, soft cap, value dim of its own", "packed keys", "behind a cache", "decode", "decode keys"),
    *("segments-and-lengths", "8 heads to a group"),
)
# Units and query tiles that no block of the native kernels divides; one KV head, whose key blocks threads share; and a
# group that fills several parts.
_UNEVEN = {
    "tiles of 40 keys": lambda: sparse(settings(tile_size=40, query_tile=20), T=170),
    "tiles of 200 keys": lambda: sparse(settings(tile_size=200, query_tile=50), T=450, batch=1, num_kv_heads=1),
    "8 heads to a group": lambda: sparse(settings(tile_size=32, query_tile=32), T=100, num_heads=16, head_dim=20),
    "float16": lambda: sparse(dtype="float16"),
}
# Each is made once in a process: what is cached of it serves every test.
PROBLEMS = {name: functools.cache(made) for name, made in _PROBLEMS.items()}
# Those of the native kernels, which select by tile.
NATIVE = {name: made for name, made in PROBLEMS.items() if made().settings.granularity == "tile"}
NATIVE |= {name: functools.cache(made) for name, made in _UNEVEN.items()}
