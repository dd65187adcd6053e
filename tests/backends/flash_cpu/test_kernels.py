"""Every emitted building block against NumPy, and the code for processors that are not here as assembly."""

import ctypes
import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import AttentionSpec, Layout, blocks
from attnsuite.backends.flash_cpu import elements, masking, products, rows, slopes, softmax, tiles
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.backends.flash_cpu.emit import Function, f32, i64, ptr, vector
from attnsuite.backends.flash_cpu.forward import Kernel
from attnsuite.backends.flash_cpu.isa import AMX_BF16, AVX2, AVX512, AVX512_BF16, NEON, available, features_for
from attnsuite.backends.flash_cpu.visibility import NO_KEY, visibility
from emitted import ISAS, assembly, call, compiled
from emulated_tiles import emulate

RNG = np.random.default_rng(0)


def _float32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def isa(request):
    return request.param


@pytest.fixture(params=[isa for isa in ISAS if isa.multiplies_bfloat16], ids=lambda isa: isa.name)
def paired(request):
    """An instruction set of this processor in which a term of a product is a pair of bfloat16 numbers."""
    return request.param


@pytest.fixture(
    params=[*((isa, False) for isa in ISAS if isa.multiplies_bfloat16), (AMX_BF16, True)],
    ids=lambda param: param[0].name + "-emulated" * param[1],
)
def multiplying(request, monkeypatch):
    """The same, and AMX in emulation."""
    isa, emulated = request.param
    if emulated:
        emulate(monkeypatch)
    return isa


def _pairs(x, axis):
    """Neighbours along an axis as bfloat16 in one int32, and the matrix that they stand for."""
    x = np.asarray(x, jnp.bfloat16)
    low, high = (np.take(x, range(n, x.shape[axis], 2), axis).view(np.uint16).astype(np.uint32) for n in (0, 1))
    return (low | high << 16).view(np.int32), x.astype(np.float32)


def _elementwise(isa, function, x):
    """``function(e, isa, vector)`` over an array whose length is a multiple of the lanes."""
    out = np.empty_like(x)

    def build(module):
        with (
            Function(module, "elementwise", [ptr, ptr, i64]) as (e, (source, target, count)),
            e.loop(0, count, isa.lanes) as i,
        ):
            target.at(i, 4).store(function(e, isa, source.at(i, 4).load(vector(f32, isa.lanes))))
        return e.function

    call(isa, build, x, out, len(x))
    return out


def test_exp2_is_right_to_two_units_in_the_last_place(isa):
    x = np.linspace(-120, 30, 4096).astype(np.float32)
    out = _elementwise(isa, elements.exp2, x)
    right = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(out - right) / right) < 2.5e-7


def test_exp2_of_something_very_negative_is_next_to_nothing(isa):
    out = _elementwise(isa, elements.exp2, np.full(64, -1e30, np.float32))
    assert (out >= 0).all()
    assert (out < 1.2e-38).all()


def test_tanh_has_a_small_relative_error_also_near_zero(isa):
    x = np.concatenate([np.linspace(-12, 12, 2048), np.geomspace(1e-8, 0.7, 2048)]).astype(np.float32)
    out = _elementwise(isa, elements.tanh, x)
    right = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(out - right) / np.maximum(np.abs(right), 1e-30)) < 5e-7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_widened_exactly_and_rounded_to_nearest_even(isa, dtype):
    width = 21
    number = jnp.dtype(dtype)
    source = _float32(width).astype(number)
    wide = np.full(rows.padded(width, isa), np.nan, np.float32)
    call(isa, lambda m: rows.copy_row(m, isa, "copy", dtype, width), source, wide)
    np.testing.assert_array_equal(wide[:width], source.astype(np.float32))
    assert (wide[width:] == 0).all()
    wide[:width] = _float32(width)
    wide[0], wide[1] = np.nan, np.float32(1 + 2.0**-8)  # the second lies halfway between two bfloat16
    out = np.zeros(width, number)
    call(isa, lambda m: rows.write_row(m, isa, "write", dtype, width), wide, out, 1.0)
    np.testing.assert_array_equal(out.astype(np.float32), wide[:width].astype(number).astype(np.float32))


