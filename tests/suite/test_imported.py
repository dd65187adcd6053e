"""attnsuite tune --import: whose entries are taken, why others are refused, and who follows them. Data are made up."""

from __future__ import annotations

import dataclasses
import json

import pytest

from attnsuite.backends import Layout, Target, plan, registry, splash_blocks, tokamax_splash
from attnsuite.backends.choices import to_json
from attnsuite.suite.choosing import POLICY
from attnsuite.suite.errors import InputError
from attnsuite.suite.imported import TOKAMAX, as_tokamax, import_tables, sources_of
from attnsuite.suite.kinds import checked, problem_of
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.kinds.tuning_case import Trial, Trials
from attnsuite.suite.record import Record
from command import code_of
from declared import sized

V6E = Target("tpu", "v6e")
PROBLEM = {
    "q": "bf16[2,1024,8,128]",
    "k": "bf16[2,1024,8,128]",
    "v": "bf16[2,1024,8,128]",
    "logits_scale": 0.1,
    "mask": {"bool_mask": None, "causal_mask": {"offset": 0, "window_size": None}},
    "dropout_rate": 0.0,
    "return_residuals": False,
}
CONFIG = {"block_q": 512, "block_kv": 1024, "block_kv_compute": 256, "q_layout": 2}
SPEC = sized(1024, N=8, H=128, dtype="bfloat16", is_causal=True, needs_grad=False)
RAGGED = """print("executed")
TUNED_BLOCK_SIZES = {"TPU v6": {("bfloat16", "bfloat16", 8, 8, 128, 128, 64, 1024): (8, 16),
                                ("bfloat16", "bfloat16", 2, 2, 128, 64, 1): (4, 64)},
                     "TPU v5": {("bfloat16", "bfloat16", 8, 8, 128, 128, 64, 1024): (2, 16)},
                     "TPU v7": {128: {"a": {"b": {"c": (1, 2), "d": (1, 2)}}}}}
"""


def written(tmp_path, entries, device="tpu_v6_lite", kernel=TOKAMAX):
    folder = tmp_path / device
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / kernel
    path.write_text(json.dumps({json.dumps(p): {json.dumps(c): {} for c in configs} for p, configs in entries}))
    return path


def test_entry_is_followed_where_device_and_problem_match_and_says_whose_it_is(tmp_path):
    found = import_tables([written(tmp_path, [(PROBLEM, [CONFIG])])])
    (tmp_path / POLICY).write_text(to_json(sources_of(found)))
    options = {"tuned": str(tmp_path / POLICY)}

    def read(spec, target=V6E):
        return splash_blocks.read_options("tokamax_splash", tokamax_splash.OPTIONS, spec, target, options)

    given, (note,) = read(SPEC)
    assert given == {"block_q": 512, "block_kv": 1024, "block_kv_compute": 256}
    assert "others measured: tokamax, tpu_v6_lite/pallas_mosaic_tpu_flash_attention.json (SHA-256 " in note
    assert found[0].entries[0].details["left_out"] == {"q_layout": 2}
    for spec, target in (
        (SPEC, Target("tpu", "v5p")),
        (dataclasses.replace(SPEC, is_causal=False), V6E),
        (dataclasses.replace(SPEC, local_window_size=(128, 0)), V6E),
        (dataclasses.replace(SPEC, num_kv_heads=2), V6E),
    ):
        with pytest.raises(ValueError, match="has no options for tokamax_splash"):
            read(spec, target)


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({"new": 1}, CONFIG, "the field 'new' is unknown"),
        ({"bias": "bf16[1,1,1,1]"}, CONFIG, "bias is not None"),
        ({"dropout_rate": 0.1}, CONFIG, "dropout_rate is not 0.0"),
        ({"mask": {"causal_mask": {"offset": 1, "window_size": None}}}, CONFIG, "the causal mask has an offset"),
        ({"mask": {"holes": 1}}, CONFIG, "the mask has unknown fields"),
        ({"q": "f16[2,1024,8,128]"}, CONFIG, "the dtypes are f16"),
        ({"q": 5}, CONFIG, "an array is not of three or four axes"),
        ({"q": "bf16[2,1024,9,128]"}, CONFIG, "num_heads=9 must be a multiple of num_kv_heads=8"),
        ({"logits_soft_cap": "high"}, CONFIG, "logits_soft_cap='high' must be a finite"),
        ({}, {**CONFIG, "new": 1}, "the option 'new' is unknown"),
        ({}, {**CONFIG, "block_q": 100}, "a block size is no multiple of 128"),
        ({}, {**CONFIG, "block_q": "512"}, "a block size is no multiple of 128"),
    ],
)
def test_entry_that_says_more_than_is_known_is_refused(tmp_path, changes, config, reason):
    (found,) = import_tables([written(tmp_path, [({**PROBLEM, **changes}, [config])])])
    assert not found.entries
    assert reason in next(iter(found.refused))
    with pytest.raises(InputError, match="no entry of these files can be used"):
        sources_of([found])


