"""Layer by layer: the numbers of the whole model, in the memory of one layer."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import ModelConfig, Transformer, load_shipped, open_checkpoint, save, streamed_nats
from attnsuite.models.loss import token_nats
from attnsuite.models.text import load_text, windows
from landing import swept
from script import printed

CONFIGS = {
    "llama": ModelConfig.from_preset("debug", num_kv_heads=1, num_layers=3),
    "untied-mixed": ModelConfig.from_preset(
        "debug", tie_embeddings=False, num_layers=4, attention=("global", "sliding") * 2, window_size=3, qkv_bias=True
    ),
    "latent": ModelConfig.from_preset(
        "debug",
        num_layers=4,
        attention=("global", "latent") * 2,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=14,
    ),
    "layernorm": ModelConfig.from_preset("debug", use_rope=False, use_rmsnorm=False, use_swiglu=False, max_length=64),
}
TOKENS = np.random.default_rng(0).integers(0, 256, (3, 17))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", swept(CONFIGS, ("untied-mixed",)))
def test_streamed_layers_give_the_loss_of_the_whole_model(name, batch, tmp_path):
    model = Transformer(CONFIGS[name])
    save(model, tmp_path)
    expected = token_nats(model(TOKENS[:, :-1], backend="standard"), jnp.asarray(TOKENS[:, 1:]))
    got = streamed_nats(open_checkpoint(tmp_path), TOKENS, batch=batch, backend="standard")
    assert got.shape == (3, 16)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_more_tokens_than_learned_positions_are_refused(tmp_path):
    save(Transformer(ModelConfig.from_preset("debug", use_rope=False, max_length=8)), tmp_path)
    with pytest.raises(ValueError, match="length=16 is more than the 8 positions that this model has learned"):
        streamed_nats(open_checkpoint(tmp_path), TOKENS)


def test_keyword_beside_resolutions_that_a_call_does_not_have_is_refused(tmp_path):
    model = Transformer(CONFIGS["layernorm"])
    save(model, tmp_path)
    found = tuple(model.resolutions(1, 16, needs_grad=False, backend="standard").items())
    with pytest.raises(TypeError, match="unexpected keyword argument 'bakend'"):
        streamed_nats(open_checkpoint(tmp_path), TOKENS, resolutions=found, bakend="chunked")
    with pytest.raises(ValueError, match="resolutions and backend_options are both given"):
        streamed_nats(open_checkpoint(tmp_path), TOKENS, resolutions=found, backend_options={})


@pytest.mark.thorough
def test_streaming_notices_a_layer_that_is_not_its_own(tmp_path):
    shipped = load_shipped()
    params = shipped.arrays()
    save(Transformer(shipped.config, {**params, "layers": params["layers"][::-1]}), tmp_path)
    rows = windows(load_text().held_out, 128)[:4]
    right = streamed_nats(open_checkpoint(save_to(tmp_path / "right", shipped)), rows).mean()
    assert right < 1.8 < streamed_nats(open_checkpoint(tmp_path), rows).mean()


def save_to(directory, model):
    save(model, directory)
    return directory


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tokens": [1, 2]}, r"tokens is int64\[2\]; expected integers \[batch, length\], not empty"),
        ({"tokens": [[1]]}, "expected integers"),
        ({"tokens": [[1, 256]]}, "tokens reach from 1 to 256; this model has tokens 0 to 255"),
        ({"tokens": [[1, 2]], "batch": 0}, "batch=0 must be an integer of at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, sentence, tmp_path):
    save(Transformer(ModelConfig.from_preset("debug")), tmp_path)
    with pytest.raises(ValueError, match=sentence):
        streamed_nats(open_checkpoint(tmp_path), **arguments)


STREAM = """
import sys, numpy as np
from attnsuite import models
from attnsuite.suite.measure.memory import high_water, mark_baseline
tokens = np.random.default_rng(0).integers(0, 256, (1, 17))
first = mark_baseline()
for source in sys.argv[1:]:
    mark_baseline()
    nats = models.streamed_nats(models.open_checkpoint(source), tokens, backend="standard")
    print(high_water(first), nats.mean())
"""


@pytest.mark.thorough
def test_streaming_takes_no_more_memory_for_more_layers(two_depths):
    """The same of loading is seen by the test of convert."""
    sources, layer = two_depths
    shallow, _, deep, nats = map(float, printed(STREAM, *sources).split())
    assert shallow > layer
    assert deep - shallow < 1.5 * layer, (shallow / layer, deep / layer)  # of three layers more
    assert 1 < nats < 30
