"""What Kvax takes and refuses, judged for any target on any machine, and the options of its plan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import (
    BackendFallbackWarning,
    Layout,
    MeshAxes,
    Target,
    resolve,
    support,
)
from attnsuite.backends.choices import Choice, Source, problem_of, to_json
from attnsuite.backends.kvax import KVAX, availability, backend, block_sizes
from declared import sized

A100, H100, B200 = (Target("cuda", kind) for kind in ("a100", "h100", "b200"))


def spec(**changes):
    plain = sized(1024, B=2, N=8, K=2, dtype="bfloat16", is_causal=True)
    return dataclasses.replace(plain, value_head_dim=changes.pop("value_head_dim", changes.get("head_dim")), **changes)


@pytest.mark.parametrize("target", [A100, H100, B200])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": False},
        {"dtype": "float16"},
        {"head_dim": 256},
        {"head_dim": 192, "value_head_dim": 128},
        {"num_heads": 7, "num_kv_heads": 1},
        {"query_length": 1, "has_positions": True},
        {"query_length": 1000, "key_value_length": 333},
        {"has_segment_ids": True, "has_positions": True, "has_seq_lengths": True},
    ],
)
def test_takes_what_its_kernels_have_on_a_gpu_that_is_not_here(changes, target):
    assert support(KVAX, spec(**changes), target)


def test_interprets_on_a_cpu_only():
    assert "JAX_PLATFORMS=cpu" in support(KVAX, spec(), H100, "interpret").reasons[0]


@pytest.mark.parametrize("mode", ["interpret", "compile"])
def test_missing_packages_are_the_reason(mode):
    bare = dataclasses.replace(KVAX, missing=lambda mode: (f"nothing here to {mode} with.",))
    target = Target("cpu") if mode == "interpret" else H100
    assert support(bare, spec(), target, mode).reasons == (f"nothing here to {mode} with.",)
    with pytest.raises(ImportError, match=f"nothing here to {mode}"):
        bare.plan(spec(), Layout(), target=target, mode=mode)


@pytest.mark.needs_kvax
def test_a_plan_for_xla_to_compile_needs_what_a_native_one_does(monkeypatch):
    monkeypatch.setattr(availability, "missing", lambda mode: ("no jax-triton.",) if mode == "native" else ())
    assert support(KVAX, spec(), H100, "compile")
    with pytest.raises(ImportError, match="no jax-triton"):
        KVAX.plan(spec(), Layout(), target=H100, mode="compile")


def test_packages_matter_natively_only_where_the_device_is():
    bare = dataclasses.replace(KVAX, missing=lambda _: ("no kvax.",))
    assert support(bare, spec(), H100)
    assert support(bare, spec(), dataclasses.replace(H100, present=True)).reasons == ("no kvax.",)


def test_is_asked_for_by_name_on_a_gpu_and_auto_says_that_nothing_was_measured():
    found = resolve("auto", spec(has_segment_ids=True), H100)
    assert found.backend.name == "chunked"
    assert found.policy.startswith("nothing was measured on this device")
    assert resolve("kvax", spec(has_segment_ids=True), H100).backend is KVAX
    with pytest.warns(BackendFallbackWarning, match="kvax cannot run this"):
        fallback = resolve("kvax", spec(), Target("cpu")).backend
    assert fallback is resolve("auto", spec(), Target("cpu")).backend


ASKED = """
from attnsuite.backends import AttentionSpec, Target, registry, support
spec = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=1, num_kv_heads=1, head_dim=16,
                     dtype="bfloat16")
