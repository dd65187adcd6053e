"""The role of each layer (select or reuse), its anchor and its head map: from a calibration or by hand.

``dp`` is the paper's dynamic programming over head-remapped similarity (arXiv 2512.16391, section 3). ``greedy`` walks
the layers and starts a new anchor if the similarity to the current one falls below a threshold or the anchor is too
far. Three more greedy rules are those of guides to an earlier port (github.com/amitsrivastava78/maxtext, d42f5bfa).
``manual`` takes the anchors as given.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from .layer_statistics import Calibration

Role = Literal["dense", "anchor", "reuse"]
Similarity = Literal["mass", "jaccard"]

LOSS_RULE = "greedy-loss"
_NAME = re.compile(r"_layers_(\d+(?:_\d+)*)\.npy")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GreedyRule:
    """What a greedy rule compares, and how it counts a distance.

    ``compared_to``: the layer whose similarity to the present one is held against the threshold, the current anchor or
    the layer before. ``counts_anchor``: whether the anchor counts in ``max_reuse_dist``. A distance of 4 then ends at
    the third reuse layer, otherwise at the fourth. ``layer_1_selects``: whether layer 1 is an anchor whatever its
    similarity to the dense layer 0.
    """

    similarity: Similarity = "mass"
    compared_to: Literal["anchor", "previous"] = "anchor"
    counts_anchor: bool = False
    layer_1_selects: bool = False


GREEDY_RULES = {
    "greedy": GreedyRule(),
    # generate_kascade_schedule in the guides' text: similarity to an anchor, distance <= max_reuse_dist.
    "greedy-guide": GreedyRule(similarity="jaccard"),
    # generate_dynamic_schedule in test_tiny_llama.py, which the Llama-3.1-8B guide calls.
    "greedy-dynamic": GreedyRule(similarity="jaccard", compared_to="previous", counts_anchor=True),
    # generate_optimized_schedule in benchmark_kascade_final.py, which printed the guides' layer table.
    "greedy-benchmark": GreedyRule(
        similarity="jaccard", compared_to="previous", counts_anchor=True, layer_1_selects=True
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRole:
    """The role of one layer.

    ``dense``: full attention, and emits its selection. ``anchor``: selects, and attends to its selection. ``reuse``:
    attends, in its own keys and values, to the selection of layer ``anchor``; its KV head ``h`` takes that of the
    anchor's KV head ``head_map[h]``. In the other roles ``anchor`` is the layer itself, and the head map the identity.
    ``similarity`` (0 to 1) is the calibration's similarity to the anchor, None if it is not known.
    """

    role: Role
    anchor: int
    head_map: tuple[int, ...] = ()
    similarity: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One role per layer, hashable. Raises ValueError where a reuse layer does not follow the anchor it names.

    ``method`` says how it was made. An empty head map is the identity.

    >>> print(manual((0, 2), num_layers=4, kv_heads=2).table())
      layer  role      anchor  similarity    head map
    -------  ------  --------  ------------  ----------
          0  dense          0                0 1
          1  reuse          0                0 1
          2  anchor         2                0 1
          3  reuse          2                0 1
    """

    layers: tuple[LayerRole, ...]
    method: str = "manual"

    def __post_init__(self) -> None:
        latest = None
        for i, layer in enumerate(self.layers):
            if layer.role not in get_args(Role):
                raise ValueError(f"layer {i} has role={layer.role!r}; use one of {', '.join(get_args(Role))}.")
            if layer.role != "reuse":
                latest = i
            if layer.anchor != latest:
                raise ValueError(
                    f"layer {i} ({layer.role}) names layer {layer.anchor} as its anchor; "
                    f"the latest layer that selects is {latest}, and only its selection is handed on."
                )

    @property
    def anchors(self) -> tuple[int, ...]:
        """The layers that select, the dense ones included."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.role != "reuse")

    def table(self) -> str:
        """The schedule as text: layer, role, anchor, similarity, head map."""
        from tabulate import tabulate  # noqa: PLC0415  (only where something is printed)

        rows = [
            (i, x.role, x.anchor, "" if x.similarity is None else f"{x.similarity:.3f}", " ".join(map(str, x.head_map)))
            for i, x in enumerate(self.layers)
        ]
        return tabulate(rows, headers=["layer", "role", "anchor", "similarity", "head map"], disable_numparse=[3, 4])


def manual(
    anchors: Sequence[int], *, num_layers: int, kv_heads: int, calibration: Calibration | None = None
) -> Schedule:
    """Layers ``anchors`` select (0 among them: dense); each other layer reuses the latest anchor. Raises ValueError.

    Head maps and similarities are those of ``calibration``; without one the maps are the identity.
    """
    chosen = tuple(sorted(set(anchors)))
    if not chosen or chosen[0] != 0 or chosen[-1] >= num_layers:
        raise ValueError(
            f"anchors={tuple(anchors)} must be layers from 0 to {num_layers - 1}, and layer 0 must be one of them."
        )
    if calibration is not None and (calibration.num_layers, calibration.kv_heads) != (num_layers, kv_heads):
        raise ValueError(
            f"the calibration has {calibration.num_layers} layers of {calibration.kv_heads} KV heads; "
            f"expected {num_layers} of {kv_heads}."
        )
    return _from_anchors(chosen, num_layers, kv_heads, calibration, "mass", "manual")


def dynamic_programming(calibration: Calibration, anchors: int) -> Schedule:
    """The paper's schedule: ``anchors`` layers (0 among them) with the largest importance-weighted similarity.

    Maximises the sum over layers b of ``importance[b]`` times the similarity of b to its anchor
    (:func:`layer_similarity`), which is 1 for an anchor itself. Raises ValueError for a number of anchors that the
    model cannot have.
    """
    count = calibration.num_layers
    _check_number(anchors, count)
    gain = calibration.importance[None] * layer_similarity(calibration.mass_similarity)
    # best[m, a]: the largest sum over layers before a, with m anchors, the m-th of which... is followed by anchor a.
    served = np.cumsum(gain, axis=1)  # of anchor a, up to and including layer b

    def sum_of(a: int, until: int) -> float:
        return float(served[a, until - 1] - (served[a, a - 1] if a else 0.0))

    best = np.full((anchors + 1, count), -np.inf)
    before = np.zeros((anchors + 1, count), int)
    best[1, 0] = 0.0
    for m in range(2, anchors + 1):
        for a in range(m - 1, count):
            sums = [best[m - 1, p] + sum_of(p, a) for p in range(a)]
            before[m, a] = int(np.argmax(sums))
            best[m, a] = sums[before[m, a]]
    totals = [best[anchors, a] + sum_of(a, count) for a in range(count)]
    chosen = [int(np.argmax(totals))]
    for m in range(anchors, 1, -1):
        chosen.append(int(before[m, chosen[-1]]))
    return _from_anchors(tuple(reversed(chosen)), count, calibration.kv_heads, calibration, "mass", "dp")


def greedy(
    calibration: Calibration,
    *,
    threshold: float = 0.65,
    max_reuse_dist: int = 4,
    similarity: Similarity | None = None,
    rule: str = "greedy",
) -> Schedule:
    """Reuse an anchor while the similarity is at least ``threshold`` and the anchor at most ``max_reuse_dist`` back.

    Layer 0 is dense. ``rule`` names one of :data:`GREEDY_RULES`, which says what is compared and how distance counts.
    ``similarity="jaccard"`` compares the selected sets, ``"mass"`` the attention that they keep (default: the rule's).
    Raises ValueError.
    """
    if rule not in GREEDY_RULES:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(GREEDY_RULES)}.")
    chosen = (
        GREEDY_RULES[rule] if similarity is None else dataclasses.replace(GREEDY_RULES[rule], similarity=similarity)
    )
    if chosen.similarity not in get_args(Similarity):
        raise ValueError(f"similarity={similarity!r} must be one of {', '.join(get_args(Similarity))}.")
    between = layer_similarity(_by_heads(calibration, chosen.similarity))
    anchors = greedy_anchors(between, chosen, threshold=threshold, max_reuse_dist=max_reuse_dist)
    count, kv_heads = calibration.num_layers, calibration.kv_heads
    return _from_anchors(anchors, count, kv_heads, calibration, chosen.similarity, rule)


def greedy_anchors(
    between: Float[np.ndarray, "layers layers"],
    rule: GreedyRule = GREEDY_RULES["greedy"],
    *,
    threshold: float = 0.65,
    max_reuse_dist: int = 4,
) -> tuple[int, ...]:
    """The layers that select, 0 among them; ``between[a, b]`` is the similarity of layer b to layer a before it.

    Raises ValueError for a threshold or a distance out of range.

    >>> alike = np.ones((7, 7))
    >>> greedy_anchors(alike)
    (0, 5)
    >>> greedy_anchors(alike, GREEDY_RULES["greedy-benchmark"])
    (0, 1, 5)
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold!r} must be from 0 to 1.")
    if max_reuse_dist < 1:
        raise ValueError(f"max_reuse_dist={max_reuse_dist!r} must be at least 1.")
    farthest = max_reuse_dist - 1 if rule.counts_anchor else max_reuse_dist
    anchors = [0, 1] if rule.layer_1_selects and len(between) > 1 else [0]
    for layer in range(len(anchors), len(between)):
        compared = anchors[-1] if rule.compared_to == "anchor" else layer - 1
        if layer - anchors[-1] > farthest or between[compared, layer] < threshold:
            anchors.append(layer)
    return tuple(anchors)


