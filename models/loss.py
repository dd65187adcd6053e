"""Next-token cross-entropy: the loss of training and of comparisons.

It is computed in float32 whatever the dtype of the logits. It is a mean over the targets that count; padding and the
borders between packed documents do not. For byte-level models, bits per byte are these nats divided by ln 2;
``text.py`` measures them over whole files.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def next_token_loss(
    logits: Float[Array, "batch length vocab"],
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
    mask: Bool[Array, "batch length"] | None = None,
    padding_mask: Bool[Array, "batch length"] | None = None,
    total: Int[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy in nats, float32, of predicting token t+1 from the logits at t.

    With ``segment_ids`` a target counts only inside its own document, and padding (negative ids) never;
    ``mask`` (True: counts) is over tokens as targets. With ``padding_mask`` (True: a token, False: padding) a target
    counts only if the token before it is no padding either. Zero, with zero gradients, where nothing counts; NaN where
    a token that counts is not in the vocabulary. Raises ValueError for arrays of another shape or dtype.
    ``total`` is what to divide by where these rows are a part of a batch; their own targets if left out.

    >>> float(next_token_loss(jnp.zeros((1, 4, 2)), jnp.zeros((1, 4), int)))  # doctest: +ELLIPSIS
    0.6931...
    """
    tokens = jnp.asarray(tokens)
    segment_ids, mask, padding_mask = (None if x is None else jnp.asarray(x) for x in (segment_ids, mask, padding_mask))
    if logits.ndim != 3 or tokens.shape != logits.shape[:2] or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"logits is {logits.dtype}{list(logits.shape)} and tokens is {tokens.dtype}{list(tokens.shape)}; expected "
            "[batch, length, vocab], and integers [batch, length]."
        )
    counts = counted_targets(tokens, segment_ids, mask, padding_mask)
    nats = jnp.where(counts, token_nats(logits[:, :-1], tokens[:, 1:]), 0.0)
    return nats.sum() / jnp.maximum(counts.sum() if total is None else total, 1)


def counted_targets(
    tokens: Int[Array, "*parts batch length"],
    segment_ids: Int[Array, "*parts batch length"] | None = None,
    mask: Bool[Array, "*parts batch length"] | None = None,
    padding_mask: Bool[Array, "*parts batch length"] | None = None,
) -> Bool[Array, "*parts batch length-1"]:
    """True for the tokens behind the first that count as targets; see :func:`next_token_loss`."""
    counts = jnp.ones(tokens[..., 1:].shape, bool)
    for name, x in (("segment_ids", segment_ids), ("mask", mask), ("padding_mask", padding_mask)):
        expected = jnp.integer if name == "segment_ids" else jnp.bool_  # `&` with integers is one of their bits
        if x is not None and not (jnp.issubdtype(x.dtype, expected) and x.shape[-1:] == tokens.shape[-1:]):
            raise ValueError(
                f"{name} is {x.dtype}{list(x.shape)}; expected {'integers' if name == 'segment_ids' else 'booleans'}, "
                f"one for each of {tokens.shape[-1]} tokens."
            )
    if segment_ids is not None:
        counts &= (segment_ids[..., 1:] == segment_ids[..., :-1]) & (segment_ids[..., 1:] >= 0)
    if padding_mask is not None:
        counts &= padding_mask[..., 1:] & padding_mask[..., :-1]
    return counts if mask is None else counts & mask[..., 1:]


def token_nats(
    logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """Cross-entropy of each target under the logits at its place, in nats, float32; NaN for a target out of range."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    chosen = jnp.where(targets < 0, jnp.nan, chosen)  # not the logit counted from the end
    return jax.nn.logsumexp(logits, axis=-1) - chosen
