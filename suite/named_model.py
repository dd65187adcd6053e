"""Models by name, the same in every verb: a preset, ``text``, or the directory of a checkpoint.

``text`` is the trained checkpoint in this package. A preset has random weights, and its name comes before a directory
of the same name. Verbs that need trained weights accept the other two (:func:`checkpoint_of`). ``where`` is the flag
that gave the name, for error sentences: ``--model``, say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flax import nnx

from attnsuite.models import PRESETS, ModelConfig, Transformer, open_checkpoint
from attnsuite.models.weights import TEXT, UnknownModelError, load, trained

from .errors import InputError


def absolute(name: str) -> str:
    """The same trained model's name for a process in another directory: a relative path becomes absolute."""
    return str(Path(name).resolve()) if name != TEXT and Path(name).is_dir() else name


@contextlib.contextmanager
def checkpoint_of(name: str) -> Iterator[Path]:
    """The directory of trained weights; it exists as long as the context. Raises InputError for an unknown name."""
    try:
        with trained(name) as directory:
            yield directory
    except UnknownModelError as error:
        raise InputError(f"--model {error}") from error


def config_of(name: str, where: str = "--model", **overrides: Any) -> ModelConfig:
    """The configuration of any model, with ``overrides`` of its fields. Raises InputError for a name it cannot use."""
    if name in PRESETS:
        return ModelConfig.from_preset(name, **overrides)
    with _readable(name, where) as directory:
        return open_checkpoint(directory, **overrides).config


def model_of(name: str, where: str = "--model", *, seed: int = 0, **overrides: Any) -> Transformer:
    """Any model with its weights; a preset's are drawn from ``seed``. Other arguments and errors: :func:`config_of`."""
    if name in PRESETS:
        return Transformer(ModelConfig.from_preset(name, **overrides), rngs=nnx.Rngs(seed))
    with _readable(name, where) as directory:
        return load(directory, **overrides)


@contextlib.contextmanager
def _readable(name: str, where: str) -> Iterator[Path]:
    """As :func:`checkpoint_of`, for callers that accept presets too. Faults inside the context name the model."""
    try:
        with trained(name) as directory:
            yield directory
    except UnknownModelError as error:
        known = ", ".join((TEXT, *PRESETS))
        raise InputError(f"{where} {name!r} is not known; use {known}, or a checkpoint's directory.") from error
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{where} {name!r} cannot be loaded: {error}") from error
