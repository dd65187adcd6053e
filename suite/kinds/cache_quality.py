"""The loss of a model over held-out text behind a cache of one dtype, beside the same model without a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnsuite.models import KVCache, TextFile, Transformer
from attnsuite.models.cache import Quantised, Slots

from ..cell import Outcome
from ..measure.tensor_errors import as_model_error
from ..record import TensorError
from .model_program import open_model
from .model_quality import read_text, window_by_window


def measure(case: Any, dtype: str, text: TextFile | None, *, wrong_scales: bool) -> Outcome:
    """The figures of a row of a ``CacheCase``, from the second half of every sequence."""
    model, half = open_model(case), case.sequence // 2
    errors: dict[str, TensorError] = {}

    def logits_of(tokens: Array) -> tuple[Array, Array]:
        dense = model(tokens, backend="standard", needs_grad=False)[:, half:]
        ours = behind_cache(model, tokens, half, dtype, wrong_scales)
        if not errors:
            errors["logits"] = as_model_error(ours, dense, None, "float32")
        return ours, dense

    outcome = window_by_window(read_text(case, model.config, text), logits_of, half)
    bytes_per_token = KVCache.create(model.config, 1, 1, dtype).nbytes
    return dataclasses.replace(outcome, accuracy=errors, figures={"kv_bytes_per_token": bytes_per_token})


def behind_cache(
    model: Transformer, tokens: Int[Array, "batch length"], half: int, dtype: str, wrong_scales: bool
) -> Float[Array, "batch rest vocab"]:
    """Logits of the tokens from ``half``, read in one call behind a cache of this dtype that holds the others.

    A token reads the keys and values of every token before it, and its own, as the cache keeps them: one call gives
    what the decode steps give one after the other.
    """
    batch, length = tokens.shape
    cache = model.new_cache(batch, length, dtype)
    _, cache = model.prefill(tokens[:, :half], cache, last_only=True, backend="standard")
    if wrong_scales:
        keys, values = (tuple(_with_other_scales(x, half) for x in of) for of in (cache.keys, cache.values))
        cache = dataclasses.replace(cache, keys=keys, values=values)
    return model.prefill(tokens[:, half:], cache, backend="standard")[0]


def _with_other_scales(slots: Slots, filled: int) -> Slots:
    """The slots with scales of others: those of the KV head before, one filled slot earlier."""
    if not isinstance(slots, Quantised):
        return slots
    rolled = jnp.roll(slots.scales[:, :, :filled], (1, 1), axis=(1, 2))
    return dataclasses.replace(slots, scales=slots.scales.at[:, :, :filled].set(rolled))
