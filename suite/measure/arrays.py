"""Arrays in a file between two processes of which one is not trusted: a line of JSON, then the numbers.

The reader opens nothing but a plain file of exactly the size that its first line says, and makes nothing else of it.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np

DTYPES = {name: np.dtype(name) for name in ("float32", "float16", "float64", "int32", "int8", "bool")} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn")
}
_LONGEST = 2**16  # bytes of the first line


class _Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**40)], ...]


def save(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write the arrays to a new file."""
    found = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    header = [_Array(name, str(x.dtype), x.shape) for name, x in found.items()]
    with path.open("xb") as file:
        file.write(msgspec.json.encode(header) + b"\n")
        for x in found.values():
            file.write(x.tobytes())


def load(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a file of :func:`save`. Raises ValueError or OSError for anything else."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("the outputs are no plain file")
        line = file.readline(_LONGEST)
        header = msgspec.json.decode(line, type=list[_Array])
        if strange := [x.dtype for x in header if x.dtype not in DTYPES]:
            raise ValueError(f"an output has the dtype {strange[0][:20]}")
        sizes = [math.prod(x.shape) * DTYPES[x.dtype].itemsize for x in header]
        if found.st_size != len(line) + sum(sizes):
            raise ValueError("the file of the outputs has another size than it says")
        return {
            x.name: np.frombuffer(file.read(size), DTYPES[x.dtype]).reshape(x.shape)
            for x, size in zip(header, sizes, strict=True)
        }
