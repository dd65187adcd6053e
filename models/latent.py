"""Multi-head latent attention (MLA): the keys and values of all heads are made from one small vector per token.

The method is DeepSeek-V2's (arXiv 2405.04434, section 2.1). A token's latent has ``kv_lora_rank`` numbers;
``kv_b_proj`` makes each head's key (``qk_nope_head_dim``) and value (``v_head_dim``) from it. All heads also share one
key of ``qk_rope_head_dim`` numbers, which carries the position. A cache holds only the latent and the shared key.

Over its own tokens attention runs *expanded*: with keys and values of every head,
``qk_nope_head_dim + qk_rope_head_dim`` and ``v_head_dim`` wide. Against a cache it runs *absorbed*: the keys' half of
``kv_b_proj`` is applied to the queries, these attend to the cached latents as a single KV head, and the values' half is
applied to the result. Both compute the same, up to rounding. Absorbed attention never makes a key or value of a cached
token. A backend that takes ``values_in_keys`` gets the latents once; for any other the values are cut out of them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from .config import ModelConfig

Latents = Float[Array, "batch length 1 cached"]  # kv_lora_rank numbers, then the turned key that heads share
Weight = Float[Array, "out in"]  # kv_b_proj


def expand(
    config: ModelConfig, weight: Weight, latents: Latents
) -> tuple[Float[Array, "batch length heads qk_dim"], Float[Array, "batch length heads v_dim"]]:
    """Keys and values of every head."""
    sizes = config.latent
    latent, shared = jnp.split(latents, [sizes.rank], axis=-1)
    to_key, to_value = _halves(config, weight, latents)
    key = jnp.einsum("btr,nhr->btnh", latent[:, :, 0], to_key)
    shared = jnp.broadcast_to(shared, (*key.shape[:3], sizes.rope))
    return jnp.concatenate([key, shared], axis=-1), jnp.einsum("btr,nvr->btnv", latent[:, :, 0], to_value)


def absorb(
    config: ModelConfig, weight: Weight, query: Float[Array, "batch q_len heads qk_dim"]
) -> Float[Array, "batch q_len heads cached"]:
    """Queries of multi-query attention over latents: its keys, whose first ``rank`` numbers are its values."""
    sizes = config.latent
    plain, placed = jnp.split(query, [sizes.nope], axis=-1)
    query = jnp.einsum("btnh,nhr->btnr", plain, _halves(config, weight, query)[0])
    return jnp.concatenate([query, placed], axis=-1)


def release(
    config: ModelConfig, weight: Weight, mixed: Float[Array, "batch q_len heads rank"]
) -> Float[Array, "batch q_len heads v_dim"]:
    """What each head makes of the latents that attention mixed for it."""
    return jnp.einsum("btnr,nvr->btnv", mixed, _halves(config, weight, mixed)[1])


def _halves(
    config: ModelConfig, weight: Weight, like: Array
) -> tuple[Float[Array, "heads nope rank"], Float[Array, "heads v_dim rank"]]:
    by_head = weight.astype(like.dtype).reshape(config.num_heads, -1, config.latent.rank)
    to_key, to_value = jnp.split(by_head, [config.latent.nope], axis=1)
    return to_key, to_value
