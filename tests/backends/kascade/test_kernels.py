"""Kascade's kernels against float64 under an explicit mask, and what they refuse.

Pallas' kernels run in the interpreter, natively on their own device; the others are native code for CPUs.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Target
from attnsuite.backends.contract import may_attend
from attnsuite.backends.kascade import (
    Settings,
    TileLayout,
    Tiling,
    block_sizes,
    pallas_rows,
    pallas_tpu,
    pallas_triton,
    reference,
)
from attnsuite.backends.kascade.pallas_tpu import TpuKernels
from attnsuite.backends.kascade.pallas_triton import TritonKernels
from attnsuite.backends.kascade.selection import with_local
from attnsuite.backends.kascade.settings import KascadeBlockSizes
from declared import sized
from landing import swept
from sparse_problems import FIRST, SETTINGS, Sparse, cached, inner_jaxprs, runs_here, solved, sparse

KERNELS = {"tpu": TpuKernels, "triton": TritonKernels}
ALL_KERNELS = [pytest.param(kernels, id=name) for name, kernels in KERNELS.items()]
if importlib.util.find_spec("llvmlite"):
    from attnsuite.backends.kascade.flash_cpu import FlashCpuKernels

    ALL_KERNELS.append(pytest.param(FlashCpuKernels, id="flash_cpu", marks=pytest.mark.flash_cpu))
CPU, V5E, H100 = Target("cpu"), Target("tpu", "v5e"), Target("cuda", "h100")


def ragged():
    """Documents and padding, a sequence that ends early, and one without keys."""
    ids = np.stack([np.repeat([0, 1, 0, -1], [40, 70, 30, 10]), np.repeat([5, 5], [100, 50]), np.full(150, 2)])
    of_keys = ids.copy()
    of_keys[1, 100:] = -1
    return Layout(
        query_segment_ids=jnp.asarray(ids, jnp.int32),
        key_value_segment_ids=jnp.asarray(of_keys, jnp.int32),
        key_value_seq_lengths=jnp.array([150, 77, 0], jnp.int32),
    )


HALF = dataclasses.replace(SETTINGS, top_k=0.5, tile_size=64, query_tile=64)  # of the earlier tiles
SIZES = {"batch": 1, "head_dim": 64}
CASES = {
    "plain": lambda: sparse(HALF, T=256, seed=1, **SIZES),  # its heads select different tiles
    "odd-length": lambda: sparse(_changed(query_tile=32), T=203, num_heads=6, head_dim=64),
    "bfloat16": lambda: sparse(HALF, T=192, batch=1, head_dim=128, dtype="bfloat16"),
    "wide-tiles": lambda: sparse(_changed(query_tile=128, tile_size=32), T=160, num_heads=2, batch=1, head_dim=128),
    "small-blocks": lambda: sparse(
        _changed(query_tile=128, tile_size=128, block_q=32, block_kv_sparse=64, block_kv_compute=32),
        T=384, num_heads=2, num_kv_heads=1, value_head_dim=32, logits_soft_cap=5.0, **SIZES,
    ),
    "segments-and-lengths": lambda: sparse(
        _changed(query_tile=32, tile_size=32), T=150, layout=ragged(), batch=3, head_dim=64
    ),
    "decode": lambda: sparse(HALF, T=1, S=300, layout=cached(1, 300, 128, 65), batch=3, head_dim=64),
    "few-behind-a-cache": lambda: sparse(_changed(query_tile=16), T=5, S=300, layout=cached(5, 194, 5), head_dim=64),
}  # fmt: skip


def _changed(**changes):
    return dataclasses.replace(HALF, **changes)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KernelProblem:
    """A case, a list of tiles to visit, and the masses in float64."""

    sparse: Sparse
    listed: jax.Array
    mass: np.ndarray


@functools.cache
def problem(name):
    given = CASES[name]()
    return KernelProblem(given, with_local(given.tiling, given.tile_layout, given.selection()), _mass(given))


def _mass(given):
    """Probabilities of whole rows in float64, summed over a query tile, a group of heads and a tile of keys."""
    spec, (query, key) = given.spec, (np.asarray(x).astype(np.float64) for x in given.inputs[:2])
    visible = may_attend(spec, given.layout)
    key = np.repeat(key, spec.group_size, axis=2)
    score = np.einsum("btnh,bsnh->bnts", query, key) * spec.softmax_scale
    if spec.logits_soft_cap is not None:
        score = spec.logits_soft_cap * np.tanh(score / spec.logits_soft_cap)
    weight = np.where(visible, np.exp(score - score.max(-1, keepdims=True)), 0.0)
    total = weight.sum(-1, keepdims=True)
    weight = weight / np.where(total == 0, 1, total)
    weight = weight.reshape(spec.batch, spec.num_kv_heads, spec.group_size, *weight.shape[2:]).sum(2)
    for axis, size in ((2, given.tiling.query_tile), (3, given.tiling.unit)):
        weight = np.add.reduceat(weight, np.arange(0, weight.shape[axis], size), axis=axis)
    return weight


def made(kernels, given):
    spec, chosen = given.sparse.spec, given.sparse.settings
    return kernels(spec, given.sparse.tiling, chosen, interpret=not runs_here(kernels, spec, chosen))


@functools.cache
def attending(kernels, given):
    """A kernel compiled once for all tests; ``attending.__wrapped__`` traces it anew."""
    return jax.jit(functools.partial(made(kernels, given).attend, given.sparse.tile_layout))


def attend(kernels, given, listed=None, inputs=None, *, changed=False):
    """``changed``: the kernel is not what it was when it was compiled."""
    run = (attending.__wrapped__ if changed else attending)(kernels, given)
    return run(*(inputs or given.sparse.inputs), given.listed if listed is None else listed)


@functools.cache
def pooling(kernels, given):
    """The same of the pass that pools masses."""
    return jax.jit(made(kernels, given).pooled_mass)


def pooled_mass(kernels, given, *, changed=False):
    run = (pooling.__wrapped__ if changed else pooling)(kernels, given)
    return run(given.sparse.tile_layout, *given.sparse.inputs[:2])


def verdict(given, output):
    return solved(given.sparse).verdict("output", output)


def mass_error(given, mass):
    """Largest error, of the largest mass. The scores' products are exact, or nearly, in float32 from either dtype."""
    assert mass.dtype == jnp.float32
    assert mass.shape == given.mass.shape
    return float(np.abs(np.asarray(mass) - given.mass).max() / given.mass.max())


