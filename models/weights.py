"""Models from disk and to disk: load, save, convert. Files are safetensors and JSON.

A checkpoint is written under Hugging Face's names, in one file or in one per layer (``chunked``). The second form is an
ordinary sharded checkpoint with an index that other programs read too. Nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .checkpoint import CONFIG, open_checkpoint
from .config import PRESETS, ModelConfig
from .huggingface import to_hf
from .parameters import Params, checkpoint_names, stored_shapes
from .shards import INDEX, WEIGHTS, write_safetensors
from .tokenizer import TOKENIZER_FILES
from .transformer import Transformer

TEXT = "text"  # what the checkpoint in this package is called, and its folder
SHIPPED = "tiny-bytes"
_NOISE = 1_000_003  # a prime, so that no two rows of a matrix are alike
_ReadTensors = Callable[[Sequence[str]], Iterable[tuple[str, np.ndarray]]]


def load(directory: str | Path, **overrides: Any) -> Transformer:
    """The model in ``directory``: a Hugging Face checkpoint in safetensors, one of Meta's, or what :func:`save` wrote.

    ``overrides`` replace fields of its configuration. Parameters are kept in the dtype that the checkpoint names
    (override ``param_dtype``), and computed with in the same (override ``dtype``). Besides the model itself it
    takes the memory of a few tensors. Raises ValueError, in a sentence, for a directory, configuration or
    tensor that is missing, unreadable, unexpected or of the wrong shape.
    """
    checkpoint = open_checkpoint(directory, **overrides)
    return Transformer(checkpoint.config, checkpoint.params())


def load_layer(directory: str | Path, index: int, **overrides: Any) -> Params:
    """The parameters of one layer, as they stand in ``params["layers"][index]`` of the whole; else as :func:`load`.

    For several layers of one checkpoint keep what :func:`attnsuite.models.checkpoint.open_checkpoint` gives.
    """
    return open_checkpoint(directory, **overrides).layer(index)


def load_shipped(**overrides: Any) -> Transformer:
    """The trained byte-level checkpoint in this package (see its README.md); ``overrides`` as in :func:`load`.

    >>> load_shipped().config.vocab_size
    256
    """
    with trained(TEXT) as directory:
        return load(directory, **overrides)


class UnknownModelError(ValueError):
    """No trained model has this name. The message is a sentence with the names that are accepted."""


@contextlib.contextmanager
def trained(name: str) -> Iterator[Path]:
    """The directory of the trained weights that ``name`` stands for, there as long as the context lasts.

    ``name`` is ``text`` (the checkpoint in this package) or a directory; a folder named ``text`` is ``./text``. Raises
    UnknownModelError, a ValueError, for any other name.

    >>> with trained("text") as directory:
    ...     load(directory).config.vocab_size
    256
    """
    if name == TEXT:
        with shipped() as directory:
            yield directory
    elif Path(name).is_dir():
        yield Path(name)
    else:
        preset = " (a preset has no trained weights)" if name in PRESETS else ""
        raise UnknownModelError(f"{name!r} is not known; use {TEXT}, or a checkpoint's directory{preset}.")


def shipped() -> contextlib.AbstractContextManager[Path]:
    """The directory of the checkpoint in this package, there as long as the context lasts."""
    return resources.as_file(resources.files("attnsuite.models") / "checkpoints" / SHIPPED)


def save(model: Transformer, directory: str | Path) -> None:
    """Write ``model.safetensors`` and ``config.json``, making the directory. Tied embeddings are written once."""
    names = jax.tree.leaves(checkpoint_names(model.config))
    arrays = dict(zip(names, jax.tree.leaves(model.arrays()), strict=True))

    def read(wanted: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, np.asarray(arrays[name])) for name in wanted)

    _write(Path(directory), model.config, read, chunked=False)


def convert(
    directory: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    chunked: bool = False,
    **overrides: Any,
) -> ModelConfig:
    """Write the checkpoint in ``directory`` (what :func:`load` reads) to ``output``; returns its configuration.

    ``dtype=None`` keeps the dtype that it names. ``chunked`` writes a file per layer. One tensor at a
    time is in memory. Tokenizer files are copied. Raises ValueError as :func:`load` does, and for an ``output``
    that already holds files.
    """
    directory, output = Path(directory), Path(output)
    if dtype is not None:
        overrides |= {"dtype": dtype, "param_dtype": dtype}
    checkpoint = open_checkpoint(directory, **overrides)
    _check_empty(output)
    _write(output, checkpoint.config, checkpoint.tensors, chunked=chunked)
    for name in TOKENIZER_FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, output / name)
    return checkpoint.config


def write_random(config: ModelConfig, directory: str | Path, *, chunked: bool = False, seed: int = 0) -> None:
    """Write a checkpoint with random weights, for runs that measure time and memory; in memory is one tensor.

    Weights are a million normal numbers (standard deviation 0.02) over and over, norms are one, biases zero. Raises
    ValueError as :func:`convert` does.
    """
    directory = Path(directory)
    _check_empty(directory)
    noise = np.random.default_rng(seed).standard_normal(_NOISE, np.float32) * 0.02
    noise = noise.astype(config.param_dtype)
    shapes = stored_shapes(config)

    def read(wanted: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name in wanted:
            if len(shapes[name]) > 1:
                yield name, np.resize(noise, shapes[name])
            else:
                yield name, np.full(shapes[name], not name.endswith("bias"), noise.dtype)

    _write(directory, config, read, chunked=chunked)


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"output {str(output)!r} already exists and is not empty; give another directory, or empty it."
        )


def _write(directory: Path, config: ModelConfig, read: _ReadTensors, *, chunked: bool) -> None:
    """Files of weights, an index where there are several, and last config.json: with it the checkpoint is whole."""
    names, shapes = checkpoint_names(config), stored_shapes(config)
    layers = [[*layer.values()] for layer in names.pop("layers")]
    outer = [*names.values()]
    files = {"outer.safetensors": [outer]} | {f"layer-{i:05d}.safetensors": [layer] for i, layer in enumerate(layers)}
    if not chunked:
        files = {WEIGHTS: [outer, *layers]}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, groups in files.items():
            tensors = {name: shapes[name] for group in groups for name in group}
            values = (value for group in groups for value in read(group))  # a layer at a time is read
            write_safetensors(directory / file, tensors, config.param_dtype, values)
        if chunked:
            mapping = {name: file for file, (group,) in files.items() for name in group}
            _write_json(directory / INDEX, {"metadata": {}, "weight_map": mapping})
        _write_json(directory / CONFIG, to_hf(config))
    except OSError as error:
        raise ValueError(f"{str(directory)!r} cannot be written to: {error.strerror or error}.") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
