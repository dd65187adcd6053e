"""Entry options: what ships, how they are looked up, and policies that have none."""

import dataclasses

import pytest

from attnsuite.backends import AttentionSpec, Layout, Target, load_policy, registry, splash
from attnsuite.backends.choices import SHIPPED, Choice, Entry, Policy, Source, problem_of, to_json, tuned
from attnsuite.backends.chunked import default_sizes
from attnsuite.backends.splash_blocks import read_options

pytestmark = pytest.mark.newest

CHUNKED = registry.get("chunked")
CPU = Target("cpu")


def entry(length, block_q, device="cpu", **fields):
    problem = spec(length, needs_grad=False, **fields)
    choice = Choice(case="a case", problem=problem_of(problem), backend="chunked", options={"block_q": block_q})
    return Entry(Source(name="a run", device=device, choices=(choice,)), choice, problem)


def spec(length, **fields):
    sizes = {"batch": 1, "query_length": length, "key_value_length": length, "num_heads": 8, "num_kv_heads": 8}
    return AttentionSpec(**{**sizes, "head_dim": 64, **fields})


def looked_up(entries, problem, target=CPU):
    found = tuned(Policy("a policy", entries), "chunked", target, dataclasses.replace(problem, needs_grad=False))
    return found[0].choice.options["block_q"] if found else None


def written(path, device, problem, **options_of):
    """A policy's file with options of each named backend."""
    described = {"case": "a case", "problem": problem_of(problem)}
    choices = tuple(Choice(**described, backend=name, options=options) for name, options in options_of.items())
    path.write_text(to_json([Source(name="a run", device=device, choices=choices)]))
    return str(path)


def test_nearest_shorter_length_holds_and_the_shortest_for_what_is_shorter_still():
    entries = entry(512, 1), entry(2048, 2)
    assert [looked_up(entries, spec(length)) for length in (100, 512, 2047, 2048, 10**6)] == [1, 1, 1, 2, 2]


def test_float16_takes_what_was_measured_for_bfloat16():
    entries = entry(512, 1), entry(512, 2, dtype="bfloat16")
    assert looked_up(entries, spec(512, dtype="float16")) == 2
    assert looked_up((entry(512, 1),), spec(512, dtype="float16")) is None


def test_other_platform_and_grouping_do_not_match():
    assert looked_up((entry(512, 1, device="cuda"),), spec(512)) is None
    assert looked_up((entry(512, 1),), spec(512, num_kv_heads=2)) is None


def test_cpu_takes_another_cpus_entries_and_a_gpu_its_own_alone():
    entries = entry(512, 1, "cpu:one"), entry(512, 2, "cpu:other")
    assert looked_up(entries, spec(512)) is not None
    assert looked_up(entries, spec(512), Target("cpu", "other")) == 2
    on_gpu = tuple(entry(512, 1, f"cuda:{kind}") for kind in ("h100", "b200"))
    assert looked_up(on_gpu, spec(512), Target("cuda", "a100")) is None


def test_wider_head_takes_nothing_from_a_narrow_one_but_on_a_cpu():
    """128 x 128 blocks in three stages fit an A100 at head_dim=64, and need 230400 of its 166912 bytes at 128."""
    narrow, wide, wider = (entry(512, width, "cuda:a100", head_dim=width) for width in (64, 128, 256))

    def on_a100(entries, **fields):
        return looked_up(entries, spec(512, **fields), Target("cuda", "a100"))

    assert on_a100((narrow, wide, wider)) == 64
    assert [on_a100((narrow, wide, wider), head_dim=width) for width in (96, 128, 256)] == [128, 128, 256]
    assert on_a100((narrow,), head_dim=128) is None
    assert on_a100((narrow,), value_head_dim=128) is None
    assert looked_up((entry(512, 1),), spec(512, head_dim=128)) == 1


def test_shipped_policy_says_what_made_it_and_covers_what_it_should():
    (source,) = load_policy(SHIPPED).sources
    assert source.name.startswith("attnsuite tune --backends chunked")
    assert source.date
    assert source.cores
    assert source.versions["jax"]
    assert source.device == "cpu:AMD EPYC"
    specs = [each.spec for each in load_policy(SHIPPED).entries if each.choice.backend == "chunked"]
    assert len({(s.dtype, s.group_size, s.needs_grad, s.query_length) for s in specs}) == 2 * 2 * 2 * 4


