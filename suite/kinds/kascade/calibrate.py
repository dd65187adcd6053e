"""``attnsuite calibrate``: measure a model on some text, save the calibration, and show the schedule that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attnsuite.backends.kascade import Calibration, Schedule, Settings
from attnsuite.models import Transformer, load_text
from attnsuite.models.calibration import calibrate
from attnsuite.models.weights import load

from ... import files
from ...errors import InputError
from ...measure.text import reader_of
from ...named_model import checkpoint_of
from .schedules import ScheduleWords


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """What to calibrate, checked by :func:`run`.

    The last four fields are those of :class:`attnsuite.suite.kinds.kascade.schedules.ScheduleWords`.
    """

    model: str
    text: Path | None
    out: Path
    prompts: int
    length: int
    settings: dict[str, Any]
    schedule: str
    anchors: str
    threshold: float
    max_reuse_dist: int


def run(request: CalibrateRequest, progress: Callable[[str], None]) -> tuple[Path, Calibration, Schedule]:
    """Calibrate and save; returns the file, the calibration, and the schedule that follows. Raises InputError."""
    if not request.out.name or request.out.suffix not in ("", ".safetensors"):
        raise InputError(f"--out {request.out} must end in .safetensors; the .json is written beside it.")
    for suffix in (".safetensors", ".json"):
        files.check_file(request.out.with_suffix(suffix))
    for flag, value in (("--prompts", request.prompts), ("--length", request.length)):
        if value < 1:
            raise InputError(f"{flag} {value} must be at least 1.")
    try:
        Settings(**request.settings)
        progress("opening the model")
        with checkpoint_of(request.model) as directory:
            model = load(directory)
        words = ScheduleWords(
            schedule=request.schedule,
            anchors=request.anchors,
            threshold=request.threshold,
            max_reuse_dist=request.max_reuse_dist,
        )
        # Before the text is read, so that a wrong flag shows before hours of calibration.
        words.check(model.config.num_layers, model.config.kv_heads)
        name, prompts = _prompts(request, model)
        watched = _watched(prompts, progress)
        calibration = calibrate(model, watched, request.settings, text={"name": name, "length": request.length})
        with files.writing(request.out):
            path = calibration.save(request.out)
        return path, calibration, words.made(calibration)
    except ValueError as error:
        raise InputError(str(error)) from error


def _prompts(request: CalibrateRequest, model: Transformer) -> tuple[str, np.ndarray]:
    """Prompts spread evenly over a whole file, or over the training part of the prose that comes with Python."""
    corpus = load_text() if request.text is None else load_text(request.text, held_out=0.0)
    rows, _ = reader_of(request.model, model.config).spread(corpus.train, request.length, request.prompts)
    return corpus.name, rows


def _watched(prompts: np.ndarray, progress: Callable[[str], None]) -> Iterator[np.ndarray]:
    for number, prompt in enumerate(prompts, start=1):
        progress(f"prompt {number} of {len(prompts)}")
        yield prompt
