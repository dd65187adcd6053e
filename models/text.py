"""Text for training and measuring, as bytes: a file, or the English prose that every CPython carries.

The prose is ``pydoc_data.topics``, the language reference behind ``help()``: 465 kB that need no network. Its topics
are split by a hash of their names. Topics quote each other at length (nine tenths of a naive held-out part also stands
in other topics), so a held-out paragraph is removed from the training part wherever it occurs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from .text_file import TextFile

Bytes = UInt8[np.ndarray, " length"]
MINIMUM_BYTES = 1024


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Bytes to train on, bytes held out, and where they are from (``sha256`` is that of both, in order)."""

    name: str
    train: Bytes
    held_out: Bytes

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of the training bytes followed by the held-out bytes."""
        return hashlib.sha256(self.train.tobytes() + self.held_out.tobytes()).hexdigest()


def load_text(path: str | Path | TextFile | None = None, *, held_out: float = 0.1, field: str | None = None) -> Corpus:
    """The corpus in a file, whose last ``held_out`` is held out; or CPython's own prose for ``path=None``.

    Files are read as bytes, in whatever encoding. ``field`` names the field of JSON lines that holds the text
    (:mod:`attnsuite.models.text_file`). The prose has its own split (see :func:`pydoc_prose`). Raises ValueError for a
    path that is no readable file, a file of another form, or a text of under 1024 bytes.
    """
    if not 0.0 <= held_out < 1.0:
        raise ValueError(f"held_out={held_out!r} must be at least 0 and below 1.")
    if path is None:
        return pydoc_prose()
    file = path if isinstance(path, TextFile) else TextFile(str(path), field)
    path = Path(file)
    try:
        data = np.frombuffer(file.read(), np.uint8)
    except OSError as error:
        raise ValueError(f"text file {str(path)!r} cannot be read ({error.strerror}); give a readable file.") from error
    if len(data) < MINIMUM_BYTES:
        raise ValueError(
            f"text file {str(path)!r} has {len(data)} bytes; give at least {MINIMUM_BYTES}, or leave it out for "
            "the prose that comes with Python."
        )
    cut = round(len(data) * (1.0 - held_out))
    return Corpus(path.name, data[:cut], data[cut:])


def pydoc_prose() -> Corpus:
    """``pydoc_data.topics``, one topic in eight held out by the SHA-256 of its name, without overlap.

    Raises ValueError where this Python was installed without its documentation.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError("this Python lacks pydoc_data.topics; give a text file instead.") from error

    def is_held_out(name: str) -> bool:
        return hashlib.sha256(name.encode()).digest()[0] < 32

    seen: set[str] = set()
    parts: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(topics, key=lambda name: (not is_held_out(name), name)):
        for paragraph in topics[name].split("\n\n"):
            normalized = " ".join(paragraph.split())  # quoted paragraphs differ in indentation
            if normalized and normalized not in seen:
                seen.add(normalized)
                parts[is_held_out(name)].append(paragraph.strip("\n") + "\n\n")
    train, held_out = (np.frombuffer("".join(parts[side]).encode(), np.uint8) for side in (False, True))
    return Corpus("pydoc_data.topics", train, held_out)


def windows(data: Bytes, length: int) -> Int[np.ndarray, "count length_plus_1"]:
    """Consecutive windows of ``length + 1`` bytes, each beginning with the last byte of the one before.

    Predicting bytes 1.. of each window predicts every byte but the first once. What does not fill a
    window is left out. Raises ValueError where the data are shorter than one.
    """
    count = (len(data) - 1) // length
    if count < 1:
        raise ValueError(f"the text has {len(data)} bytes; windows of {length} need at least {length + 1}.")
    at = np.arange(count)[:, None] * length + np.arange(length + 1)[None]
    return data[at].astype(np.int32)


def random_windows(data: Bytes, length: int, count: int, rng: np.random.Generator) -> Int[np.ndarray, "count length"]:
    """``count`` windows of ``length`` bytes from anywhere. Raises ValueError where the data are shorter."""
    if len(data) < length:
        raise ValueError(f"the text has {len(data)} bytes; windows of {length} need at least as many.")
    at = rng.integers(0, len(data) - length + 1, count)[:, None] + np.arange(length)[None]
    return data[at].astype(np.int32)
