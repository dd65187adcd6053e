"""Layers of every type in one model, through every backend that takes them.

The types themselves are held against plain NumPy in ``test_forward.py``, through ``standard``; here the other backends
are held against ``standard``. Which types a backend refuses is in the table that ``tests/suite/test_support.py`` holds.
"""

import os
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import BackendFallbackWarning, resolve
from attnsuite.backends.kvax import availability
from attnsuite.models import ModelConfig, Transformer
from landing import swept

pytestmark = pytest.mark.splash

LENGTH = 40
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SIZES |= {"window_size": 7, "chunk_size": 16}
SIZES |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
# Kascade that approximates nothing.
KEEP_ALL = {"top_k": 1.0, "min_keys": 64, "granularity": "tile", "tile_size": 16, "query_tile": 16}
TOLERANCE = 1e-5  # of the largest logit
# What each backend takes, and how it is asked on this machine.
ALL = ("global", "sliding", "chunked", "full", "latent")
TAKES = {
    "chunked": (ALL, {"backend_options": {"block_q": 16, "block_kv": 16}}),
    "splash": (ALL, {"mode": "interpret"}),
    "kvax": (("global", "full", "latent"), {"mode": "interpret"}),
    "kascade": (("global", "latent"), {"backend_options": KEEP_ALL}),
    "pallas_flash": (("global", "full"), {"mode": "interpret"}),
}
FORWARD_ONLY = ("kascade", "pallas_flash")
HALF = ("pallas_flash",)  # takes no float32


def model_of(types, **overrides):
    """A model whose attention is far from uniform: with small queries a test sees no mask."""
    model = Transformer(ModelConfig.from_preset("debug", **SIZES, num_layers=len(types), attention=types))
    params = model.arrays()
    for layer in params["layers"]:
        layer["q_proj"] = 8.0 * layer["q_proj"]
    return Transformer(model.config.replace(**overrides), params)


def tokens_for(length=LENGTH):
    return np.random.default_rng(5).integers(0, 256, (2, length))


def asked(backend):
    if backend == "kvax" and (reasons := availability.missing("interpret")):
        must = os.environ.get("ATTNSUITE_REQUIRE_KVAX")  # set by tox -e kvax
        (pytest.fail if must else pytest.skip)(" ".join(reasons))
    types, call = TAKES[backend]
    return types, {"backend": backend, "on_unavailable": "raise", **call}


def distance(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert np.ptp(expected) > 0.5, "flat logits would hide a mistake"
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("backend", swept(TAKES, ("splash", "kvax", "kascade")))
def test_a_model_of_every_type_that_a_backend_takes_gives_what_standard_gives(backend):
    types, call = asked(backend)
    model, tolerance = model_of(types), TOLERANCE
    expected = model(tokens_for(), backend="standard")
    if backend in HALF:  # twice as far as standard is in that dtype
        model = model.with_config(dtype="bfloat16")
        tolerance = 2 * distance(model(tokens_for(), backend="standard"), expected)
    got = model(tokens_for(), needs_grad=backend not in FORWARD_ONLY, **call)
    assert distance(got, expected) <= tolerance


# How each decodes is in its conformance suite, and how a model decodes in test_cache.py; a selection is handed on here.
@pytest.mark.parametrize("backend", swept([name for name in TAKES if name != "pallas_flash"], ["kascade"]))
def test_it_decodes_from_a_cache_to_the_same_logits(backend):
    types, call = asked(backend)
    model = model_of(tuple(kind for kind in types if kind != "full"))
    tokens, ahead = tokens_for(), LENGTH - 3
    expected = model(tokens, backend="standard")[:, ahead - 1 :]
    logits, cache = model.prefill(tokens[:, :ahead], model.new_cache(2, 64), last_only=True, backend="standard")
    got = [logits]
    for step in range(ahead, LENGTH):
        logits, cache = model.decode(tokens[:, step], cache, **call)
        got.append(logits)
    assert distance(jnp.stack(got, axis=1), expected) <= TOLERANCE


def test_layers_of_a_refused_type_fall_back_and_the_others_do_not():
    model = model_of(("global", "sliding", "latent"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendFallbackWarning)
        found = model.resolutions(2, LENGTH, needs_grad=False, backend="kascade")
    assert {kind: resolution.backend.name for kind, resolution in found.items()} == {
        "global": "kascade",
        "sliding": resolve("auto", found["sliding"].spec).backend.name,
        "latent": "kascade",
    }
