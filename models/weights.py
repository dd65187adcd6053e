"""Checkpoints on disk: safetensors with Hugging Face's names, beside a ``config.json``.

Reads one file or the shards that ``model.safetensors.index.json`` lists, one tensor at a time from a memory
map. Every tensor that the configuration needs must be there in its shape, and no other: a checkpoint that
does not fit is refused with a sentence that names the tensor. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from models.config import ModelConfig
from models.huggingface import from_hf, to_hf
from models.parameters import checkpoint_names, parameter_shapes
from models.transformer import Transformer

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SHIPPED = "tiny-bytes"


def load(directory: str | Path, **overrides: Any) -> Transformer:
    """The model in ``directory``. ``overrides`` replace fields of its configuration.

    Parameters are kept in the dtype that config.json names (override ``param_dtype``), and computed with
    in the same (override ``dtype``). Raises ValueError, in a sentence, for a directory, configuration or
    tensor that is missing, unreadable, unexpected or of the wrong shape.
    """
    directory = Path(directory)
    config = from_hf(_read_json(directory / CONFIG)).replace(**overrides)
    names, shapes = checkpoint_names(config), parameter_shapes(config)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    wanted = dict(zip(jax.tree.leaves(names), jax.tree.leaves(shapes, is_leaf=is_shape), strict=True))
    tensors = _read_tensors(_shards(directory), wanted, config)
    return Transformer(config, jax.tree.map(lambda name: tensors[name], names))


def load_shipped(**overrides: Any) -> Transformer:
    """The trained byte-level checkpoint in this package (see its README.md); ``overrides`` as in :func:`load`.

    >>> load_shipped().config.vocab_size
    256
    """
    with resources.as_file(resources.files("models") / "checkpoints" / SHIPPED) as directory:
        return load(directory, **overrides)


def save(model: Transformer, directory: str | Path) -> None:
    """Write ``model.safetensors`` and ``config.json``, making the directory. Tied embeddings are written once."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    names = jax.tree.leaves(checkpoint_names(model.config))
    tensors = dict(zip(names, jax.tree.leaves(model.arrays()), strict=True))
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(to_hf(model.config), indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error.strerror}); a checkpoint is a directory with {CONFIG} and {WEIGHTS}."
        ) from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(  # noqa: TRY004  (the content of a file is wrong, not the type of an argument)
            f"{str(path)!r} holds a {type(content).__name__}; expected a JSON object."
        )
    return content


def _shards(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        raise ValueError(f"{str(directory)!r} holds neither {WEIGHTS} nor {INDEX}; only safetensors are read.")
    mapping = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(mapping, dict):
        raise ValueError(f"{INDEX} in {str(directory)!r} has no weight_map.")  # noqa: TRY004  (as above)
    shards = sorted(set(mapping.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{INDEX} in {str(directory)!r} names {shard!r}; shards lie beside it, without a path.")
    return [directory / shard for shard in shards]


def _read_tensors(shards: list[Path], wanted: dict[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    tied_head: Array | None = None
    for shard in shards:
        try:
            with safe_open(shard, framework="flax") as file:  # "numpy" cannot read bfloat16
                for name in file.keys():  # noqa: SIM118  (a safe_open is no mapping)
                    if name.endswith("rotary_emb.inv_freq"):  # old checkpoints carry what the config says anyway
                        continue
                    if name == "lm_head.weight" and config.tie_embeddings:
                        tied_head = file.get_tensor(name)
                        continue
                    if name not in wanted:
                        raise ValueError(f"{shard.name} holds {name!r}, which this configuration has no place for.")
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != wanted[name]:
                        raise ValueError(f"{name!r} in {shard.name} has shape {shape}; expected {wanted[name]}.")
                    tensors[name] = jnp.asarray(file.get_tensor(name), config.param_dtype)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{str(shard)!r} cannot be read as safetensors: {error}.") from error
    missing = [name for name in wanted if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"the checkpoint lacks {missing[0]!r}{more}, which its configuration needs.")
    embedding = "model.embed_tokens.weight"
    if tied_head is not None and not np.array_equal(tensors[embedding], tied_head.astype(config.param_dtype)):
        raise ValueError(f"config.json ties the embeddings, but 'lm_head.weight' differs from {embedding!r}.")
    return tensors
