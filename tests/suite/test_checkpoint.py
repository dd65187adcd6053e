"""``attnsuite run --model`` and ``attnsuite perplexity``: how text is read, what is refused, and what INVALID says."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from attnsuite.backends.kascade import dynamic_programming, load_calibration
from attnsuite.models import (
    ModelConfig,
    TextFile,
    Tokenizer,
    Transformer,
    load_shipped,
    load_text,
    open_checkpoint,
    save,
)
from attnsuite.models.kascade.calibration import calibrate
from attnsuite.models.loss import token_nats
from attnsuite.suite import suites as model_suite
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid.work import find_cells
from attnsuite.suite.kinds import model_program, model_quality
from attnsuite.suite.kinds.kascade import calibration_run, dense
from attnsuite.suite.kinds.kascade.extension import applied
from attnsuite.suite.kinds.kascade.selection_case import SelectionCase
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.kinds.quality_case import TextCase
from attnsuite.suite.measure import tokens as suite_text
from attnsuite.suite.store import parse_records
from attnsuite.suite.verbs.calibrate import Calibrate
from command import code_of
from landing import is_landing

PROSE = load_text().held_out


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untrained") / "noise"
    save(Transformer(ModelConfig.from_preset("debug", num_layers=2)), directory)
    return directory


def by_words(front=(1,), end=()):
    """A tokenizer: words of three letters as numbers of their own, behind what stands in front of a text."""

    def encode(text):
        return [*front, *(2 + sum(text[i : i + 3].encode()) % 500 for i in range(0, len(text), 3)), *end]

    return Tokenizer(vocab_size=502, encode=encode, decode=str)


WHOLE = by_words(front=()).encode(PROSE.tobytes().decode())


def reader_of(directory, vocab_size=512):
    return suite_text.reader_of(str(directory), ModelConfig.from_preset("debug", vocab_size=vocab_size))


@pytest.fixture
def tokenized(tmp_path, monkeypatch):
    """A directory in which a tokenizer lies."""
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(suite_text, "load_tokenizer", lambda _: by_words())
    return tmp_path


def test_every_window_begins_with_what_stands_in_front_of_a_text(tokenized):
    rows, bytes_per_token = reader_of(tokenized).spread(PROSE, 32, 6)
    assert rows.shape == (6, 32)
    assert set(rows[:, 0].tolist()) == {1}
    assert bytes_per_token == pytest.approx(len(PROSE) / len(WHOLE))
    assert rows[0, 1:].tolist() == WHOLE[1:32]
    assert rows[-1, 1:].tolist() == WHOLE[1 + 31 * (len(WHOLE) // 31 - 1) :][:31], "the last window of the text"
    drawn = reader_of(tokenized).drawn(PROSE, 32, 5, np.random.default_rng(0))
    assert drawn.shape == (5, 32)
    assert set(drawn[:, 0].tolist()) == {1}


def test_with_nothing_in_front_windows_overlap_by_the_token_that_predicts(tokenized, monkeypatch):
    monkeypatch.setattr(suite_text, "load_tokenizer", lambda _: by_words(front=()))
    rows, _ = reader_of(tokenized).spread(PROSE[:300], 25, 4)
    assert rows.ravel()[[24, 25]].tolist() == [rows[0, -1]] * 2
    monkeypatch.setattr(suite_text, "load_tokenizer", lambda _: by_words(end=(0,)))  # what stands at the end is not
    assert reader_of(tokenized).front == (1,)
    assert reader_of(tokenized).encode(PROSE).tolist() == [*WHOLE, 0]


def test_calibration_reads_text_with_the_tokenizer_of_the_checkpoint(tokenized):
    """Its prompts are those of the JSON lines' text, each behind what stands in front of a text."""
    path = tokenized / "prose.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in (PROSE.tobytes().decode(), "end " * 9)))
    save(Transformer(ModelConfig.from_preset("debug", vocab_size=512, num_layers=2)), tokenized)
    words = {"model": str(tokenized), "prompts": 2, "length": 96, "top_k": 0.25, "schedule": "manual", "anchors": "0"}
    flags, text = Calibrate(**words, out=tokenized / "c"), TextFile(str(path), "text")
    name, prompts = calibration_run.prompts_of(flags, text, ModelConfig.from_preset("debug", vocab_size=512))
    assert (name, prompts[0].tolist()) == ("prose.jsonl", [1, *WHOLE[1:96]])
    calibration_run.run(flags, text, lambda _: None)
    assert load_calibration(tokenized / "c").text["name"] == "prose.jsonl"


