"""Large checkpoints for tests that measure memory."""

import jax
import numpy as np
import pytest

from models import ModelConfig
from models.parameters import checkpoint_names, parameter_shapes
from models.weights import _write


def layer_bytes(config: ModelConfig) -> int:
    """Bytes of one layer in half precision."""
    return 2 * (config.replace(num_layers=2).num_parameters - config.replace(num_layers=1).num_parameters)


@pytest.fixture
def noise_checkpoint(tmp_path):
    """Writes a checkpoint of slices of one block of noise, cheap to make; gives its directory and bytes per layer."""

    def write(config):
        shapes = jax.tree.leaves(parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
        places = dict(zip(jax.tree.leaves(checkpoint_names(config)), shapes, strict=True))
        largest = max(int(np.prod(shape)) for shape in shapes)
        noise = (np.random.default_rng(0).standard_normal(largest, np.float32) * 0.02).astype(config.param_dtype)

        def read(names):
            return ((name, noise[: int(np.prod(places[name]))].reshape(places[name])) for name in names)

        _write(tmp_path / "noise", config, read, chunked=False)
        return tmp_path / "noise", layer_bytes(config)

    return write
