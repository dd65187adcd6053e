"""Text to tokens and back, by the tokenizer beside a checkpoint.

Hugging Face's ``tokenizers`` reads ``tokenizer.json``. ``tiktoken`` reads ``tokenizer.model`` of Llama 3, a list of
byte sequences in the order of their ranks, and encodes by these ranks unchanged. That file lacks the split pattern and
the special tokens; they are Llama 3's. Both libraries are in the extra ``text`` and imported only here. Byte-level
models need neither; see ``text.py``.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .checked_json import CheckpointError, is_file

JSON, RANKS = "tokenizer.json", "tokenizer.model"
TOKENIZER_FILES = (JSON, RANKS, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_INSTALL = "pip install '.[text]'"
# How Llama 3 cuts text before byte pairs are merged (llama3/tokenizer.py of Meta).
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BEGIN = "<|begin_of_text|>"
# The names of Llama 3.1 and 3.2, in order; what follows up to 256 are reserved ones.
_SPECIAL = (
    _BEGIN,
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_SPECIALS = 256


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """``encode`` turns text into tokens, with those that the checkpoint puts around a text; ``decode`` turns back.

    ``decode`` leaves special tokens out. ``vocab_size`` is one above the largest token, special tokens included.
    ``encode`` raises CheckpointError for a text that the tokenizer cannot encode.
    """

    vocab_size: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer in a checkpoint's directory; ``tokenizer.json`` where both are there.

    Raises CheckpointError where there is none, its library is missing, or the file is no tokenizer.
    """
    directory = Path(directory)
    if is_file(directory / JSON):
        return _from_json(directory / JSON)
    if is_file(directory / RANKS):
        return _from_ranks(directory / RANKS)
    raise CheckpointError(
        f"{str(directory)!r} holds neither {JSON} nor {RANKS}; a byte-level model needs no tokenizer."
    )


def _from_json(path: Path) -> Tokenizer:
    library = _library("tokenizers", JSON)
    found = _checked(path, lambda: library.Tokenizer.from_file(str(path)))
    size = 1 + max(_checked(path, lambda: found.get_vocab(with_added_tokens=True)).values(), default=-1)

    def encode(text: str) -> list[int]:
        tokens = _checked(path, lambda: found.encode(text).ids)
        if max(tokens, default=0) >= size:
            raise CheckpointError(
                f"{str(path)!r} gives token {max(tokens)}, but its vocabulary ends at {size - 1}; "
                "get the checkpoint from its publisher."
            )
        return tokens

    return Tokenizer(size, encode, lambda tokens: found.decode(list(tokens), skip_special_tokens=True))


def _checked(path: Path, ask: Callable[[], Any]) -> Any:
    """The result of a call of the library. Raises CheckpointError for its errors, panics of its Rust code included."""
    try:
        return ask()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{str(path)!r} cannot be read as a tokenizer: {error}.") from error


def _from_ranks(path: Path) -> Tokenizer:
    library = _library("tiktoken", RANKS)
    ranks = _read_ranks(path)
    special = {name: len(ranks) + i for i, name in enumerate(special_tokens())}
    found = library.Encoding("llama3", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    begin, ordinary = special[_BEGIN], len(ranks)
    return Tokenizer(
        vocab_size=len(ranks) + len(special),
        encode=lambda text: [begin, *found.encode_ordinary(text)],
        decode=lambda tokens: found.decode([token for token in tokens if token < ordinary]),
    )


def special_tokens() -> tuple[str, ...]:
    """The special tokens of Llama 3, in the order of their numbers, which follow those of the ranks."""
    return (*_SPECIAL, *(f"<|reserved_special_token_{i}|>" for i in range(3, _SPECIALS - len(_SPECIAL) + 3)))


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Byte sequence -> rank. Raises CheckpointError for a file of another kind, such as Llama 2's (sentencepiece)."""
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, binascii.Error):
        ranks = {}
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([i]) in ranks for i in range(256)):
        raise CheckpointError(
            f"{str(path)!r} is no list of byte sequences and ranks as Llama 3 has it (Llama 2's is sentencepiece, "
            f"which is not read); put the {JSON} of the same model beside it."
        )
    return ranks


def _library(name: str, file: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise CheckpointError(f"{file} is read by the library {name}, which is not installed; {_INSTALL}.") from None