def greedy_by_loss(
    calibration: Calibration, anchors: int, losses: Callable[[Sequence[Schedule]], Sequence[float]]
) -> Schedule:
    """IndexCache's search (arXiv 2603.12201): at first every layer selects, then one more reuses in each round.

    That layer is the one with which the loss is the lowest, until ``anchors`` layers select, layer 0 (dense) among
    them. A tie goes to the earlier layer. ``losses`` gives the loss of each schedule of a round. Head maps are the
    calibration's. Raises ValueError for a number of anchors that the model cannot have, and for a loss that is not
    finite.
    """
    count, kv_heads = calibration.num_layers, calibration.kv_heads
    _check_number(anchors, count)
    found = _from_anchors(tuple(range(count)), count, kv_heads, calibration, "mass", LOSS_RULE)
    while len(found.anchors) > anchors:
        left = [tuple(a for a in found.anchors if a != layer) for layer in found.anchors[1:]]
        round_ = [_from_anchors(chosen, count, kv_heads, calibration, "mass", LOSS_RULE) for chosen in left]
        measured = np.asarray(losses(round_), np.float64)
        if not np.isfinite(measured).all():
            raise ValueError(f"the losses {measured.tolist()} are not finite, so that no schedule can be chosen.")
        found = round_[int(measured.argmin())]
    return found


