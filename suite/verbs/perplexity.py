"""The verb ``attnsuite perplexity``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .flags import NO_RESULT, DType, added, directory, flag, text_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Perplexity of a checkpoint on text, layer by layer: for models larger than memory.

    Exits with 1 where losses are not finite (no figure), with 2 for weights that are not.
    """

    model: Annotated[str, tyro.conf.arg(metavar="NAME|DIR")]
    """text (the checkpoint that ships here), or the directory of a checkpoint."""
    text: Annotated[Path | None, flag("FILE", "prose that ships with Python")] = None
    """Text (UTF-8) to measure on."""
    text_field: Annotated[str | None, flag("NAME", "plain text")] = None
    """Field of JSON lines that holds the text."""
    random_tokens: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Random tokens in place of text: for time and memory alone, of a checkpoint without a tokenizer."""
    seq_len: Annotated[int, flag("TOKENS")] = 512
    """Tokens of a sequence."""
    sequences: Annotated[int, flag("N")] = 8
    """Sequences, spread evenly over the text; each layer is read once for all of them."""
    batch: Annotated[int, flag("N")] = 1
    """Sequences that are computed at a time."""
    backend: Annotated[str, flag("NAME")] = "auto"
    """What computes attention."""
    options: Annotated[str, flag("NAME=VALUE,...", "the backend's")] = ""
    """Options of the backend, such as top_k=0.125,min_keys=0, separated by commas."""
    against: Annotated[str | None, flag("NAME", "none")] = None
    """Backend that computes the same tokens too, for a paired difference, such as chunked; reads the model twice."""
    dtype: Annotated[DType | None, flag("DTYPE", "as stored", choices=DType)] = None
    """What is computed in."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-perplexity")] = None
    """Directory for the record."""


def run(command: Perplexity) -> int:
    """Measure, print, and write the record."""
    from ..flag_values import parse_options
    from ..grid.run_grid import checked_text
    from ..layerwise_perplexity import run as measured
    from ..store import RECORDS

    for name, value, least in (("--seq-len", command.seq_len, 2), ("--sequences", command.sequences, 1)):
        if value < least:
            raise InputError(f"{name} {value} must be at least {least}.")
    if command.random_tokens and command.text is not None:
        raise InputError("--random-tokens takes the place of --text; give one of them.")
    text = text_of(command)
    out, options = directory(command.out, "perplexity"), parse_options(command.options)
    checked = None if text is None else checked_text(text)
    record, lines = measured(command, checked, options, added(command, Perplexity), out)
    print(*lines, f"record: {out / RECORDS}", sep="\n")
    return NO_RESULT if record.status == "wrong" else 0
