"""The head maps that Kascade's authors publish, as a schedule (github.com/microsoft/kascade, results/head_mappings).

A file is a NumPy array, int32 ``[layers, KV heads]``. Its name ends in ``_layers_`` and the anchors, joined by ``_``:
``Qwen3-8B_layers_0_2_7_14_23.npy``. Entry ``[b, h]`` is the KV head of layer b's anchor whose selection head h of layer
b takes. The row of an anchor is the identity. The anchor of a layer is the latest one at or before it.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from .schedule import LayerRole, Schedule

_NAME = re.compile(r"_layers_(\d+(?:_\d+)*)\.npy")


def published_schedule(path: str | Path) -> Schedule:
    """The schedule in a file of the authors' form. Raises ValueError, with a sentence, for any other file.

    Nothing is unpickled. The anchors are those of the file's name, so that the file must keep it.
    """
    path = Path(path)
    match = _NAME.search(path.name)
    if match is None or match.end() != len(path.name):
        raise ValueError(
            f"{path.name} does not end in _layers_A_B_....npy with the anchors, as Kascade's authors name a head map; "
            "give the file under its own name."
        )
    anchors = tuple(map(int, match[1].split("_")))
    try:
        with path.open("rb") as file:
            maps = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a NumPy array: {error}.") from error
    if maps.ndim != 2 or 0 in maps.shape or not np.issubdtype(maps.dtype, np.integer):
        raise ValueError(f"{path.name} is {maps.dtype}{list(maps.shape)}; expected integers [layers, KV heads].")
    layers, heads = maps.shape
    if anchors[0] != 0 or list(anchors) != sorted(set(anchors)) or anchors[-1] >= layers:
        raise ValueError(
            f"{path.name} names the anchors {', '.join(map(str, anchors))}; expected layers from 0 to {layers - 1} in "
            "ascending order, with layer 0 first."
        )
    if maps.min() < 0 or maps.max() >= heads:
        raise ValueError(f"{path.name} holds {maps.min()} to {maps.max()}; a KV head is from 0 to {heads - 1}.")
    for anchor in anchors:
        if maps[anchor].tolist() != list(range(heads)):
            raise ValueError(f"{path.name}: layer {anchor} is an anchor, but its head map is not the identity.")
    return Schedule(tuple(_role(maps[layer].tolist(), layer, anchors) for layer in range(layers)), "published")


def _role(head_map: list[int], layer: int, anchors: tuple[int, ...]) -> LayerRole:
    anchor = max(each for each in anchors if each <= layer)
    role = "reuse" if anchor < layer else "anchor" if layer else "dense"
    return LayerRole(role, anchor, tuple(head_map))
