import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Target, adaptive, adaptive_flash_attention, get_flash_attention_config, registry
from attnsuite.backends.registry import BUILT_IN
from drawn import draw


def qkv(T=24, S=24):
    return draw(2, T, 4, 16), draw(2, S, 2, 16, seed=1), draw(2, S, 2, 16, seed=2)


@pytest.mark.parametrize(("platform", "expected"), [("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu"), ("cpu", "cpu")])
def test_device_type_is_jaxs_name(platform, expected, monkeypatch):
    monkeypatch.setattr(adaptive.Target, "here", lambda: Target(platform))
    assert get_flash_attention_config().device_type == expected


def test_approximate_backend_is_no_flash_kernel(monkeypatch):
    left = {name: BUILT_IN[name] for name in ("standard", "chunked", "kascade")}
    monkeypatch.setattr(registry, "DEFAULT", registry.Registry(left))
    assert not get_flash_attention_config().supported


def test_config_reads_as_the_mapping_that_its_users_know():
    config = get_flash_attention_config()
    assert config["kvax_available"] is config.kvax_available
    assert config["device_type"] == config.device_type
    assert config["flash_attention_supported"] is config.supported
    assert config["device_info"] == str(jax.devices()[0])
    assert "forward_params" not in config
    assert config.get("forward_params") is None
    assert dict(config) == config
    with pytest.raises(KeyError):
        config["supports"]  # an attribute of the class is no key either
    with pytest.raises(KeyError):
        config["supported"]


@pytest.mark.foreign_numerics
@pytest.mark.parametrize("use_flash_attention", [True, False])
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"causal": False}], ids=str)
def test_gives_what_jax_gives(use_flash_attention, asked):
    ours = adaptive_flash_attention(*qkv(), **asked, use_flash_attention=use_flash_attention)
    theirs = jax.nn.dot_product_attention(*qkv(), is_causal=asked.get("causal", True))
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize(
    "scale", [1.0 / jnp.sqrt(16), np.float32(0.25), np.array(0.25), 0.25], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("use_flash_attention", [True, False])
def test_scale_may_be_a_concrete_scalar_array(scale, use_flash_attention):
    ours = adaptive_flash_attention(*qkv(), scale=scale, use_flash_attention=use_flash_attention)
    np.testing.assert_array_equal(ours, adaptive_flash_attention(*qkv(), use_flash_attention=use_flash_attention))


def test_traced_scale_is_refused_with_what_to_give():
    with pytest.raises(ValueError, match=r"scale is traced .* give a Python float such as head_dim \*\* -0.5"):
        jax.jit(lambda q, k, v: adaptive_flash_attention(q, k, v, scale=1.0 / jnp.sqrt(16)))(*qkv())


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (jnp.ones((2,)), r"scale has shape \(2,\); expected one number"),
        (jnp.ones((), bool), "scale=True must be a finite"),
    ],
)
def test_array_that_is_no_scale_is_refused(scale, message):
    with pytest.raises(ValueError, match=message):
        adaptive_flash_attention(*qkv(), scale=scale)


@pytest.mark.parametrize("use_flash_attention", [True, False])
def test_padding_is_neither_seen_nor_computed(use_flash_attention):
    query, key, value = qkv()
    real = jnp.arange(24)[None, :] < jnp.array([[24], [9]])
    out = adaptive_flash_attention(query, key, value, padding_mask=real, use_flash_attention=use_flash_attention)
    alone = adaptive_flash_attention(query[1:, :9], key[1:, :9], value[1:, :9], use_flash_attention=use_flash_attention)
    np.testing.assert_allclose(out[1:, :9], alone, atol=2e-6)
    assert not np.asarray(out[1, 9:]).any()


def test_padding_mask_of_the_keys_alone_where_lengths_differ():
    query, key, value = qkv(T=5)
    real = jnp.arange(24)[None, :] < jnp.array([[24], [9]])
    out = adaptive_flash_attention(query, key, value, causal=False, padding_mask=real)
    alone = adaptive_flash_attention(query[1:], key[1:, :9], value[1:, :9], causal=False)
    np.testing.assert_allclose(out[1:], alone, atol=2e-6)
