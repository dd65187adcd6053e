"""Attention in a transformer of one's own: replace the attention of a block by one call, and train.

Run: python examples/own_transformer.py
The block is plain JAX. `backends.attention` has the arguments of `jax.nn.dot_product_attention`, and `backend` chooses
what computes it. With on_unavailable="raise" nothing else runs in its place.
"""

import jax
import jax.numpy as jnp
import optax

from attnsuite import backends

HEADS, HEAD_DIM, VOCABULARY = 4, 16, 64
WIDTH = HEADS * HEAD_DIM


def initial(key):
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def logits(params, tokens, backend):
    x = params["embed"][tokens]
    query, key, value = jnp.split(x @ params["qkv"], 3, axis=-1)
    query, key, value = (y.reshape(*tokens.shape, HEADS, HEAD_DIM) for y in (query, key, value))
    attended = backends.attention(query, key, value, is_causal=True, backend=backend, on_unavailable="raise")
    x = x + attended.reshape(x.shape) @ params["out"]
    return x @ params["head"]


def loss(params, tokens, backend):
    per_token = optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens[:, :-1], backend), tokens[:, 1:])
    return per_token.mean()


def main(backend="chunked", steps=30):
    """Train to repeat the token three places back, and return the first and the last loss."""
    start = jax.random.randint(jax.random.key(0), (8, 3), 0, VOCABULARY)
    tokens = jnp.tile(start, (1, 11))  # each row repeats its three tokens
    params, optimizer = initial(jax.random.key(1)), optax.adam(1e-2)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params, tokens, backend)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    print(f"{backend}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
