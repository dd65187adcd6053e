"""Safetensors files: which tensors lie where, reading some of them, and writing them one after the other.

A checkpoint is one file or the shards that ``model.safetensors.index.json`` lists. Files are opened anew for every
tensor: what was read of a mapped file counts as memory of the process until the file is closed. The writer streams:
the library's own takes all tensors of a file at once, which for a checkpoint of 16 GB is 16 GB. The format is a
length, a header in JSON, and the tensors' bytes (github.com/huggingface/safetensors, "Format"); what is written here
the library reads and checks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_IGNORED = "rotary_emb.inv_freq"  # old checkpoints carry what the configuration says anyway


class SafetensorsSource:
    """The tensors of a directory of safetensors. Raises ValueError where there are none, or they cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _shards(directory):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (a safe_open is no mapping)
                    if not name.endswith(_IGNORED):
                        self._files[name] = path
                        self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def where(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._files[name].name

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """The tensors of these names, each with its own, in the dtype in which they are stored."""
        for name in names:
            with _opened(self._files[name]) as file:
                value = file.get_tensor(name)
            yield name, value


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[int, ...]], dtype: str, values: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write ``values`` (in whatever order) to ``path``; ``tensors`` are their names and shapes, ``dtype`` that of all.

    The file appears under its name when it is whole. Raises ValueError for a value that was not announced so.
    """
    places, end = {}, 0
    for name, shape in tensors.items():
        size = int(np.prod(shape)) * (4 if dtype == "float32" else 2)
        places[name] = (end, end + size)
        end += size
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    header |= {
        name: {"dtype": _CODES[dtype], "shape": list(tensors[name]), "data_offsets": list(place)}
        for name, place in places.items()
    }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
        for name, value in values:
            if value.shape != tensors[name] or value.dtype.name != dtype:
                raise ValueError(
                    f"{name!r} is {value.dtype}{list(value.shape)}; expected {dtype}{list(tensors[name])}."
                )
            file.seek(8 + len(raw) + places[name][0])
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    unfinished.replace(path)


def _shards(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        raise ValueError(
            f"{str(directory)!r} holds neither {WEIGHTS} nor {INDEX}, nor Meta's params.json; only safetensors are "
            "read, and Meta's .pth."
        )
    mapping = read_json(directory / INDEX).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(shard, str) for shard in mapping.values()):
        raise ValueError(f"{INDEX} in {str(directory)!r} has no weight_map from names to files.")
    shards = sorted(set(mapping.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{INDEX} in {str(directory)!r} names {shard!r}; shards lie beside it, without a path.")
    return [directory / shard for shard in shards]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="flax") as file:  # older safetensors cannot read bfloat16 as "numpy"
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as safetensors: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError for what is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error.strerror}); a checkpoint is a directory with config.json and "
            f"{WEIGHTS}, or Meta's params.json and consolidated.*.pth."
        ) from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(  # noqa: TRY004  (the content of a file is wrong, not the type of an argument)
            f"{str(path)!r} holds a {type(content).__name__}; expected a JSON object."
        )
    return content
