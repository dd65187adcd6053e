"""Files of weights: find tensors, read some of them, and write safetensors one tensor after the other.

A checkpoint is one file, or the shards that an index lists, in safetensors or in PyTorch's form (``torch_file.py``).
Files are opened anew for every tensor, because the pages read from a mapped file count as memory of the process until
the file is closed. The writer streams; the library's own needs all tensors of a file at once, 16 GB for a checkpoint of
16 GB. The format is a length, a header in JSON, and the tensors' bytes (github.com/huggingface/safetensors, "Format").
The library reads and checks the files written here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from .checked_json import CheckpointError, checked, is_file, read_json
from .torch_file import TorchFile

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FORMS = ((WEIGHTS, INDEX), ("pytorch_model.bin", "pytorch_model.bin.index.json"))  # the first that is there is read
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_IGNORED = "rotary_emb.inv_freq"  # old checkpoints carry what the configuration says anyway


class _Index(msgspec.Struct):
    """What the index of a checkpoint says; its metadata are of no use here."""

    weight_map: dict[str, str]


class SafetensorsFile:
    """A file of safetensors, whose tensors are JAX's. Raises CheckpointError where it cannot be read."""

    accepted = tuple(_CODES.values())

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (a safe_open is no mapping)
            self.tensors = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}

    def read(self, name: str) -> Any:
        """A tensor, in the dtype in which it is stored."""
        with self._opened() as file:
            return file.get_tensor(name)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, framework="flax") as file:  # older safetensors cannot read bfloat16 as "numpy"
                yield file
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{str(self.path)!r} cannot be read as safetensors: {error}.") from error


File = SafetensorsFile | TorchFile


class ShardedSource:
    """The tensors of a directory of safetensors, or of PyTorch's files.

    Raises CheckpointError where there are none, where they cannot be read, and for a dtype that no weight has.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, File] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _shards(directory):
            file = SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
            for name, (dtype, shape) in file.tensors.items():
                if name.endswith(_IGNORED):
                    continue
                if name in self._files:
                    raise CheckpointError(f"{name!r} is in {self.where(name)} and in {path.name}; expected once.")
                check_dtype(name, file, dtype)
                self._files[name] = file
                self.shapes[name] = shape

    def where(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._files[name].path.name

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """The tensors of these names, each with its own, in the dtype in which they are stored."""
        for name in names:
            yield name, self._files[name].read(name)


def check_dtype(name: str, file: File, dtype: str) -> None:
    """Raise CheckpointError unless ``dtype`` is one that weights are taken in: no other is cast without a word."""
    if dtype not in file.accepted:
        raise CheckpointError(
            f"{name!r} in {file.path.name} is stored as {dtype}; weights are read from {', '.join(file.accepted)}: "
            "convert it with the program that wrote it."
        )


def check_fit(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: Callable[[str], str]
) -> None:
    """Raise CheckpointError where a tensor is missing, of another shape, or has no place; ``where`` names its file."""
    for name, shape in found.items():
        if name not in wanted:
            raise CheckpointError(f"{where(name)} holds {name!r}, which this configuration has no place for.")
        if shape != wanted[name]:
            raise CheckpointError(f"{name!r} in {where(name)} has shape {shape}; expected {wanted[name]}.")
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"the checkpoint lacks {missing[0]!r}{more}, which its configuration needs.")


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
    offsets, end = {}, 0
    for name, shape in tensors.items():
        size = int(np.prod(shape)) * (4 if dtype == "float32" else 2)
        offsets[name] = (end, end + size)
        end += size
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    header |= {
        name: {"dtype": _CODES[dtype], "shape": list(tensors[name]), "data_offsets": list(span)}
        for name, span in offsets.items()
    }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + end)
            for name, value in values:
                if value.shape != tensors[name] or value.dtype.name != dtype:
                    raise ValueError(
                        f"{name!r} is {value.dtype}{list(value.shape)}; expected {dtype}{list(tensors[name])}."
                    )
                file.seek(8 + len(raw) + offsets[name][0])
                file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _shards(directory: Path) -> list[Path]:
    for single, index in _FORMS:
        if is_file(directory / single):
            return [directory / single]
        if is_file(directory / index):
            return _indexed(directory, index)
    raise CheckpointError(
        f"{str(directory)!r} holds neither {' nor '.join(name for form in _FORMS for name in form)}, nor Meta's "
        "params.json; no other form of weights is read."
    )


def _indexed(directory: Path, index: str) -> list[Path]:
    shards = sorted(set(checked(read_json(directory / index), _Index, index).weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.isprintable():
            raise CheckpointError(
                f"{index} in {str(directory)!r} names {shard!r}; shards lie beside it, without a path."
            )
    return [directory / shard for shard in shards]
