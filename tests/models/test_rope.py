import math

import numpy as np
import pytest

from attnsuite.models import RopeScaling
from attnsuite.models.rope import inverse_frequencies

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=64)


def frequencies_by_the_book(head_dim, theta, scaling):
    """transformers' llama3 rule, one frequency at a time."""
    out = []
    for i in range(0, head_dim, 2):
        frequency = 1.0 / theta ** (i / head_dim)
        if scaling is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > scaling.original_max_length / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength >= scaling.original_max_length / scaling.high_freq_factor:
                smooth = (scaling.original_max_length / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        out.append(frequency)
    return np.array(out)


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["plain", "llama3"])
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10000.0), (64, 500000.0)])
def test_frequencies_are_those_of_transformers(head_dim, theta, scaling):
    expected = frequencies_by_the_book(head_dim, theta, scaling)
    np.testing.assert_allclose(inverse_frequencies(head_dim, theta, scaling), expected, rtol=1e-6)
