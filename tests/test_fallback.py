"""On a CPU-only machine that flash_cpu serves, with nothing optional installed: what runs for each request, and why."""

import dataclasses
import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite import backends
from attnsuite.backends import masks
from attnsuite.backends.contract import AttentionSpec
from declared import sized

pytestmark = pytest.mark.fallback

OPTIONAL = ("kvax", "triton", "jax_triton", "torch", "transformers", "libtpu")

LONG = sized(2048, N=8, is_causal=True)
DECODE = AttentionSpec(batch=1, query_length=1, key_value_length=8192, num_heads=8, num_kv_heads=2, head_dim=64)
MASKED = sized(64, has_mask=True)
DILATED = dataclasses.replace(LONG, mask_function=masks.Dilated(2))
KINDS = jnp.asarray(np.arange(2**17, dtype=np.int32) % 3)  # more than a kernel holds
LOOKED_UP = dataclasses.replace(LONG, mask_function=masks.Where(lambda q, k: KINDS[q] == KINDS[k]))
WIDE = dataclasses.replace(LONG, dtype="float64")

# (request, spec) -> (what runs, its mode, words that the reasons must contain)
EXPECTED = [
    ("auto", LONG, "flash_cpu", "native", ()),
    ("auto", DECODE, "flash_cpu", "native", ()),
    ("auto", MASKED, "flash_cpu", "native", ()),
    ("auto", DILATED, "flash_cpu", "native", ()),
    ("auto", LOOKED_UP, "chunked", "native", ("flash_cpu:", "mask_function", "holds an array int32[131072]")),
    ("standard", LONG, "standard", "native", ()),
    ("chunked", LONG, "chunked", "native", ()),
    ("chunked", WIDE, "standard", "fallback", ("chunked:", "float64", "flash_cpu:")),
    ("cudnn", LONG, "flash_cpu", "fallback", ("cudnn:", "NVIDIA GPUs")),
    ("cudnn", LOOKED_UP, "chunked", "fallback", ("cudnn:", "NVIDIA GPUs", "flash_cpu:", "mask_function")),
]


@pytest.fixture(scope="module")
def here():
    target = backends.Target.here()
    assert target.platform == "cpu", f"these claims are about a CPU-only machine; this one computes on {target}"
    return target


def test_no_optional_package_is_needed_or_present():
    present = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    assert present == []


@pytest.mark.parametrize(("request_", "spec", "runs", "mode", "words"), EXPECTED)
def test_what_runs_for_a_request_and_why(here, request_, spec, runs, mode, words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolution = backends.resolve(request_, spec, here)
    assert (resolution.backend.name, resolution.mode) == (runs, mode)
    given = " ".join(resolution.reasons)
    for word in words:
        assert word in given
    assert bool(resolution.rejections) == bool(words)
    fallbacks = [w for w in caught if w.category is backends.BackendFallbackWarning]
    assert len(fallbacks) == (1 if mode == "fallback" else 0)
    for warning in fallbacks:
        assert all(reason in str(warning.message) for reason in resolution.reasons)


@pytest.mark.parametrize("name", backends.names())
def test_every_request_computes_the_same_attention(here, name):
    key = jax.random.key(0)
    q, k, v = (jax.random.normal(x, (1, 160, 4, 32)) for x in jax.random.split(key, 3))
    expected = backends.attention(q, k, v, is_causal=True, backend="standard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", backends.BackendFallbackWarning)
        out = backends.attention(q, k, v, is_causal=True, backend=name)
    assert jnp.abs(out - expected).max() < 1e-5
