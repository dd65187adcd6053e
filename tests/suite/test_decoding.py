"""Prefill and decode of a batch of unequal prompts: what is computed, counted, recorded and shown."""

from __future__ import annotations

import csv
import dataclasses

import jax
import numpy as np
import pytest

from attnsuite.models import ModelConfig
from attnsuite.suite.cell import Means
from attnsuite.suite.kinds import model_program
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.kinds.model_kind import MODEL
from attnsuite.suite.measure import execution
from attnsuite.suite.store import parse_records
from command import cell_of, code_of
from landing import swept

PREFILL = ModelCase(kind="model_prefill", model="debug", sequence=40, batch=3, ragged=True)
DECODE = ModelCase(kind="model_decode", model="debug", sequence=40, batch=3, new_tokens=4, ragged=True)


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=lambda case: case.kind)
def test_each_row_is_what_its_prompt_gives_alone(case):
    model = model_program.open_model(case)
    program = model_program.judged_program(case, model, "standard")
    logits = np.asarray(jax.jit(program.function)(*program.arguments)["logits"])
    lengths = model_program.prompt_lengths(case)
    assert lengths[0] == 40
    assert 10 <= lengths.min() < 40
    tokens = np.asarray(model_program.case_tokens(case, model.config))
    cache = model_program.noisy_cache(case, model)
    for row, length in enumerate(lengths):
        if case.kind == "model_prefill":
            alone = model(tokens[row : row + 1], backend="standard")[0, length - 1]  # which sees no later token
            np.testing.assert_allclose(logits[row], alone, atol=2e-5)
            continue
        keys, values = (tuple(x[row : row + 1] for x in slots) for slots in (cache.keys, cache.values))
        one = dataclasses.replace(cache, keys=keys, values=values, lengths=lengths[row : row + 1])
        for step, token in enumerate(np.asarray(model_program.decoded_tokens(case, model.config))[row]):
            alone, one = model.decode([token], one, backend="standard")
            np.testing.assert_allclose(logits[step, row], alone[0], atol=2e-5)
    blind = dataclasses.replace(case, ragged=False)
    program = model_program.judged_program(blind, model, "standard")
    other = np.asarray(jax.jit(program.function)(*program.arguments)["logits"])
    assert np.abs(other - logits).max() > 1e-2, "lengths must matter, or this test sees nothing"


@pytest.mark.parametrize(("preset", "dtype"), [("debug", "bfloat16"), ("llama-3.2-1b", "float32")])
@pytest.mark.parametrize("kind", ["model_prefill", "model_decode"])
def test_no_call_converts_the_weights_and_a_train_step_keeps_them_as_they_are_stored(kind, preset, dtype):
    case = ModelCase(kind=kind, model=preset, sequence=16, dtype=dtype)
    stored = ModelConfig.from_preset(preset)
    assert model_program.model_config(case) == stored.replace(dtype=dtype, param_dtype=dtype) != stored
    step = ModelCase(kind="model_train", model="debug", sequence=16, dtype="bfloat16")
    assert model_program.model_config(step).param_dtype == "float32"


@pytest.mark.parametrize("case", swept([PREFILL, DECODE], [DECODE]), ids=lambda case: case.kind)
def test_program_that_is_timed_is_the_one_that_is_judged(case, tmp_path, monkeypatch):
    path, spoilt = tmp_path / "right.npz", tmp_path / "spoilt.npz"
    MODEL.write_reference(case, path, None, None)
    with np.load(path) as arrays:
        np.savez(spoilt, **{name: tensor + 0.01 for name, tensor in arrays.items()})
    monkeypatch.setattr(execution, "outputs_of", pytest.fail)  # a second program
    answers = MODEL.prepare(cell_of(case, "chunked"), case, Means(reference=None, memory_limit=2**33)).answers(0)
    for file, passed in ((path, True), (spoilt, False)):
        errors = MODEL.judge(case, answers, file, None, exact=True)
        assert all(error.passed is passed for error in errors.values())


def test_padding_is_not_counted():
    lengths = model_program.prompt_lengths(PREFILL)
    config = model_program.model_config(PREFILL)
    assert model_program.model_tokens(PREFILL) == lengths.sum() < 120
    assert model_program.model_tokens(DECODE) == 12
    flops = [model_program.model_flops(dataclasses.replace(PREFILL, ragged=ragged), config) for ragged in (True, False)]
    pairs = [sum(n * (n + 1) // 2 for n in rows) for rows in (lengths.tolist(), [40] * 3)]
    by_layer = config.num_layers * (2 * config.hidden_size * config.dim * 4 + 3 * 64 * 172)
    expected = [
        2 * (by_layer * tokens + 64 * 256 * 3) + 4 * config.num_layers * config.num_heads * config.dim * seen
        for tokens, seen in zip((lengths.sum(), 120), pairs, strict=True)
    ]
    assert flops == expected


@pytest.mark.usefixtures("in_this_process")
def test_a_run_records_and_shows_ttft_tpot_and_the_cache(tmp_path, new_run):
    prefill = 'kind = "model_prefill"\nmodel = "debug"\nsequence = 40\nbatch = 3\nragged = true\n'
    decode = prefill.replace("prefill", "decode") + "new_tokens = 4\n"
    (tmp_path / "decoding.toml").write_text(f"[[case]]\n{prefill}[[case]]\n{decode}")
    arguments = ["run", "--suite", tmp_path / "decoding.toml", "--backends", "standard", "--out", new_run]
    arguments += ["--profile", tmp_path / "traces", "--sample-seconds", "0.01"]
    assert code_of(*arguments) == 0
    prefill, decode = parse_records(new_run / "records.jsonl")[0]
    assert (prefill.status, prefill.steps, prefill.tokens) == ("ok", 1, model_program.model_tokens(PREFILL))
    assert (decode.status, decode.steps, decode.tokens) == ("ok", 4, 12)
    assert prefill.figures == decode.figures == {"kv_bytes_per_token": 2 * 2 * 2 * 32 * 4}
    page = (new_run / "details.md").read_text()
    shown = ("TTFT (ms)", "TPOT (ms)", "prefill tokens/s", "decode tokens/s", "KV cache (bytes per token)", "ragged")
    assert [words for words in shown if words not in page] == []
    with (new_run / "records.csv").open(encoding="utf-8") as file:
        rows = {row["kind"]: row for row in csv.DictReader(file)}
    assert float(rows["model_prefill"]["ttft_seconds"]) == pytest.approx(np.median(prefill.samples))
    assert float(rows["model_decode"]["tpot_seconds"]) == pytest.approx(np.median(decode.samples) / 4)
    assert rows["model_prefill"]["tpot_seconds"] == rows["model_decode"]["ttft_seconds"] == ""
    traces = {f"{record.case}-standard.trace.json.gz" for record in (prefill, decode)}
    assert {path.name for path in (tmp_path / "traces").glob("*.gz")} == traces
