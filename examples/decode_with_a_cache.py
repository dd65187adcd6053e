"""Decoding with a cache: by the transformer of this package, and by hand with one attention call per token.

Run: python examples/decode_with_a_cache.py
Behind a cache the query's place in the sequence is given (`query_positions`), and so is how much of the cache is
filled (`key_value_seq_lengths`). What lies behind that length changes nothing, whatever it holds.
"""

import jax
import jax.numpy as jnp

from attnsuite import backends, models


def generated(prompt, count):
    """Text from the checkpoint that ships: one prefill, then one compiled step per token."""
    model = models.load_shipped()
    return bytes(models.generate(model, [list(prompt)], count, backend="auto")[0].tolist())


def decoded_by_hand(length=12, heads=4, kv_heads=2, head_dim=16, capacity=64):
    """One token at a time through a cache, and the same tokens in one causal pass. Returns both outputs."""
    shapes = [(1, length, heads, head_dim), (1, length, kv_heads, head_dim), (1, length, kv_heads, head_dim)]
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))
    cached_key = cached_value = jnp.full((1, capacity, kv_heads, head_dim), jnp.nan)  # empty slots are never read

    @jax.jit
    def step(cached_key, cached_value, i):
        cached_key = cached_key.at[:, i].set(key[:, i])
        cached_value = cached_value.at[:, i].set(value[:, i])
        out = backends.attention(
            jax.lax.dynamic_slice_in_dim(query, i, 1, axis=1),
            cached_key,
            cached_value,
            is_causal=True,
            query_positions=jnp.full((1, 1), i),
            key_value_seq_lengths=jnp.full((1,), i + 1),
            needs_grad=False,
        )
        return out, cached_key, cached_value

    steps = []
    for i in range(length):
        out, cached_key, cached_value = step(cached_key, cached_value, i)
        steps.append(out)
    return jnp.concatenate(steps, axis=1), backends.attention(query, key, value, is_causal=True)


def main():
    """Return the largest difference between decoding and one pass, and the generated text."""
    by_steps, in_one_pass = decoded_by_hand()
    difference = float(jnp.abs(by_steps - in_one_pass).max())
    text = generated(b"The attention ", 24)
    print(f"token by token and in one pass differ by {difference:.1e}")
    print("The attention " + text.decode(errors="replace"))
    return difference, text


if __name__ == "__main__":
    main()
