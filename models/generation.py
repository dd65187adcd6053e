"""Autoregressive generation: one prefill, then one compiled step per token with the cache donated.

Greedy at ``temperature=0``. Else tokens are sampled from the softened distribution, cut to its nucleus by ``top_p``
(arXiv 1904.09751). Changing temperature, ``top_p`` or seed compiles nothing anew.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from .cache import Held, KVCache
from .checks import is_number, require_positive_int
from .config import ModelConfig
from .forward_pass import forward_cached
from .padding import left_aligned
from .parameters import Params
from .planning import Call, Resolutions, planned
from .transformer import Transformer, check_tokens


def generate(
    model: Transformer,
    tokens: Any,
    max_new_tokens: int,
    *,
    lengths: Any = None,
    padding_mask: Any = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token: int | Collection[int] | None = None,
    cache_dtype: str | None = None,
    page_size: int | None = None,
    **call: Unpack[Call],
) -> Int[np.ndarray, "batch max_new_tokens"]:
    """The tokens that follow each prompt ``tokens [batch, length]``, int32.

    ``lengths [batch]`` says how many tokens of each prompt are valid, the rest being padding on the right. In its place
    ``padding_mask [batch, length]`` (True: a token) says where the padding is, on the left or on the right.
    Behind its first ``stop_token`` (one, or any of several) a row repeats that token, and generation ends once every
    row has one. The same seed gives the same tokens. ``cache_dtype`` and ``page_size`` are those of
    :meth:`attnsuite.models.cache.KVCache.create`. ``call`` are the keywords of
    :class:`attnsuite.models.planning.Call`. Raises ValueError for arguments out of range.

    >>> model = Transformer(ModelConfig.from_preset("debug"))
    >>> generate(model, [[1, 2, 3]], 4).shape
    (1, 4)
    """
    max_new_tokens = require_positive_int("max_new_tokens", max_new_tokens)
    _check_numbers(temperature, top_p, seed)
    _require_untraced(tokens, lengths, padding_mask)
    stops = [] if stop_token is None else list(stop_token) if isinstance(stop_token, Collection) else [stop_token]
    for token in stops:
        if not isinstance(token, int | np.integer) or not 0 <= token < model.config.vocab_size:
            raise ValueError(f"stop_token={token!r}: this model has tokens 0 to {model.config.vocab_size - 1}.")
    if padding_mask is not None and lengths is not None:
        raise ValueError("lengths and padding_mask both say where the padding is; give one of them.")
    tokens = check_tokens(tokens, model.config.vocab_size)
    if padding_mask is not None:
        tokens, lengths = left_aligned(tokens, padding_mask)
    cache = model.new_cache(tokens.shape[0], tokens.shape[1] + max_new_tokens, cache_dtype, page_size=page_size)
    logits, cache = model.prefill(tokens, cache, lengths=lengths, last_only=True, **call)
    _require_untraced(logits)  # of a model that is traced, too
    sampler = (jax.random.key(seed), jnp.float32(max(temperature, 1e-6)), jnp.float32(max(top_p, 1e-6)))
    greedy = bool(temperature == 0.0)  # of a JAX number too
    latest = compiled_sample(logits, 0, *sampler, greedy=greedy)
    found = planned(model.config, call, batch=tokens.shape[0], query_length=1, needs_grad=False, **cache.problem)
    params = model.arrays()
    made, stopped = [latest], np.zeros(tokens.shape[0], bool)
    for step in range(1, max_new_tokens):
        if stops:
            stopped |= np.isin(np.asarray(latest), stops)
            if stopped.all():
                break
        after = cache.lengths_after(1)
        table = cache.table_after(after)
        latest, (keys, values) = _step(
            model.config,
            params,
            latest,
            (cache.keys, cache.values),
            cache.lengths,
            table,
            step,
            *sampler,
            resolutions=found,
            greedy=greedy,
        )
        cache = KVCache(keys=keys, values=values, lengths=after, page_table=table)
        made.append(latest)
    out = np.stack([np.asarray(x) for x in made], axis=1).astype(np.int32)
    return _stopped(out, stops, max_new_tokens) if stops else out


def _stopped(out: np.ndarray, stops: list[int], length: int) -> Int[np.ndarray, "batch length"]:
    """The tokens, each row repeating its first one of ``stops`` behind it, and up to ``length``."""
    found = np.isin(out, stops)
    first = np.take_along_axis(out, found.argmax(axis=1)[:, None], axis=1)
    return np.pad(np.where(np.cumsum(found, axis=1) > 0, first, out), ((0, 0), (0, length - out.shape[1])), mode="edge")


def _check_numbers(temperature: float, top_p: float, seed: Any) -> None:
    if not (is_number(temperature) and temperature >= 0.0):
        raise ValueError(f"temperature={temperature!r} must be at least 0 (0: always the likeliest token).")
    if not (is_number(top_p) and 0.0 < top_p <= 1.0):
        raise ValueError(f"top_p={top_p!r} must be above 0 and at most 1.")
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:  # JAX drops the higher bits
        raise ValueError(f"seed={seed!r} must be an integer from 0 to {2**32 - 1}.")


def _require_untraced(*given: Any) -> None:
    """Raise ValueError for what is traced: no token is known there, and the next one follows from it."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
        raise ValueError(
            "generate is traced by jax.jit, jax.grad or jax.vmap, and reads each token when it is made; call it "
            "outside of them: its steps are compiled."
        )


def sample(
    logits: Float[Array, "batch vocab"],
    step: Any,
    key: Array,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    *,
    greedy: bool,
) -> Int[Array, " batch"]:
    """One token per row: the likeliest, or drawn from the smallest set whose probability reaches ``top_p``.

    The likeliest token is always in the set. ``step`` makes the draw differ from token to token.
    """
    if greedy:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / temperature
    ordered = jnp.sort(logits, axis=-1, descending=True)
    shares = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares  # probability of everything likelier
    least = jnp.where(before < top_p, ordered, jnp.inf).min(-1, keepdims=True)
    truncated = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.random.categorical(jax.random.fold_in(key, step), truncated, axis=-1).astype(jnp.int32)


compiled_sample = jax.jit(sample, static_argnames=("greedy",))


@functools.partial(jax.jit, static_argnames=("config", "resolutions", "greedy"), donate_argnames="held")
def _step(
    config: ModelConfig,
    params: Params,
    latest: Int[Array, " batch"],
    held: Held,
    start: Int[Array, " batch"],
    page_table: Int[Array, "batch pages_per_sequence"] | None,
    step: Any,
    key: Array,
    temperature: Array,
    top_p: Array,
    *,
    resolutions: Resolutions,
    greedy: bool,
) -> tuple[Array, Held]:
    logits, held = forward_cached(
        config,
        params,
        latest[:, None],
        held,
        start,
        start + 1,
        resolutions=resolutions,
        last_only=True,
        page_table=page_table,
    )
    return sample(logits, step, key, temperature, top_p, greedy=greedy), held
