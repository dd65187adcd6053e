import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import ModelConfig, Transformer, generate, next_token_loss

PROMPT = np.random.default_rng(0).integers(1, 256, 9)
WIDTH = 12
LEFT, RIGHT = np.arange(WIDTH) >= WIDTH - 9, np.arange(WIDTH) < 9
MASK = np.stack([LEFT, RIGHT])
TOKENS = np.zeros((2, WIDTH), int)
TOKENS[MASK] = np.tile(PROMPT, 2)


@functools.cache
def model():
    return Transformer(
        ModelConfig.from_preset(
            "debug", num_layers=3, attention=("global", "sliding", "chunked"), window_size=3, chunk_size=4
        )
    )


def test_padding_on_either_side_gives_the_logits_of_the_row_alone():
    alone = np.asarray(model()(PROMPT[None], backend="standard"))[0]
    padded = np.asarray(model()(TOKENS, padding_mask=MASK, backend="standard"))
    for row, mask in zip(padded, MASK, strict=True):
        np.testing.assert_allclose(row[mask], alone, atol=2e-6)


def test_what_is_generated_behind_padding_is_what_follows_the_row_alone():
    two = Transformer(model().config.replace(num_layers=2, attention=("sliding", "chunked")))
    alone = generate(two, PROMPT[None], 5, backend="standard")
    assert generate(two, TOKENS, 5, padding_mask=MASK, backend="standard").tolist() == [*alone.tolist()] * 2
    with pytest.raises(ValueError, match="lengths and padding_mask both say"):
        generate(two, TOKENS, 5, padding_mask=MASK, lengths=[9, 9])


def test_loss_counts_no_target_that_padding_would_predict():
    logits, loss = model()(TOKENS, padding_mask=MASK, backend="standard"), jax.jit(next_token_loss)
    alone = loss(model()(PROMPT[None], backend="standard"), jnp.asarray(PROMPT[None]))
    padded = loss(logits, jnp.asarray(TOKENS), padding_mask=jnp.asarray(MASK))
    assert float(padded) == pytest.approx(float(alone), rel=1e-6)


def test_a_mask_beside_segment_ids_has_to_agree_with_them():
    packed = np.tile([0] * 4 + [-1] * 2 + [1] * 6, (2, 1))
    both = model()(TOKENS, segment_ids=packed, padding_mask=packed >= 0, backend="standard")
    np.testing.assert_array_equal(both, model()(TOKENS, segment_ids=packed, backend="standard"))
    with pytest.raises(ValueError, match="is True at token 4 of row 0, where segment_ids is -1; it must be True exact"):
        model()(TOKENS, segment_ids=packed, padding_mask=np.ones_like(MASK))


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (MASK.astype(int), "padding_mask is int64; expected booleans.* give attention_mask == 1"),
        (MASK[0], r"padding_mask has shape \(12,\); expected that of tokens, \(2, 12\)"),
        (np.arange(WIDTH)[None] != [[3], [0]], "padding between the tokens of row 0; it must be at the left or right"),
    ],
)
def test_a_mask_that_says_no_padding_is_refused(mask, sentence):
    with pytest.raises(ValueError, match=sentence):
        model()(TOKENS, padding_mask=mask)


def test_a_traced_mask_is_refused_because_it_cannot_be_checked():
    with pytest.raises(ValueError, match=r"padding_mask is traced.* give segment_ids"):
        jax.eval_shape(lambda mask: model()(TOKENS, padding_mask=mask), MASK)
