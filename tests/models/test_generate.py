import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnsuite.models import ModelConfig, Transformer, generate
from attnsuite.models.generation import _step, sample
from landing import swept

# Most tests make five tokens of both: a program for each number of them takes longer than all that they claim.
PROMPTS = np.array([[5, 6, 7, 8], [9, 10, 0, 0]])


@functools.cache
def model():
    return Transformer(ModelConfig.from_preset("debug", num_layers=1))


def test_greedy_generation_follows_the_likeliest_token_of_a_full_pass_behind_padded_prompts_too():
    made = generate(model(), PROMPTS, 5, lengths=[4, 2], backend="standard")
    assert made.dtype == np.int32
    for prompt, row in zip(([5, 6, 7, 8], [9, 10]), made.tolist(), strict=True):
        likeliest = np.asarray(model()([prompt + row], backend="standard").argmax(-1))[0]
        assert row == likeliest[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize("rows", swept((1, 2), (2,)))  # 2: one of them padded
def test_generation_under_x64_makes_the_same_tokens(rows):
    made = generate(model(), PROMPTS[:rows], 2, backend="standard")
    with jax.enable_x64(new_val=True):
        np.testing.assert_array_equal(generate(model(), PROMPTS[:rows], 2, backend="standard"), made)


def test_the_seed_decides_the_sample():
    draw = {
        seed: generate(model(), PROMPTS, 5, temperature=1.0, seed=seed, backend="standard").tolist() for seed in (0, 1)
    }
    assert draw[0] == generate(model(), PROMPTS, 5, temperature=1.0, seed=0, backend="standard").tolist()
    assert draw[0] != draw[1]


def test_a_tiny_nucleus_is_greedy():
    greedy = generate(model(), PROMPTS, 5, backend="standard")
    assert generate(model(), PROMPTS, 5, temperature=1.0, top_p=1e-50, backend="standard").tolist() == greedy.tolist()


def test_other_temperatures_and_seeds_do_not_trace_again():
    generate(model(), PROMPTS, 5, temperature=1.0, backend="standard")
    traced = _step._cache_size()
    generate(model(), PROMPTS, 5, temperature=0.5, top_p=0.3, seed=9, backend="standard")
    assert _step._cache_size() == traced


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    draws = {
        int(sample(logits, step, jax.random.key(0), jnp.float32(1.0), jnp.float32(top_p), greedy=False)[0])
        for step in range(200)
    }
    assert draws == kept


def test_low_temperature_sharpens():
    logits = jnp.tile(jnp.array([[1.0, 0.0]]), (4000, 1))
    shares = [
        float((sample(logits, 0, jax.random.key(2), jnp.float32(t), jnp.float32(1.0), greedy=False) == 0).mean())
        for t in (1.0, 0.25)
    ]
    assert shares == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-4))], abs=0.03)


def test_temperature_may_be_a_number_of_jax():
    made = [generate(model(), PROMPTS, 2, temperature=t, backend="standard") for t in (0.5, jnp.float32(0.5))]
    assert (made[0] == made[1]).all()


def test_generation_ends_at_the_stop_token():
    made = generate(model(), PROMPTS, 5, backend="standard")[0].tolist()
    stop = made[2]
    first = made.index(stop)
    never = next(token for token in range(len(made) + 1) if token not in made)
    for several in (stop, [never, stop], [stop, never]):
        stopped = generate(model(), PROMPTS, 5, stop_token=several, backend="standard")[0]
        assert stopped.tolist() == made[:first] + [stop] * (5 - first)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer of at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"temperature": None}, "temperature=None must be at least 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": "1"}, "top_p='1' must be above 0 and at most 1"),
        ({"seed": 2**40}, "seed=1099511627776 must be an integer from 0 to 4294967295"),
        ({"stop_token": [3, 256]}, "stop_token=256: this model has tokens 0 to 255"),
        ({"stop_token": "\n"}, r"stop_token='\\n': this model has tokens 0 to 255"),
        ({"tokens": [[1, 9999]]}, "tokens reach from 1 to 9999; this model has tokens 0 to 255"),
        ({"tokens": [[1, -1]]}, "tokens reach from -1 to 1"),
        ({"tokens": [[1, 2], [3]]}, "tokens makes no array .*; pad its rows to one length, and give padding_mask"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, sentence):
    call = {"tokens": PROMPTS, "max_new_tokens": 2} | arguments
    with pytest.raises(ValueError, match=sentence):
        generate(model(), **call)


@pytest.mark.parametrize("traced", ["tokens", "lengths", "model"])
def test_generation_inside_of_jit_is_refused_in_a_sentence(traced):
    def run(tokens, lengths, model):
        return generate(model, tokens, 2, lengths=lengths, backend="standard")

    given = {"tokens": jnp.asarray(PROMPTS), "lengths": jnp.array([4, 2]), "model": model()}
    with pytest.raises(ValueError, match=r"generate is traced by jax.jit, .* call it outside"):
        nnx.jit(lambda x: run(**{**given, traced: x}))(given[traced])


def test_a_step_refuses_a_token_outside_of_the_vocabulary():
    cache = model().prefill(PROMPTS, model().new_cache(len(PROMPTS), 9), backend="standard")[1]
    with pytest.raises(ValueError, match="tokens reach from 9999 to 9999"):
        model().decode([9999] * len(PROMPTS), cache)
