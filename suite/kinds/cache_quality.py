"""The loss of a model over held-out text behind a cache of one dtype, beside the same model without a cache."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnsuite.models import KVCache, TextFile, Transformer
from attnsuite.models.cache import Quantised, Slots

from ..cell import Outcome
from ..measure.judge import as_model_error
from ..measure.text import unigram_bits
from .cache import CONTROL, DTYPES, CacheCase
from .model_program import model_config, open_model
from .quality import HeldOut, compared, figures_of, read_text


def checked(case: CacheCase, text: TextFile | None) -> HeldOut:
    """The text of a case. Raises InputError for an unknown model, and for a text that it cannot read."""
    return read_text(case, model_config(case), text)


def measure(case: CacheCase, row: str, text: TextFile | None) -> Outcome:
    """The figures of a row, from the second half of every sequence."""
    model, held_out = open_model(case), checked(case, text)
    series: dict[str, list[float]] = {name: [] for name in ("nll", "standard_nll", "kl", "top1")}
    errors = {}
    half = case.sequence // 2
    for tokens in held_out.rows[:, None]:
        dense = model(tokens, backend="standard", needs_grad=False)[:, half:]
        ours = behind_cache(model, tokens, half, row)
        for name, value in zip(series, compared(ours, dense, jnp.asarray(tokens[:, half:])), strict=True):
            series[name].append(float(value))
        errors = errors or {"logits": as_model_error(ours, dense, None, "float32")}
    raw = {name: tuple(values) for name, values in series.items()}
    figures = figures_of(raw, held_out.bytes_per_token)
    figures["unigram_bits_per_byte"] = unigram_bits(held_out.rows[:, half:]) / held_out.bytes_per_token
    bytes_kept = KVCache.create(model.config, 1, 1, DTYPES[row]).nbytes
    return Outcome(quality=figures, series=raw, accuracy=errors, figures={"kv_bytes_per_token": bytes_kept})


def behind_cache(
    model: Transformer, tokens: Int[np.ndarray, "batch length"], half: int, row: str
) -> Float[Array, "batch rest vocab"]:
    """Logits of the tokens from ``half``, read in one call behind a cache of the row's dtype that holds the others.

    A token reads the keys and values of every token before it, and its own, as the cache keeps them: one call gives
    what the decode steps give one after the other.
    """
    batch, length = tokens.shape
    cache = model.new_cache(batch, length, DTYPES[row])
    _, cache = model.prefill(tokens[:, :half], cache, last_only=True, backend="standard")
    if row == CONTROL:
        keys, values = (tuple(_with_other_scales(x, half) for x in of) for of in (cache.keys, cache.values))
        cache = dataclasses.replace(cache, keys=keys, values=values)
    return model.prefill(tokens[:, half:], cache, backend="standard")[0]


def _with_other_scales(slots: Slots, filled: int) -> Slots:
    """The slots with scales of others: those of the KV head before, one filled slot earlier."""
    if not isinstance(slots, Quantised):
        return slots
    rolled = jnp.roll(slots.scales[:, :, :filled], (1, 1), axis=(1, 2))
    return dataclasses.replace(slots, scales=slots.scales.at[:, :, :filled].set(rolled))
