"""A checkpoint on disk, read layer by layer: Hugging Face's safetensors or Meta's ``.pth``, with one interface.

Opening checks names, shapes and dtypes (and a head that should equal the embeddings). A checkpoint that does not fit
its configuration is refused with a sentence that names the tensor. A layer is read when it is asked for, in the
requested dtype; keys and values keep their number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .checked_json import CheckpointError, is_file, read_json
from .config import ModelConfig
from .fused import FusedSource, pieces_of
from .huggingface import from_hf
from .huggingface_keys import CONFIG
from .meta import MetaSource, is_meta
from .parameters import Params, checkpoint_names, stored_shapes
from .shards import ShardedSource, check_fit, is_finite

T = TypeVar("T")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Source(Protocol):
    """The tensors of a checkpoint's files, under Hugging Face's names whoever wrote the files."""

    shapes: dict[str, tuple[int, ...]]

    def where(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        ...

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """The tensors of these names in any order, each with its own name, in memory that nobody else changes."""
        ...


class Checkpoint:
    """The result of :func:`open_checkpoint`: the configuration, and the parameters on request."""

    def __init__(self, config: ModelConfig, source: Source) -> None:
        self.config = config
        self._source = source
        self._names = checkpoint_names(config)
        self._check()

    def outer(self, *names: str) -> Params:
        """The parameters outside of the layers (embeddings, last norm, head), or those of them that are named."""
        tree = {name: stored for name, stored in self._names.items() if name != "layers"}
        return self._read({name: tree[name] for name in names or tree})

    def layer(self, index: int) -> Params:
        """The parameters of one layer. Raises CheckpointError for an index that is none, and as :meth:`tensors`."""
        if not isinstance(index, int) or not 0 <= index < self.config.num_layers:
            raise CheckpointError(
                f"layer {index!r} does not exist; this checkpoint has layers 0 to {self.config.num_layers - 1}."
            )
        return self._read(self._names["layers"][index])

    def params(self) -> Params:
        """All parameters, read layer by layer."""
        return {**self.outer(), "layers": [self.layer(i) for i in range(self.config.num_layers)]}

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Tensors by the names that a checkpoint uses, one at a time, in ``param_dtype`` and on the host.

        Raises CheckpointError for a tensor that holds NaN or infinity, or values beyond the range of that dtype.
        """
        for name, value in self._source.read(names):
            with np.errstate(over="ignore"):  # what overflows is refused by name
                cast = np.asarray(value).astype(self.config.param_dtype, copy=False)
            yield name, self._finite(name, value, cast)

    def leaves(self) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of :meth:`params`, one at a time with its path, in the order of the tree."""
        for path, stored in jax.tree_util.tree_leaves_with_path(self._names):
            ((_, value),) = self.tensors([stored])
            yield jax.tree_util.keystr(path), value

    def _read(self, names: dict[str, str]) -> Params:
        ours = {stored: name for name, stored in names.items()}
        read = self._source.read(list(ours))
        dtype = self.config.param_dtype
        return {ours[stored]: self._finite(stored, value, jnp.asarray(value, dtype)) for stored, value in read}

    def _finite(self, name: str, stored: Any, cast: T) -> T:
        if is_finite(cast):
            return cast
        where = f"{name!r} in {self._source.where(name)}"
        if is_finite(stored):
            raise CheckpointError(
                f"{where} holds values beyond the range of {self.config.param_dtype}; read it as float32 or bfloat16."
            )
        raise CheckpointError(f"{where} holds NaN or infinity; whatever is computed with it has no meaning.")

    def _check(self) -> None:
        """Raise CheckpointError where a tensor does not fit, or a head is not the embeddings that it is tied to."""
        found = dict(self._source.shapes)
        is_tied = self.config.tie_embeddings and found.pop(_HEAD, None) is not None
        check_fit(stored_shapes(self.config), found, self._source.where)
        if not is_tied:
            return
        (_, head), (_, embedding) = sorted(self._source.read([_HEAD, _EMBEDDING]), key=lambda item: item[0])
        if not np.array_equal(np.asarray(head), np.asarray(embedding)):
            raise CheckpointError(f"config.json ties the embeddings, but {_HEAD!r} differs from {_EMBEDDING!r}.")


def read_config(directory: str | Path, **overrides: Any) -> ModelConfig:
    """The configuration of the checkpoint in ``directory``; errors and ``overrides`` as :func:`open_checkpoint`.

    Of Hugging Face's form only ``config.json`` is read; Meta's says its sizes in its weights.
    """
    directory = Path(directory)
    if _is_only_meta(directory):
        return open_checkpoint(directory, **overrides).config
    return from_hf(read_json(directory / CONFIG)).replace(**overrides)


def open_checkpoint(directory: str | Path, **overrides: Any) -> Checkpoint:
    """The checkpoint in ``directory``; ``overrides`` replace fields of its configuration.

    Parameters are given in the dtype that the checkpoint names (override ``param_dtype``), and computed with
    in the same (override ``dtype``). Raises CheckpointError, in a sentence, for a directory, configuration or
    tensor that is missing, unreadable, unexpected, or of the wrong shape or dtype (values are looked at when they are
    read), and ValueError for ``overrides`` that do not fit.
    """
    directory = Path(directory)
    if _is_only_meta(directory):
        source = MetaSource(directory, overrides.get("rope_scaling", "preset"))
        return Checkpoint(source.config.replace(**overrides), source)
    fields = read_json(directory / CONFIG)
    config = from_hf(fields)
    source: Source = ShardedSource(directory)
    pieces = pieces_of(fields["model_type"], config)  # read_fields has seen that the type is there
    if pieces:
        source = FusedSource(source, pieces)
    return Checkpoint(config.replace(**overrides), source)


def _is_only_meta(directory: Path) -> bool:
    return not is_file(directory / CONFIG) and is_meta(directory)
