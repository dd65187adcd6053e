"""Kascade's kernels against float64 under an explicit mask: Pallas through the interpreter, and native code for CPUs.

And what they refuse.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Target, oracle
from attnsuite.backends.kascade import (
    Places,
    Settings,
    Tiling,
    block_sizes,
    pallas_rows,
    pallas_tpu,
    pallas_triton,
    reference,
)
from attnsuite.backends.kascade.settings import KascadeBlockSizes
from attnsuite.backends.standard import STANDARD
from sparse_problems import inner_jaxprs

KERNELS = {"tpu": pallas_tpu, "triton": pallas_triton}
ALL_KERNELS = [pytest.param(kernels, id=name) for name, kernels in KERNELS.items()]
if importlib.util.find_spec("llvmlite"):
    from attnsuite.backends.kascade import flash_cpu

    ALL_KERNELS.append(pytest.param(flash_cpu, id="flash_cpu", marks=pytest.mark.flash_cpu))
CPU, V5E, H100 = Target("cpu"), Target("tpu", "v5e"), Target("cuda", "h100")


def runs(*pairs):
    """Segment ids given as id, count, id, count, ..."""
    return np.repeat(pairs[::2], pairs[1::2]).astype(np.int32)


# name -> sizes (batch, queries, keys, heads, KV heads, head_dim, value_head_dim), settings, layout, options of the spec
CASES = {
    "plain": ((1, 256, 256, 4, 2, 64, 64), {}, {}, {}),
    "odd-length": ((2, 203, 203, 6, 2, 64, 64), {"query_tile": 32, "tile_size": 64}, {}, {}),
    "bfloat16": ((1, 192, 192, 4, 2, 128, 128), {}, {}, {"dtype": "bfloat16"}),
    "wide-tiles": ((1, 160, 160, 2, 2, 128, 128), {"query_tile": 128, "tile_size": 32}, {}, {}),
    "small-blocks": (
        (1, 384, 384, 2, 1, 64, 32),
        {"query_tile": 128, "tile_size": 128, "block_q": 32, "block_kv_sparse": 64, "block_kv_compute": 32},
        {},
        {"logits_soft_cap": 5.0},
    ),
    "segments-and-lengths": (
        (3, 150, 150, 4, 2, 64, 64),
        {"query_tile": 32, "tile_size": 32},
        {
            "query_segment_ids": np.stack([runs(0, 40, 1, 70, 0, 30, -1, 10), runs(5, 150), runs(2, 150)]),
            "key_value_segment_ids": np.stack([runs(0, 40, 1, 70, 0, 30, -1, 10), runs(5, 100, -1, 50), runs(2, 150)]),
            "key_value_seq_lengths": np.array([150, 77, 0], np.int32),
        },
        {},
    ),
    "decode": (
        (3, 1, 300, 4, 2, 64, 64),
        {},
        {
            "query_positions": np.array([[299], [127], [64]], np.int32),
            "key_value_seq_lengths": np.array([300, 128, 65], np.int32),
        },
        {},
    ),
    "few-behind-a-cache": (
        (2, 5, 300, 4, 2, 64, 64),
        {"query_tile": 16},
        {
            "query_positions": np.array([[189], [0]], np.int32) + np.arange(5, dtype=np.int32),
            "key_value_seq_lengths": np.array([194, 5], np.int32),
        },
        {},
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KernelProblem:
    """A case with its arrays, a list of tiles to visit, and the float64 results."""

    spec: AttentionSpec
    settings: Settings
    layout: Layout
    inputs: tuple[jax.Array, jax.Array, jax.Array]
    listed: np.ndarray
    visible: np.ndarray  # [batch, queries, keys]
    mask: np.ndarray  # [batch, heads, queries, keys]: listed and visible
    output: np.ndarray
    standard: jax.Array
    mass: np.ndarray

    @property
    def tiling(self) -> Tiling:
        return Tiling.of(self.spec, self.settings)

    @property
    def places(self) -> Places:
        return Places.of(self.spec, self.layout, self.tiling)


@functools.cache
def problem(name: str) -> KernelProblem:
    (b, t, s, n, k, h, v), options, layout, more = CASES[name]
    settings = Settings(**{"query_tile": 64, "tile_size": 64, **options})
    spec = AttentionSpec(
        batch=b,
        query_length=t,
        key_value_length=s,
        num_heads=n,
        num_kv_heads=k,
        head_dim=h,
        value_head_dim=v,
        is_causal=True,
        has_segment_ids="query_segment_ids" in layout,
        has_positions="query_positions" in layout,
        has_seq_lengths="key_value_seq_lengths" in layout,
        needs_grad=False,
        **more,
    )
    rng = np.random.default_rng(sum(map(ord, name)))
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, v))
    inputs = tuple(jnp.asarray(2 * rng.standard_normal(shape), spec.dtype) for shape in shapes)
    positions = layout.get("query_positions", np.broadcast_to(np.arange(t), (b, t)))
    listed = _some_tiles(
        rng, positions, k, min(settings.query_tile, t), settings.tile_size, -(-s // settings.tile_size)
    )
    visible = _visible(layout, positions, b, t, s)
    tile_of_query, tile_of_key = np.arange(t) // min(settings.query_tile, t), np.arange(s) // settings.tile_size
    chosen = (listed[:, :, tile_of_query, :, None] == tile_of_key).any(3)  # [b, k, t, s]
    mask = np.repeat(chosen & visible[:, None], n // k, axis=1)
    bare = dataclasses.replace(
        spec, is_causal=False, has_segment_ids=False, has_positions=False, has_seq_lengths=False, has_mask=True
    )
    only_mask = Layout(mask=jnp.asarray(mask))
    standard = STANDARD.plan(bare, only_mask, target=CPU).run(*inputs)[0]
    mass = _mass(spec, settings, inputs[0], inputs[1], visible)
    layout = Layout(**{name: jnp.asarray(x) for name, x in layout.items()})
    expected = oracle.forward(bare, only_mask, *inputs)
    return KernelProblem(spec, settings, layout, inputs, listed, visible, mask, expected, standard, mass)


def _some_tiles(rng, positions, kv_heads, query_tile, unit, units):
    """For every query tile its own tiles of keys and about half of the earlier ones, ascending, -1 behind."""
    batch, length = positions.shape
    listed = np.full((batch, kv_heads, -(-length // query_tile), units), -1, np.int32)
    for b, k, i in np.ndindex(listed.shape[:3]):
        own = positions[b, i * query_tile : (i + 1) * query_tile] // unit
        earlier = rng.permutation(own.min())[: (own.min() + 1) // 2]
        tiles = np.unique(np.concatenate([own, earlier]))
        tiles = tiles[tiles < units]
        listed[b, k, i, : len(tiles)] = tiles
    return listed


def _visible(layout, positions, batch, queries, keys):
    visible = np.broadcast_to(np.arange(keys) <= positions[..., None], (batch, queries, keys)).copy()
    if "key_value_seq_lengths" in layout:
        visible &= np.arange(keys) < layout["key_value_seq_lengths"][:, None, None]
    if "query_segment_ids" in layout:
        of_queries, of_keys = layout["query_segment_ids"], layout["key_value_segment_ids"]
        visible &= (of_queries[:, :, None] == of_keys[:, None]) & (of_queries >= 0)[:, :, None]
    return visible


def _mass(spec, settings, query, key, visible):
    """Probabilities of whole rows in float64, summed over a query tile, a group of heads and a tile of keys."""
    query, key = (np.asarray(x).astype(np.float64) for x in (query, key))
    key = np.repeat(key, spec.group_size, axis=2)
    score = np.einsum("btnh,bsnh->bnts", query, key) * spec.softmax_scale
    if spec.logits_soft_cap is not None:
        score = spec.logits_soft_cap * np.tanh(score / spec.logits_soft_cap)
    weight = np.where(visible[:, None], np.exp(score - score.max(-1, keepdims=True)), 0.0)
    total = weight.sum(-1, keepdims=True)
    weight = weight / np.where(total == 0, 1, total)
    weight = weight.reshape(spec.batch, spec.num_kv_heads, spec.group_size, *weight.shape[2:]).sum(2)
    for axis, size in ((2, min(settings.query_tile, spec.query_length)), (3, settings.tile_size)):
        starts = np.arange(0, weight.shape[axis], size)
        weight = np.add.reduceat(weight, starts, axis=axis)
    return weight


@functools.cache
def attending(kernels, given: KernelProblem):
    """A kernel compiled once for all tests; ``attending.__wrapped__`` traces it anew."""
    geometry = kernels.geometry(given.spec, given.tiling, given.settings)

    @jax.jit
    def run(places, listed, *inputs):
        return kernels.attend(geometry, places, *inputs, listed, interpret=True)

    return run


def attend(kernels, given: KernelProblem, listed=None, inputs=None, *, changed=False):
    """``changed``: the kernel is not what it was when it was compiled."""
    listed = given.listed if listed is None else listed
    run = (attending.__wrapped__ if changed else attending)(kernels, given)
    return run(given.places, jnp.asarray(listed), *(given.inputs if inputs is None else inputs))


def pooled_mass(kernels, given: KernelProblem):
    geometry = kernels.geometry(given.spec, given.tiling, given.settings)

    @jax.jit
    def run(places, query, key):
        return kernels.pooled_mass(geometry, places, query, key, interpret=True)

    return run(given.places, *given.inputs[:2])


def verdict(given: KernelProblem, output) -> oracle.Verdict:
    unseen = ~given.mask.any(-1).swapaxes(1, 2)
    return oracle.judge(output, given.output, given.standard, given.spec.dtype, zero=unseen)


def mass_error(given: KernelProblem, mass) -> float:
    """Largest error, of the largest mass. The scores' products are exact, or nearly, in float32 from either dtype."""
    assert mass.dtype == jnp.float32
    assert mass.shape == given.mass.shape
    return float(np.abs(np.asarray(mass) - given.mass).max() / given.mass.max())