def test_shipped_policy_decides_what_chunked_does():
    problem, policy, expected = spec(2048), load_policy(SHIPPED), {}
    for found in tuned(policy, "chunked", CPU, problem):
        expected |= found.choice.options
    sizes = default_sizes(problem, CPU, policy)
    assert set(expected) == {"block_q", "block_kv", "heads_per_tile", "block_backward"}
    assert {name: getattr(sizes, name) for name in expected} == expected


def test_options_given_by_hand_come_before_the_policy(tmp_path):
    path = written(tmp_path / "p.json", "cpu", spec(512, needs_grad=False), chunked={"block_q": 12})
    CHUNKED.plan(spec(1024), Layout(), target=CPU, options={"tuned": path, "block_q": 64})
    with pytest.raises(ValueError, match="block_q=12 is not accepted"):
        CHUNKED.plan(spec(1024), Layout(), target=CPU, options={"tuned": path})
    written(tmp_path / "p.json", "cpu", spec(512, needs_grad=False), chunked={"block_k": 64})
    with pytest.raises(ValueError, match=r"^policy '.*p.json': chunked has no option 'block_k'; its options are"):
        CHUNKED.plan(spec(1024), Layout(), target=CPU, options={"tuned": path})


def test_splash_and_kascade_read_a_policy_and_options_beside_it_hold_over_it(tmp_path):
    v5e, problem = Target("tpu", "v5e"), spec(512, dtype="bfloat16", needs_grad=False, is_causal=True)
    tried = {"splash": {"block_q": 256, "block_kv": 128}, "kascade": {"kernel": "nonsense"}}
    path = written(tmp_path / "p.json", "tpu:v5e", problem, **tried)
    given, notes = read_options("splash", splash.OPTIONS, problem, v5e, {"tuned": path, "block_q": 512})
    assert notes == ()
    assert given == {"block_q": 512, "block_kv": 128}
    kascade, layout = registry.get("kascade"), Layout()
    with pytest.raises(ValueError, match="kernel='nonsense' is not accepted"):
        kascade.plan(problem, layout, target=v5e, options={"tuned": path})
    kascade.plan(problem, layout, target=v5e, options={"tuned": path, "kernel": "xla"})


def test_work_of_splash_is_counted_over_the_blocks_that_a_causal_mask_leaves():
    """4 x 4 blocks of 256: ten have something to see, in each of 8 heads; two kernels backward visit each twice."""
    v5e, splash_backend = Target("tpu", "v5e"), registry.get("splash")
    problem = spec(1024, dtype="bfloat16", needs_grad=False, is_causal=True)
    found = splash_backend.work(problem, v5e, {"block_q": 256, "block_kv": 256})
    assert (found.steps, found.loaded_bytes) == (80, 80 * 256 * (64 + 64) * 2)
    backward = {"block_q_backward": 256, "block_kv_backward": 256}
    trained = spec(1024, dtype="bfloat16", is_causal=True)
    assert splash_backend.work(trained, v5e, backward).steps == 160
    assert splash_backend.work(trained, v5e, backward | {"fused_backward": True}).steps == 80


def test_work_of_kascade_halves_with_blocks_of_twice_the_keys():
    v5e, kascade = Target("tpu", "v5e"), registry.get("kascade")
    problem = spec(2048, dtype="bfloat16", needs_grad=False, is_causal=True)
    given = {"tile_size": 256, "query_tile": 256, "min_keys": 0, "top_k": 0.25}
    small, large = (kascade.work(problem, v5e, given | {"block_kv_sparse": keys}) for keys in (128, 256))
    assert (small.steps, small.loaded_bytes) == (2 * large.steps, large.loaded_bytes)
    # Tiles 0 to 7 select 0, 1, 1, 1, 1, 2, 2, 2 tiles and see their own; the mass reads 36 tiles twice.
    assert large.steps == 8 * (10 + 8) + 8 * 2 * 36
