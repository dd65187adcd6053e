"""What a model loses when each query attends to few keys: Kascade, its controls, and other ways to choose keys."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from msgspec import Meta

from attnsuite.backends.kascade import GREEDY_RULES

from ...errors import InputError
from ...flag_values import is_whole, parts_of
from ...typed import Count, Seed
from ..kind import Kernel, Keys, Layers, Least, Long, Share, check_fields, name_case
from .methods import settings_of

Steps = Annotated[int, Meta(ge=0, le=10**6)]
SelectionKind = Literal["kascade_text", "kascade_retrieval", "kascade_gate"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionCase:
    """What a model loses when each query attends to few keys: one row per way to choose them.

    ``kascade_text`` runs a byte-level model on held-out text, ``kascade_retrieval`` the constructed checkpoint with
    needles at every distance, ``kascade_gate`` the same with controls that have to fail. In all rows layer 0 is dense;
    every other layer attends to the local region and to the share ``top_k`` of the earlier keys (in ``omnikv`` and
    ``lessismore`` the layers that reuse; those that select are dense). ``phase`` is "prefill"
    (the whole sequence) or "decode" (the last tokens, one by one, behind a densely filled cache). ``anchors`` is a
    number of layers for ``schedule`` "dp" and a list ("0,2") for "manual"; the greedy rules use
    ``threshold`` and ``max_reuse_dist``. ``calibration`` is a file that ``attnsuite calibrate`` wrote for the model of
    a ``kascade_text`` case; without one the case calibrates on other text than it measures. With ``training_steps``
    every row is first trained by so many updates with its own attention, dense too. Raises InputError for a field that
    does not fit.
    """

    kind: SelectionKind
    name: str = ""
    model: str = "text"
    phase: Literal["prefill", "decode"] = "prefill"
    sequence: Long = 512
    sequences: Least = 12
    top_k: Share = 0.125
    min_keys: Keys = 0
    granularity: Literal["tile", "token"] = "tile"
    tile_size: Count = 16
    schedule: Literal["dp", "greedy", "greedy-guide", "greedy-dynamic", "greedy-benchmark", "manual"] = "dp"
    anchors: str = ""
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.65
    max_reuse_dist: Layers = 4
    calibration: str = ""
    kernel: Kernel = ""
    training_steps: Steps = 0
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        parts = [self.kind.replace("_", "-"), self.phase, f"s{self.sequence}", f"k{self.top_k:g}"]
        parts += [self.granularity] if self.granularity != "tile" else []
        parts += [f"n{self.training_steps}"] if self.training_steps else []
        name_case(self, "-".join([*parts, f"t{self.tile_size}"]))
        anchor_layers(self)
        settings_of(self)
        if self.calibration and self.kind != "kascade_text":
            raise InputError(f"case {self.name}: calibration is about the model of a kascade_text case; leave it out.")
        if self.training_steps and (self.kind, self.phase) != ("kascade_text", "prefill"):
            raise InputError(
                f"case {self.name}: training_steps is for kascade_text cases of phase prefill; leave it out."
            )


def anchor_layers(case: SelectionCase) -> tuple[int, ...]:
    """The numbers in ``anchors``: one for "dp" (default 2), the layers for "manual". Raises InputError."""
    numbers = parts_of(case.anchors)
    if case.schedule in GREEDY_RULES and numbers:
        raise InputError(
            f"case {case.name}: anchors = {case.anchors!r} has no place in a greedy schedule; leave it out."
        )
    if case.schedule == "dp" and not numbers:
        numbers = ["2"]
    whole = all(map(is_whole, numbers))
    if not whole or (case.schedule == "dp" and (len(numbers) != 1 or int(numbers[0]) < 1)):
        raise InputError(
            f"case {case.name}: anchors = {case.anchors!r} must be one number of layers for schedule dp, "
            "and layers separated by commas for schedule manual."
        )
    if case.schedule == "manual" and not numbers:
        raise InputError(f"case {case.name}: schedule manual needs anchors, such as 0,2.")
    return tuple(map(int, numbers))
