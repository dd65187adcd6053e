"""Emitted building blocks whose precision is a claim of its own, and the code for absent processors as assembly."""

import functools
import itertools
import re

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Layout, blocks
from attnsuite.backends.flash_cpu import elements, masking
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.backends.flash_cpu.emit import Function, f32, i64, ptr, vector
from attnsuite.backends.flash_cpu.forward import Kernel
from attnsuite.backends.flash_cpu.isa import AMX_BF16, AVX2, AVX512, AVX512_BF16, NEON, available, features_for
from attnsuite.backends.flash_cpu.visibility import visibility
from declared import sized
from emitted import ISAS, assembly, call, compiled
from landing import swept

RNG = np.random.default_rng(0)


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def isa(request):
    return request.param


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
    if isa.multiplies_bfloat16:  # of numbers that become bfloat16, whose exponentials add up to a log-sum-exp
        of_pairs, whole = functools.partial(elements.exp2, pack=2), np.arange(-126, 66, dtype=np.float32)
        out = _elementwise(isa, of_pairs, x)
        assert np.max(np.abs(out - right) / right) < 3.5e-7
        np.testing.assert_array_equal(_elementwise(isa, of_pairs, whole), 2**whole)


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
    spec = sized(size, N=1, H=8, **options)
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
    assert available({**full, "sse4a": True}, "x86_64") == (AVX512_BF16, AVX512, AVX2)  # AMD
    assert available(full, "x86_64") == (AVX512, AVX512_BF16, AVX2)
    assert available({**full, "avx512bf16": False}, "x86_64") == (AVX512, AVX2)
    assert available({**full, "amx-tile": True, "amx-bf16": True}, "x86_64") == (AMX_BF16, AVX512, AVX512_BF16, AVX2)
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


# Before a change lands, each instruction set that is not run here, both systems, and both kernels of two of the sets.
FIRST_ABROAD = (
    *(("neoverse-n1", "backward"), ("apple-m1", "forward"), ("haswell", "forward"), ("haswell", "backward")),
    ("znver4", "forward"),
)


@pytest.mark.parametrize(("name", "kind"), swept(itertools.product(ABROAD, ("forward", "backward")), FIRST_ABROAD))
def test_kernels_compile_for_processors_that_are_not_here(name, kind):
    """Compiled and looked at, not run."""
    processor, isa, pattern = ABROAD[name]
    kernel = Kernel("bfloat16", 64, 64, soft_cap=False, out_dtype="bfloat16")
    text = assembly(processor, isa, kind, kernel)
    assert len(re.findall(pattern, text)) > 40
    for called in ("sched_setaffinity", "clock_gettime"):  # macOS has not the first, and other numbers of clocks
        assert (called in text) == ("linux" in processor.triple)
    if isa is AVX2:
        assert "zmm" not in text
