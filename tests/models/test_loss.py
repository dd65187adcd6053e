import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import next_token_loss

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(RNG.normal(size=(2, 6, 11)) * 3, jnp.float32)
TOKENS = jnp.asarray(RNG.integers(0, 11, (2, 6)))


def nats(b, t):
    """Of predicting token t+1 of row b, in float64."""
    row = np.asarray(LOGITS[b, t], np.float64)
    return np.log(np.exp(row).sum()) - row[int(TOKENS[b, t + 1])]


def mean_over(pairs):
    return np.mean([nats(b, t) for b, t in pairs])


EVERY = [(b, t) for b in range(2) for t in range(5)]


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({}, EVERY),
        ({"mask": np.stack([np.arange(6) < 6, np.arange(6) < 2])}, [(b, t) for b, t in EVERY if b == 0 or t == 0]),
        (  # borders between documents, and padding
            {"segment_ids": np.array([[0, 0, 0, 1, 1, 1], [5, 5, 5, 5, -1, -1]])},
            [(0, 0), (0, 1), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)],
        ),
    ],
    ids=["all", "masked", "packed"],
)
def test_loss_is_the_mean_over_the_targets_that_count(options, counted):
    options = {name: jnp.asarray(x) for name, x in options.items()}
    assert float(next_token_loss(LOGITS, TOKENS, **options)) == pytest.approx(mean_over(counted), rel=1e-6)


def test_nothing_to_predict_is_zero_with_zero_gradients():
    loss = jax.value_and_grad(lambda x: next_token_loss(x, TOKENS, jnp.full((2, 6), -1)))
    value, gradient = jax.jit(loss)(LOGITS)
    assert value == 0.0
    assert not gradient.any()


def test_lists_are_taken_and_tokens_that_do_not_fit_are_refused():
    assert next_token_loss(LOGITS, TOKENS.tolist()) == next_token_loss(LOGITS, TOKENS)
    with pytest.raises(ValueError, match=r"logits is float32\[2, 6, 11\] and tokens is int32\[2, 5\]; expected"):
        next_token_loss(LOGITS, TOKENS[:, :5])


@pytest.mark.parametrize(
    "given",
    [
        {"mask": jnp.full((2, 6), 2)},  # taken bit by bit, nothing would count
        {"mask": jnp.ones((2, 5), bool)},
        {"segment_ids": jnp.ones((2, 6))},
        {"padding_mask": jnp.ones((2, 6), int)},
    ],
)
def test_array_of_another_kind_is_refused_by_name(given: dict[str, jax.Array]):
    (name,) = given
    with pytest.raises(ValueError, match=rf"^{name} is .*; expected"):
        next_token_loss(LOGITS, TOKENS, **given)


def test_target_that_is_negative_is_no_token_counted_from_the_end():
    tokens = TOKENS.at[1, 3].set(-1)
    assert jnp.isnan(next_token_loss(LOGITS, tokens))
    value, gradient = jax.value_and_grad(lambda x: next_token_loss(x, tokens, mask=tokens >= 0))(LOGITS)
    assert value == pytest.approx(mean_over([pair for pair in EVERY if pair != (1, 2)]), rel=1e-6)
    assert jnp.isfinite(gradient).all()


def test_half_precision_logits_are_summed_in_float32():
    assert next_token_loss(LOGITS.astype(jnp.bfloat16), TOKENS).dtype == jnp.float32