def test_rows_of_pairs_are_copied_and_two_of_them_joined(paired):
    width = 21
    x = np.concatenate([_float32(2, width), np.zeros((2, 11), np.float32)], 1).astype(jnp.bfloat16)
    copied = np.full((2, rows.padded(width, paired, 2)), -1, np.int32)
    for row, target in zip(x, copied, strict=True):
        call(paired, lambda m: rows.copy_row(m, paired, "copy", "bfloat16", width, 2), row[:width].copy(), target)
        np.testing.assert_array_equal(target, _pairs(row[None], 1)[0][0])
    joined = np.full(32, -1, np.int32)
    call(paired, lambda m: rows.join(m, paired, "join", 32), copied, joined, 2)
    np.testing.assert_array_equal(joined, _pairs(x, 0)[0][0])


def test_transpose_turns_rows_into_columns(isa):
    n, width = 3 * isa.lanes, 2 * isa.lanes
    x, out = _float32(n, width), np.empty((width, n), np.float32)
    call(isa, lambda m: rows.transpose(m, isa, "turn", n, width), x, out)
    np.testing.assert_array_equal(out, x.T)


def test_score_tiles_are_keys_times_queries(isa):
    depth, queries, keys = 24, 2 * isa.group, 2 * isa.strip
    k, q, out = _float32(keys, depth), _float32(depth, queries), np.zeros((keys, queries), np.float32)

    def build(module):
        scores = products.Scores.of(module, isa, "score", depth, depth, queries)
        with Function(module, "all_scores", [ptr] * 3) as (e, (k, q, s)):
            for group in range(0, queries, isa.group):
                scores.emit(e, k, q.at(group, 4), s.at(group, 4), e.const(i64, isa.strip), e.const(i64, keys))
        return e.function

    call(isa, build, k, q, out)
    np.testing.assert_allclose(out[isa.strip :], (k @ q)[isa.strip :], rtol=2e-5, atol=2e-5)
    assert (out[: isa.strip] == 0).all()


def test_score_tiles_of_pairs_are_keys_times_queries(multiplying):
    depth, queries, keys = 23, multiplying.group, multiplying.strip
    k = _float32(keys, 32)
    k[:, depth:] = 0  # what pads a head dimension is zero
    (k, whole_k), (q, whole_q) = _pairs(k, 1), _pairs(_float32(32, queries), 0)
    out = np.zeros((keys, queries), np.float32)

    def build(module):
        scores = products.Scores.of(module, multiplying, "score", depth, k.shape[1], queries, 2)
        with Function(module, "all_scores", [ptr] * 3) as (e, (k_, q_, s)), tiles.configured(e):
            scores.emit(e, k_, q_, s, e.const(i64, 0), e.const(i64, keys))
        return e.function

    call(multiplying, build, k, q, out)
    np.testing.assert_allclose(out, whole_k @ whole_q, rtol=2e-5, atol=2e-5)


def test_value_tiles_of_pairs_add_weights_times_values_to_what_is_there(multiplying):
    width, n, terms = 2 * multiplying.lanes, multiplying.value_rows, 64
    (p, whole_p), (v, whole_v) = _pairs(_float32(terms, n), 0), _pairs(_float32(terms, width), 0)
    out = _float32(n, width)
    expected = out + whole_p[16:].T @ whole_v[16:]

    def build(module):
        weigh = products.Weighted.of(module, multiplying, "value", width, (1, n), 2)
        with Function(module, "all_values", [ptr] * 3) as (e, (p_, v_, out_)), tiles.configured(e):
            weigh.emit(e, p_, v_, out_, (0, n), (16, terms))
        return e.function

    call(multiplying, build, p, v, out)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_score_is_a_sum_of_short_sums(isa):
    """Of 256 terms it is nearer to the exact one than a sum of one after the other."""
    depth, queries, keys = 256, isa.group, isa.strip
    k, q, out = _float32(keys, depth), _float32(depth, queries), np.zeros((keys, queries), np.float32)

    def build(module):
        scores = products.Scores.of(module, isa, "score", depth, depth, queries)
        with Function(module, "all_scores", [ptr] * 3) as (e, (k, q, s)):
            scores.emit(e, k, q, s, e.const(i64, 0), e.const(i64, keys))
        return e.function

    call(isa, build, k, q, out)
    in_turn = np.zeros_like(out)
    for d in range(depth):
        in_turn = (in_turn + np.outer(k[:, d].astype(np.float64), q[d])).astype(np.float32)  # rounded once, as fma does
    exact = k.astype(np.float64) @ q.astype(np.float64)
    assert np.std(out - exact) < 0.7 * np.std(in_turn - exact)


