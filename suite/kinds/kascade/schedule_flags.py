"""The flags for Kascade's schedule: checked before any file is read, then turned into a schedule."""

from __future__ import annotations

import dataclasses

from attnsuite.backends.kascade import (
    GREEDY_RULES,
    LOSS_RULE,
    Calibration,
    Schedule,
    dynamic_programming,
    greedy,
    manual,
)

from ...errors import InputError, as_input
from ...flag_values import is_whole, parts_of, spelled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFlags:
    """``schedule`` is dp, a greedy rule, greedy-loss or manual.

    ``anchors`` is a number of layers (dp, greedy-loss), a list (manual), or empty.
    """

    schedule: str = "dp"
    anchors: str = ""
    threshold: float = 0.65
    max_reuse_dist: int = 4

    def check(self, num_layers: int, kv_heads: int) -> None:
        """Raise InputError for flags that fit no model of these sizes."""
        numbers = self._numbers()
        limits = [
            field.name
            for field in dataclasses.fields(self)
            if field.name in ("threshold", "max_reuse_dist") and getattr(self, field.name) != field.default
        ]
        if limits and self.schedule in ("dp", LOSS_RULE, "manual"):
            raise InputError(
                f"{spelled(limits, ' and ')} has no place in schedule {self.schedule}; leave it out, or give "
                f"--schedule {' or --schedule '.join(GREEDY_RULES)}."
            )
        if self.schedule == "manual":
            with as_input("--"):
                manual(numbers, num_layers=num_layers, kv_heads=kv_heads)
        elif self.schedule in GREEDY_RULES:
            if numbers:
                raise InputError(f"--anchors {self.anchors!r} has no place in a greedy schedule; leave it out.")
            if not 0 <= self.threshold <= 1 or self.max_reuse_dist < 1:
                raise InputError(
                    f"--threshold {self.threshold:g} must be from 0 to 1, and --max-reuse-dist "
                    f"{self.max_reuse_dist} at least 1."
                )
        elif self.schedule not in ("dp", LOSS_RULE):
            known = ", ".join(("dp", *GREEDY_RULES, LOSS_RULE, "manual"))
            raise InputError(f"--schedule {self.schedule!r} must be one of {known}.")
        elif len(numbers) > 1 or (numbers and not 1 <= numbers[0] <= num_layers):
            raise InputError(
                f"--anchors {self.anchors!r} must be one number from 1 to {num_layers} for schedule {self.schedule}."
            )

    def made(self, calibration: Calibration) -> Schedule:
        """The schedule that follows from a calibration."""
        numbers, layers = self._numbers(), calibration.num_layers
        if self.schedule in GREEDY_RULES:
            limits = {"threshold": self.threshold, "max_reuse_dist": self.max_reuse_dist}
            return greedy(calibration, **limits, rule=self.schedule)
        if self.schedule == "manual":
            return manual(numbers, num_layers=layers, kv_heads=calibration.kv_heads, calibration=calibration)
        if self.schedule == LOSS_RULE:
            raise InputError(
                f"--schedule {LOSS_RULE} is chosen by attnsuite calibrate, which has the text; give the layers that it "
                "printed, such as --schedule manual --anchors 0,2."
            )
        return dynamic_programming(calibration, self.number_of_anchors(layers))

    def number_of_anchors(self, num_layers: int) -> int:
        """How many layers select, for dp and greedy-loss."""
        numbers = self._numbers()
        # The paper's 3 to 8 anchors are for 16 to 32 layers; a quarter of them, and at least two.
        return numbers[0] if numbers else min(max(2, num_layers // 4), num_layers)

    def uncalibrated(self, num_layers: int, kv_heads: int) -> Schedule:
        """The schedule without a calibration: a manual one, in which each head reuses the head of its own number."""
        if self.schedule != "manual":
            raise InputError(f"--schedule {self.schedule} is made from a calibration; give --calibration FILE.")
        return manual(self._numbers(), num_layers=num_layers, kv_heads=kv_heads)

    def _numbers(self) -> tuple[int, ...]:
        parts = parts_of(self.anchors)
        if not all(map(is_whole, parts)):
            raise InputError(f"--anchors {self.anchors!r} must be a number of layers, or layers separated by commas.")
        return tuple(map(int, parts))
