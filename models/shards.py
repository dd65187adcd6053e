"""Safetensors files: find tensors, read some of them, and write them one after the other.

A checkpoint is one file, or the shards that ``model.safetensors.index.json`` lists. Files are opened anew for every
tensor, because the pages read from a mapped file count as memory of the process until the file is closed. The writer
streams; the library's own needs all tensors of a file at once, 16 GB for a checkpoint of 16 GB. The format is a length,
a header in JSON, and the tensors' bytes (github.com/huggingface/safetensors, "Format"). The library reads and checks
the files written here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from .reading import CheckpointError, checked, is_file, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_IGNORED = "rotary_emb.inv_freq"  # old checkpoints carry what the configuration says anyway


class _Index(msgspec.Struct):
    """What ``model.safetensors.index.json`` says; its metadata are of no use here."""

    weight_map: dict[str, str]


class SafetensorsSource:
    """The tensors of a directory of safetensors.

    Raises CheckpointError where there are none, where they cannot be read, and for a dtype that no weight has.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _shards(directory):
            with opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (a safe_open is no mapping)
                    if name.endswith(_IGNORED):
                        continue
                    if name in self._files:
                        raise CheckpointError(f"{name!r} is in {self.where(name)} and in {path.name}; expected once.")
                    tensor = file.get_slice(name)
                    check_dtype(name, path.name, tensor.get_dtype())
                    self._files[name] = path
                    self.shapes[name] = tuple(tensor.get_shape())

    def where(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._files[name].name

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """The tensors of these names, each with its own, in the dtype in which they are stored."""
        for name in names:
            with opened(self._files[name]) as file:
                value = file.get_tensor(name)
            yield name, value


def check_dtype(name: str, file: str, dtype: str, accepted: Collection[str] = tuple(_CODES.values())) -> None:
    """Raise CheckpointError unless ``dtype`` is one that weights are taken in: no other is cast without a word."""
    if dtype not in accepted:
        raise CheckpointError(
            f"{name!r} in {file} is stored as {dtype}; weights are read from {', '.join(accepted)}: convert it with "
            "the program that wrote it."
        )


@jax.jit
def is_finite(x: Any) -> Any:
    """Whether no number is NaN or infinity. Compiled, so that no array of the tensor's size is made beside it."""
    return jnp.isfinite(x).all()


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
    if is_file(directory / WEIGHTS):
        return [directory / WEIGHTS]
    if not is_file(directory / INDEX):
        raise CheckpointError(
            f"{str(directory)!r} holds neither {WEIGHTS} nor {INDEX}, nor Meta's params.json; only safetensors are "
            "read, and Meta's .pth."
        )
    index = checked(read_json(directory / INDEX), _Index, INDEX)
    shards = sorted(set(index.weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.isprintable():
            raise CheckpointError(
                f"{INDEX} in {str(directory)!r} names {shard!r}; shards lie beside it, without a path."
            )
    return [directory / shard for shard in shards]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of safetensors, whose tensors are JAX's. Raises CheckpointError where it cannot be read."""
    try:
        with safe_open(path, framework="flax") as file:  # older safetensors cannot read bfloat16 as "numpy"
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read as safetensors: {error}.") from error
