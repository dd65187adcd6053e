"""Large checkpoints for tests that measure memory."""

import pytest

from models import ModelConfig, write_random


def layer_bytes(config: ModelConfig) -> int:
    """Bytes of one layer in half precision."""
    return 2 * (config.replace(num_layers=2).num_parameters - config.replace(num_layers=1).num_parameters)


@pytest.fixture
def noise_checkpoint(tmp_path):
    """Writes a checkpoint of random weights; gives its directory and bytes per layer."""

    def write(config):
        write_random(config, tmp_path / "noise")
        return tmp_path / "noise", layer_bytes(config)

    return write