def test_first_of_two_entries_for_one_problem_holds_and_the_other_is_listed(tmp_path):
    """The batch is no part of what a plan looks up."""
    larger = {**PROBLEM, "q": "bf16[4,1024,8,128]"}
    one = written(tmp_path / "one", [(PROBLEM, [CONFIG])])
    two = written(tmp_path / "two", [(PROBLEM, [CONFIG]), (larger, [{**CONFIG, "block_q": 256}])])
    first, second = import_tables([one, two])
    assert (len(first.entries), first.contradict) == (1, [])
    assert (len(second.entries), second.repeated, len(second.contradict), second.total) == (0, 1, 1, 2)
    assert "'block_q': 256" in second.contradict[0]


def test_ragged_tables_are_read_as_literals_and_only_the_kernel_that_is_called_is_taken(tmp_path, capsys):
    path = tmp_path / "tuned_block_sizes.py"
    path.write_text(RAGGED)
    assert code_of("tune", "--import", path, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "executed" not in said
    assert "5 entries, 1 match, 4 refused, 0 contradict" in said
    for reason in ("'TPU v5' names more than one kind", "version 3 of ragged", "sglang-jax's kernel"):
        assert reason in said
    backend, spec = registry.get("ragged_paged_attention"), dataclasses.replace(SPEC, batch=1, query_length=64)
    options = {"tuned": str(tmp_path / "out" / POLICY)}
    made = plan(backend, spec, Layout(), target=V6E, options=options)
    assert any("others measured" in note for note in made.notes)
    with pytest.raises(ValueError, match="has no options for ragged_paged_attention"):
        plan(backend, dataclasses.replace(spec, query_length=128), Layout(), target=V6E, options=options)


def test_unknown_files_are_one_sentence(tmp_path, capsys):
    names = {"a.txt": "", "b.py": "TUNED_BLOCK_SIZES = open('x')", "c.py": "x = 1", "d.py": "(", "e.json": "{}"}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    broken = written(tmp_path, [])
    broken.write_text("[1]")
    for path in (*(tmp_path / name for name in names), broken, tmp_path / "missing.json", tmp_path):
        assert code_of("tune", "--import", path, "--out", tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert said.startswith("attnsuite: --import ")
        assert "Traceback" not in said
    assert code_of("tune", "--import", broken, "--target", "v6e") == 2
    assert "beside it only --out" in capsys.readouterr().err


def test_what_was_measured_is_written_in_tokamax_format_and_read_back(tmp_path):
    case = OpCase(kind="op_forward", sequence=1024, head_dim=128, dtype="bfloat16")
    options = {"block_q": 512, "block_kv": 1024, "block_kv_compute": 256}
    record = Record(
        key="k", suite="tune", case=case.name, kind="tuning", mode="native", exact=True, target="tpu:v6e",
        problem=problem_of(case) | {"kind": "tuning", "op": case.kind}, requested="tokamax_splash",
        resolved="tokamax_splash", status="ok", started="2026-11-25T00:00:00Z", environment={},
        facts=Trials(tried=(Trial(options=options, samples=(1e-3, 2e-3)),)),
    )  # fmt: skip
    text = as_tokamax([checked(record)])
    assert as_tokamax([dataclasses.replace(record, requested="splash")]) is None
    (tmp_path / "tpu_v6_lite").mkdir()
    (tmp_path / "tpu_v6_lite" / TOKAMAX).write_text(text)
    (found,) = import_tables([tmp_path / "tpu_v6_lite" / TOKAMAX])
    assert found.entries[0].options == options
    cache = pytest.importorskip("tokamax._src.autotuning.cache")  # tokamax's own reader takes it
    theirs = pytest.importorskip("tokamax._src.ops.attention.pallas_mosaic_tpu").PallasMosaicTpuFlashAttention()
    (data,) = cache._get_cache_adapter(theirs).validate_json(text).values()
    config, times = next(iter(data.items()))
    assert (config.block_q, config.block_kv_compute, times.median_evaluation_time_ms) == (512, 256, 1.5)