def test_a_folder_named_as_the_shipped_checkpoint_does_not_read_its_text(tokenized, monkeypatch):
    monkeypatch.chdir(tokenized)
    (tokenized / "text").mkdir()
    (tokenized / "tokenizer.json").rename(tokenized / "text/tokenizer.json")
    rows, bytes_per_token = reader_of("text", 256).spread(PROSE, 32, 2)
    assert bytes_per_token == 1.0
    assert rows[0].tolist() == PROSE[:32].tolist()
    assert reader_of("./text").unit == "tokens"


def test_text_that_a_model_cannot_read_is_refused(tokenized, tmp_path):
    with pytest.raises(InputError, match=r"has 502 tokens, but the model 400; they do not belong together"):
        reader_of(tokenized, 400)
    with pytest.raises(InputError, match=r"has 512 tokens and no tokenizer beside it; text needs a byte-level model"):
        reader_of(tmp_path / "other")
    with pytest.raises(ValueError, match=r"holds 4 windows of 32 tokens, fewer than the 40"):
        reader_of(tokenized).spread(PROSE[:400], 32, 40)


def test_no_unigram_model_beats_the_one_that_knows_the_frequencies():
    rng = np.random.default_rng(0)
    rows = np.minimum(rng.geometric(0.2, (4, 500)), 30)
    best = suite_text.unigram_bits(rows)
    for other in (rng.dirichlet(np.ones(31)) for _ in range(20)):
        assert -np.log2(other[rows[:, 1:]]).mean() > best
    assert suite_text.unigram_bits(rng.integers(0, 256, (64, 513))) == pytest.approx(8.0, abs=0.01)


