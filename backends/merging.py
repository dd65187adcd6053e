"""Put attention over parts of the keys together, by the log-sum-exp of each part.

A row's softmax over all keys is the mean of its softmaxes over disjoint parts, weighted by the exponentials of their
log-sum-exps. FlashInfer (arXiv 2501.01005, section 2.2) calls output and log-sum-exp the state of an attention.
:func:`put_together` merges unrounded parts with a log-sum-exp of two numbers, which keeps more bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# The result of query rows over some of the keys: (out, top, rest), see :class:`Part`.
Seen = tuple[Array, Array, Array]
State = tuple[Float[Array, "batch q_len heads v_dim"], Float[Array, "batch q_len heads"]]


def merge_parts(parts: Sequence[State]) -> State:
    """Output and log-sum-exp over all keys, from those over disjoint parts of the keys.

    Each part is what ``attention(..., return_log_sum_exp=True)`` returns: an output in any float dtype, rounded once,
    and a float32 log-sum-exp (float64 of a float64 output), ``-inf`` for a row that sees nothing of this part. A row
    that sees nothing of any part is zero, with ``-inf``. Both results have gradients. A sink belongs to one part.
    Raises ValueError where there is no part, and where shapes or dtypes differ.

    >>> import jax.numpy as jnp
    >>> from attnsuite.backends import attention
    >>> x = jnp.arange(24.0).reshape(1, 6, 1, 4) / 24
    >>> parts = [attention(x, y, y, return_log_sum_exp=True) for y in (x[:, :2], x[:, 2:])]
    >>> bool(jnp.allclose(merge_parts(parts)[0], attention(x, x, x), atol=1e-6))
    True
    """
    parts = list(parts) if isinstance(parts, Iterable) else []
    pairs = all(isinstance(part, tuple | list) and len(part) == 2 for part in parts)
    if not parts or not pairs or not all(hasattr(x, "shape") for part in parts for x in part):
        raise ValueError("parts is empty or no list of pairs; give at least one pair of output and log-sum-exp.")
    outs, sums = zip(*parts, strict=True)
    wide = jnp.dtype(jnp.float64 if outs[0].dtype == jnp.float64 else jnp.float32)
    for number, (out, log_sum_exp) in enumerate(parts):
        expected = (outs[0].shape, outs[0].dtype, outs[0].shape[:-1], wide)
        actual = (out.shape, out.dtype, log_sum_exp.shape, log_sum_exp.dtype)
        if actual != expected:
            raise ValueError(
                f"part {number} is {out.dtype}{list(out.shape)} with a log-sum-exp {log_sum_exp.dtype}"
                f"{list(log_sum_exp.shape)}; expected {expected[1]}{list(expected[0])} and {wide}{list(expected[2])}."
            )
    top = lax.stop_gradient(functools.reduce(jnp.maximum, sums))
    weights = [jnp.exp(each - jnp.where(jnp.isneginf(top), 0.0, top)) for each in sums]
    total = functools.reduce(jnp.add, weights)
    total = jnp.where(total == 0.0, 1.0, total)
    shares = [(weight / total)[..., None] for weight in weights]
    out = functools.reduce(jnp.add, [x.astype(wide) * share for x, share in zip(outs, shares, strict=True)])
    return out.astype(outs[0].dtype), top + jnp.log(total)


def put_together(a: Seen, b: Seen) -> Seen:
    """Merge float32 outputs over two parts of the keys by their log-sum-exps."""
    (out_a, top_a, rest_a), (out_b, top_b, rest_b) = a, b
    top = jnp.maximum(top_a, top_b)
    weight_a, weight_b = jnp.exp((top_a - top) + rest_a), jnp.exp((top_b - top) + rest_b)
    total = weight_a + weight_b
    out = out_a * (weight_a / total)[..., None] + out_b * (weight_b / total)[..., None]
    return out, top, jnp.log(total)
