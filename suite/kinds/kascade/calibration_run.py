"""``attnsuite calibrate``: measure a model on some text, save the calibration, and show the schedule that follows.

A checkpoint is read layer by layer, so that it may be larger than memory. Of somebody's own model a function of a file
gives the queries and keys of each layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from attnsuite.backends.kascade import LOSS_RULE, Calibration, Schedule, Settings
from attnsuite.models import ModelConfig, TextFile, load_text, open_checkpoint
from attnsuite.models.kascade.calibration import QueriesAndKeys, calibrate
from attnsuite.models.kascade.loss_search import schedule_by_loss

from ... import files
from ...errors import InputError, as_input
from ...measure.tokens import BYTE_VOCABULARY, BYTES, reader_of
from ...named_model import checkpoint_of
from ...user_function import check_reference, is_reference, load_module
from .schedule_flags import ScheduleFlags


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """What to calibrate, checked by :func:`run`, and the flags of the schedule."""

    model: str
    text: TextFile | None
    random_tokens: bool
    out: Path
    prompts: int
    length: int
    settings: dict[str, Any]
    schedule_flags: ScheduleFlags


def run(request: CalibrateRequest, progress: Callable[[str], None]) -> tuple[Path, Calibration, Schedule]:
    """Calibrate and save; returns the file, the calibration, and the schedule that follows. Raises InputError."""
    if not request.out.name or request.out.suffix not in ("", ".safetensors"):
        raise InputError(f"--out {request.out} must end in .safetensors; the .json is written beside it.")
    for suffix in (".safetensors", ".json"):
        files.check_file(request.out.with_suffix(suffix))
    for flag, value, least in (("--prompts", request.prompts, 1), ("--length", request.length, 2)):
        if value < least:
            raise InputError(f"{flag} {value} must be at least {least}.")
    if request.random_tokens and request.text is not None:
        raise InputError("--random-tokens takes the place of --text; give one of them.")
    with as_input():
        Settings(**request.settings)
        progress("opening the model")
        flags = request.schedule_flags
        if is_reference(request.model):
            return _of_function(request, progress)
        with checkpoint_of(request.model) as directory:
            model = open_checkpoint(directory)
            # Before the text is read, so that a wrong flag shows before hours of calibration.
            flags.check(model.config.num_layers, model.config.kv_heads)
            name, prompts = prompts_of(request, model.config)
            text = {"name": name, "length": request.length}
            calibration = calibrate(model, prompts, request.settings, text=text, progress=progress)
        with files.writing(request.out):
            path = calibration.save(request.out)
        if flags.schedule == LOSS_RULE:
            number = flags.number_of_anchors(calibration.num_layers)
            return path, calibration, schedule_by_loss(model, prompts, calibration, number, progress=progress)
        return path, calibration, flags.made(calibration)


def _of_function(request: CalibrateRequest, progress: Callable[[str], None]) -> tuple[Path, Calibration, Schedule]:
    """The same for a function of bytes that gives queries and keys of each layer."""
    flags = request.schedule_flags
    if flags.schedule == LOSS_RULE:
        raise InputError(
            f"--schedule {LOSS_RULE} needs a model that can be run; give a checkpoint, or another schedule."
        )
    path, _, name = check_reference(request.model, "give PATH.py:NAME, a function of a prompt").rpartition(":")
    layers_of: Any = getattr(load_module(Path(path)), name, None)
    if not callable(layers_of):
        raise InputError(f"{name} in {path} is no function of a prompt that returns queries and keys of each layer.")
    source, prompts = prompts_of(request, None)
    text = {"name": source, "length": request.length}
    queries_and_keys = cast("QueriesAndKeys", layers_of)
    calibration = calibrate(queries_and_keys, prompts, request.settings, text=text, progress=progress)
    flags.check(calibration.num_layers, calibration.kv_heads)
    with files.writing(request.out):
        saved = calibration.save(request.out)
    return saved, calibration, flags.made(calibration)


def prompts_of(request: CalibrateRequest, config: ModelConfig | None) -> tuple[str, np.ndarray]:
    """Prompts spread evenly over a whole file, or over the training part of the prose that comes with Python.

    Or random tokens, for a checkpoint without a tokenizer. A function, which has no ``config``, gets bytes.
    """
    if request.random_tokens:
        shape = (request.prompts, request.length)
        vocabulary = BYTE_VOCABULARY if config is None else config.vocab_size
        return "random tokens", np.random.default_rng(1).integers(0, vocabulary, shape)
    corpus = load_text() if request.text is None else load_text(request.text, held_out=0.0)
    reader = BYTES if config is None else reader_of(request.model, config)
    rows, _ = reader.spread(corpus.train, request.length, request.prompts)
    return corpus.name, rows