@pytest.mark.parametrize(("name", "valid"), [("shipped", True), ("untrained", False)])
def test_a_model_that_learned_nothing_does_not_beat_unigrams(name, valid, request):
    case = TextCase(model=str(request.getfixturevalue(name)), sequence=64, sequences=6)
    found = model_quality.perplexity(case, "standard", None)
    assert (found.quality["bits_per_byte"] < found.quality["unigram_bits_per_byte"]) == valid
    if is_landing() and not valid:
        return
    rows = model_quality.read_text(case, model_program.model_config(case), None).rows
    nats = token_nats(model_program.open_model(case)(rows[:, :-1], backend="standard"), rows[:, 1:]).mean()
    assert found.quality["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)


def test_bits_are_counted_per_byte_of_the_text(tokenized):
    save(Transformer(ModelConfig.from_preset("debug", vocab_size=512, num_layers=1)), tokenized)
    found = model_quality.perplexity(TextCase(model=str(tokenized), sequence=32, sequences=6), "standard", None).quality
    bytes_per_token = len(PROSE) / len(WHOLE)
    assert bytes_per_token == pytest.approx(3.0, rel=0.01)
    assert found["bits_per_byte"] == pytest.approx(found["nll_mean"] / math.log(2) / bytes_per_token)


def test_the_suite_of_a_checkpoint_has_kascades_controls_where_kascade_is_asked_for(shipped):
    words = model_suite.ModelSuiteFlags(model=str(shipped), sequence=64, batch=3)
    cases = model_suite.model_suite(words, ["kascade"]).cases
    assert [type(case) for case in cases] == [ModelCase, ModelCase, TextCase, SelectionCase, SelectionCase]
    assert {case.model for case in cases} == {str(shipped.resolve())}
    assert all(case.ragged and case.batch == 3 for case in cases[:2])
    assert len(model_suite.model_suite(words).cases) == 3
    assert {"dense", "random_tiles"} <= set(model_suite.model_rows(["standard", "kascade"]))
    assert model_suite.model_rows(["standard"]) == ("standard",)
    small = tuple(dataclasses.replace(case, sequence=64) for case in cases)
    found = find_cells(("standard", "kascade", "dense"), small)["cells"]
    plans = {(cell.case.name, cell.row): cell for cell in found}
    left = plans[cases[2].name, "kascade"]
    assert left.mode is None
    assert "beside its controls" in left.reasons[0]
    assert plans[cases[1].name, "kascade"].mode == "native"


def test_kascades_row_of_a_model_runs_the_schedule_that_the_case_says(shipped, untrained):
    case = ModelCase(kind="model_prefill", model=str(shipped), sequence=64, top_k=0.25, tile_size=8, anchors=2)
    model = model_program.open_model(case)
    options = model_program.options_of(case, model.config, "kascade")
    assert options["schedule"].anchors == (0, 2)
    assert model_program.options_of(case, model.config, "chunked") == {}
    assert model_program.options_of(dataclasses.replace(case, top_k=None), model.config, "kascade") == {}

    small = dataclasses.replace(case, model=str(untrained))

    def logits(backend, **changes):
        made = model_program.judged_program(
            dataclasses.replace(small, **changes), model_program.open_model(small), backend
        )
        return np.asarray(jax.jit(made.function)(*made.arguments)["logits"])

    dense = logits("standard")
    assert np.abs(logits("kascade", top_k=1.0) - dense).max() < 1e-4
    assert np.abs(logits("kascade") - dense).max() > 1e-3


@pytest.mark.thorough
def test_a_train_step_keeps_the_share_that_its_case_says(untrained):
    """Judged and timed; only the loss is compiled."""
    case = ModelCase(kind="model_train", model=str(untrained), sequence=64, top_k=0.25, tile_size=8, anchors=2)
    model = model_program.open_model(case)

    def loss(backend, top_k, program=model_program.judged_program, which="loss"):
        made = program(dataclasses.replace(case, top_k=top_k), model, backend)
        return float(jax.jit(lambda *arrays: made.function(*arrays)[which])(*made.arguments))

    dense, sparse = loss("standard", 0.25), loss("kascade", 0.25)
    assert abs(loss("kascade", 1.0) - dense) < 1e-5 < abs(sparse - dense)
    assert loss("kascade", 0.25, model_program.model_program, 2) == pytest.approx(sparse, abs=1e-6)


def test_a_calibration_decides_the_settings_of_a_run_and_the_schedule_of_its_rows_on_text(
    shipped, untrained, tmp_path, refused
):
    file, settings = tmp_path / "c.safetensors", {"top_k": 0.5, "min_keys": 0, "tile_size": 8, "query_tile": 8}
    made = calibrate(open_checkpoint(shipped), [PROSE[:96]], settings)
    made.save(file)
    words = {"calibration": str(file), "top_k": 0.25}
    cases = applied(words, model_suite.model_suite(model_suite.ModelSuiteFlags(model=str(shipped)), ["kascade"]).cases)
    assert {(case.top_k, case.tile_size) for case in (*cases[:2], *cases[3:])} == {(0.25, 8)}
    assert cases[-1].calibration == str(file)
    assert dense.checked_config(cases[-1], None).num_layers == made.num_layers
    found = dense.schedules(dataclasses.replace(cases[-1], anchors="3"), load_shipped(), tmp_path / "nowhere.npz")
    assert found["case"] == dynamic_programming(made, 3)
    call = ["--backends", "kascade", "--calibration", file, "--out", tmp_path / "run"]
    assert "was calibrated on another model" in refused("run", "--model", untrained, *call)
    assert "--calibration is about a checkpoint; add --model" in refused("run", *call)
    assert not (tmp_path / "run" / "records.jsonl").exists()


@pytest.mark.usefixtures("in_this_process")
def test_a_run_of_a_model_that_learned_nothing_is_marked_invalid(untrained, new_run):
    arguments = ["--model", untrained, "--backends", "standard", "--seq-len", "64"]
    assert code_of("run", *arguments, "--cases", "perpl*,prefill*", "--out", new_run) == 0
    records = parse_records(new_run / "records.jsonl")[0]
    assert {record.status for record in records} == {"ok"}
    page = (new_run / "report.md").read_text()
    section = page[page.index("## Backends in noise") : page.index("## Speed")]
    (row,) = [line for line in section.splitlines() if re.match(r"\| `?standard", line)]
    assert "INVALID: the dense model is no better than a unigram model" in row
    assert "TTFT" in section
    assert f"attnsuite run --model {untrained} --seq-len 64 --batch 1 --backends standard" in page
