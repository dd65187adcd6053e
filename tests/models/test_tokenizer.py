"""Tokenizers beside a checkpoint: the same tokens by two libraries, and a sentence for what is missing."""

import base64
import importlib
import json
import os
import sys

import pytest

from attnsuite.models import CheckpointError, load_tokenizer

pytestmark = pytest.mark.llama

TEXTS = (
    "The attention of the heads, then the heads' attention: 12345 tokens.",
    "  spaces\n\n and\ttabs \r\n  ",
    "Größe, 注意力, \N{BRAIN}, they'LL",
    "<|eot_id|> in a text is text",
)


def ranks(words):
    """A list of ranks as Llama 3 has it: all bytes, then what merges into these words, shortest pieces first."""
    found = {bytes([i]): i for i in range(256)}
    for word in words:
        for size in range(2, len(word) + 1):
            found.setdefault(word[:size].encode(), len(found))
    return found


def write_ranks(path, found):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in found.items()))


@pytest.fixture
def both(tmp_path):
    """tokenizer.model, and the tokenizer.json that transformers makes of it."""
    need("tiktoken", "tokenizers", "transformers")
    found = ranks(["The", " the", " attention", " heads", "ttention", " tokens", "123"])
    (tmp_path / "ranks").mkdir()
    (tmp_path / "json").mkdir()
    write_ranks(tmp_path / "ranks" / "tokenizer.model", found)
    tokenizer = importlib.import_module("attnsuite.models.tokenizer")
    special = {name: len(found) + i for i, name in enumerate(tokenizer.special_tokens())}
    converter = importlib.import_module("transformers.convert_slow_tokenizer").TikTokenConverter(
        vocab_file=str(tmp_path / "ranks" / "tokenizer.model"),
        pattern=tokenizer._PATTERN,
        extra_special_tokens=special,
    )
    converter.converted().save(str(tmp_path / "json" / "tokenizer.json"))
    return load_tokenizer(tmp_path / "ranks"), load_tokenizer(tmp_path / "json"), len(found)


def need(*names):
    for name in names:
        if not os.environ.get("ATTNSUITE_REQUIRE_TRANSFORMERS"):  # set by tox -e llama
            pytest.importorskip(name, reason=f"{name} is not installed; tox -e llama")


@pytest.mark.parametrize("text", TEXTS)
def test_two_libraries_read_two_files_as_the_same_tokens(both, text):
    by_ranks, by_json, ordinary = both
    tokens = by_ranks.encode(text)
    assert tokens[0] == ordinary, "a text begins with <|begin_of_text|>"
    assert max(tokens[1:]) < ordinary, "special tokens spelled out in a text are text"
    if "<|" not in text:  # tokenizers takes the spelling for the token
        assert tokens[1:] == by_json.encode(text)
    assert by_ranks.decode(tokens) == text
    assert by_json.decode(tokens) == text
    assert by_ranks.vocab_size == by_json.vocab_size == ordinary + 256


def test_merges_happen(both):
    by_ranks, _, _ = both
    assert len(by_ranks.encode("The attention the heads")) == 5


def test_special_tokens_stand_where_llama_3_has_them():
    special = importlib.import_module("attnsuite.models.tokenizer").special_tokens()
    assert len(set(special)) == len(special) == 256
    places = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|finetune_right_pad_id|>": 4, "<|start_header_id|>": 6}
    places |= {"<|end_header_id|>": 7, "<|eom_id|>": 8, "<|eot_id|>": 9, "<|python_tag|>": 10}
    places |= {"<|reserved_special_token_3|>": 11, "<|reserved_special_token_247|>": 255}
    assert {name: special.index(name) for name in places} == places


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds neither tokenizer.json nor tokenizer.model; a byte-level model needs"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("file", "library"), [("tokenizer.json", "tokenizers"), ("tokenizer.model", "tiktoken")])
def test_a_missing_library_is_named_with_the_line_that_installs_it(file, library, tmp_path, monkeypatch):
    (tmp_path / file).write_text("{}")
    monkeypatch.setitem(sys.modules, library, None)
    sentence = rf"{file} is read by the library {library}, which is not installed; pip install '\.\[text"
    with pytest.raises(ValueError, match=sentence):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"\x0a\x0d\x00sentencepiece", b"", b"aGk= one\n", b"aGk= 0\n"])
def test_a_file_that_is_no_list_of_ranks_is_refused(content, tmp_path):
    need("tiktoken")
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match="no list of byte sequences and ranks as Llama 3 has it"):
        load_tokenizer(tmp_path)


def test_a_json_that_is_no_tokenizer_is_refused(tmp_path):
    need("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


def of_words(folder, words, front):
    """A tokenizer.json of whole words, which puts the token ``front`` in front of every text."""
    need("tokenizers")
    special = {"first": {"id": "first", "ids": [front], "tokens": ["first"]}}
    single = [{"SpecialToken": {"id": "first", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "unknown"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": processor}))
    return load_tokenizer(folder)


def test_numbers_of_tokens_may_have_gaps(tmp_path):
    found = of_words(tmp_path, {"unknown": 0, "the": 9}, front=0)
    assert (found.vocab_size, found.encode("the end")) == (10, [0, 9, 0])


def test_token_beyond_the_vocabulary_is_refused(tmp_path):
    """JAX would look up the last row of the embeddings for it."""
    found = of_words(tmp_path, {"unknown": 0, "the": 1}, front=7)
    with pytest.raises(CheckpointError, match="gives token 7, but its vocabulary ends at 1"):
        found.encode("the")


def test_text_that_a_tokenizer_cannot_encode_is_a_sentence(tmp_path):
    found = of_words(tmp_path, {"the": 0}, front=0)
    with pytest.raises(CheckpointError, match=r"cannot be read as a tokenizer: .*Missing"):
        found.encode("the end")