def layer_similarity(by_heads: np.ndarray) -> np.ndarray:
    """``[anchor, layer]``: the best over the anchor's KV heads, mean over the layer's; 1 on the diagonal.

    ``by_heads [anchor, layer, anchor head, layer head]``.
    """
    between = by_heads.max(axis=2).mean(axis=-1)
    np.fill_diagonal(between, 1.0)
    return between


def _check_number(anchors: object, num_layers: int) -> None:
    if not isinstance(anchors, int | np.integer) or not 1 <= anchors <= num_layers:
        raise ValueError(f"anchors={anchors!r} must be an integer from 1 to {num_layers}, the number of layers.")


def _by_heads(calibration: Calibration, similarity: Similarity) -> np.ndarray:
    return calibration.mass_similarity if similarity == "mass" else calibration.jaccard_similarity


def _from_anchors(
    anchors: tuple[int, ...],
    num_layers: int,
    kv_heads: int,
    calibration: Calibration | None,
    similarity: Similarity,
    method: str,
) -> Schedule:
    layers = []
    for b in range(num_layers):
        role = _role(range(kv_heads), b, anchors)
        if role.role == "reuse" and calibration is not None:
            between = _by_heads(calibration, similarity)[role.anchor, b]
            # A tie goes to the head of the same number; where attention is flat, all heads are equal.
            head_map = tuple(int(h) for h in (between + 1e-6 * np.eye(kv_heads)).argmax(axis=0))
            role = LayerRole("reuse", role.anchor, head_map, float(between.max(axis=0).mean()))
        layers.append(role)
    return Schedule(tuple(layers), method)


def published_schedule(path: str | Path) -> Schedule:
    """The schedule in a file of the head maps that Kascade's authors publish. Raises ValueError for any other file.

    They are in github.com/microsoft/kascade, results/head_mappings. A file is a NumPy array, int32 ``[layers, KV
    heads]``. Its name ends in ``_layers_`` and the anchors, joined by ``_``: ``Qwen3-8B_layers_0_2_7_14_23.npy``. Entry
    ``[b, h]`` is the KV head of layer b's anchor whose selection head h of layer b takes. The row of an anchor is the
    identity. The anchor of a layer is the latest one at or before it. Nothing is unpickled.
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


def _role(head_map: Iterable[int], layer: int, anchors: tuple[int, ...]) -> LayerRole:
    """The role of a layer under these anchors, with a head map."""
    anchor = max(each for each in anchors if each <= layer)
    role = "reuse" if anchor < layer else "anchor" if layer else "dense"
    return LayerRole(role, anchor, tuple(head_map))