MASS_BOUND = 64 * float(jnp.finfo(jnp.float32).eps)

both = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
every = pytest.mark.parametrize("kernels", ALL_KERNELS)


@every
@pytest.mark.parametrize("case", CASES)
def test_attention_to_listed_tiles(case, kernels):
    given = problem(case)
    judged = verdict(given, attend(kernels, given))
    assert judged.passed, judged


@every
@pytest.mark.parametrize("case", CASES)
def test_mass_of_every_tile(case, kernels):
    given = problem(case)
    assert mass_error(given, pooled_mass(kernels, given)) < MASS_BOUND


def test_cases_have_what_they_are_about():
    """A row that sees nothing, a sequence without keys, a tile without keys, and tiles that are left out."""
    ragged = problem("segments-and-lengths")
    assert not ragged.mask[2].any()
    assert (~ragged.mask[0].any(-1)).any()
    assert ragged.mass[2].sum() == 0
    for given in map(problem, CASES):
        left_out = given.visible[:, None] & ~given.mask
        assert left_out.any(), given.spec
        assert given.mask.any()


# Controls: kernels that are wrong, and must fail


def _see_everything(_queries, place, slot, _ids):
    return jnp.ones(jnp.broadcast_shapes(place.shape, slot.shape), bool)


@both
@pytest.mark.parametrize("case", ["plain", "decode"])
def test_kernel_without_its_mask_fails(case, kernels, monkeypatch):
    given = problem(case)
    monkeypatch.setattr(pallas_rows.Queries, "visible", _see_everything)
    assert not verdict(given, attend(kernels, given, changed=True)).passed
    assert mass_error(given, pooled_mass(kernels, given)) > 10 * MASS_BOUND


