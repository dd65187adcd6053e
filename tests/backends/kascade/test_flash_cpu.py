"""Kascade by native kernels: the selections of the reference, its outputs, and faults in a kernel that must show."""

import dataclasses
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Target, oracle, plan, support
from attnsuite.backends.flash_cpu import availability, decode, rows
from attnsuite.backends.flash_cpu import sparse as sparse_kernels
from attnsuite.backends.flash_cpu.emit import Function, f32, i64, ptr
from attnsuite.backends.kascade import KASCADE, Schedule, flash_cpu, manual, reference
from attnsuite.backends.kascade.flash_cpu import FlashCpuKernels
from emitted import set_apart
from landing import swept
from sparse_problems import FIRST, NATIVE, cached, settings, sparse

pytestmark = pytest.mark.flash_cpu

STEPS = {
    "tokens behind a cache": lambda: sparse(settings(query_tile=8), T=5, S=128, layout=cached(5, 128, 77)),
    # One new token: units of whole blocks of keys, and not; a length inside a unit; rows of several tiles.
    "decode": lambda: sparse(settings(tile_size=64), T=1, S=300, layout=cached(1, 300, 201)),
    "decode, tiles of 100": lambda: sparse(
        settings(tile_size=100, query_tile=50),
        T=1,
        S=450,
        num_heads=12,
        head_dim=20,
        layout=cached(1, 450, 333),
        dtype="bfloat16",
    ),
}
ALL = NATIVE | STEPS
CLOSE = {"float32": 1e-5, "bfloat16": 0.04, "float16": 5e-3}


def _kernels(problem):
    return FlashCpuKernels(problem.spec, problem.tiling, problem.settings)


def _wide(x):
    return np.asarray(x, np.float32)


@pytest.mark.parametrize("name", swept(ALL, FIRST))
def test_selects_and_attends_as_the_reference_does(name):
    problem = ALL[name]()
    out, selection = problem.layer(kernel="flash_cpu")
    expected = problem.selection()
    jax.tree.map(np.testing.assert_array_equal, selection, expected)
    np.testing.assert_allclose(_wide(out), _wide(problem.expected(expected)), atol=CLOSE[problem.spec.dtype])


@pytest.mark.parametrize("name", ["packed", "bfloat16", "8 heads to a group", "decode"])
def test_reuse_layer_attends_to_the_selection_that_it_is_given(name):
    problem = ALL[name]()
    straight, carry = manual((0,), num_layers=2, kv_heads=problem.spec.num_kv_heads), problem.selection()
    crossed = tuple(reversed(range(problem.spec.num_kv_heads)))
    schedule = Schedule((straight.layers[0], dataclasses.replace(straight.layers[1], head_map=crossed)))
    out, after = problem.layer(1, carry, kernel="flash_cpu", schedule=schedule)
    jax.tree.map(np.testing.assert_array_equal, after, carry)
    expected = problem.expected(carry.remapped(crossed))
    np.testing.assert_allclose(_wide(out), _wide(expected), atol=CLOSE[problem.spec.dtype])


@pytest.mark.parametrize(
    "name", swept(["bfloat16", "tokens behind a cache", "decode, tiles of 100"], ["tokens behind a cache"])
)
def test_dense_layer_selects_in_the_pass_that_attends_to_all(name):
    problem = ALL[name]()
    assert _kernels(problem).dense_layer(problem.tile_layout, *problem.inputs) is not None
    schedule = manual((0, 1), num_layers=2, kv_heads=problem.spec.num_kv_heads)
    assert schedule.layers[0].role == "dense"
    out, selection = problem.layer(0, kernel="flash_cpu", schedule=schedule)
    jax.tree.map(np.testing.assert_array_equal, selection, problem.selection())
    right = oracle.forward(problem.spec, problem.layout, *problem.inputs)
    np.testing.assert_allclose(_wide(out), right, atol=CLOSE[problem.spec.dtype])


def test_all_heads_share_one_selection_of_the_summed_mass():
    problem = sparse()
    _, selection = problem.layer(kernel="flash_cpu", ablation="all_heads")
    jax.tree.map(np.testing.assert_array_equal, selection, problem.selection("all_heads"))


# What is not finite


