"""Run a model larger than memory: each layer is read, applied to all sequences, and dropped.

Memory holds one layer and the hidden states of all sequences, ``[sequences, length, hidden]``; at the beginning and the
end also the table of embeddings and the head. A checkpoint is read once for all sequences, so more sequences cost no
more reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnsuite.backends import Layout
from attnsuite.backends.contract import Carry
from attnsuite.backends.resolve import Resolution

from .checkpoint import Checkpoint
from .checks import require_positive_int
from .config import AttentionType, ModelConfig
from .forward_pass import Hidden, embed, layer_forward, logits_of, turns_of, whole_sequence
from .loss import token_nats
from .parameters import Params
from .planning import Call, Resolutions, check_call, planned
from .transformer import Transformer, check_tokens


def streamed_nats(
    checkpoint: Checkpoint,
    tokens: Any,
    *,
    batch: int = 1,
    resolutions: Resolutions | None = None,
    **call: Unpack[Call],
) -> Float[np.ndarray, "sequences targets"]:
    """Cross-entropy in nats of every token of ``tokens [sequences, length]`` but the first of each sequence.

    The exponential of the mean is the perplexity. ``batch`` sequences are computed at a time. ``resolutions`` are those
    of :func:`attnsuite.models.planning.resolve_attention` for ``batch`` and ``length - 1``, where the caller has asked
    already. ``call`` are the keywords of :class:`attnsuite.models.planning.Call`, in their place. Raises ValueError for
    tokens that do not fit and for both, and CheckpointError as reading does.
    """
    check_call(call)
    if resolutions is not None and call:
        raise ValueError(f"resolutions and {next(iter(call))} are both given; resolutions have backend and options.")
    config, tokens = checkpoint.config, np.asarray(check_tokens(np.asarray(tokens), checkpoint.config.vocab_size))
    if tokens.shape[1] < 2:
        raise ValueError(f"tokens is {tokens.dtype}{list(tokens.shape)}; expected integers [sequences, 2 or more].")
    batch = require_positive_int("batch", batch)
    count, length = tokens.shape[0], tokens.shape[1] - 1
    padded = np.pad(tokens, ((0, -count % batch), (0, 0)))  # one shape, one compilation
    parts = [jnp.asarray(part, jnp.int32) for part in padded.reshape(-1, batch, length + 1)]
    problem = {"batch": batch, "query_length": length, "needs_grad": False}
    resolved = dict(planned(config, call, **problem) if resolutions is None else resolutions)
    hidden = embedded(checkpoint, [part[:, :-1] for part in parts])
    carries: list[dict[str, Carry]] = [dict.fromkeys(resolved, ()) for _ in parts]
    for i in range(config.num_layers):
        layer, kind = checkpoint.layer(i), config.layer_types[i]
        resolution = resolved[kind]
        # An exact backend computes every layer of a type alike, so that one compiled program serves them all.
        index = 0 if resolution.backend.exact else i
        for n, x in enumerate(hidden):
            hidden[n], carries[n][kind] = _run_layer(
                config, layer, x, carries[n][kind], kind=kind, index=index, resolution=resolution
            )
        jax.block_until_ready(hidden)
        del layer
        _return_freed_memory()
    outer = outer_of_head(checkpoint)
    nats = [np.asarray(last_nats(config, outer, x, part[:, 1:])) for x, part in zip(hidden, parts, strict=True)]
    return np.concatenate(nats)[:count]


def embedded(model: Transformer | Checkpoint, parts: Sequence[Int[Array, "batch length"]]) -> list[Hidden]:
    """The hidden states before the first layer; the table of embeddings is in memory meanwhile.

    Raises ValueError for tokens beyond the positions that the model has learned.
    """
    config = model.config
    for tokens in parts:
        config.check_length("length", tokens.shape[1])
    outer = model.outer(*(("embed_tokens",) if config.use_rope else ("embed_tokens", "embed_positions")))
    return [embed(config, outer, tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]) for tokens in parts]


def outer_of_head(model: Transformer | Checkpoint) -> Params:
    """The parameters behind the last layer: those of the last norm, and of the head."""
    norm = ("norm",) if model.config.use_rmsnorm else ("norm", "norm_bias")
    return model.outer(*norm, "embed_tokens" if model.config.tie_embeddings else "lm_head")


def _return_freed_memory() -> None:
    """Hand what was freed back to the system, where the C library can (glibc).

    A backend that is not exact compiles a program for each layer. glibc keeps what the compiler freed: about 60 MiB a
    layer of Llama 3.1 8B's shape.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def run_layer(
    config: ModelConfig,
    layer: Params,
    x: Hidden,
    carry: Carry,
    *,
    kind: AttentionType,
    index: int,
    resolution: Resolution,
) -> tuple[Hidden, Carry]:
    """One layer over whole sequences; ``index`` is the layer that the plan runs."""
    plan = resolution.plan(Layout())
    turns = turns_of(config, *whole_sequence(x.shape[1]))
    return layer_forward(config, layer, x, turns[kind], plan, index, carry)


LAYER_STATICS = ("config", "kind", "index", "resolution")
_run_layer = jax.jit(run_layer, static_argnames=LAYER_STATICS, donate_argnames=("x",))


@functools.partial(jax.jit, static_argnames=("config",))
def last_nats(
    config: ModelConfig, outer: Params, x: Hidden, targets: Int[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """The cross-entropy of each target, from the hidden state behind the last layer."""
    return token_nats(logits_of(config, outer, x), targets)