MASS_BOUND = 64 * float(jnp.finfo(jnp.float32).eps)

both = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
every = pytest.mark.parametrize("kernels", ALL_KERNELS)


@every
@pytest.mark.parametrize("case", swept(CASES, FIRST))
def test_attention_to_listed_tiles(case, kernels):
    given = problem(case)
    judged = verdict(given, attend(kernels, given))
    assert judged.passed, judged


@every
@pytest.mark.parametrize("case", swept(CASES, ("segments-and-lengths",)))
def test_mass_of_every_tile(case, kernels):
    given = problem(case)
    assert mass_error(given, pooled_mass(kernels, given)) < MASS_BOUND


# Controls: kernels that are wrong, and must fail


def _see_everything(_queries, place, slot, _ids):
    return jnp.ones(jnp.broadcast_shapes(place.shape, slot.shape), bool)


@pytest.mark.thorough
@both
@pytest.mark.parametrize("case", ["plain", "decode"])
def test_kernel_without_its_mask_fails(case, kernels, monkeypatch):
    given = problem(case)
    monkeypatch.setattr(pallas_rows.Queries, "visible", _see_everything)
    assert not verdict(given, attend(kernels, given, changed=True)).passed
    assert mass_error(given, pooled_mass(kernels, given, changed=True)) > 10 * MASS_BOUND


# What is read and written


@every
def test_keys_outside_the_listed_tiles_are_not_read(kernels):
    given = problem("segments-and-lengths")
    query, key, value = given.sparse.inputs
    listed = np.where(given.listed <= 0, 99, given.listed)  # all but tile 0
    listed = np.sort(listed, axis=-1)
    listed = np.where(listed == 99, -1, listed)
    spoilt = (query, *(x.at[:, : given.sparse.tiling.unit].set(jnp.nan) for x in (key, value)))
    assert jnp.isnan(attend(kernels, given, inputs=spoilt)).any()  # or the spoiling would prove nothing
    np.testing.assert_array_equal(attend(kernels, given, listed, spoilt), attend(kernels, given, listed))


