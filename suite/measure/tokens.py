"""Text as the tokens of a model: by the tokenizer beside the checkpoint, or as bytes where there is none.

Windows are of one length. The token that a tokenizer puts in front of every text (Llama's ``<|begin_of_text|>``, to
which much attention goes) stands in front of every window and is not predicted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from attnsuite.models import PRESETS, ModelConfig, load_tokenizer
from attnsuite.models.text import random_windows, windows
from attnsuite.models.tokenizer import JSON, RANKS
from attnsuite.models.weights import TEXT

from ..errors import InputError, as_input

BYTE_VOCABULARY = 256
Bytes = UInt8[np.ndarray, " length"]
Rows = Int[np.ndarray, "sequences length"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """How a model reads text: its units, and the tokens in ``front`` of every text. ``decode`` gives text again."""

    unit: str
    encode: Callable[[Bytes], Int[np.ndarray, " tokens"]]
    decode: Callable[[Sequence[int]], str]
    front: tuple[int, ...] = ()

    def spread(self, data: Bytes, length: int, count: int) -> tuple[Rows, float]:
        """``count`` windows of ``length`` tokens, spread evenly over the text, and the text's bytes per token.

        Raises ValueError where the text is too short for so many.
        """
        tokens = self.encode(data)
        # Without tokens in front, a window begins with the last token of the window before.
        new = length - (len(self.front) or 1)
        rows = windows(tokens, new) if 0 < new < len(tokens) else np.zeros((0, 0))
        if len(rows) < count:
            raise ValueError(
                f"the text holds {len(rows)} windows of {length} {self.unit}, fewer than the {count} asked for; "
                "give a longer text, or ask for fewer or for another length."
            )
        rows = rows[np.linspace(0, len(rows) - 1, count).astype(int)]
        return (self._led(rows[:, 1:]) if self.front else rows), len(data) / len(tokens)

    def drawn(self, data: Bytes, length: int, count: int, rng: np.random.Generator) -> Rows:
        """``count`` windows of ``length`` tokens from anywhere. Raises ValueError where the text is shorter."""
        return self._led(random_windows(self.encode(data), length - len(self.front), count, rng))

    def _led(self, rows: Rows) -> Rows:
        front = np.tile(np.array(self.front, np.int32).reshape(1, -1), (len(rows), 1))
        return np.concatenate([front, rows], axis=1)


BYTES = Reader("bytes", lambda data: data.astype(np.int32), lambda tokens: bytes(tokens).decode(errors="replace"))


def reader_of(model: str, config: ModelConfig) -> Reader:
    """How ``model`` reads. Raises InputError for a checkpoint whose tokens are not bytes and that has no tokenizer."""
    directory = Path(model)
    is_named = model == TEXT or model in PRESETS  # also where a directory has that name
    if not is_named and any((directory / name).is_file() for name in (JSON, RANKS)):
        with as_input():
            found = load_tokenizer(directory)
            around, text = found.encode(""), found.encode("a")
        front = next(tuple(around[:n]) for n in range(len(around), -1, -1) if text[:n] == around[:n])
        if found.vocab_size > config.vocab_size:
            raise InputError(
                f"the tokenizer in {model!r} has {found.vocab_size} tokens, but the model {config.vocab_size}; they do "
                "not belong together."
            )

        def encode(data: Bytes) -> Int[np.ndarray, " tokens"]:
            with as_input():
                tokens = found.encode(data.tobytes().decode("utf-8", errors="replace"))
            return np.array(tokens[len(front) :] if tuple(tokens[: len(front)]) == front else tokens, np.int32)

        return Reader("tokens", encode, found.decode, front)
    if config.vocab_size == BYTE_VOCABULARY:
        return BYTES
    raise InputError(
        f"model {model!r} has {config.vocab_size} tokens and no tokenizer beside it; text needs a byte-level model "
        f"({BYTE_VOCABULARY}), or {JSON} or {RANKS} in the checkpoint's directory."
    )


def unigram_bits(rows: Rows) -> float:
    """Bits per predicted token of a unigram model that is fitted on the predicted tokens themselves.

    No unigram model does better on these tokens.

    >>> unigram_bits(np.array([[0, 1, 2], [0, 2, 1]]))
    1.0
    """
    _, counts = np.unique(rows[:, 1:], return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def bits(nats: float, bytes_per_token: float) -> float:
    """Nats per token as bits per byte."""
    return nats / math.log(2) / bytes_per_token
