"""``attnsuite calibrate``: measure a model on some text, save the calibration, and show the schedule that follows.

A checkpoint is read layer by layer, so that it may be larger than memory. Of somebody's own model a function of a file
gives the queries and keys of each layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from attnsuite.backends.kascade import LOSS_RULE, Calibration, Schedule, Settings
from attnsuite.backends.kascade.layer_statistics import calibration_files
from attnsuite.models import ModelConfig, TextFile, load_text, open_checkpoint
from attnsuite.models.kascade.calibration import QueriesAndKeys, calibrate
from attnsuite.models.kascade.loss_search import schedule_by_loss

from ... import files
from ...errors import InputError, as_input
from ...measure.tokens import BYTE_VOCABULARY, BYTES, reader_of
from ...named_model import checkpoint_of
from ...user_function import check_reference, is_reference, load_module
from .schedule_flags import ScheduleFlags


def run(flags: Any, text: TextFile | None, progress: Callable[[str], None]) -> tuple[Path, Calibration, Schedule]:
    """Calibrate and save; returns the file, the calibration, and the schedule that follows. Raises InputError.

    ``flags`` are those of the verb (``verbs/calibrate.py``).
    """
    if not flags.out.name or flags.out.suffix not in ("", ".safetensors"):
        raise InputError(f"--out {flags.out} must end in .safetensors; the .json is written beside it.")
    for file in calibration_files(flags.out):
        files.check_file(file)
    for flag, value, least in (("--prompts", flags.prompts, 1), ("--length", flags.length, 2)):
        if value < least:
            raise InputError(f"{flag} {value} must be at least {least}.")
    if flags.random_tokens and text is not None:
        raise InputError("--random-tokens takes the place of --text; give one of them.")
    out, text = flags.out.absolute(), text and text.resolved()  # a function or its file may change the directory
    with as_input():
        settings = {name: getattr(flags, name) for name in ("tile_size", "top_k", "min_keys", "granularity")}
        settings["query_tile"] = flags.tile_size
        Settings(**settings)
        schedule = ScheduleFlags(**{each.name: getattr(flags, each.name) for each in dataclasses.fields(ScheduleFlags)})
        progress("opening the model")
        with contextlib.ExitStack() as stack:
            model: Any
            if is_reference(flags.model):
                model, config = _function(flags.model, schedule), None
            else:
                model = open_checkpoint(stack.enter_context(checkpoint_of(flags.model)))
                config = model.config
                # Before the text is read, so that a wrong flag shows before hours of calibration.
                schedule.check(config.num_layers, config.kv_heads)
            name, prompts = prompts_of(flags, text, config)
            source = {"name": name, "length": flags.length}
            calibration = calibrate(model, prompts, settings, text=source, progress=progress)
            schedule.check(calibration.num_layers, calibration.kv_heads)
            with files.writing(flags.out):
                calibration.save(out)
            path, _ = calibration_files(flags.out)
            if schedule.schedule == LOSS_RULE:
                number = schedule.number_of_anchors(calibration.num_layers)
                return path, calibration, schedule_by_loss(model, prompts, calibration, number, progress=progress)
        return path, calibration, schedule.made(calibration)


def _function(reference: str, schedule: ScheduleFlags) -> Callable[[Any], Iterator[Any]]:
    """A function of a file, of bytes, that gives queries and keys of each layer. Raises InputError with its errors."""
    if schedule.schedule == LOSS_RULE:
        raise InputError(
            f"--schedule {LOSS_RULE} needs a model that can be run; give a checkpoint, or another schedule."
        )
    path, _, name = check_reference(reference, "give PATH.py:NAME, a function of a prompt").rpartition(":")
    layers_of: Any = getattr(load_module(Path(path)), name, None)
    if not callable(layers_of):
        raise InputError(f"{name} in {path} is no function of a prompt that returns queries and keys of each layer.")
    function = cast("QueriesAndKeys", layers_of)

    def queries_and_keys(prompt: Any) -> Iterator[Any]:
        try:
            yield from function(prompt)
        except (Exception, SystemExit) as error:
            raise InputError(f"{reference} raised {type(error).__name__}: {error}") from error

    return queries_and_keys


def prompts_of(flags: Any, text: TextFile | None, config: ModelConfig | None) -> tuple[str, np.ndarray]:
    """Prompts spread evenly over a whole file, or over the training part of the prose that comes with Python.

    Or random tokens, for a checkpoint without a tokenizer. A function, which has no ``config``, gets bytes.
    """
    if flags.random_tokens:
        shape = (flags.prompts, flags.length)
        vocabulary = BYTE_VOCABULARY if config is None else config.vocab_size
        return "random tokens", np.random.default_rng(1).integers(0, vocabulary, shape)
    corpus = load_text() if text is None else load_text(text, held_out=0.0)
    reader = BYTES if config is None else reader_of(flags.model, config)
    rows, _ = reader.spread(corpus.train, flags.length, flags.prompts)
    return corpus.name, rows
