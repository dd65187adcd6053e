import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsuite.models import PRESETS, ModelConfig, TextFile, Transformer, load, load_text
from attnsuite.models.text import random_windows, windows
from pretrain import Train, bigram_bits, evaluate, main, train, unigram_bits

PROSE = load_text()


def test_prose_is_split_without_overlap():
    held_out = {" ".join(p.split()) for p in PROSE.held_out.tobytes().decode().split("\n\n")} - {""}
    train = {" ".join(p.split()) for p in PROSE.train.tobytes().decode().split("\n\n")} - {""}
    assert len(PROSE.train) > 200_000
    assert len(PROSE.held_out) > 20_000
    assert not held_out & train


def test_the_end_of_a_file_is_held_out(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 10)
    corpus = load_text(path)
    assert (corpus.name, len(corpus.train), len(corpus.held_out)) == ("text.txt", 2304, 256)
    assert np.concatenate([corpus.train, corpus.held_out]).tobytes() == path.read_bytes()
    assert len(load_text(path, held_out=0.0).held_out) == 0


WIKITEXT = " \n = Robert Boulter = \n \n Robert Boulter is an English film actor .\n \n = = Career = = \n" * 20


def test_wikitext_raw_is_read_unchanged_with_its_headings(tmp_path):
    (tmp_path / "wiki.test.raw").write_text(WIKITEXT)
    assert load_text(tmp_path / "wiki.test.raw", held_out=0.0).train.tobytes() == WIKITEXT.encode()


def test_texts_of_json_lines_are_joined_by_empty_lines(tmp_path):
    path, texts = tmp_path / "c4.jsonl", ["one é" * 200, "two\n" * 200]
    path.write_text("\n".join(json.dumps({"url": "x", "text": text}) for text in texts) + "\n\n")
    assert load_text(path, held_out=0.0, field="text").train.tobytes().decode() == "\n\n".join(texts)
    assert load_text(TextFile(str(path), "text")).sha256 == load_text(path, field="text").sha256


def test_file_of_another_form_is_refused_with_what_to_do(tmp_path):
    """JSON lines without a field would be read as prose of braces, a Parquet file as noise."""

    def refused(content, field=None, name="file"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"text file '.*file.*'.*") as found:
            load_text(tmp_path / name, field=field)
        return str(found.value)

    line = json.dumps({"id": 1, "text": "a" * 600}).encode() + b"\n"
    assert "JSON lines with the fields id, text; name the one" in refused(line * 2)
    assert "name the one" in refused(line, name="file.jsonl")
    assert "line 1 has no text in a field 'body'; fields with text: text." in refused(line, "body")
    assert "line 1 has no text in a field 'id'" in refused(line, "id")
    assert "line 3 is no JSON object" in refused(line + WIKITEXT.encode(), "text")
    assert "is Parquet; save it as" in refused(b"PAR1" + bytes(2000))
    (tmp_path / "braces.txt").write_bytes(b'{"a": 1}\n' + WIKITEXT.encode())
    assert load_text(tmp_path / "braces.txt")  # one line of an object is still prose


def test_unusable_files_are_refused_with_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        load_text(tmp_path)
    with pytest.raises(ValueError, match="text file '/dev/zero' is a device"):
        load_text("/dev/zero")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="has 0 bytes; give at least 1024"):
        load_text(tmp_path / "empty")
    (tmp_path / "short").write_bytes(b"a" * 1023)
    with pytest.raises(ValueError, match="has 1023 bytes"):
        load_text(tmp_path / "short")
    with pytest.raises(ValueError, match=r"held_out=1.0 must be at least 0 and below 1"):
        load_text(None, held_out=1.0)


@given(st.integers(2, 200), st.integers(1, 50))
def test_windows_predict_every_byte_once(size, length):
    data = (np.arange(size) % 256).astype(np.uint8)
    if size <= length:
        with pytest.raises(ValueError, match=f"the text has {size} bytes"):
            windows(data, length)
        return
    rows = windows(data, length)
    assert rows[:, 1:].ravel().tolist() == data[1 : 1 + rows.shape[0] * length].tolist()
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    assert size - 1 - rows.shape[0] * length < length


def test_random_windows_are_pieces_of_the_text():
    data = np.arange(100, dtype=np.uint8)
    rows = random_windows(data, 10, 50, np.random.default_rng(0))
    assert (np.diff(rows, axis=1) == 1).all()
    assert len(np.unique(rows[:, 0])) > 20
    with pytest.raises(ValueError, match="the text has 100 bytes; windows of 101"):
        random_windows(data, 101, 1, np.random.default_rng(0))


def test_baselines_know_what_they_should():
    rng = np.random.default_rng(0)
    uniform = rng.integers(0, 256, 200_000).astype(np.uint8)
    assert unigram_bits(uniform, uniform) == pytest.approx(8.0, abs=0.01)
    alternating = np.tile(np.array([65, 66], np.uint8), 5000)
    assert unigram_bits(alternating, alternating) == pytest.approx(1.0, abs=0.05)
    assert bigram_bits(alternating, alternating) < 0.01
    assert bigram_bits(PROSE.train, PROSE.held_out) < unigram_bits(PROSE.train, PROSE.held_out) - 0.5


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Of one small layer: Muon takes long to compile."""
    sizes = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    monkeypatch.setitem(PRESETS, "nano", PRESETS["debug"] | sizes)
    return Train(out=tmp_path, preset="nano", stages=((20, 4, 64),))


@pytest.mark.thorough
def test_training_is_reproducible(arguments):
    (first, _), (again, _) = (train(arguments, [PROSE]) for _ in range(2))
    assert np.array_equal(first.arrays()["embed_tokens"], again.arrays()["embed_tokens"])


def test_training_learns_and_saves_what_it_did(arguments, tmp_path):
    main(arguments)
    assert load(tmp_path).config.num_layers == 1
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["tokens"] == 20 * 4 * 64
    assert written["text"][0]["bytes"] == len(PROSE.train)
    assert written["final_bits_per_byte"] < 7.5


def test_evaluation_of_an_untrained_model_finds_nothing_learned():
    data = PROSE.held_out[:2049]
    figures = evaluate(Transformer(ModelConfig.from_preset("debug")), PROSE.train, data, length=256, backend="standard")
    assert figures["model"] == pytest.approx(8.0, abs=0.3)
    assert figures["bigram"] < figures["unigram"] < figures["model"]