def test_kernel_that_takes_the_diagonal_for_visible_fails(monkeypatch):
    given = problem("plain")
    monkeypatch.setattr(pallas_rows.Queries, "all_see", lambda _queries, end: end > 0)
    assert not verdict(given, attend(pallas_tpu, given, changed=True)).passed


@every
@pytest.mark.parametrize(
    "wrong",
    [
        lambda listed: listed[:, ::-1],
        lambda listed: np.where(listed > 0, listed - 1, listed),
        lambda listed: listed[:, :, ::-1],
    ],
    ids=["heads-swapped", "one-tile-off", "query-tiles-reversed"],
)
def test_wrong_list_of_tiles_fails(kernels, wrong):
    given = problem("plain")
    assert not verdict(given, attend(kernels, given, wrong(given.listed))).passed


@every
def test_tile_that_is_listed_twice_would_count_twice(kernels):
    """Why a list is distinct by construction: the kernels do not look."""
    given = problem("plain")
    first_again = np.concatenate([given.listed[..., :1], given.listed], axis=-1)
    assert not verdict(given, attend(kernels, given, first_again)).passed


# What is read and written


@every
def test_keys_outside_the_listed_tiles_are_not_read(kernels):
    given = problem("plain")
    query, key, value = given.inputs
    listed = np.where(given.listed == 0, 99, np.where(given.listed < 0, 99, given.listed))  # all but tile 0
    listed = np.sort(listed, axis=-1)
    listed = np.where(listed == 99, -1, listed)
    spoilt = (query, *(x.at[:, : given.tiling.unit].set(jnp.nan) for x in (key, value)))
    assert jnp.isnan(attend(kernels, given, inputs=spoilt)).any()  # or the spoiling would prove nothing
    np.testing.assert_array_equal(attend(kernels, given, listed, spoilt), attend(kernels, given, listed))


