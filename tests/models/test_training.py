"""The training step: parts add up to the whole, packed documents to each alone, and memory policies change nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnsuite.models import ModelConfig, Transformer
from attnsuite.models.forward_pass import forward
from attnsuite.models.optimizer import make_optimizer
from attnsuite.models.planning import resolve_attention
from attnsuite.models.training import Batch, compiled_step, loss_and_gradient, training_step
from landing import swept

CONFIG = ModelConfig.from_preset(
    "debug", hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, max_length=32
)
LENGTH = 24
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 256, (1, 4, LENGTH)).astype(np.int32)
# Documents of 10 and 14 tokens; the last row is mostly padding, so that the parts of a batch count differently.
SEGMENTS = np.repeat(np.array([[0, 1]]), [10, 14], axis=1)[None].repeat(4, axis=1).astype(np.int32)
SEGMENTS[0, 3, 5:] = -1
PACKED = Batch(TOKENS, SEGMENTS)


def gradient_of(config=CONFIG, *, rows=4, packed=True, **options):
    resolutions = resolve_attention(config, batch=rows, query_length=LENGTH, packed=packed, backend="standard")
    return jax.jit(loss_and_gradient(config, resolutions, **options))


def close(left, right, tolerance=1e-5):
    """Whether two trees agree to within ``tolerance`` of the largest entry of each leaf."""
    agree = jax.tree.map(lambda a, b: bool(np.abs(np.subtract(a, b)).max() <= tolerance * np.abs(b).max()), left, right)
    return all(jax.tree.leaves(agree))


@pytest.fixture(scope="module")
def params():
    return Transformer(CONFIG).arrays()


@pytest.fixture(scope="module")
def gradient_of_whole():
    return gradient_of()


@pytest.fixture(scope="module")
def whole(params, gradient_of_whole):
    return gradient_of_whole(params, PACKED, None)


def test_accumulated_parts_give_the_update_of_the_whole_batch(params, whole):
    by_part = gradient_of(rows=2)
    parts = jax.tree.map(lambda x: x.reshape(2, 2, LENGTH), PACKED)
    loss, gradients = by_part(params, parts, None)
    assert float(loss) == pytest.approx(float(whole[0]), rel=1e-6)
    assert close(gradients, whole[1])
    # The mean of the parts' means is another number where padding is uneven: the check can fail.
    # A part given twice has its own mean, and the program of two parts.
    (_, first), (_, second) = (
        by_part(params, Batch(parts.tokens[[at, at]], parts.segment_ids[[at, at]]), None) for at in (0, 1)
    )
    mean = jax.tree.map(lambda a, b: np.add(a, b) / 2, first, second)
    assert not close(mean, whole[1], 1e-3)


def test_packed_documents_train_as_each_would_alone(params, gradient_of_whole, whole):
    counts, losses, gradients = [], [], []
    for begin, end in ((0, 10), (10, 24)):  # each document at the front of a row of its own
        tokens, segments = np.zeros_like(TOKENS), np.full_like(SEGMENTS, -1)
        tokens[..., : end - begin] = TOKENS[..., begin:end]
        segments[..., : end - begin] = np.where(SEGMENTS[..., begin:end] < 0, -1, 0)
        loss, gradient = gradient_of_whole(params, Batch(tokens, segments), None)
        counts.append(int(((segments[..., 1:] == 0) & (segments[..., :-1] == 0)).sum()))
        losses.append(loss)
        gradients.append(gradient)
    shares = np.array(counts) / sum(counts)
    assert float(np.dot(shares, losses)) == pytest.approx(float(whole[0]), rel=1e-6)
    assert close(jax.tree.map(lambda a, b: np.average([a, b], 0, shares), *gradients), whole[1])
    # One document of the same tokens is something else.
    one = Batch(TOKENS, np.where(SEGMENTS < 0, -1, 0).astype(np.int32))
    assert abs(float(gradient_of_whole(params, one, None)[0] - whole[0])) > 1e-4


def test_each_policy_computes_more_again_and_none_changes_the_gradient(params, whole):
    products = []
    for policy in ("none", "dots", "layer"):
        gradient = gradient_of(remat=policy)
        products.append(str(gradient.trace(params, PACKED, None).jaxpr).count("dot_general"))
        if policy != "none":
            loss, gradients = gradient(params, PACKED, None)
            assert float(loss) == pytest.approx(float(whole[0]), rel=1e-6)
            assert close(gradients, whole[1], 1e-6)
    assert products[0] < products[1] < products[2]


def test_a_gate_keeps_only_its_inputs_and_its_output_for_the_gradient(params):
    found = resolve_attention(CONFIG, batch=4, query_length=LENGTH, backend="standard")
    kept = jax.eval_shape(lambda p: jax.vjp(lambda q: forward(CONFIG, q, TOKENS[0], resolutions=found), p)[1], params)
    assert [x.shape for x in jax.tree.leaves(kept)].count((4, LENGTH, CONFIG.intermediate_size)) == 3


def test_only_a_cpu_computes_cosines_in_a_loop_and_slopes_of_projections_behind_barriers(params):
    traced = gradient_of().trace(params, PACKED, None)
    cpu, tpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu"))
    projections = sum(name.endswith("_proj") for name in params["layers"][0])
    assert cpu.count("optimization_barrier") - tpu.count("optimization_barrier") == projections
    assert cpu.count("stablehlo.while") - tpu.count("stablehlo.while") == 1


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_small_updates_of_bfloat16_training_are_kept_by_float32_parameters_only(params, kept):
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype=kept)
    resolutions = resolve_attention(config, batch=4, query_length=LENGTH, packed=True, backend="standard")
    assert all(found.spec.dtype == "bfloat16" for _, found in resolutions)
    update = optax.sgd(1e-5)
    step = jax.jit(training_step(config, resolutions, update))
    before = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(kept)), params)
    after, _, loss = step(before, update.init(before), PACKED, None)
    assert loss.dtype == jnp.float32
    assert {str(x.dtype) for x in jax.tree.leaves(after)} == {kept}
    norms = [tree["layers"][0]["input_layernorm"] for tree in (before, after)]  # at one: 1e-5 is below half a step
    assert bool((norms[0] == norms[1]).all()) == (kept == "bfloat16")


@pytest.mark.parametrize(
    "changes", swept([{}, {"use_rope": False, "use_rmsnorm": False, "use_swiglu": False}], [{}]), ids=str
)
def test_the_compiled_step_learns_takes_its_state_and_leaves_the_batch(changes):
    config = CONFIG.replace(**changes)
    resolutions = resolve_attention(config, batch=4, query_length=LENGTH, packed=True, backend="standard")
    update = make_optimizer("adamw", steps=8, learning_rate=1e-2, weight_decay=0.1)
    step = compiled_step(training_step(config, resolutions, update))
    trained = Transformer(config).arrays()
    first, state, losses = trained, update.init(trained), []
    for _ in range(8):
        trained, state, loss = step(trained, state, PACKED, None)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.3
    assert first["embed_tokens"].is_deleted()


@pytest.mark.parametrize(("steps", "warm_up"), [(1, 1), (3, 1), (40, 4)])
def test_every_update_has_a_rate_and_the_peak_comes_behind_the_warm_up(steps, warm_up):
    update = make_optimizer("adamw", steps=steps, learning_rate=0.5, weight_decay=0.0)
    tree, rates = {"matrix": jnp.ones((2, 2))}, []
    state = update.init(tree)
    for _ in range(steps):  # Adam's update of a constant gradient is the rate
        change, state = update.update(tree, state, tree)
        rates.append(-float(change["matrix"][0, 0]))
    assert min(rates) > 0.0
    assert rates.index(max(rates)) == warm_up - 1
    assert max(rates) == pytest.approx(0.5, rel=1e-5)


def test_only_matrices_decay():
    update = make_optimizer("adamw", steps=10, learning_rate=1.0, weight_decay=0.5)
    tree = {"matrix": jnp.ones((2, 2)), "experts": jnp.ones((2, 2, 2))}
    tree |= {"vector": jnp.ones(2), "experts_bias": jnp.ones((2, 2))}
    change, _ = jax.jit(update.update)(jax.tree.map(jnp.zeros_like, tree), update.init(tree), tree)
    assert all((change[name] == -0.5).all() for name in ("matrix", "experts"))
    assert all((change[name] == 0.0).all() for name in ("vector", "experts_bias"))


def test_muon_updates_the_matrix_of_each_expert_alone_and_no_bias_as_a_matrix():
    rng = np.random.default_rng(0)
    matrices, biases = (jnp.asarray(rng.normal(0, 0.05, shape), jnp.float32) for shape in ((2, 4, 3), (2, 4)))

    def updated(layer):
        update = make_optimizer("muon", steps=10, learning_rate=1.0, weight_decay=0.5)
        tree = {"layers": [layer]}
        return jax.jit(update.update)(tree, jax.jit(update.init)(tree), tree)[0]["layers"][0]

    together = updated({"experts_up_proj": matrices, "experts_up_proj_bias": biases})
    apart = updated({f"{i}": x for i, x in enumerate((*matrices, *biases))})
    for name, first in (("experts_up_proj", 0), ("experts_up_proj_bias", 2)):
        for i, expected in enumerate((apart[f"{first}"], apart[f"{first + 1}"])):
            np.testing.assert_allclose(together[name][i], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"name": "sgd"}, "optimizer='sgd' is not known; use one of adamw, muon"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be a finite number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be a finite number, at least 0"),
    ],
)
def test_impossible_optimisers_are_refused(words, expected):
    with pytest.raises(ValueError, match=expected):
        make_optimizer(**({"name": "adamw", "steps": 1, "learning_rate": 1e-3, "weight_decay": 0.0} | words))
