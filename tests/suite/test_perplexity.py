"""``attnsuite perplexity``: no figure without the backend that computed it and what it kept; what is no figure."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends.resolve import PRIORITY
from attnsuite.models import ModelConfig, Transformer, save, write_random
from attnsuite.models.weights import load, shipped
from attnsuite.suite import layerwise_perplexity as perplexity_run
from attnsuite.suite.kinds import model_program, model_quality
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.kinds.quality_case import RetrievalCase, TextCase
from attnsuite.suite.store import parse_records
from command import code_of

LENGTH = 128  # tokens of a sequence, of which the last is only predicted
TILES = "tile_size=16,query_tile=16,min_keys=0,top_k=0.125"


def perplexity(capsys, out, *arguments, sequences=2):
    """Exit code, what was printed, and the record."""
    code = code_of("perplexity", "--out", out, "--seq-len", LENGTH, "--sequences", sequences, *arguments)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    records = parse_records(out / "records.jsonl")[0] if (out / "records.jsonl").is_file() else [None]
    return code, said.out or said.err, records[0]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Of the checkpoint that ships, with tiles of 16."""
    path = tmp_path_factory.mktemp("calibration") / "c.safetensors"
    assert code_of("calibrate", "--out", path, "--prompts", "1", "--length", "96", "--top-k", "0.25") == 0
    return path


