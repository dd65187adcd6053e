"""Statistics of one model, from which a schedule is made: similarity of layers, importance, mass kept.

``models.kascade.calibration.calibrate`` computes them; this module holds, saves (safetensors and JSON side by
side) and loads them. The fingerprint ties a calibration to its model and settings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

_FORMAT = 1
_ARRAYS = ("importance", "mass_similarity", "jaccard_similarity", "mass")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """Statistics of one model over some text, float32.

    - ``importance [layers]``: 1 - cos(x, x + attention output), mean over tokens.
    - ``mass_similarity [anchor, layer, anchor KV head, layer KV head]``: the attention that the layer's head keeps with
      the anchor's selection, relative to that with its own (both with the local region); least over query tiles, mean
      over prompts; zero where the anchor is not before the layer.
    - ``jaccard_similarity``, same shape: overlap of the two selected sets over their union, mean over the tiles that
      had a choice, then over prompts.
    - ``mass [layers, KV heads, query tiles]``: share of the pooled attention mass in the layer's own selection and
      local region, mean over the prompts that are long enough.
    - ``settings``: how keys were selected (tiles, top_k, ...). ``text``: the source of the prompts.
    - ``fingerprint``: of the model; see ``models.kascade.calibration``.
    """

    importance: Float[np.ndarray, " layers"]
    mass_similarity: Float[np.ndarray, "anchor layer anchor_head head"]
    jaccard_similarity: Float[np.ndarray, "anchor layer anchor_head head"]
    mass: Float[np.ndarray, "layers kv_heads query_tiles"]
    settings: dict[str, Any]
    text: dict[str, Any]
    fingerprint: str

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.mass_similarity.shape[0]

    @property
    def kv_heads(self) -> int:
        """KV heads of each layer."""
        return self.mass_similarity.shape[2]

    def save(self, path: str | Path) -> Path:
        """Write the :func:`calibration_files` of ``path``; returns the first.

        Each file is written whole or not at all. Raises OSError.
        """
        path, beside = calibration_files(path)
        about = {"format": _FORMAT, "fingerprint": self.fingerprint, "settings": self.settings, "text": self.text}
        contents = {
            path: save({name: np.ascontiguousarray(getattr(self, name), np.float32) for name in _ARRAYS}),
            beside: (json.dumps(about, indent=2, sort_keys=True) + "\n").encode(),
        }
        for file, content in contents.items():
            partial = file.with_name(f"{file.name}.partial")
            partial.write_bytes(content)
            partial.replace(file)
        return path


def calibration_files(path: str | Path) -> tuple[Path, Path]:
    """The two files of a calibration: ``path``, which ends in ``.safetensors``, and the ``.json`` beside it."""
    return Path(path).with_suffix(".safetensors"), Path(path).with_suffix(".json")


def load_calibration(path: str | Path) -> Calibration:
    """Read the files of :meth:`Calibration.save`. Raises ValueError, with a sentence, for anything else.

    This function does not know the model; ``models.kascade.calibration.load`` also checks that the calibration
    belongs to it.
    """
    path, beside = calibration_files(path)
    try:
        about = msgspec.json.decode(beside.read_bytes(), type=_About)
        with safe_open(path, framework="numpy") as file:
            stored = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
            arrays = {name: file.get_tensor(name) for name, dtype in stored.items() if dtype == "F32"}
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(
            f"{path} (with its .json beside it) cannot be read as a calibration: {error}; make one with "
            "attnsuite calibrate."
        ) from error
    shapes = {name: array.shape for name, array in arrays.items()}
    if about.format != _FORMAT or set(stored) != set(_ARRAYS) or not _fit(shapes):
        raise ValueError(
            f"{path} is not a calibration of format {_FORMAT} (format {about.format}, float32 arrays {shapes}); make "
            "one with attnsuite calibrate."
        )
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ValueError(f"{path} holds NaN or infinity; make one with attnsuite calibrate.")
    return Calibration(**arrays, settings=about.settings, text=about.text, fingerprint=about.fingerprint)


class _About(msgspec.Struct, forbid_unknown_fields=True):
    """The .json beside the arrays."""

    format: int
    fingerprint: str
    settings: dict[str, Any]
    text: dict[str, Any]


def _fit(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether all arrays are there and of one number of layers and KV heads."""
    similarity, mass = shapes.get("mass_similarity", ()), shapes.get("mass", ())
    if len(similarity) != 4 or len(mass) != 3:
        return False
    layers, heads = similarity[1:3]
    return (
        0 not in similarity
        and similarity == shapes.get("jaccard_similarity") == (layers, layers, heads, heads)
        and shapes.get("importance") == (layers,)
        and mass[:2] == (layers, heads)
    )
