"""Kinds of hostile input that other libraries read: tokenizers beside a checkpoint, and Meta's ``.pth``.

A kind is drawn where its libraries are installed (``NEEDS``): ``tox -e llama`` and ``tox -e fuzz``.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from attnsuite.models import meta
from hostile_inputs import Commands, Hand, Valid, of_checkpoint
from hostile_values import as_json

NEEDS = {"tokenizers": ("tokenizers", "tiktoken"), "pth": ("torch",)}
_VOCABULARY = 1024  # of the checkpoint: bytes and Llama 3's special tokens are 512


def tokenizers(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """Verbs that read text, with a tokenizer.json or a tokenizer.model that was changed."""
    _widened(valid.checkpoint, folder)
    if hand.one_of((True, False)):
        hand.written(folder / "tokenizer.json", as_json(hand.changed(_tokenizer())))
    else:
        hand.written(folder / "tokenizer.model", _ranks(hand))
    model = ["--model", str(folder)]
    yield ["perplexity", *model, "--seq-len", "32", "--out", str(folder / "perplexity")]
    yield ["calibrate", *model, "--prompts", "1", "--length", "32", "--out", str(folder / "c.safetensors")]


def pth(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """Every verb that opens a checkpoint, with Meta's .pth or params.json that was changed."""
    params, described = _as_meta(valid.checkpoint)
    place = hand.one_of(("params", "tensors", "pickle", "file")) if hand.spoils else ""
    said = as_json(hand.changed(params) if place == "params" else params)
    hand.written(folder / "params.json", said)
    data = _saved(hand.changed(described) if place == "tensors" else described)
    if place == "pickle":
        data = _with_other_pickle(hand, data)
    (folder / "consolidated.00.pth").write_bytes(_spoilt(hand, data) if place == "file" else data)
    yield from of_checkpoint(folder)


def _widened(checkpoint: Path, folder: Path) -> None:
    """The checkpoint with a vocabulary that a tokenizer fits."""
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": _VOCABULARY}))
    tensors = load_file(checkpoint / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = np.resize(tensors[name], (_VOCABULARY, tensors[name].shape[1]))
    save_file(tensors, folder / "model.safetensors")


def _tokenizer() -> dict[str, Any]:
    """What tokenizer.json holds of byte pairs."""
    library = importlib.import_module("tokenizers")
    letters = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # the last two stand for the space and the new line
    vocabulary = {token: at for at, token in enumerate([*letters, "th", "the"])}
    made = library.Tokenizer(library.models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    made.add_special_tokens(["<s>"])
    made.normalizer = library.normalizers.NFC()
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", pair="$A $B", special_tokens=[("<s>", 98)]
    )
    return json.loads(made.to_str())


def _ranks(hand: Hand) -> str:
    """What tokenizer.model holds of byte pairs, with lines that were changed."""
    tokens = [*(bytes([at]) for at in range(256)), b"th", b"the"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    changes = st.sampled_from(
        ["", "A", "A A", "= 1", "AA== -1", "AA== 1e3", "dGg= 256", "\u0660 1", "AAAA 99999999999"]
    )
    for _ in range(hand.draw(st.integers(0, 2)) if hand.spoils else 0):
        lines[hand.one_of(range(len(lines)))] = hand.draw(changes)
    return "\n".join(lines) + "\n"


def _as_meta(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """params.json of the checkpoint, and the dtype and the shape of each of its tensors under Meta's name."""
    config = json.loads((checkpoint / "config.json").read_text())
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_theta"],
        "vocab_size": config["vocab_size"],
        "multiple_of": 32,
    }
    tensors = load_file(checkpoint / "model.safetensors")
    names = {ours: theirs for theirs, (ours, _) in meta._known(params["n_layers"]).items()}
    return params, {names[name]: ["float32", *tensor.shape] for name, tensor in tensors.items()}


def _saved(described: Any) -> bytes:
    """What PyTorch saves of such tensors. What describes none is saved as it is."""
    torch = importlib.import_module("torch")

    def tensor(told: Any) -> Any:
        try:
            dtype, *shape = told
            size = int(np.prod([1, *shape], dtype=float))
            return torch.zeros(shape, dtype=getattr(torch, dtype)) if size < 2**20 else told
        except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError):
            return told

    data = io.BytesIO()
    held = {name: tensor(told) for name, told in described.items()} if isinstance(described, dict) else described
    torch.save(held, data)
    return data.getvalue()


def _with_other_pickle(hand: Hand, data: bytes) -> bytes:
    """The archive with a pickle that was changed."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as given, zipfile.ZipFile(made, "w") as other:
        for name in given.namelist():
            held = given.read(name)
            other.writestr(name, _spoilt(hand, held) if name.endswith("data.pkl") else held)
    return made.getvalue()


def _spoilt(hand: Hand, data: bytes) -> bytes:
    """The bytes, cut or with some of them changed."""
    at = hand.one_of(range(len(data)))
    put = hand.draw(st.binary(min_size=1, max_size=4))
    return hand.one_of((data[:at], data[:at] + put + data[at + len(put) :], data[:at] + put + data[at:]))


KINDS = (tokenizers, pth)
