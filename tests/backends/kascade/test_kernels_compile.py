"""Kascade's kernels compiled for a TPU and a GPU that are not here, from shapes alone; nothing is run."""

import json

import pytest

import compilers
from attnsuite.suite.compile import topologies
from landing import is_landing
from script import printed

pytestmark = compilers.needed

# One process per kind of device: neither compiler allows two in one.
PROGRAM = """
import dataclasses, json, sys
import jax, jax.numpy as jnp
from attnsuite.backends import AttentionSpec, Layout, Target
from attnsuite.backends.kascade import Settings, Tiling, TileLayout
from attnsuite.backends.kascade.backend import kernels_of
from attnsuite.backends.kascade import block_sizes
from attnsuite.suite.compile import topologies
from attnsuite.suite.measure.program import Program
from attnsuite.suite.compile.compilation import compile_program, rejected

target = Target.named(sys.argv[1])

def compiled(what, length, queries=None, oversized=False, segments=False):
    spec = AttentionSpec(
        batch=1, query_length=queries or length, key_value_length=length, num_heads=8, num_kv_heads=2, head_dim=128,
        dtype="bfloat16", is_causal=True, needs_grad=what == "gradient", has_positions=queries is not None,
        has_seq_lengths=queries is not None, has_segment_ids=segments,
    )
    # Of keys and values 16 MiB each, loaded while the next are on their way, and 1024 of either in a step.
    sizes = {"block_q": 16, "query_tile": 16, "tile_size": 65536, "block_kv_sparse": 65536, "block_kv_compute": 1024}
    settings = Settings(**(sizes if oversized else {"query_tile": 512, "tile_size": 256}), top_k=0.125)
    tiling = Tiling.of(spec, settings)

    def shape(length, heads):
        return jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16)

    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    layout = Layout(
        query_positions=integers(1, queries) if queries else None,
        key_value_seq_lengths=integers(1) if queries else None,
        query_segment_ids=integers(1, length) if segments else None,
        key_value_segment_ids=integers(1, length) if segments else None,
    )

    made = kernels_of("pallas", target)(spec, tiling, settings)

    def mass(layout, query, key):
        return made.pooled_mass(TileLayout.of(spec, layout, tiling), query, key)

    def attend(layout, query, key, value, listed):
        return made.attend(TileLayout.of(spec, layout, tiling), query, key, value, listed)

    def gradient(layout, query, key, value, listed, d_out):
        operands = TileLayout.of(spec, layout, tiling), query, key, value, listed
        return made.gradients(*operands, made.attend_with_residuals(*operands)[1], d_out)

    query, key = shape(spec.query_length, 8), shape(length, 2)
    listed = integers(1, 2, tiling.query_tiles, tiling.slots + tiling.local_units)
    program = {
        "mass": Program(mass, (layout, query, key)),
        "attend": Program(attend, (layout, query, key, key, listed)),
        "gradient": Program(gradient, (layout, query, key, key, listed, query)),
    }[what]
    try:
        return {"memory": compile_program(program, topologies.device(target)).memory}
    except Exception as error:
        return {"error": rejected(error).error}

answers = {
    "mass": compiled("mass", 8192),
    "attend-segments": compiled("attend", 8192, segments=True),
    "decode": compiled("attend", 8192, queries=1),
    "gradient-segments": compiled("gradient", 8192, segments=True),
}
if "plain" in sys.argv:
    answers["attend"] = compiled("attend", 8192)
if "oversized" in sys.argv:
    answers["oversized"] = compiled("attend", 65536, queries=16, oversized=True)
print("ANSWER", json.dumps(answers))
"""


# A TPU's compiler takes half a minute to find out: before a change lands, the GPU's is asked.
OVERSIZED = ["h100"] if is_landing() else ["v5e", "h100"]


@pytest.fixture(scope="module", params=["v5e", "h100"])
def answers(request, tmp_path_factory):
    words = (
        request.param,
        *(["oversized"] if request.param in OVERSIZED else []),
        *([] if is_landing() else ["plain"]),
    )
    folder = tmp_path_factory.mktemp(request.param)
    return json.loads(printed(PROGRAM, *words, folder=folder, **topologies.ENVIRONMENT).rpartition("ANSWER")[2])


def test_kernels_compile_in_memory_that_is_linear_in_the_length(answers):
    for what in set(answers) - {"oversized"}:
        assert "error" not in answers[what], f"{what}: {answers[what]}"
        # Queries and outputs as rows, and what the kernel writes; scores would be 8192 x 8192 x 8 heads.
        assert answers[what]["memory"]["compiled_temp"] < 128 * 2**20


@pytest.mark.parametrize("answers", OVERSIZED, indirect=True)
def test_blocks_that_no_core_can_hold_are_rejected(answers):
    """Or this test could not fail: the plan refuses them first (test_kernels.py)."""
    assert "error" in answers["oversized"]
