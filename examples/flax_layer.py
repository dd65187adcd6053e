"""A backend in flax's own attention layer.

Run: python examples/flax_layer.py
`backends.attention_fn` makes a function for the argument attention_fn of nnx.MultiHeadAttention (and of linen's layer).
What flax passes and the function does not know is refused.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from attnsuite import backends


def layer(**options):
    return nnx.MultiHeadAttention(num_heads=4, in_features=64, decode=False, rngs=nnx.Rngs(0), **options)


def main(backend="chunked"):
    """Return the largest difference to flax's own attention: of the output, and of the gradients."""
    x = jax.random.normal(jax.random.key(0), (2, 128, 64))
    own, ours = layer(), layer(attention_fn=backends.attention_fn(backend, on_unavailable="raise"))

    def squared(module):
        return (module(x, is_causal=True) ** 2).mean()

    output = jnp.abs(own(x, is_causal=True) - ours(x, is_causal=True)).max()
    pairs = zip(*(jax.tree.leaves(nnx.grad(squared)(module)) for module in (own, ours)), strict=True)
    gradients = max(jnp.abs(a - b).max() for a, b in pairs)
    print(f"{backend} in nnx.MultiHeadAttention: output differs by {output:.1e}, gradients by {gradients:.1e}")
    return float(output), float(gradients)


if __name__ == "__main__":
    main()
