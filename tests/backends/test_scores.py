"""Score functions: what is none is refused, and heads and positions are the caller's wherever a block lies."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attnsuite.backends import AttentionSpec, attention

pytestmark = pytest.mark.standard

SPEC = AttentionSpec(batch=1, query_length=4, key_value_length=4, num_heads=1, num_kv_heads=1, head_dim=8)
REFUSED = {
    "a maximum over keys": (lambda score, *_: score - score.max(-1, keepdims=True), "treat each score alone"),
    "keys in another order": (lambda score, *_: score[..., ::-1], "treat each score alone"),
    "half precision": (lambda score, *_: score.astype(jnp.bfloat16), r"gives bfloat16 \(1, 2, 2, 3\)"),
    "one answer for all keys": (lambda score, *_: score[..., :1], r"gives float32 \(1, 2, 2, 1\)"),
    "hidden keys": (lambda score, _b, _n, q, k: jnp.where(k <= q, score, -jnp.inf), "use mask_function to hide a key"),
    "an if": (lambda score, _b, _n, q, k: score if q > k else -score, r"raises ValueError.*uses jnp.where for `if`"),
    "two arguments": (lambda score, head: score * head, r"raises TypeError.*five arrays \(score, batch, head"),
    "nothing": (lambda *_: None, "gives NoneType"),
    "a root": (lambda score, *_: jnp.sqrt(score), "not finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_function_of_one_score_is_refused(name):
    function, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"score_function=.*{words}"):
        dataclasses.replace(SPEC, score_function=function)


def test_a_function_of_a_traced_array_is_refused_in_a_sentence():
    def learn(weight):
        x = jnp.ones((1, 4, 1, 8))
        return attention(x, x, x, score_function=lambda score, *_: weight * score).sum()

    with pytest.raises(ValueError, match="depends on a traced array; learned numbers go into bias, alibi or sinks"):
        jax.grad(learn)(jnp.float32(1.0))
