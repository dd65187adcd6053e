"""Checkpoints that PyTorch wrote: Meta's ``.pth`` files, and ``pytorch_model.bin`` with its shards.

Such a file is a pickle, which can run any code when it is opened. It is opened by ``torch.load`` with
``weights_only=True``, which makes only tensors and plain containers and refuses the rest. Only a torch in which this is
known to hold (2.6 or newer) is accepted (CVE-2025-32434). Only this module imports PyTorch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .reading import CheckpointError, is_file
from .shards import IGNORED, check_dtype, indexed

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_OLDEST_TORCH = (2, 6)
_INSTALL = "pip install '.[meta]'"
_DTYPES = ("float32", "bfloat16", "float16")


class TorchFiles:
    """Opens files of PyTorch. Raises CheckpointError if PyTorch is missing or too old; ``what`` needs it."""

    def __init__(self, what: str) -> None:
        self.torch = _import_torch(what)

    def load(self, path: Path) -> dict[str, Any]:
        """The tensors of one file, mapped and not read. Raises CheckpointError."""
        try:
            found = self.torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # what a hostile file raises is not known beforehand
            if type(error).__name__ == "UnpicklingError":
                raise CheckpointError(
                    f"{str(path)!r} is refused: it asks for more than tensors, which could run code on this machine; "
                    "get the checkpoint from its publisher, best as safetensors."
                ) from None
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{str(path)!r} cannot be read as a PyTorch checkpoint: {reason}.") from error
        if not isinstance(found, dict) or not all(isinstance(k, str) and self._is_dense(v) for k, v in found.items()):
            raise CheckpointError(f"{str(path)!r} does not hold a dictionary of tensors, as a checkpoint does.")
        return found

    def check_dtype(self, name: str, path: Path, tensor: Any) -> None:
        """Raise CheckpointError for a dtype that weights are not taken in."""
        check_dtype(name, path.name, str(tensor.dtype).removeprefix("torch."), _DTYPES)

    def to_numpy(self, tensor: Any) -> np.ndarray:
        """The numbers in the dtype in which they are stored; still mapped, not read."""
        tensor = tensor.detach()
        if tensor.dtype == self.torch.bfloat16:  # NumPy has none of its own
            return tensor.view(self.torch.int16).numpy().view(np.dtype(jnp.bfloat16))
        return tensor.numpy()

    def _is_dense(self, value: Any) -> bool:
        return self.torch.is_tensor(value) and value.layout == self.torch.strided


class TorchSource:
    """The tensors of ``pytorch_model.bin``, or of the shards that its index lists.

    Raises CheckpointError as :class:`TorchFiles`, for a tensor that occurs twice, and for a dtype that no weight has.
    """

    def __init__(self, directory: Path) -> None:
        self._files = TorchFiles(BIN)
        self._paths: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in [directory / BIN] if is_file(directory / BIN) else indexed(directory, BIN_INDEX):
            for name, tensor in self._files.load(path).items():
                if name.endswith(IGNORED):
                    continue
                if name in self._paths:
                    raise CheckpointError(f"{name!r} is in {self.where(name)} and in {path.name}; expected once.")
                self._files.check_dtype(name, path, tensor)
                self._paths[name], self.shapes[name] = path, tuple(tensor.shape)

    def where(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._paths[name].name

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of these names, each with its own, in the dtype in which they are stored."""
        loaded: tuple[Path | None, dict[str, Any]] = (None, {})
        for name in names:
            if loaded[0] != self._paths[name]:
                loaded = self._paths[name], self._files.load(self._paths[name])
            yield name, np.array(self._files.to_numpy(loaded[1][name]))  # a copy: the file is not kept mapped


def is_torch(directory: Path) -> bool:
    """Whether ``directory`` holds PyTorch's files under Hugging Face's names."""
    return is_file(directory / BIN) or is_file(directory / BIN_INDEX)


def _import_torch(what: str) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise CheckpointError(f"{what} is read by PyTorch, which is not installed; {_INSTALL}.") from None
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < _OLDEST_TORCH:
        raise CheckpointError(
            f"torch {torch.__version__} can be made to run code by a checkpoint (CVE-2025-32434); use 2.6 or newer: "
            f"{_INSTALL}."
        )
    return torch