def kept_by_hand(top_k, tile, length):
    """Row by row: its own tile up to itself, and ``top_k`` of the tiles before it, rounded up."""
    kept = sum(math.ceil(top_k * (row // tile)) * tile + row % tile + 1 for row in range(length))
    return kept / (length * (length + 1) / 2)


@pytest.fixture
def no_model(monkeypatch):
    """Losses of zero, and no model that computes them: for claims about what is said of the attention."""
    monkeypatch.setattr(perplexity_run, "streamed_nats", lambda _, rows, **__: np.zeros((len(rows), LENGTH - 1)))


@pytest.mark.usefixtures("no_model")
def test_the_backend_that_ran_is_named_beside_the_one_that_was_asked_for(tmp_path, capsys):
    code, said, record = perplexity(capsys, tmp_path, "--model", "text", "--backend", "cudnn", "--options", "x=1")
    ran = record.resolved
    assert code == 0
    assert ran in PRIORITY["cpu"]
    assert f"backend: {ran} (cudnn was asked for)" in said
    assert "because cudnn: cuDNN runs on NVIDIA GPUs, not on cpu" in said
    assert "the options of cudnn were not used" in said
    assert f", by {ran}" in said
    assert (record.requested, record.mode, record.exact) == ("cudnn", "fallback", True)
    assert any("cuDNN runs on NVIDIA GPUs" in reason for reason in record.reasons)
    assert "kept_pairs" not in record.quality


@pytest.mark.usefixtures("no_model")
def test_a_figure_of_kascade_that_kept_everything_says_dense(tmp_path, capsys):
    code, said, record = perplexity(capsys, tmp_path, "--model", "text", "--backend", "kascade")
    assert code == 0
    assert "DENSE: every pair was kept, so that this is not a figure of sparse attention (min_keys=128" in said
    assert "schedule: none; every layer selects for itself" in said
    assert record.quality["kept_pairs"] == 1.0
    assert record.exact is False


def test_a_figure_of_kascade_stands_beside_what_each_role_of_layer_kept(tmp_path, capsys):
    words = ["--backend", "kascade", "--schedule", "manual", "--anchors", "0,2", "--options", TILES]
    code, said, record = perplexity(capsys, tmp_path, "--model", "text", *words)
    share = kept_by_hand(0.125, 16, LENGTH - 1)
    assert code == 0
    assert f"dense (0) 1.0000, reuse (1, 3) {share:.4f}, anchor (2) {share:.4f}" in said
    assert "schedule: manual; layers that select: 0, 2; that reuse: 1 from 0, 3 from 2" in said
    assert f", by kascade, which kept {(1 + 3 * share) / 4:.4f} of the causal pairs" in said
    assert "DENSE" not in said
    assert record.quality["kept_pairs"] == pytest.approx((1 + 3 * share) / 4)
    assert record.quality["kept_pairs_reuse"] == pytest.approx(share)
    assert any("options: tile_size=16, query_tile=16, min_keys=0, top_k=0.125" in note for note in record.notes)


@pytest.mark.thorough
def test_a_sparse_figure_has_the_settings_of_its_calibration_and_stands_beside_the_dense_one(
    calibrated, tmp_path, capsys
):
    """Beside it: the paired difference of the two."""
    words = ["--model", "text", "--backend", "kascade", "--calibration", calibrated, "--anchors", "2"]
    code, said, record = perplexity(capsys, tmp_path / "a", *words, "--against", "standard", sequences=6)
    dense = perplexity(capsys, tmp_path / "b", "--model", "text", "--backend", "standard", sequences=6)[2]
    figures, series = record.quality, record.series
    assert code == 0
    assert f"calibration: {calibrated}" in said
    assert "schedule: dp; layers that select: 0, " in said
    assert f"{kept_by_hand(0.25, 16, LENGTH - 1):.4f}" in said
    assert any("top_k=0.25" in note for note in record.notes)
    assert series["against_nll"] == dense.series["nll"]
    assert figures["nats_lost"] == pytest.approx(np.mean(np.subtract(series["nll"], dense.series["nll"])))
    assert 0 < figures["nats_lost_low"] < figures["nats_lost"] < figures["nats_lost_high"]
    assert f"compared with standard on the same tokens: perplexity {dense.quality['perplexity']:.4f}; " in said
    assert 0 < figures["kept_pairs"] < 1


@pytest.mark.usefixtures("no_model")
def test_options_beside_a_calibration_are_measured_with_its_schedule(calibrated, tmp_path, capsys):
    words = ["--calibration", calibrated, "--options", "top_k=0.5", "--schedule", "greedy"]
    said = perplexity(capsys, tmp_path, "--model", "text", "--backend", "kascade", *words)[1]
    assert "measured here with top_k=0.5 (calibrated with 0.25)" in said
    assert "schedule: greedy" in said


@pytest.mark.thorough
def test_random_weights_are_calibrated_and_measured_on_random_tokens_and_are_invalid(tmp_path, capsys):
    """The way to measure time and memory of a shape whose weights and tokenizer are not here."""
    write_random(
        ModelConfig.from_preset("qwen3-0.6b", num_layers=2, hidden_size=64, intermediate_size=64, vocab_size=300),
        tmp_path / "model",
        chunked=True,
    )
    model, calibration = ["--model", str(tmp_path / "model"), "--random-tokens"], tmp_path / "c.safetensors"
    assert code_of("calibrate", *model, "--out", calibration, "--prompts", "1", "--length", "96", "--anchors", "1") == 0
    words = ["--backend", "kascade", "--calibration", calibration, "--anchors", "1", "--against", "standard"]
    code, said, record = perplexity(capsys, tmp_path / "run", *model, *words)
    assert code == 0
    assert "INVALID: no better than a unigram model" in said
    assert record.quality["kept_pairs"] < 1
    assert "nats_lost" in record.quality


def test_the_record_holds_what_was_printed(tmp_path, capsys):
    _, said, record = perplexity(capsys, tmp_path, "--model", "text", "--backend", "standard")
    assert f"perplexity per token: {record.quality['perplexity']:.4f} over {2 * (LENGTH - 1)} tokens" in said
    assert f"bits per byte: {record.quality['bits_per_byte']:.4f}" in said
    assert "GiB more than at the start" in said
    assert "INVALID" not in said
    assert record.quality["nll_mean"] == pytest.approx(np.mean(record.series["nll"]))
    assert (record.status, record.kind, record.problem["sequence"]) == ("ok", "perplexity", LENGTH)
    assert json.loads((tmp_path / "records.jsonl").read_text())["environment"]["versions"]["jax"]
    assert f"record: {tmp_path / 'records.jsonl'}" in said
    code, said, _ = perplexity(capsys, tmp_path, "--model", "text")
    assert code == 2
    assert "has records already; choose another directory" in said


@pytest.fixture
def overflowing(tmp_path):
    """Weights that are finite, and sums in float16 that are not."""
    model = Transformer(ModelConfig.from_preset("debug", num_layers=1))
    params = model.arrays()
    for name in ("gate_proj", "up_proj"):
        params["layers"][0][name] = jnp.full_like(params["layers"][0][name], 300.0)
    save(Transformer(model.config, params), tmp_path / "model")
    return tmp_path / "model"


def test_losses_that_are_not_finite_are_no_figure_and_no_success(overflowing, tmp_path, capsys):
    arguments = ["--model", overflowing, "--backend", "standard"]
    code, said, record = perplexity(capsys, tmp_path / "half", *arguments, "--dtype", "float16")
    assert code == 1
    assert "INVALID: " in said
    assert "losses are not finite, the first at token " in said
    assert "what is computed overflows float16; try another --dtype" in said
    assert "perplexity per token" not in said
    assert record.status == "wrong"
    assert "perplexity" not in record.quality
    code, said, record = perplexity(capsys, tmp_path / "single", *arguments)
    assert (code, record.status) == (0, "ok")
    assert "INVALID: no better than a unigram model" in said  # of weights that learned nothing


def test_a_weight_that_is_not_finite_is_named(tmp_path, capsys):
    with shipped() as directory:
        model = load(directory)
    params = model.arrays()
    params["layers"][2]["up_proj"] = params["layers"][2]["up_proj"].at[3, 4].set(jnp.nan)
    save(Transformer(model.config, params), tmp_path / "model")
    code, said, record = perplexity(capsys, tmp_path / "run", "--model", tmp_path / "model")
    assert code == 2
    assert "'model.layers.2.mlp.up_proj.weight' in model.safetensors holds NaN or infinity" in said
    assert record is None


@pytest.mark.thorough
def test_a_runs_figures_of_kascade_say_what_was_kept_too():
    """``attnsuite run``: text, retrieval and whole models, where the options are the backend's own."""
    text = model_quality.perplexity(TextCase(sequence=64, sequences=2), "kascade", None)
    assert text.quality["kept_pairs"] == 1.0
    assert any(note.startswith("DENSE: every pair was kept") for note in text.notes)
    recall = model_quality.recall(RetrievalCase(sequence=384, prompts=2), "kascade")
    assert recall.quality["kept_pairs"] < 1.0
    assert recall.notes[0].startswith("kept: 0.")
    exact = model_quality.recall(RetrievalCase(sequence=384, prompts=2), "standard")
    assert not exact.notes
    assert "kept_pairs" not in exact.quality
    case = ModelCase(kind="model_prefill", sequence=256, top_k=0.125, tile_size=16, anchors=2)
    notes = model_program.notes(case, model_program.model_config(case), "kascade")
    assert "schedule: manual; layers that select: 0, 2; that reuse: 1 from 0, 3 from 2" in notes
    assert not model_program.notes(case, model_program.model_config(case), "chunked")