def _run(problem, query, key, value):
    options = problem.options | {"kernel": "flash_cpu"}
    return plan(KASCADE, problem.spec, problem.layout, target=Target("cpu"), options=options).run(query, key, value)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_row_that_may_not_see_what_is_not_finite_is_as_with_zeros_there(name):
    problem, at = sparse(T=101), 86  # inside a tile that does not select its first units
    inputs = dict(zip(("query", "key", "value"), problem.inputs, strict=True))
    zeros = {**inputs, name: inputs[name].at[0, at, 0].set(0)}
    out, selection = _run(problem, **{**inputs, name: inputs[name].at[0, at, 0, 3].set(jnp.nan)})
    expected, same = _run(problem, **zeros)
    jax.tree.map(np.testing.assert_array_equal, selection, same)
    spoilt = np.isnan(out).all(-1)
    np.testing.assert_array_equal(np.asarray(out)[~spoilt], np.asarray(expected)[~spoilt])
    if name == "query":
        assert spoilt[0, at, 0]
        assert spoilt.sum() == 1
        return
    group, width = problem.spec.group_size, problem.tiling.query_tile
    assert spoilt[0, at : at // width * width + width, :group].all()  # the local region is always attended to
    spoilt[0, at:, :group] = False
    assert not spoilt.any()


@pytest.mark.parametrize("name", ["query", "key"])
def test_mass_of_a_step_leaves_out_what_is_not_finite(name):
    problem = STEPS["decode"]()
    spoilt = {"query": problem.query, "key": problem.key}
    spoilt[name] = spoilt[name].at[:, 7 if name == "key" else 0, 0, 3].set(jnp.nan)
    mass = _kernels(problem).pooled_mass(problem.tile_layout, **spoilt)
    assert np.isfinite(mass).all()
    group = problem.spec.group_size
    np.testing.assert_allclose(mass.sum(-1)[:, 0, 0], group - 1 if name == "query" else group, rtol=1e-5)


# Refusals


@pytest.mark.parametrize(
    ("options", "target", "mode", "words"),
    [
        (
            {"granularity": "token"},
            Target("cpu"),
            "native",
            "granularity='token' is not supported by kascade with kernel=",
        ),
        ({}, Target("cpu"), "interpret", "mode='interpret' is not supported by kascade with kernel='flash_cpu'"),
        ({}, Target("cuda", "h100"), "native", "kernel='flash_cpu' runs on CPUs, the target is cuda:h100"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(options, target, mode, words):
    found = support(KASCADE, sparse().spec, target, mode, {"kernel": "flash_cpu", **options})
    assert not found
    assert any(words in reason for reason in found.reasons)


def test_cpu_where_the_kernels_do_not_work_is_refused(monkeypatch):
    monkeypatch.setattr(flash_cpu, "why_not", lambda: "flash_cpu does not work here; use chunked.")
    assert (
        "does not work here"
        in support(KASCADE, sparse().spec, Target("cpu"), options={"kernel": "flash_cpu"}).reasons[0]
    )
    assert availability.why_not() is None
    assert support(KASCADE, sparse().spec, Target("cpu"))  # XLA's code does not need them


# Controls: kernels that are wrong, and must show


def _rows_behind_the_last_counted(patch):
    """Padding rows of a tile have weight."""
    emit_pool = sparse_kernels._emit_pool

    def wrong(module, isa, at):
        right = emit_pool(module, isa, at)
        with Function(module, "pool_of_all", [ptr] * 4 + [i64] * 2) as (e, (w, sums, tops, mass, count, _)):
            e.run(right, w, sums, tops, mass, count, e.const(i64, sparse_kernels.block_rows(isa)))
        return e.function

    patch.setattr(sparse_kernels, "_emit_pool", wrong)


def _maxima_forgotten(patch):
    """Sums of units are added up as if all were relative to one maximum."""
    patch.setattr(sparse_kernels, "exp2", lambda e, _isa, x: e.const(x.type, 1.0))


def _maxima_of_units_forgotten(patch):
    """The same in a decode step."""
    patch.setattr(decode, "exp2_scalar", lambda e, _isa, _x: e.const(f32, 1.0))


def _second_head_pooled_as_first(patch):
    each_query = rows.each_query

    @contextmanager
    def wrong(e, dims, head, start, count):
        with each_query(e, dims, head, start, count) as (i, place):
            yield i, place - (start + i) % (dims["N"] // dims["K"])

    patch.setattr(rows, "each_query", wrong)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (_rows_behind_the_last_counted, "mass"),
        (_maxima_forgotten, "mass"),
        (_maxima_of_units_forgotten, "mass"),
        (_second_head_pooled_as_first, "both"),
    ],
)
def test_kernel_with_a_fault_shows(fault, what, monkeypatch, tmp_path):
    problem = STEPS["decode"]() if fault is _maxima_of_units_forgotten else sparse(T=101)
    availability.why_not()  # the self-test, before kernels are wrong
    set_apart(monkeypatch, tmp_path, f"kascade: {fault.__name__}")
    fault(monkeypatch)
    assert _mass_error(problem) > 1e-3
    if what == "both":
        out, selection = _run(problem, *problem.inputs)
        assert not np.allclose(_wide(out), _wide(problem.expected(selection)), atol=0.01)


def _mass_error(problem):
    """Largest error of the mass, of the largest one."""
    mass = _kernels(problem).pooled_mass(problem.tile_layout, problem.query, problem.key)
    right = reference.pooled_mass(problem.spec, problem.layout, problem.tiling, problem.query, problem.key)
    return float(jnp.abs(mass - right).max() / right.max())
