"""Files of ``torch.save`` (``pytorch_model.bin``, Meta's ``.pth``), read without PyTorch and without running code.

Such a file is a zip archive that is not compressed: ``data.pkl`` describes the tensors, ``data/0``, ``data/1``, ... are
their bytes (pytorch.org/docs/stable/notes/serialization.html). A pickle names functions that the reader calls. Here a
pickle gets only the few names below, and each stands for a function of this module that notes shapes and offsets. A
pickle with any other name, with an instruction that ``torch.save`` does not write, or with an object that is no tensor
is refused. PyTorch before 1.6 wrote another form, which is refused too.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from attnsuite.sentences import quoted

from .checked_json import CheckpointError

_LARGEST_PICKLE = 2**26  # bytes; a tensor takes about 200
_STORAGES = {
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
_DTYPES = ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")  # of tensors whose storage has no type
# The instructions that torch.save writes (pickle protocol 2).
# fmt: off
_INSTRUCTIONS = frozenset((
    "PROTO", "STOP", "MARK", "POP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "BINPUT", "LONG_BINPUT",
    "BINGET", "LONG_BINGET",
))
# fmt: on


class _Storage(NamedTuple):
    dtype: str
    key: str


class TorchTensor(NamedTuple):
    """A tensor as its file describes it: not yet checked, and not read."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _Rebuild:
    """What the pickle calls to make a tensor. Without attributes, so that a pickle cannot change it."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TorchTensor:
        """``rest`` are gradient, hooks and, of a storage without type, the dtype."""
        return TorchTensor(storage, offset, shape, strides, rest[2] if len(rest) > 2 else storage.dtype)


class _Parameter:
    """What the pickle calls to make a parameter of a tensor: the tensor."""

    __slots__ = ()

    def __call__(self, tensor: Any, *rest: Any) -> Any:
        """``rest`` are about gradients."""
        return tensor


_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
    ("torch._utils", "_rebuild_tensor_v3"): _Rebuild(),
    ("torch._utils", "_rebuild_parameter"): _Parameter(),
    **{(module, name): dtype for name, dtype in _STORAGES.items() for module in ("torch", "torch.storage")},
    **{("torch", name): name for name in _DTYPES},
}


class _RefusedError(Exception):
    """The pickle asks for something else than tensors; the message says what."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise _RefusedError(f"{module}.{name}")
        return _NAMES[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, _, _ = pid
        return _Storage(dtype, key)


class TorchFile:
    """The tensors of one file, by name. Raises CheckpointError for a file that is refused or cannot be read."""

    accepted = ("float32", "bfloat16", "float16")  # dtypes of weights

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {info.filename: info for info in archive.infolist()}
                self._folder = self._checked_folder()
                content = archive.read(f"{self._folder}data.pkl")
            described = _unpickled(content)
        except _RefusedError as error:
            raise CheckpointError(
                f"{str(path)!r} is refused: it asks for more than tensors ({quoted(str(error))}), which could run code "
                "on this machine; get the checkpoint from its publisher, best as safetensors."
            ) from None
        except Exception as error:  # what a hostile file raises is not known beforehand
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{str(path)!r} cannot be read as a PyTorch checkpoint: {reason}.") from error
        if not isinstance(described, dict) or not all(
            isinstance(name, str) and isinstance(tensor, TorchTensor) for name, tensor in described.items()
        ):
            raise CheckpointError(f"{str(path)!r} does not hold a dictionary of tensors; a checkpoint does.")
        self._tensors: dict[str, TorchTensor] = dict(described)
        for name, tensor in self._tensors.items():
            self._check(name, tensor)

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and the shape of every tensor."""
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """A tensor, in the dtype in which it is stored. Raises CheckpointError where the file has become shorter."""
        tensor = self._tensors[name]
        dtype, entry = np.dtype(jnp.dtype(tensor.dtype)), self._entry(tensor)
        extent = _extent(tensor) * dtype.itemsize
        try:
            with self.path.open("rb") as file:
                file.seek(entry.header_offset + 26)  # the lengths of name and extra field, in the entry's own header
                lengths = np.frombuffer(file.read(4), "<u2")
                begin = entry.header_offset + 30 + int(lengths.sum()) + tensor.offset * dtype.itemsize
                raw = np.fromfile(file, np.uint8, extent, offset=begin - file.tell())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{str(self.path)!r} cannot be read as a PyTorch checkpoint: {error}.") from error
        if len(raw) != extent:
            raise CheckpointError(f"{str(self.path)!r} ends within {name!r}; get it anew.")
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(raw.view(dtype), tensor.shape, strides))

    def _checked_folder(self) -> str:
        """The folder of the archive in which everything is. Raises ValueError for an archive of another form."""
        pickles = [name for name in self._entries if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("a file of torch.save holds one data.pkl")
        if any(info.compress_type != zipfile.ZIP_STORED for info in self._entries.values()):
            raise ValueError("a file of torch.save is not compressed")
        if self._entries[pickles[0]].file_size > _LARGEST_PICKLE:
            raise ValueError(f"data.pkl is larger than {_LARGEST_PICKLE} bytes")
        return pickles[0].removesuffix("data.pkl")

    def _entry(self, tensor: TorchTensor) -> zipfile.ZipInfo:
        return self._entries[f"{self._folder}data/{tensor.storage.key}"]

    def _check(self, name: str, tensor: TorchTensor) -> None:
        """Raise CheckpointError for a tensor that does not lie within its storage."""
        numbers = (tensor.offset, *tensor.shape, *tensor.strides) if _has_types(tensor) else (-1,)
        if any(type(number) is not int or number < 0 for number in numbers) or len(tensor.shape) != len(tensor.strides):
            raise CheckpointError(f"{name!r} in {self.path.name} is described in a way that no tensor is.")
        if tensor.dtype not in self.accepted:
            return  # whoever reads weights refuses the dtype by its name
        size = (tensor.offset + _extent(tensor)) * np.dtype(jnp.dtype(tensor.dtype)).itemsize
        if f"{self._folder}data/{tensor.storage.key}" not in self._entries or size > self._entry(tensor).file_size:
            raise CheckpointError(f"{name!r} in {self.path.name} lies outside of its storage; get the file anew.")
        if math.prod(tensor.shape) > _extent(tensor):
            raise CheckpointError(f"{name!r} in {self.path.name} has elements that overlap; no weight has.")


def _has_types(tensor: TorchTensor) -> bool:
    return (
        isinstance(tensor.storage, _Storage)
        and isinstance(tensor.storage.key, str)
        and isinstance(tensor.dtype, str)
        and isinstance(tensor.shape, tuple)
        and isinstance(tensor.strides, tuple)
    )


def _extent(tensor: TorchTensor) -> int:
    """The elements of the storage from the first of the tensor to its last."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))


def _unpickled(content: bytes) -> Any:
    """What a pickle describes. Raises _RefusedError before anything of it is called, or at the first other name."""
    for instruction, argument, _ in pickletools.genops(content):
        if instruction.name not in _INSTRUCTIONS:
            raise _RefusedError(instruction.name)
        if instruction.name.endswith("BINPUT") and int(argument or 0) > len(content):  # would take memory for that many
            raise ValueError("data.pkl numbers more objects than it has bytes")
    return _Unpickler(io.BytesIO(content)).load()
