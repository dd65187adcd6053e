import math

import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import RopeScaling
from attnsuite.models.rope import angles, inverse_frequencies, rotate

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


def test_the_scaling_matters_at_the_lengths_tested():
    plain, scaled = inverse_frequencies(64, 5e5), inverse_frequencies(64, 5e5, SCALING)
    assert (scaled < 0.9 * plain).sum() > 10
    assert (scaled == plain).sum() >= 3


def test_rotation_is_multiplication_by_a_unit_complex_number():
    x = np.random.default_rng(0).normal(size=(2, 7, 3, 16)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4, 5, 6], [5, 9, 100, 101, 0, 0, 3]])
    frequencies = inverse_frequencies(16, 10000.0)
    got = rotate(jnp.asarray(x), *angles(jnp.asarray(positions), frequencies))
    turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * positions[:, :, None, None] * frequencies.astype(np.float64))
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=2e-5)


def test_scores_depend_on_distances_only():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 32)).astype(np.float32)

    def score(at_query, at_key):
        frequencies = inverse_frequencies(32, 10000.0)
        turned = [rotate(x, *angles(jnp.array([[at]]), frequencies)) for x, at in ((q, at_query), (k, at_key))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)