@pytest.mark.parametrize("vectors", [1, 5, 8])
def test_value_tiles_add_weights_times_values_to_what_is_there(isa, vectors):
    width, n, terms = vectors * isa.lanes, 2 * isa.value_rows, 10
    p, v, out = _float32(terms, n), _float32(terms, width), _float32(n, width)
    expected = out + p[3:].T @ v[3:]

    def build(module):
        weigh = products.Weighted.of(module, isa, "value", width, (1, n))
        with Function(module, "all_values", [ptr] * 3) as (e, (p, v, out)):
            weigh.emit(e, p, v, out, (0, n), (3, terms))
        return e.function

    call(isa, build, p, v, out)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def _numbers(scale, cap=None):
    log2_e = np.log2(np.e)
    inner = scale / cap if cap else 0.0
    return np.array([scale * log2_e, inner, (cap or 0.0) * log2_e, scale], np.float32)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_softmax_of_two_blocks_is_the_softmax_of_both(isa, mixed, cap):
    group, keys, scale = isa.group, 40, 0.3
    raw = _float32(2 * keys, group) * 9
    raw[keys:] += 60  # the second block raises the maximum by far more than the lazy bound
    position, key_id = np.arange(2 * keys, dtype=np.int32), np.zeros(2 * keys, np.int32)
    key_id[7] = NO_KEY
    first, last = np.full(group, 3, np.int32), np.arange(group, dtype=np.int32) + keys - group // 2
    query_id = np.zeros(group, np.int32)
    last[0] = 2  # sees nothing
    top, total, decay = (np.full(group, x, np.float32) for x in (softmax.HIDDEN, 0, np.nan))
    logits = raw.astype(np.float64) * scale
    if cap:
        logits = cap * np.tanh(logits / cap)
    if mixed:
        seen = (position[:, None] >= first) & (position[:, None] <= last) & (key_id[:, None] == query_id)
        logits = np.where(seen, logits, -np.inf)
    scores, sums = raw.copy(), np.zeros(group)
    for block in (slice(0, keys), slice(keys, 2 * keys)):
        part = np.ascontiguousarray(scores[block])
        decay[:] = 1
        raised = call(
            isa,
            lambda m: softmax.softmax(m, isa, group, mixed=mixed, soft_cap=cap is not None),
            part, top, total, decay, first, last, query_id,
            np.ascontiguousarray(position[block]), np.ascontiguousarray(key_id[block]), _numbers(scale, cap), 0, keys,
            returns=ctypes.c_bool,
        )  # fmt: skip
        sums = sums * (decay if raised else 1) + part.sum(0)
        np.testing.assert_allclose(total, sums, rtol=1e-5)
        if mixed:
            assert (part[~seen[block]] == 0).all()
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top * np.log(2)
        expected = np.log(np.exp(logits).sum(0))
    live = np.isfinite(expected)
    np.testing.assert_allclose(lse[live], expected[live], rtol=1e-5)
    assert live.all() != mixed
    assert (total[~live] == 0).all()


