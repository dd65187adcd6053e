"""Kernels for AMX: executed here with emulated instructions, and compiled for a processor that has them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import AttentionSpec, Layout, oracle
from attnsuite.backends.flash_cpu import availability, compiler, targets, tiles
from attnsuite.backends.flash_cpu.calls import Calls
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.backends.flash_cpu.emit import Function, ptr
from attnsuite.backends.flash_cpu.forward import Kernel
from attnsuite.backends.flash_cpu.isa import AMX_BF16, AVX512, AVX512_BF16
from attnsuite.backends.flash_cpu.visibility import visibility
from emitted import ISAS, assembly, call, set_apart
from emulated_tiles import emulate

SAPPHIRE_RAPIDS = Processor("x86_64-unknown-linux-gnu", "sapphirerapids", tuple((x, True) for x in AMX_BF16.needs))
PROBLEMS = {
    # Odd head dimensions of one and a half tiles, 130 keys in blocks of 96, a group of two heads, windows.
    "window": ({"head_dim": 39, "value_head_dim": 23, "local_window_size": (50, 3), "logits_soft_cap": 5.0}, {}),
    "segments": (
        {"head_dim": 128, "is_causal": True, "has_segment_ids": True},
        {
            "query_segment_ids": np.repeat([0, 1, -1], [50, 60, 20])[None].astype(np.int32),
            "key_value_segment_ids": np.repeat([0, 1, -1], [60, 40, 30])[None].astype(np.int32),
        },
    ),
}


@pytest.fixture(params=["emulated", *(["executed"] if AMX_BF16 in ISAS else [])])
def instructions(request, monkeypatch, tmp_path):
    if AVX512_BF16 not in ISAS:
        pytest.skip("this processor has no AVX-512 with BF16, which AMX's kernels take for everything but the products")
    set_apart(monkeypatch, tmp_path, request.node.name)
    if request.param == "emulated":
        emulate(monkeypatch)


def _spec(options):
    return AttentionSpec(
        batch=1, query_length=130, key_value_length=130, num_heads=4, num_kv_heads=2, dtype="bfloat16", **options
    )


def _verdicts(name, *, backward, isa=AMX_BF16, **changes):
    """What the oracle says of the output, and of the gradients; what nobody sees is NaN."""
    options, arrays = PROBLEMS[name]
    spec, layout = _spec(options | changes), Layout(**arrays)
    rng, wide = np.random.default_rng(0), spec.value_head_dim or spec.head_dim
    shapes = (1, 130, 4, spec.head_dim), (1, 130, 2, spec.head_dim), (1, 130, 2, wide), (1, 130, 4, wide)
    query, key, value, d_out = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)
    gradients = oracle.gradients(spec, layout, query, key, value, d_out) if backward else {}
    expected = oracle.forward(spec, layout, query, key, value), *(gradients[x] for x in ("dq", "dk", "dv") if backward)
    if spec.has_segment_ids:
        key[arrays["key_value_segment_ids"] < 0] = value[arrays["key_value_segment_ids"] < 0] = np.nan
    calls, seen = Calls(spec, isa), visibility(spec, layout)

    @jax.jit
    def run(query, key, value, d_out):
        out, top, total = calls.forward(query, key, value, seen)
        return out, *(calls.backward(query, key, value, seen, out, top, total, d_out, None) if backward else ())

    judged = zip(run(query, key, value, d_out), expected, ("forward", *["gradient"] * len(gradients)), strict=True)
    return [bool(oracle.judge(found, right, None, "bfloat16", kind).passed) for found, right, kind in judged]


@pytest.mark.parametrize(("name", "isa"), [*((name, AMX_BF16) for name in PROBLEMS), ("window", AVX512_BF16)])
@pytest.mark.usefixtures("instructions")
def test_output_and_gradients_by_tiles_or_pairs_are_what_the_oracle_says(name, isa):
    """No named problem has an odd head dimension in bfloat16."""
    assert _verdicts(name, backward=True, isa=isa) == [True] * 4


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("instructions", ["emulated"], indirect=True)  # a processor would end the process
def test_registers_that_no_thread_configures_would_be_noticed(monkeypatch):
    monkeypatch.setattr(tiles, "configuration", lambda: bytes(64))
    assert _verdicts("window", backward=False) == [False]


def test_emulated_instruction_is_the_published_one(monkeypatch):
    """Even and odd numbers of the pairs are summed apart, then added; subnormal numbers are zero; 8 terms in half."""
    emulate(monkeypatch)
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape) for shape in ((16, 32), (16, 16, 2), (16, 16)))
    a[0, 0], b[0, 0], c[0] = 1e-39, 1e38, 0
    a, b, c = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), c.astype(np.float32)
    out = np.stack([c, c])

    def build(module):
        with Function(module, "multiply", [ptr] * 3) as (e, (a, b, out)):
            stride = e.const(tiles.i64, 64)
            tiles.operation(e, "ldtilecfg", tiles.Value(e, tiles.constant(module, "tiles", tiles.configuration())))
            for n, (left, right) in enumerate((tiles.WHOLE, tiles.HALF)):
                tiles.operation(e, "tileloadd64", 0, out.at(n * 1024), stride)
                tiles.operation(e, "tileloadd64", left, a, stride)
                tiles.operation(e, "tileloadd64", right, b, stride)
                tiles.operation(e, "tdpbf16ps", 0, left, right)
                tiles.operation(e, "tilestored64", 0, out.at(n * 1024), stride)
        return e.function

    call(AMX_BF16, build, a.view(np.int16), b.view(np.int16), out)
    a, b = (np.where(np.abs(x.astype(np.float64)) < 2.0**-126, 0, x.astype(np.float64)) for x in (a, b))
    for terms, found in zip((16, 8), out, strict=True):
        halves = np.zeros((2, 16, 16), np.float32)
        for k in range(terms):
            for half in (0, 1):
                halves[half] = halves[half] + np.outer(a[:, 2 * k + half], b[k, :, half])  # in float64, rounded once
        np.testing.assert_array_equal(found, c + (halves[0] + halves[1]))


def test_configuration_of_the_registers_begins_as_the_processor_wants():
    """The sizes that follow are read by the emulation."""
    assert (len(tiles.configuration()), tiles.configuration()[:16]) == (64, bytes([1]) + bytes(15))


def _function(text, name):
    """Of an assembly."""
    return text[text.index(f"\n{name}:") :].split("\n.Lfunc_end")[0]


@pytest.mark.parametrize(("kind", "phases"), [("forward", 1), ("backward", 2)])
def test_products_are_compiled_to_amx_for_a_processor_that_is_not_here(kind, phases):
    """Compiled and looked at, not run."""
    kernel = Kernel("bfloat16", 64, 64, soft_cap=False, out_dtype="bfloat16")
    text = assembly(SAPPHIRE_RAPIDS, AMX_BF16, kind, kernel)
    assert "dpbf16ps\t%zmm" not in text
    assert [text.count(name) for name in ("ldtilecfg", "tilerelease")] == [1, 1]
    steps = re.findall(r"ldtilecfg|tilerelease|\$(?:\w+_item|release)", _function(text, "worker"))
    assert (steps[0], *steps[-2:]) == ("ldtilecfg", "tilerelease", "$release")
    assert len(steps[1:-2]) == phases  # an item of each
    # Of a group of two vectors each is stored when the sums of the next one are on their way.
    steps = ["tileloadd", *["tilezero", "tileloadd", "tileloadd", "tdpbf16ps", "tilestored"] * 2, "tilestored"]
    assert re.findall(r"\t(tile\w+|tdpbf16ps)\t", _function(text, "score")) == steps


def test_no_other_kernel_touches_tiles(monkeypatch):
    monkeypatch.delattr(tiles, "operation")
    for dtype, isa in (("float32", AMX_BF16), ("bfloat16", AVX512_BF16)):
        kernel = Kernel(dtype, 64, 64, soft_cap=False, out_dtype=dtype)
        targets.build("forward", kernel, compiler.new_module(SAPPHIRE_RAPIDS), isa.of(dtype))


@pytest.mark.parametrize("permitted", [True, False])
def test_amx_is_the_default_where_the_system_permits_it(monkeypatch, permitted):
    monkeypatch.setattr(tiles, "permitted", lambda: permitted)
    assert SAPPHIRE_RAPIDS.isa() is (AMX_BF16 if permitted else AVX512)
    assert SAPPHIRE_RAPIDS.isa("amx_bf16") is (AMX_BF16 if permitted else None)
    monkeypatch.setattr(Processor, "here", staticmethod(lambda: SAPPHIRE_RAPIDS))
    monkeypatch.setattr(availability, "_self_test", lambda isa: f"{isa.name} would be tested")
    found = availability.why_not.__wrapped__("amx_bf16")
    assert found == (
        "amx_bf16 would be tested"
        if permitted
        else "isa='amx_bf16' is refused by the system, which keeps AMX's registers back; leave isa out."
    )


def test_system_that_permits_nothing_is_asked_without_harm():
    assert tiles.permitted() == (AMX_BF16 in ISAS)


def test_amx_multiplies_only_bfloat16():
    assert [AMX_BF16.of(dtype).name for dtype in ("float32", "bfloat16")] == ["avx512_bf16", "amx_bf16"]
    assert dataclasses.replace(AMX_BF16, tiles=False).of("float32").name == "amx_bf16"