found = support(registry.get("kvax"), spec, Target("{0}", {1}), "{2}")
"""


def test_asking_about_a_gpu_that_is_not_here_imports_nothing_and_touches_no_device(loaded_by):
    initialised, packages = loaded_by(ASKED.format("cuda", "'h100'", "native") + "assert found")
    assert initialised is False
    assert not packages & {"kvax", "triton", "jax_triton"}
    assert "attnsuite" in packages


@pytest.mark.needs_kvax
def test_asking_whether_it_can_be_interpreted_imports_its_packages_and_touches_no_device(loaded_by):
    initialised, packages = loaded_by(ASKED.format("cpu", "None", "interpret") + "assert found")
    assert initialised is False
    assert "triton" in packages  # only what imports can be trusted
    assert "kvax" not in packages  # a private copy


def test_block_parameters_are_those_given_and_the_generations_own():
    chosen = block_sizes.choose(spec(), H100, {"kv_block_size": 64, "backward_num_stages": 2})
    assert chosen.forward == block_sizes.FlashAttentionParamsConfig(128, 64, 8, 3)
    assert chosen.backward == block_sizes.FlashAttentionParamsConfig(64, 128, 8, 2)


def test_h200_has_the_blocks_of_an_h100_and_not_the_small_ones():
    assert block_sizes.choose(spec(), Target("cuda", "h200"), {}) == block_sizes.choose(spec(), H100, {})
    assert block_sizes.choose(spec(), H100, {}) != block_sizes.choose(spec(), A100, {})


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def test_kvax_deals_the_length_itself_and_nothing_else():
    (devices,) = KVAX.sharded(MESH, MeshAxes(context="data", heads="model")).make.args
    assert devices.context_size == 2
    assert KVAX.sharded(MESH, MeshAxes(data="data", heads="model")) is None
    assert KVAX.sharded(MESH, MeshAxes(context="data", exchange="ring")) is None


def test_layout_may_be_traced_without_kvax():
    """The guards are plain JAX; what they make of a layout does not depend on the packages."""
    from attnsuite.backends.kvax import converted_layout as layouts

    ids = jnp.asarray(np.repeat([7, -1, 10**9, 7], 32).astype(np.int32)[None])
    small = spec(batch=1, query_length=128, key_value_length=128, has_segment_ids=True)
    made = jax.jit(lambda x: layouts.convert(small, x, 256, 256))(
        Layout(query_segment_ids=ids, key_value_segment_ids=ids)
    )
    assert made.key_segment_ids[0].tolist() == [0] * 32 + [257] * 32 + [64] * 32 + [0] * 32 + [257] * 128
    assert made.query_segment_ids[0].tolist() == [0] * 32 + [-1] * 32 + [64] * 32 + [0] * 32 + [-1] * 128
    assert made.keys_in_order.tolist() == made.queries_in_order.tolist() == [False]
    assert made.seen[0].tolist() == [True] * 32 + [False] * 32 + [True] * 64


def test_policy_of_tuned_options_comes_between_the_generation_and_the_caller(tmp_path):
    problem = spec(num_kv_heads=8, head_dim=64)
    passes = {False: {"kv_block_size": 32, "num_stages": 2}, True: {"backward_num_warps": 4}}
    problems = {each: problem_of(dataclasses.replace(problem, needs_grad=each)) for each in passes}
    choices = tuple(Choice(case="", problem=problems[i], backend="kvax", options=passes[i]) for i in passes)
    path = tmp_path / "policy.json"
    path.write_text(to_json([Source(name="", device="cuda:h100", choices=choices)]))
    chosen = backend._blocks(problem, H100, {"tuned": str(path), "num_stages": 4})
    assert dataclasses.astuple(chosen.forward) == (128, 32, 8, 4)  # the generation's, the table's, the caller's
    assert dataclasses.astuple(chosen.backward) == (64, 128, 4, 3)
    with pytest.raises(ValueError, match="has no options for kvax on cuda:a100"):
        backend._blocks(problem, A100, {"tuned": str(path)})


@pytest.mark.parametrize("needs_grad", [False, True])
def test_candidates_for_tuning_are_accepted_options_and_hold_the_generations_own(needs_grad):
    candidates = KVAX.candidates(spec(needs_grad=needs_grad), H100, {})
    assert KVAX.defaults(spec(needs_grad=needs_grad), H100, {}) in candidates
    assert all(block_sizes.choose(spec(), H100, options) for options in candidates)