@pytest.mark.parametrize("mixed", [False, True])
def test_weights_are_rounded_to_pairs_of_keys_and_summed_before(paired, mixed):
    group, keys = paired.group, 24
    raw, results = _float32(keys, group), {}
    position, key_id = np.arange(keys, dtype=np.int32), np.zeros(keys, np.int32)
    for pack in (1, 2):
        scores = raw.copy()
        top, total, decay = (np.full(group, x, np.float32) for x in (softmax.HIDDEN, 0, 1))
        first, last, query_id = np.zeros(group, np.int32), np.full(group, 13, np.int32), np.zeros(group, np.int32)
        call(
            paired,
            lambda m, pack=pack: softmax.softmax(m, paired, group, mixed=mixed, soft_cap=False, pack=pack),
            scores, top, total, decay, first, last, query_id, position, key_id, _numbers(0.3), 4, keys,
            returns=ctypes.c_bool,
        )  # fmt: skip
        results[pack] = scores, total
    np.testing.assert_array_equal(results[2][0][2:12].view(np.int32), _pairs(results[1][0][4:], 0)[0])
    np.testing.assert_allclose(results[2][1], results[1][1], rtol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_slopes_are_rounded_to_pairs_of_queries_and_to_pairs_of_keys(paired, mixed):
    group, keys = paired.group, 24
    raw, d_probs, results = _float32(keys, group), _float32(keys, group), {}
    position, key_id = np.arange(keys, dtype=np.int32), np.zeros(keys, np.int32)
    numbers = [np.full(group, x, np.float32).view(np.int32) for x in (1.0, 0.1, 0.2, slopes.NEVER, 0.3)]
    whole = [np.full(group, x, np.int32) for x in (0, 13, 0)]
    for pack in (1, 2):
        p, d, by_key = raw.copy(), d_probs.copy(), np.zeros((keys // 2, group), np.int32)
        call(
            paired,
            lambda m, pack=pack: slopes.slopes(m, paired, group, mixed=mixed, soft_cap=False, pack=pack),
            p, d, by_key, np.stack([*numbers, *whole]), position, key_id, _numbers(0.3), 4, keys,
        )  # fmt: skip
        results[pack] = p[4:], d[4:], by_key[2:]
    (p, d, _), (p_pairs, d_pairs, by_key) = results[1], results[2]
    for pairs, exact in ((p_pairs, p), (d_pairs, d)):
        np.testing.assert_array_equal(pairs[:, : group // 2].view(np.int32), _pairs(exact, 1)[0])
    np.testing.assert_array_equal(by_key, _pairs(d, 0)[0])


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_slopes_are_the_derivative_of_the_softmax(isa, mixed, cap):
    group, keys, scale = isa.group, 24, 0.4
    raw, d_probs = _float32(keys, group), _float32(keys, group)
    position, key_id = np.arange(keys, dtype=np.int32), np.zeros(keys, np.int32)
    first, last = np.zeros(group, np.int32), np.full(group, keys - 5, np.int32)
    logits = raw.astype(np.float64) * scale
    bend = np.ones_like(logits)
    if cap:
        bend = 1 - np.tanh(logits / cap) ** 2
        logits = cap * np.tanh(logits / cap)
    if mixed:
        logits[position > keys - 5] = -np.inf
    top = logits.max(0)
    total = np.exp(logits - top).sum(0)
    probs = np.exp(logits - top) / total
    delta = (probs * d_probs).sum(0)
    d_lse = _float32(group)
    numbers = [top * np.log2(np.e), 1 / total, delta, np.full(group, slopes.NEVER), d_lse]
    per_query = np.stack([*(x.astype(np.float32).view(np.int32) for x in numbers), first, last, np.zeros_like(first)])
    p, d = raw.copy(), d_probs.copy()
    call(
        isa,
        lambda m: slopes.slopes(m, isa, group, mixed=mixed, soft_cap=cap is not None),
        p, d, np.empty(0, np.int32), per_query, position, key_id, _numbers(scale, cap), 0, keys,
    )  # fmt: skip
    np.testing.assert_allclose(p, probs, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(d, probs * (d_probs - delta + d_lse) * bend, rtol=1e-4, atol=1e-6)


LAYOUTS = {
    "causal": ({"is_causal": True}, {}),
    "window": ({"local_window_size": (20, 7)}, {}),
    "chunk": ({"is_causal": True, "chunk_size": 30}, {}),
    "everything visible": ({}, {}),
    "segments": (
        {"is_causal": True},
        {
            "query_segment_ids": np.repeat([0, 1, -1], [50, 100, 42])[None].astype(np.int32),
            "key_value_segment_ids": np.repeat([0, 1, -1], [96, 20, 76])[None].astype(np.int32),
        },
    ),
    "lengths": ({}, {"key_value_seq_lengths": np.array([100], np.int32)}),
    "positions": ({"is_causal": True}, {"query_positions": RNG.permutation(192).astype(np.int32)[None]}),
}


@functools.cache
def _classifier(isa, queries, keys):
    """What a kernel finds of a block: the first visible key, the one behind the last, whether it is mixed."""

    def build(module):
        with Function(module, "classify", [ptr] * 5 + [i64, i64, ptr]) as (e, (f, l, q, p, k, row, column, out)):
            record = e.stack(vector(f32, 16))
            records = e.stack(vector(f32, 16 * (1 + keys // isa.strip)))
            masking.key_bounds(e, p.at(column, 4), k.at(column, 4), keys, isa.strip, records)
            masking.query_bounds(e, *(x.at(row, 4) for x in (f, l, q)), e.const(i64, queries), record)
            live = masking.live_keys(e, record, records, keys, isa.strip)
            out.at(0).store(live.start, 8)
            out.at(8).store(live.stop, 8)
            out.at(16).store(e.select(live.mixed, e.const(i64, 1), 0), 8)
        return e.function

    return compiled(isa, build)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_empty_mixed_or_full_as_the_block_table_says(isa, name):
    """Same kinds as ``backends/blocks.py``; of a mixed block no visible key is cut off."""
    options, arrays = LAYOUTS[name]
    size, keys, queries = 192, 2 * isa.strip, 48
    spec = AttentionSpec(
        batch=1, query_length=size, key_value_length=size, num_heads=1, num_kv_heads=1, head_dim=8, **options
    )
    layout = Layout(**arrays)
    seen = visibility(spec, layout)
    padded = blocks.pad_layout(spec, layout, queries, keys)
    kinds = np.asarray(blocks.classify(spec, padded, queries, keys))[0]
    first, last, query_id, position, key_id = (np.ascontiguousarray(x[0]) for x in seen.by_name.values())
    visible = (first[:, None] <= position) & (position <= last[:, None]) & (query_id[:, None] == key_id)

    classify = _classifier(isa, queries, keys)
    for i, row in enumerate(range(0, size, queries)):
        for j, column in enumerate(range(0, size, keys)):
            out = np.zeros(3, np.int64)
            classify(first, last, query_id, position, key_id, row, column, out)
            start, stop, mixed = out
            inside = visible[row : row + queries, column : column + keys].any(0)
            if kinds[i, j] == blocks.FULL:
                assert (start, stop, mixed) == (0, keys, 0)
            elif kinds[i, j] == blocks.SKIP:
                assert start >= stop
            else:
                assert mixed or start >= stop
                assert not inside[:start].any()
                assert not inside[stop:].any()


def test_instruction_set_follows_from_the_features():
    full = dict.fromkeys((*AVX512_BF16.needs, *AVX2.needs), True)
    assert available(full, "x86_64") == (AVX512_BF16, AVX512, AVX2)
    assert available({**full, "avx512bf16": False}, "x86_64") == (AVX512, AVX2)
    assert available({**full, "amx-tile": True, "amx-bf16": True}, "x86_64") == (AMX_BF16, AVX512_BF16, AVX512, AVX2)
    assert available({**full, "avx512bw": False}, "x86_64") == (AVX2,)
    assert available({**full, "avx512bw": False, "fma": False}, "x86_64") == ()
    assert available({}, "arm64") == (NEON,)
    assert not features_for(AVX2, full)["avx512f"]


ABROAD = {
    "neoverse-n1": (
        Processor("aarch64-unknown-linux-gnu", "neoverse-n1", (("neon", True),)),
        NEON,
        r"\tfmla\t.*\[\d\]",
    ),
    "apple-m1": (Processor("arm64-apple-macosx13.0", "apple-m1", (("neon", True),)), NEON, r"\tfmla"),
    "haswell": (
        Processor("x86_64-unknown-linux-gnu", "haswell", tuple((x, True) for x in AVX2.needs)),
        AVX2,
        r"vfmadd\w+ps.*%ymm",
    ),
    "znver4": (
        Processor("x86_64-unknown-linux-gnu", "znver4", tuple((x, True) for x in AVX512_BF16.needs)),
        AVX512_BF16,
        r"vdpbf16ps.*%zmm",
    ),
    "sapphirerapids": (
        Processor("x86_64-unknown-linux-gnu", "sapphirerapids", tuple((x, True) for x in AVX512.needs)),
        AVX512,
        r"vfmadd\w+ps.*%zmm",
    ),
}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name", ABROAD)
def test_kernels_compile_for_processors_that_are_not_here(name, kind):
    """Compiled and looked at, not run."""
    processor, isa, pattern = ABROAD[name]
    kernel = Kernel("bfloat16", 64, 64, soft_cap=False, out_dtype="bfloat16")
    text = assembly(processor, isa, kind, kernel)
    assert len(re.findall(pattern, text)) > 40
    if isa is AVX2:
        assert "zmm" not in text


def test_a_wrong_tile_would_be_noticed(isa):
    """The comparison with NumPy sees a single element that is off."""
    wrong = dataclasses.replace(isa, value_rows=isa.value_rows - 1)  # rows that no tile covers
    width, n, terms = isa.lanes, 2 * isa.value_rows, 8
    p, v, out = _float32(terms, n), _float32(terms, width), np.zeros((n + 8, width), np.float32)

    def build(module):
        weigh = products.Weighted.of(module, wrong, "value", width, (1, n))
        with Function(module, "all_values", [ptr] * 3) as (e, (p, v, out)):
            weigh.emit(e, p, v, out, (0, n - wrong.value_rows), (0, terms))
        return e.function

    call(isa, build, p, v, out)
    assert not np.allclose(out[:n], p.T @ v, atol=2e-5)