@both
def test_nothing_is_gathered_and_no_scores_are_written(kernels):
    """Over shapes alone, at a length where queries x keys would be 64 times everything else."""
    spec = sized(8192, K=1, is_causal=True, needs_grad=False)
    tiling = Tiling.of(spec, Settings())
    own, tile_layout = kernels(spec, tiling, Settings()), TileLayout.of(spec, Layout(), tiling)
    query, key = (jax.ShapeDtypeStruct((1, 8192, n, 64), jnp.float32) for n in (2, 1))
    listed = jax.ShapeDtypeStruct((1, 1, tiling.query_tiles, tiling.slots + 1), jnp.int32)

    def both_layers(query, key, value, listed):
        return own.pooled_mass(tile_layout, query, key), own.attend(tile_layout, query, key, value, listed)

    largest, primitives = _arrays(jax.make_jaxpr(both_layers)(query, key, key, listed).jaxpr)
    assert largest <= 2 * 8192 * 128
    assert "gather" not in primitives
    whole = jax.make_jaxpr(lambda q, k: reference.pooled_mass(spec, Layout(), tiling, q, k))(query, key)
    assert _arrays(whole.jaxpr)[0] >= 8192 * 8192


def _arrays(jaxpr):
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


@pytest.mark.parametrize("case", swept(["plain", "segments-and-lengths", "decode"], ["segments-and-lengths"]))
def test_rows_that_no_programs_share_are_the_same(case, monkeypatch):
    """All cases are so small that programs share their rows: a list, and the keys whose mass is pooled."""
    given = problem(case)
    shared = attend(TritonKernels, given), pooled_mass(TritonKernels, given)
    monkeypatch.setattr(pallas_triton, "PROGRAMS", 1)
    alone = attend(TritonKernels, given, changed=True), pooled_mass(TritonKernels, given, changed=True)
    assert verdict(given, alone[0]).passed
    assert mass_error(given, alone[1]) < MASS_BOUND
    assert any((one != several).any() for one, several in zip(alone, shared, strict=True))  # they were not one program


@pytest.mark.parametrize("case", swept(["odd-length", "segments-and-lengths"], ["segments-and-lengths"]))
def test_long_list_is_worked_through_in_several_calls(case, monkeypatch):
    given = problem(case)
    once = attend(TpuKernels, given)
    monkeypatch.setattr(pallas_tpu, "LIST_BYTES", 256)
    np.testing.assert_array_equal(attend(TpuKernels, given, changed=True), once)


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


def large(**options):
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
    kernels = TritonKernels if target.platform == "cuda" else TpuKernels
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
@pytest.mark.parametrize("needs_grad", [False, True])
def test_defaults_fit_every_device(target, spec, needs_grad):
    kernels = TritonKernels if target.platform == "cuda" else TpuKernels
    for settings in (Settings(), Settings(query_tile=512, tile_size=256)):
        assert kernels.refuses(large(**spec, needs_grad=needs_grad), settings, target) == ()


def test_kernels_for_an_interpreter_take_any_tile():
    assert TpuKernels.refuses(large(head_dim=40), Settings(tile_size=24, query_tile=24), CPU) == ()


def test_blocks_are_at_most_their_tiles():
    spec = large(num_heads=8)
    settings = Settings(query_tile=128, tile_size=384)
    blocks = block_sizes.tpu_blocks(spec, Tiling.of(spec, settings), settings)
    assert (blocks.tile_q, blocks.block_q, blocks.tile_kv, blocks.block_kv, blocks.step_kv) == (128, 128, 384, 128, 128)
    settings = Settings(query_tile=512, tile_size=256)
    blocks = block_sizes.tpu_blocks(spec, Tiling.of(spec, settings), settings)
    assert (blocks.block_q, blocks.block_kv, blocks.step_kv) == (512, 256, 128)