@both
def test_nothing_is_gathered_and_no_scores_are_written(kernels):
    """Over shapes alone, at a length where queries x keys would be 64 times everything else."""
    spec = AttentionSpec(
        batch=1, query_length=8192, key_value_length=8192, num_heads=2, num_kv_heads=1, head_dim=64, is_causal=True,
        needs_grad=False,
    )  # fmt: skip
    settings = Settings()
    tiling = Tiling.of(spec, settings)
    places = Places.of(spec, Layout(), tiling)
    query, key = (jax.ShapeDtypeStruct((1, 8192, n, 64), jnp.float32) for n in (2, 1))
    listed = jax.ShapeDtypeStruct((1, 1, tiling.query_tiles, tiling.slots + 1), jnp.int32)

    geometry = kernels.geometry(spec, tiling, settings)

    def both_layers(query, key, value, listed):
        mass = kernels.pooled_mass(geometry, places, query, key, interpret=False)
        return mass, kernels.attend(geometry, places, query, key, value, listed, interpret=False)

    largest, primitives = _arrays(jax.make_jaxpr(both_layers)(query, key, key, listed).jaxpr)
    assert largest <= 2 * 8192 * 128
    assert "gather" not in primitives
    whole = jax.make_jaxpr(lambda q, k: reference.pooled_mass(spec, Layout(), tiling, q, k))(query, key)
    assert _arrays(whole.jaxpr)[0] >= 8192 * 8192


def _arrays(jaxpr) -> tuple[int, set[str]]:
    """Elements of the largest array that a program makes, and its primitives; kernels are not looked into."""
    largest, primitives = 0, set()
    for equation in jaxpr.eqns:
        primitives.add(equation.primitive.name)
        largest = max([largest, *(out.aval.size for out in equation.outvars)])
        if equation.primitive.name == "pallas_call":
            continue
        for inner in inner_jaxprs(equation):
            below, more = _arrays(inner)
            largest, primitives = max(largest, below), primitives | more
    return largest, primitives


@pytest.mark.parametrize("case", ["odd-length", "segments-and-lengths"])
def test_long_list_is_worked_through_in_several_calls(case, monkeypatch):
    given = problem(case)
    once = attend(pallas_tpu, given)
    monkeypatch.setattr(pallas_tpu, "LIST_BYTES", 256)
    np.testing.assert_array_equal(attend(pallas_tpu, given, changed=True), once)


