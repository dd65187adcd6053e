"""A mask array that a flag, lengths or segment ids would say is named, and only such a one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnsuite import backends
from attnsuite.suite import mask_arrays
from attnsuite.suite.traced_calls import executed
from command import code_of
from declared import sized

T = 12
CAUSAL = np.tril(np.ones((T, T), bool))
LENGTHS = np.array([9, 12])
KEYS = np.arange(T) < LENGTHS[:, None, None, None]
IDS = np.array([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])
SAME = ((IDS[:, :, None] == IDS[:, None]) & (IDS >= 0)[:, :, None])[:, None]
MASKS = {
    "no mask": np.ones((1, 1, T, T), bool),
    "is_causal=True": CAUSAL[None, None],
    "key_value_seq_lengths=[9, 12]": KEYS,
    "is_causal=True, key_value_seq_lengths=[9, 12]": CAUSAL & KEYS,
    "query_segment_ids and key_value_segment_ids (2 documents, padding -1)": SAME,
    "is_causal=True, query_segment_ids and key_value_segment_ids (2 documents, padding -1)": CAUSAL & SAME,
}


def spec_of(mask, queries=T):
    return sized(queries, T, B=2, H=8, has_mask=True)


@pytest.mark.parametrize("words", MASKS)
def test_array_is_said_in_words_that_mean_the_same(words):
    mask = MASKS[words]
    said = mask_arrays.read(mask, spec_of(mask))
    assert said.text == words
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, 2, 8)), jnp.float32)
    by_array = backends.attention(q, q, q, mask=mask, backend="standard")
    by_words = backends.attention(q, q, q, **said.arguments, backend="standard")
    np.testing.assert_allclose(by_array, by_words, rtol=0, atol=1e-6)


def test_a_step_of_decoding_is_a_length():
    mask = np.arange(T)[None, None, None] < 7
    assert mask_arrays.read(mask, spec_of(mask, queries=1)).text == "key_value_seq_lengths=[7, 7]"


def other_than_causal(*place):
    mask = np.broadcast_to(CAUSAL, (2, 2, T, T)).copy()
    mask[place] ^= True
    return mask


@pytest.mark.parametrize(
    ("mask", "batch"),
    [
        (other_than_causal(slice(None), slice(None), 7, 3), 2),
        (other_than_causal(0, 1), 2),
        (np.broadcast_to(CAUSAL, (3, 1, T, T)), 6),  # of a query [2, 3, T, N, H], say
    ],
    ids=["one pair", "one head", "another batch"],
)
def test_array_that_says_more_is_left_alone(mask, batch):
    assert mask_arrays.read(mask, dataclasses.replace(spec_of(mask), batch=batch)) is None


STEP = """
import jax, jax.numpy as jnp
from flax import nnx
layer = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=nnx.Rngs(0))
def fn():
    x = jnp.ones((1, 32, 16))
    return jax.jit(lambda x: layer(x, mask=nnx.make_causal_mask(x[..., 0]))), (x,)
"""


def test_harvest_names_the_flag_and_the_cost(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    assert code_of("harvest", "step.py:fn") == 0
    told = capsys.readouterr().err
    assert "step.py:7: the mask array [1, 1, 32, 32] says is_causal=True on this batch; the array takes" in told


def test_masks_are_read_under_a_gradient():
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=nnx.Rngs(0))

    def step(x):
        return nnx.grad(lambda layer: layer(x, mask=nnx.make_causal_mask(x[..., 0])).sum())(layer)

    (mask,) = executed(step, jnp.ones((1, 8, 16))).masks.values()
    assert (mask[0, 0] == np.tril(np.ones((8, 8)))).all()


@pytest.mark.parametrize(("way", "said"), [("scan", ["not every"]), ("loop", ["is_causal=True", "not every"])])
def test_what_one_of_several_arrays_says_is_not_told_of_all(way, said):
    masks = jnp.stack([CAUSAL, CAUSAL & ~np.tril(CAUSAL, -4)])[:, None, None]

    def layer(x, mask):
        return jax.nn.dot_product_attention(x, x, x, mask=mask), None

    def step(x):
        if way == "scan":
            return jax.lax.scan(layer, x, masks)[0]
        return layer(layer(x, masks[0])[0], masks[1])[0]

    found = mask_arrays.sentences(executed(step, jnp.ones((1, T, 2, 8))))
    assert [next(words for words in said if words in sentence) for sentence in found] == said
