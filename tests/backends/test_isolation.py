"""NaN and infinity behind the lengths, in padding and in other documents reach no row that may not see them.

``chunked`` and ``flash_cpu`` keep them out of rows that a mask hides them from too; ``standard`` does not (docs).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Target, Terms, from_function, oracle, plan, registry
from attnsuite.backends.contract import may_attend
from declared import sized
from landing import swept

pytestmark = pytest.mark.newest

# flash_cpu is compiled by llvmlite
NATIVE = [pytest.param("flash_cpu", marks=pytest.mark.flash_cpu)] if importlib.util.find_spec("llvmlite") else []
BACKENDS = ["standard", "chunked", *NATIVE]
SMALL = {"block_q": 24, "block_kv": 56, "block_backward": 40}  # of chunked; most do not divide the length
SMALL_BLOCKS = "chunked in small blocks"
LENGTH = 192  # several blocks of chunked, and more pairs than fit its small-problem path
BASE = sized(LENGTH, B=2, N=4, K=2, H=16, is_causal=True)
IDS = jnp.asarray(np.repeat([0, 1, -1], [80, 90, 22])[None].repeat(2, 0), jnp.int32)
PROBLEMS = {
    "causal": (BASE, Layout()),
    "documents and padding": (
        dataclasses.replace(BASE, has_segment_ids=True),
        Layout(query_segment_ids=IDS, key_value_segment_ids=IDS),
    ),
    "lengths": (
        dataclasses.replace(BASE, is_causal=False, has_seq_lengths=True),
        Layout(key_value_seq_lengths=jnp.asarray([150, 60])),
    ),
    "window": (dataclasses.replace(BASE, local_window_size=(31, 0)), Layout()),
    "mask and soft cap": (
        dataclasses.replace(BASE, is_causal=False, has_mask=True, logits_soft_cap=5.0),
        Layout(mask=(jnp.arange(LENGTH) % 7 < 4)[None, None, None] & (jnp.arange(LENGTH) < 140)[None, None, :, None]),
    ),
    "documents without gradients": (
        dataclasses.replace(BASE, has_segment_ids=True, needs_grad=False, return_log_sum_exp=True),
        Layout(query_segment_ids=IDS, key_value_segment_ids=IDS),
    ),
    "decode": (
        dataclasses.replace(BASE, query_length=1, needs_grad=False, has_positions=True, has_seq_lengths=True),
        Layout(query_positions=jnp.asarray([[149], [59]]), key_value_seq_lengths=jnp.asarray([150, 60])),
    ),
}
# By standard: a pass over the values for every call would be the price.
GIVEN_UP = ("causal", "window", "mask and soft cap")
PLACES = (0, 75, 100, 149, 160, 180)


def inputs(spec):
    rng = np.random.default_rng(0)
    shapes = (spec.query_length, spec.num_heads), *((spec.key_value_length, spec.num_kv_heads),) * 2
    return [rng.standard_normal((spec.batch, length, heads, 16)).astype(np.float32) for length, heads in shapes]


def run_of(spec, layout, backend):
    name, _, small = backend.partition(" in ")
    made = plan(registry.get(name), spec, layout, target=Target.here(), options=SMALL if small else None)

    def run(query, key, value, cotangent=1.0):
        if not spec.needs_grad:
            return jax.tree.leaves(made.run(query, key, value)[0])
        out, pull_back = jax.vjp(lambda *x: made.run(*x)[0], query, key, value)
        return out, *pull_back(jnp.broadcast_to(cotangent, out.shape))

    return jax.jit(run)


@functools.cache
def compiled(problem, backend):
    """One program for every number that is not finite."""
    return run_of(*PROBLEMS[problem], backend)


@functools.cache
def seen_by(problem, place):
    """Rows ``[b, t, n]`` that may see the key at ``place`` of KV head 1, by the oracle."""
    spec, layout = PROBLEMS[problem]
    alone = jnp.zeros((spec.batch, 1, 1, spec.key_value_length), bool).at[..., place].set(True)
    alone = alone if layout.mask is None else alone & layout.mask
    rows = ~oracle.unseen_rows(dataclasses.replace(spec, has_mask=True), dataclasses.replace(layout, mask=alone))
    rows[:, :, :2] = False  # the heads of KV head 0
    return rows


@pytest.mark.parametrize("number", swept([np.nan, np.inf], [np.nan]))
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("backend", ["standard", SMALL_BLOCKS, *NATIVE])
def test_key_that_is_not_finite_spoils_the_rows_that_see_it_and_no_other(backend, problem, number):
    if backend == "standard" and problem in GIVEN_UP:
        with pytest.raises(AssertionError):
            holds(compiled(problem, backend), problem, number)
        return
    holds(compiled(problem, backend), problem, number)


def holds(run, problem, number, places=PLACES, wholly=False):
    """Rows that see a slot are NaN; all others, and gradients of what they and no spoilt row see, keep their bits."""
    spec, layout = PROBLEMS[problem]
    query, key, value = inputs(spec)
    expected = [np.asarray(x) for x in run(query, key, value)]
    quantities = ("output", "dq", "dk", "dv") if spec.needs_grad else ("output", "log_sum_exp")
    mask = np.broadcast_to(np.asarray(may_attend(spec, layout)), (2, 1, spec.query_length, spec.key_value_length))
    for place in places:
        seen = seen_by(problem, place)
        beside = (seen[:, :, 2, None] & mask[:, 0]).any(1)  # keys that a spoilt row sees
        beside = np.stack([np.zeros_like(beside), beside], -1)
        reached = {"output": seen, "log_sum_exp": seen, "dq": seen, "dk": beside, "dv": beside}
        for spoilt in (0, 1):
            arrays = [key.copy(), value.copy()]
            arrays[spoilt][:, place, 1, 3] = number
            found = [np.asarray(x) for x in run(query, *arrays)]
            # One number in a value is one of the output's; an infinite score is a probability of zero or of one.
            assert np.isinf(number) or np.isnan(found[0][seen]).any(-1).all()
            assert not wholly or np.isnan(found[0][seen]).all()
            for name, x, clean in zip(quantities, found, expected, strict=False):
                np.testing.assert_array_equal(x[~reached[name]], clean[~reached[name]], name)


@pytest.mark.flash_cpu
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_decode_step_of_flash_cpu_is_nan_where_it_sees_what_is_not_finite_and_only_there(soft_cap):
    pytest.importorskip("llvmlite", reason="flash_cpu is compiled by llvmlite")
    spec, layout = PROBLEMS["decode"]
    spec = dataclasses.replace(spec, logits_soft_cap=soft_cap)
    step = run_of(spec, layout, "flash_cpu")
    # In a query: the second sequence has no key, and its rows stay zero.
    run = run_of(spec, dataclasses.replace(layout, key_value_seq_lengths=jnp.asarray([150, 0])), "flash_cpu")
    for number in (np.nan, np.inf, -np.inf):
        holds(step, "decode", number, wholly=True)
        query, key, value = inputs(spec)
        (expected,) = run(query, key, value)
        query[:, 0, 2, 3] = number
        (found,) = run(query, key, value)
        assert np.isnan(found[0, 0, 2]).all(), number
        np.testing.assert_array_equal(found.at[0, 0, 2].set(expected[0, 0, 2]), expected)


@pytest.mark.thorough
@pytest.mark.flash_cpu
@pytest.mark.parametrize(
    ("fault", "problem", "places"),
    [
        ("what is not finite is packed", "causal", PLACES),
        ("no row is spoilt", "causal", PLACES),
        ("padding is packed", "documents and padding", (180,)),
        ("padding is packed backward", "documents and padding", (180,)),
    ],
)
def test_flash_cpu_without_its_marks_would_be_noticed(fault, problem, places, monkeypatch, tmp_path):
    pytest.importorskip("llvmlite", reason="flash_cpu is compiled by llvmlite")
    from attnsuite.backends.flash_cpu import backward_rows, forward, panels, rows  # noqa: PLC0415 (needs llvmlite)
    from emitted import everything_finite, nothing_done, set_apart  # noqa: PLC0415 (as above)

    if fault == "no row is spoilt":
        monkeypatch.setattr(forward, "_emit_spoil", nothing_done)
    else:
        monkeypatch.setattr(rows, "finite", everything_finite)
    if problem != "causal":  # what a key is compared with before it is copied
        monkeypatch.setattr(backward_rows if fault.endswith("backward") else panels, "NO_KEY", -99)
    set_apart(monkeypatch, tmp_path, fault)
    with pytest.raises(AssertionError):
        holds(run_of(*PROBLEMS[problem], "flash_cpu"), problem, np.nan, places)


QUERIES = [("documents and padding", backend, "query") for backend in ("standard", SMALL_BLOCKS)]
SPOILT = [
    QUERIES[0],
    *(
        (problem, SMALL_BLOCKS, operand)
        for problem, (spec, _) in PROBLEMS.items()
        if spec.needs_grad
        for operand in ("query", "cotangent")
    ),
]


@pytest.mark.parametrize(
    ("problem", "backend", "operand"),
    [
        *swept(SPOILT, QUERIES),
        *(pytest.param("documents and padding", *native.values, "query", marks=native.marks) for native in NATIVE),
    ],
)
def test_row_that_is_not_finite_spoils_itself_and_the_gradients_of_keys_that_it_sees(problem, backend, operand):
    spec, layout = PROBLEMS[problem]
    run, arrays = run_of(spec, layout, backend), [*inputs(spec), np.ones((2, LENGTH, 4, 16), np.float32)]
    expected = [np.asarray(x) for x in run(*arrays)]
    visible = np.broadcast_to(np.asarray(may_attend(spec, layout)), (2, 1, LENGTH, LENGTH))[0, 0]
    spoilt = arrays[0 if operand == "query" else 3]
    spoilt[0, 100, 2, 0] = np.nan
    spoilt[0, ~visible.any(1)] = np.nan  # rows that see nothing
    row, keys = np.zeros((2, LENGTH, 4), bool), np.zeros((2, LENGTH, 2), bool)
    row[0, 100, 2] = True
    keys[0, :, 1] = visible[169] if backend == "standard" else visible[100]  # or the whole document
    reached = {"output": row & (operand == "query"), "dq": row, "dk": keys, "dv": keys}
    found = [np.asarray(x) for x in run(*arrays)]
    for (name, where), x, clean in zip(reached.items(), found, expected, strict=True):
        np.testing.assert_array_equal(x[~where], clean[~where], name)
    assert np.isnan(found[0][reached["output"]]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_cotangent_of_a_row_that_sees_nothing_reaches_no_gradient(backend):
    """Also with sinks, which such a row sees."""
    spec, layout = PROBLEMS["documents and padding"]
    spec = dataclasses.replace(spec, has_sinks=True)
    made = plan(registry.get(backend), spec, layout, target=Target.here())
    query, key, value = inputs(spec)
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0])

    @jax.jit
    def gradients(d_out):
        def run(query, key, value, sinks):
            return made.run(query, key, value, terms=Terms(sinks=sinks))[0]

        return jax.vjp(run, query, key, value, sinks)[1](d_out)

    dead = (np.asarray(IDS) < 0)[..., None, None]
    plain = np.ones(query.shape, np.float32)
    for found, expected in zip(
        gradients(np.where(dead, np.nan, plain)), gradients(np.where(dead, 0, plain)), strict=True
    ):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found, expected)


def test_isolate_zeroes_what_lengths_and_padding_hide_for_a_backend_that_lets_nan_in():
    def averaging(query, key, value, key_value_seq_lengths):
        return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=key_value_seq_lengths)

    backend = from_function(averaging, takes={"bidirectional", "lengths", "grouped_queries", "gradient"})
    spec, layout = PROBLEMS["lengths"]
    query, key, value = inputs(spec)
    key[1, 60:] = value[0, 150:] = np.nan

    @functools.partial(jax.jit, static_argnums=0)
    def run(isolate, *operands):
        made = plan(backend, spec, layout, target=Target.here(), isolate=isolate)
        out, pull_back = jax.vjp(lambda *x: made.run(*x)[0], *operands)
        return out, *pull_back(jnp.ones_like(out))

    assert np.isnan(run(False, query, key, value)[0]).any()  # noqa: FBT003 (static arguments have no names)
    assert all(np.isfinite(x).all() for x in run(True, query, key, value))  # noqa: FBT003 (as above)
    pages = dataclasses.replace(BASE, page_size=16, num_pages=4, key_value_length=32, needs_grad=False)
    table = jnp.zeros((2, 2), jnp.int32)
    with pytest.raises(ValueError, match="isolate=True with page_size=16 is not supported"):
        plan(registry.get("standard"), pages, Layout(page_table=table), target=Target.here(), isolate=True)
    with pytest.raises(ValueError, match="isolate='yes' is not accepted"):
        plan(backend, spec, layout, target=Target.here(), isolate="yes")


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of JAX 0.10 copies a cache that a token joins")
@pytest.mark.parametrize(("backend", "kv_layout"), [("standard", "HND"), ("chunked", "NHD"), ("chunked", "HND")])
def test_decode_step_reads_a_cache_where_it_lies(backend, kv_layout):
    """A cache that was written down transposed, or beside a token that joins it, would be read three times."""
    spec, layout = PROBLEMS["decode"]
    joins = backend == "chunked"
    made = plan(registry.get(backend), dataclasses.replace(spec, kv_layout=kv_layout), layout, target=Target.here())
    shapes = {"NHD": (2, LENGTH, 2, 16), "HND": (2, 2, LENGTH, 16)}

    def step(query, key, value, index):
        at = (slice(None), index) if kv_layout == "NHD" else (slice(None), slice(None), index)
        if joins:
            key, value = key.at[at].set(1.0), value.at[at].set(1.0)
        return made.run(query, key, value)[0], *((key, value) if joins else ())

    cache = jax.ShapeDtypeStruct(shapes[kv_layout], jnp.float32)
    query, index = jax.ShapeDtypeStruct((2, 1, 4, 16), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(step, donate_argnums=(1, 2) if joins else ()).lower(query, cache, cache, index).compile()
    program = compiled.as_text()
    entry = program[program.index("\nENTRY") :].partition("\n}")[0]
    lies, turned = (",".join(map(str, shapes[name])) for name in (kv_layout, {"NHD": "HND", "HND": "NHD"}[kv_layout]))
    assert f"f32[{lies}]" in entry
    assert f"f32[{turned}]" not in entry
    assert not re.search(rf"= f32\[{lies}\]\S* copy\(", entry)
