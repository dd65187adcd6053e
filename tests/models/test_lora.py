"""Adapters: they start as nothing, leave the base alone, merge into the same function and unmerge bit for bit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.flax import load_file, save_file

from attnsuite.models import CheckpointError, ModelConfig, Transformer, lora
from attnsuite.models.forward_pass import forward
from attnsuite.models.planning import resolve_attention
from attnsuite.models.training import Batch, loss_and_gradient

CONFIG = ModelConfig.from_preset(
    "debug", hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, max_length=32
)
ALL = lora.LoraConfig(rank=4, alpha=8.0, targets=lora.PROJECTIONS)
TOKENS = np.random.default_rng(0).integers(0, 256, (1, 2, 16)).astype(np.int32)
RESOLUTIONS = resolve_attention(CONFIG, batch=2, query_length=16, backend="standard")


@pytest.fixture(scope="module")
def base():
    return Transformer(CONFIG).arrays()


@pytest.fixture(scope="module")
def trained(base):
    """Adapters of every projection after three steps, with the losses and the first gradient."""
    gradient = jax.jit(loss_and_gradient(CONFIG, RESOLUTIONS))
    update = optax.sgd(0.5)
    adapters = lora.initialise(CONFIG, ALL, jax.random.key(0))
    state, losses, first = update.init(adapters), [], None
    for _ in range(3):
        loss, gradients = gradient(adapters, Batch(TOKENS), base)
        change, state = update.update(gradients, state)
        adapters = optax.apply_updates(adapters, change)
        losses.append(float(loss))
        first = gradients if first is None else first
    return adapters, losses, first


@jax.jit
def logits(params):
    return forward(CONFIG, params, TOKENS[0], resolutions=RESOLUTIONS)


def test_fresh_adapters_change_nothing(base):
    fresh = lora.initialise(CONFIG, ALL, jax.random.key(0))
    assert jnp.allclose(logits(lora.attach(base, fresh)), logits(base), rtol=0, atol=1e-6)
    assert not any(np.any(layer[name].matrix()) for layer in fresh for name in lora.PROJECTIONS)


def test_every_projection_learns(trained):
    adapters, losses, first = trained
    assert losses[-1] < losses[0] - 0.01
    for layer in first:
        assert set(layer) == set(lora.PROJECTIONS)
        assert all(np.any(adapter.b) for adapter in layer.values())
        assert not any(np.any(adapter.a) for adapter in layer.values())  # B is zero at first
    assert all(adapter.scale == 2.0 for layer in adapters for adapter in layer.values())


def test_merged_model_is_the_adapted_one_and_the_base_is_untouched(base, trained):
    copy = jax.tree.map(np.array, base)
    merged = lora.merge(base, trained[0])
    adapted, plain = logits(lora.attach(base, trained[0])), logits(base)
    error = float(jnp.abs(logits(merged.params) - adapted).max())
    assert error < 1e-4 * float(jnp.abs(adapted - plain).max())
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, copy, base)))
    # The update is alpha / rank times BA, and half of it is another model.
    halved = jax.tree.map(lambda x: x, trained[0])
    halved = tuple({n: dataclasses.replace(a, scale=a.scale / 2) for n, a in layer.items()} for layer in halved)
    assert float(jnp.abs(logits(lora.merge(base, halved).params) - adapted).max()) > 1000 * error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unmerging_gives_back_every_bit_which_subtracting_does_not(base, trained, dtype):
    base = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(dtype)), base)
    merged = lora.merge(base, trained[0])
    params, adapters = lora.unmerge(merged)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, base)))
    assert adapters is trained[0]
    name = "q_proj"
    weight, adapter = merged.params["layers"][0][name], trained[0][0][name]
    assert weight.dtype == jnp.dtype(dtype)
    subtracted = (weight.astype(jnp.float32) - adapter.matrix()).astype(dtype)
    assert not bool((subtracted == base["layers"][0][name]).all())


def test_saved_adapters_come_back_bit_for_bit_under_the_names_of_peft(trained, tmp_path):
    lora.save(trained[0], ALL, tmp_path, base="tiny")
    again, config = lora.load(tmp_path, CONFIG)
    assert config == ALL
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, again, trained[0])))
    tensors = load_file(tmp_path / lora.WEIGHTS)
    assert tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"].shape == (4, 32)
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (32, 4)
    assert json.loads((tmp_path / lora.CONFIG).read_text())["lora_alpha"] == 8.0


@pytest.fixture
def saved(trained, tmp_path):
    lora.save(trained[0], ALL, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' in adapter_config.json is not supported; only 'LORA' is"),
        ({"use_dora": True}, "use_dora=true in adapter_config.json is not supported; only false is"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=a table in"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"eva_config": {"rho": 2.0}}, "has 'eva_config' .a table., which is not known here"),
        ({"target_modules": "all-linear"}, "target_modules in adapter_config.json is not accepted: expected `array`"),
        ({"target_modules": None}, "adapter_config.json lacks target_modules"),
        ({"lora_alpha": "16"}, "lora_alpha in adapter_config.json is not accepted"),
        ({"r": 10**9}, "has shape .4, 48.; expected"),
        ({"r": 0}, "rank=0 must be an integer of at least 1"),
        ({"r": 5}, "has shape .4, 48.; expected .5, 48."),
        ({"target_modules": ["q_proj"]}, "holds 'base_model.model.model.layers.0.mlp.down_proj"),
    ],
    ids=str,
)
def test_adapters_that_are_something_else_are_refused(saved, change, expected):
    config = json.loads((saved / lora.CONFIG).read_text()) | change
    (saved / lora.CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=expected):
        lora.load(saved, CONFIG)


B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda x: {B: x.astype(jnp.int8)},
            f"'{B}' in {lora.WEIGHTS} is stored as I8; weights are read from F32, BF16",
        ),
        (lambda x: {B: x.at[0, 0].set(jnp.inf)}, f"'{B}' in {lora.WEIGHTS} holds NaN or infinity"),
        (lambda _: {}, f"lacks '{B}"),
    ],
    ids=["int8", "infinity", "nothing"],
)
def test_adapters_that_are_no_weights_are_refused_by_name(saved, change, expected):
    tensors = load_file(saved / lora.WEIGHTS)
    save_file(tensors | change(jnp.asarray(tensors.pop(B))), saved / lora.WEIGHTS)
    with pytest.raises(CheckpointError, match=expected):
        lora.load(saved, CONFIG)


@pytest.mark.parametrize("file", [lora.WEIGHTS, lora.CONFIG])
def test_adapters_that_cannot_be_read_are_refused(saved, file):
    (saved / file).write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=f"{file}.* (cannot be read|is not valid)"):
        lora.load(saved, CONFIG)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: lora.LoraConfig(targets=()), "must name one or more of q_proj"),
        (lambda: lora.LoraConfig(targets=("q_proj", "q_proj")), "each once"),
        (
            lambda: lora.initialise(CONFIG.replace(use_swiglu=False), ALL, jax.random.key(0)),
            "'gate_proj', which this model lacks; it has q_proj",
        ),
    ],
)
def test_impossible_settings_are_refused(call, expected):
    with pytest.raises(ValueError, match=expected):
        call()


@pytest.mark.parametrize("use", [lora.attach, lora.merge])
def test_adapters_of_another_model_are_refused(base, trained, use):
    adapters, (first, second) = trained[0], trained[0]
    with pytest.raises(ValueError, match="the adapters are for 1 layers, and the model has 2"):
        use(base, adapters[:1])
    with pytest.raises(ValueError, match=r"'gate' in layer 1 is for a matrix .48, 32., and the model has None"):
        use(base, (first, {"gate": second["gate_proj"]}))  # the forward pass would leave it out
    with pytest.raises(ValueError, match=r"'q_proj' in layer 0 is for a matrix .16, 32., and the model has .32, 32."):
        use(base, (first | {"q_proj": first["k_proj"]}, second))


def test_adapters_are_not_saved_with_settings_that_would_scale_them_anew(trained, tmp_path):
    with pytest.raises(ValueError, match=r"_proj' in layer 0 has .rank, alpha / rank. .4, 2.0., and LoraConfig"):
        lora.save(trained[0], dataclasses.replace(ALL, alpha=16.0), tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


def test_layers_without_a_projection_get_no_adapter_for_it(tmp_path):
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
    mixed = CONFIG.replace(attention=("latent", "global"), **sizes)
    adapters = lora.initialise(mixed, lora.LoraConfig(targets=("k_proj", "o_proj")), jax.random.key(0))
    assert [set(layer) for layer in adapters] == [{"o_proj"}, {"k_proj", "o_proj"}]
    lora.save(adapters, lora.LoraConfig(targets=("k_proj", "o_proj")), tmp_path)
    assert [set(layer) for layer in lora.load(tmp_path, mixed)[0]] == [set(layer) for layer in adapters]
    with pytest.raises(ValueError, match="'k_proj', which this model lacks; it has q_proj, o_proj"):
        lora.initialise(mixed.replace(attention="latent"), ALL, jax.random.key(0))


@pytest.mark.parametrize("use", [lora.attach, lora.merge, lambda params, _: Transformer(CONFIG, params)])
def test_a_model_with_adapters_beside_its_arrays_gets_them_neither_twice_nor_unmerged(base, trained, use):
    with pytest.raises(ValueError, match=r"has (LoRA )?adapters"):
        use(lora.attach(base, trained[0]), trained[0])
