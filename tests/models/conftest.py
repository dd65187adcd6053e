"""Checkpoints of one shape and two depths, for tests that memory does not grow with the number of layers."""

import pytest

from attnsuite.models import ModelConfig, write_random
from attnsuite.models.parameters import count_parameters

# Layers of half the width of Llama 3.2 1B, 28 MiB each in bfloat16, and a small vocabulary.
SHAPE = ModelConfig.from_preset("llama-3.2-1b", vocab_size=512, hidden_size=1024, intermediate_size=4096)
DEPTHS = (2, 5)


@pytest.fixture(scope="session")
def two_depths(tmp_path_factory):
    """Directories of a shallow and a deep checkpoint, and the bytes of a layer."""
    folder = tmp_path_factory.mktemp("depths")
    for depth in DEPTHS:
        write_random(SHAPE.replace(num_layers=depth), folder / str(depth))
    counts = [count_parameters(SHAPE.replace(num_layers=depth)) for depth in (1, 2)]
    return [folder / str(depth) for depth in DEPTHS], 2 * (counts[1] - counts[0])