# Block sizes and refusals


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"block_q": 100}, "block_q=100 is not accepted; it is a power of two of at least 16"),
        ({"block_q": True}, "block_q=True is not accepted"),
        ({"block_kv_sparse": 8}, "block_kv_sparse=8 is not accepted"),
        ({"block_kv_compute": 512}, "block_kv_compute=512 is more than block_kv_sparse=256"),
    ],
)
def test_block_size_that_is_none_is_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        KascadeBlockSizes(**sizes)
    with pytest.raises(ValueError, match=words):
        Settings(**sizes)


def large(**options) -> AttentionSpec:
    sizes = {"batch": 1, "query_length": 8192, "key_value_length": 8192, "num_heads": 32, "num_kv_heads": 8}
    return AttentionSpec(
        **(sizes | {"head_dim": 128, "dtype": "bfloat16", "is_causal": True, "needs_grad": False} | options)
    )


@pytest.mark.parametrize(
    ("target", "settings", "spec", "words"),
    [
        (V5E, {"granularity": "token"}, {}, ["granularity='token' is not supported by kascade's Pallas kernels"]),
        (V5E, {}, {"dtype": "float16"}, ["dtype=float16 is not supported"]),
        (V5E, {"tile_size": 64, "query_tile": 64}, {}, ["tile_size=64 is not supported", "a multiple of 128"]),
        (V5E, {"block_kv_compute": 64}, {}, ["block_kv_compute=64 is not accepted on tpu:v5e", "at least 128"]),
        (
            V5E,
            {"block_q": 2048, "query_tile": 2048},
            {"num_heads": 64},
            ["block_q=2048 with 8 heads in a group", "MiB of vector memory", "give a smaller block_q"],
        ),
        (H100, {"tile_size": 8, "query_tile": 16}, {}, ["tile_size=8 is not supported", "a multiple of 16"]),
        (H100, {}, {"head_dim": 96}, ["head_dim=96 is not supported", "value_head_dim=96"]),
        (
            H100,
            {"block_q": 512, "query_tile": 512, "block_kv_compute": 256, "tile_size": 256},
            {"dtype": "float32"},
            ["KiB of shared memory; cuda:h100 has 227 KiB"],
        ),
    ],
)
def test_what_a_device_cannot_hold_is_refused_before_anything_is_traced(target, settings, spec, words):
    kernels = pallas_triton if target.platform == "cuda" else pallas_tpu
    said = " ".join(kernels.refuses(large(**spec), Settings(**settings), target))
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    "target", [*(Target("tpu", kind) for kind in ("v4", "v5e", "v5p", "v6e", "tpu7x")), H100], ids=str
)
@pytest.mark.parametrize(
    "spec",
    [{}, {"num_heads": 128}, {"dtype": "float32", "head_dim": 256}, {"num_kv_heads": 32}, {"query_length": 1}],
    ids=str,
)
def test_defaults_fit_every_device(target, spec):
    kernels = pallas_triton if target.platform == "cuda" else pallas_tpu
    for settings in (Settings(), Settings(query_tile=512, tile_size=256)):
        assert kernels.refuses(large(**spec), settings, target) == ()


def test_kernels_for_an_interpreter_take_any_tile():
    assert pallas_tpu.refuses(large(head_dim=40), Settings(tile_size=24, query_tile=24), CPU) == ()


def test_blocks_are_at_most_their_tiles():
    spec = large(num_heads=8)
    settings = Settings(query_tile=128, tile_size=384)
    blocks = block_sizes.tpu_blocks(spec, Tiling.of(spec, settings), settings)
    assert (blocks.tile_q, blocks.block_q, blocks.tile_kv, blocks.block_kv, blocks.step_kv) == (128, 128, 384, 128, 128)
    settings = Settings(query_tile=512, tile_size=256)
    blocks = block_sizes.tpu_blocks(spec, Tiling.of(spec, settings), settings)
    assert (blocks.block_q, blocks.block_kv, blocks.step_kv) == (512, 256, 128)
