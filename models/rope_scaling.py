"""Ways to stretch RoPE beyond the length that a model was trained with: one frozen dataclass each.

Each has :meth:`stretched`, which returns the changed frequencies, and ``attention_factor``, by which cosines and sines
are multiplied (1.0 in all but YaRN). The rules are those of transformers' ``modeling_rope_utils.py``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from .checks import require_positive_int, require_positive_real


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of slow RoPE frequencies (arXiv 2407.21783, section 3.4.1).

    Wavelengths above ``original_max_length / low_freq_factor`` are stretched by ``factor``, those below
    ``original_max_length / high_freq_factor`` stay, and those between are blended. Raises ValueError.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check(self, "factor", "low_freq_factor", "high_freq_factor")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}."
            )

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The frequencies ``[head_dim / 2]`` after stretching; ``theta`` is RoPE's base."""
        wavelengths = 2 * math.pi / frequencies
        keep = (self.original_max_length / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        keep = np.clip(keep, 0.0, 1.0)  # 1: short wavelength, unchanged; 0: long one, stretched by the whole factor
        return frequencies * (keep + (1.0 - keep) / self.factor)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by ``factor``: position interpolation (arXiv 2306.15595). Raises ValueError."""

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check(self, "factor")

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The frequencies ``[head_dim / 2]`` after stretching; ``theta`` is RoPE's base."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """A base that grows with the document once it is longer than ``original_max_length`` ("dynamic NTK").

    A document of ``length`` tokens has the base ``theta * (factor * length / original_max_length - factor + 1) **
    (head_dim / (head_dim - 2))``. A key in a cache keeps the rotation of the length at which it was written, as in
    transformers: stepwise and one-pass logits therefore differ beyond ``original_max_length``. Raises ValueError.
    """

    factor: float
    original_max_length: int
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check(self, "factor")

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The frequencies of a document that is not longer than ``original_max_length``: unchanged."""
        return frequencies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): fast frequencies stay, slow ones are divided by ``factor``, and a ramp lies between.

    ``beta_fast`` and ``beta_slow`` are the turns within ``original_max_length`` at which the ramp begins and ends;
    ``truncate`` rounds its ends to whole pairs. Cosines and sines are multiplied by ``attention_factor``; None means
    ``0.1 * ln(factor) + 1``, or a quotient of two such terms where ``mscale`` and ``mscale_all_dim`` are given
    (DeepSeek). After construction it is a number. Raises ValueError.
    """

    factor: float
    original_max_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        given = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if getattr(self, name) is not None]
        _check(self, "factor", "beta_fast", "beta_slow", *given)
        if not isinstance(self.truncate, bool):
            raise ValueError(f"rope_scaling.truncate={self.truncate!r} must be True or False.")  # noqa: TRY004
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"rope_scaling.beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}.")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("rope_scaling.mscale and mscale_all_dim are used together; give both or neither.")
        if self.mscale is not None and self.attention_factor is None:
            factor = self._scale(self.mscale) / self._scale(self.mscale_all_dim or 1.0)
            object.__setattr__(self, "attention_factor", factor)
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", self._scale(1.0))

    def _scale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The frequencies ``[head_dim / 2]`` after stretching; ``theta`` is RoPE's base."""
        pairs = len(frequencies)
        low, high = (self._pair_of(turns, 2 * pairs, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = high - low or 0.001  # 0.001: transformers' value for an empty ramp
        stretch = np.clip((np.arange(pairs) - low) / width, 0.0, 1.0)
        return frequencies * (stretch / self.factor + 1.0 - stretch)

    def _pair_of(self, turns: float, head_dim: int, theta: float) -> float:
        """The pair, as a real number, that makes ``turns`` turns within ``original_max_length``."""
        return head_dim * math.log(self.original_max_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


AnyScaling = RopeScaling | LinearScaling | DynamicScaling | YarnScaling


def _check(scaling: Any, *names: str) -> None:
    for name in names:
        require_positive_real(f"rope_scaling.{name}", getattr(scaling, name))
    if hasattr(scaling, "original_max_length"):
        length = require_positive_int("rope_scaling.original_max_length", scaling.original_max_length)
        object.__setattr__(scaling, "original_max_length", length)
