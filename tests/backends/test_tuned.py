"""Tables of measured options: what ships, how they are looked up, and files that are none."""

import json
from importlib import resources

import pytest

from attnsuite.backends import AttentionSpec, Layout, Target, registry, splash, tuned
from attnsuite.backends.chunked import default_sizes
from attnsuite.backends.splash_blocks import read_options
from attnsuite.backends.tuned import Entry

pytestmark = pytest.mark.newest

CHUNKED = registry.get("chunked")
CPU = Target("cpu")
FIELDS = {"backend": "chunked", "platform": "cpu", "kind": "", "dtype": "float32", "grouped": False}
FIELDS |= {"gradient": False, "head_dim": 64}


def entry(length, block_q, **fields):
    return Entry(**{**FIELDS, **fields}, length=length, options={"block_q": block_q})


def spec(length, **fields):
    sizes = {"batch": 1, "query_length": length, "key_value_length": length, "num_heads": 8, "num_kv_heads": 8}
    return AttentionSpec(**{**sizes, "head_dim": 64, **fields})


def looked_up(entries, problem):
    return dict(tuned.options_for(entries, "chunked", CPU, problem, gradient=False)).get("block_q")


def test_nearest_shorter_length_holds_and_the_shortest_for_what_is_shorter_still():
    entries = entry(512, 1), entry(2048, 2)
    assert [looked_up(entries, spec(length)) for length in (100, 512, 2047, 2048, 10**6)] == [1, 1, 1, 2, 2]


def test_float16_takes_what_was_measured_for_bfloat16():
    entries = entry(512, 1), entry(512, 2, dtype="bfloat16")
    assert looked_up(entries, spec(512, dtype="float16")) == 2
    assert looked_up((entry(512, 1),), spec(512, dtype="float16")) is None


def test_other_platform_and_grouping_do_not_match():
    assert looked_up((entry(512, 1, platform="cuda"),), spec(512)) is None
    assert looked_up((entry(512, 1),), spec(512, num_kv_heads=2)) is None


def test_cpu_takes_another_cpus_entries_and_a_gpu_its_own_alone():
    entries = entry(512, 1, kind="one"), entry(512, 2, kind="other")
    assert looked_up(entries, spec(512)) is not None
    options = tuned.options_for(entries, "chunked", Target("cpu", "other"), spec(512), gradient=False)
    assert dict(options) == {"block_q": 2}
    on_gpu = tuple(entry(512, 1, platform="cuda", kind=kind) for kind in ("h100", "b200"))
    assert not tuned.options_for(on_gpu, "chunked", Target("cuda", "a100"), spec(512), gradient=False)


def test_wider_head_takes_nothing_from_a_narrow_one_but_on_a_cpu():
    """128 x 128 blocks in three stages fit an A100 at head_dim=64, and need 230400 of its 166912 bytes at 128."""
    a100 = {"platform": "cuda", "kind": "a100"}
    narrow, wide, wider = (entry(512, width, head_dim=width, **a100) for width in (64, 128, 256))

    def on_a100(entries, **fields):
        found = tuned.options_for(entries, "chunked", Target("cuda", "a100"), spec(512, **fields), gradient=False)
        return dict(found).get("block_q")

    assert on_a100((narrow, wide, wider)) == 64
    assert [on_a100((narrow, wide, wider), head_dim=width) for width in (96, 128, 256)] == [128, 128, 256]
    assert on_a100((narrow,), head_dim=128) is None
    assert on_a100((narrow,), value_head_dim=128) is None
    assert looked_up((entry(512, 1),), spec(512, head_dim=128)) == 1


def test_shipped_table_says_what_made_it_and_covers_what_it_should():
    data = json.loads((resources.files("attnsuite.backends") / tuned.SHIPPED).read_text(encoding="utf-8"))
    assert data["command"].startswith("attnsuite tune --backends chunked")
    assert data["date"]
    assert data["environment"]["cpu"]
    assert data["environment"]["versions"]["jax"]
    found = {(e.dtype, e.grouped, e.gradient, e.length) for e in tuned.shipped() if e.backend == "chunked"}
    assert len(found) == 2 * 2 * 2 * 4


def test_shipped_table_decides_what_chunked_does():
    problem = spec(2048)
    expected = {}
    for gradient in (False, True):
        expected |= tuned.options_for(tuned.shipped(), "chunked", CPU, problem, gradient=gradient)
    sizes = default_sizes(problem, CPU, tuned.shipped())
    assert expected
    assert {name: getattr(sizes, name) for name in expected} == expected


def test_options_given_by_hand_come_before_the_table(tmp_path):
    table = tmp_path / "tuned.json"
    table.write_text(json.dumps({"schema": 1, "entries": [{**FIELDS, "length": 1, "options": {"block_q": 12}}]}))
    CHUNKED.plan(spec(1024), Layout(), target=CPU, options={"tuned": str(table), "block_q": 64})
    with pytest.raises(ValueError, match="block_q=12 is not accepted"):
        CHUNKED.plan(spec(1024), Layout(), target=CPU, options={"tuned": str(table)})


def test_table_without_an_entry_for_the_device_is_refused_in_a_sentence(tmp_path):
    table = tmp_path / "tuned.json"
    fields = {**FIELDS, "platform": "cuda", "kind": "h100", "length": 1, "options": {}}
    table.write_text(json.dumps({"schema": 1, "entries": [fields]}))
    with pytest.raises(ValueError, match="have nothing for chunked on cpu in float32"):
        CHUNKED.plan(spec(1024), Layout(), target=CPU, options={"tuned": str(table)})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "entries": []}', '{"schema": 1, "entries": [{}]}'])
def test_file_that_is_no_table_is_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cannot be used: .*; make them with attnsuite tune"):
        CHUNKED.plan(spec(1024), Layout(), target=CPU, options={"tuned": str(path)})


def test_missing_file_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\)"):
        CHUNKED.plan(spec(1024), Layout(), target=CPU, options={"tuned": str(tmp_path / "none.json")})


def test_splash_and_kascade_read_a_table_and_options_beside_it_hold_over_it(tmp_path):
    v5e, problem = Target("tpu", "v5e"), spec(512, dtype="bfloat16", needs_grad=False, is_causal=True)
    fields = {**FIELDS, "platform": "tpu", "kind": "v5e", "dtype": "bfloat16", "length": 512}
    for name, options in (("splash", {"block_q": 256, "block_kv": 128}), ("kascade", {"kernel": "nonsense"})):
        table = {"schema": tuned.SCHEMA, "entries": [{**fields, "backend": name, "options": options}]}
        (tmp_path / name).write_text(json.dumps(table))
    options = {"tuned": str(tmp_path / "splash"), "block_q": 512}
    given, notes = read_options("splash", splash.OPTIONS, problem, v5e, options)
    assert notes == ()
    assert given == {"block_q": 512, "block_kv": 128}
    kascade, layout = registry.get("kascade"), Layout()
    with pytest.raises(ValueError, match="kernel='nonsense' is not accepted"):
        kascade.plan(problem, layout, target=v5e, options={"tuned": str(tmp_path / "kascade")})
    kascade.plan(problem, layout, target=v5e, options={"tuned": str(tmp_path / "kascade"), "kernel": "xla"})


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
