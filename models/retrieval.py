"""A hand-built Llama with a known retrieval circuit: the sharp test for sparse attention. Nothing is trained.

A needle symbol of type c carries two halves (a, b) of an answer and stands anywhere in filler. Later the query symbol
of type c must be answered with that needle. The *anchor* layer can fetch only ``a``, the *reuse* layer only ``b`` (same
queries and keys, different values), so the answer is right only if both attend to the needle. Dense attention is always
right. If the reuse layer attends elsewhere, one answer in 4 is right; if both layers do, one in 16. Types 0-3 live on
KV head 0 and 4-7 on KV head 1, so the choice of each head counts. Text perplexity shows none of this.

The residual stream: [0:8] needle type, [8:16] query type, [16:20] the needle's a, [20:24] its b, [24:28] fetched a,
[28:32] fetched b, [32:64] noise that tells filler bytes apart.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from .config import ModelConfig
from .parameters import Params, parameter_shapes
from .rope_scaling import RopeScaling
from .transformer import Transformer

TYPES, HALVES = 8, 4
QUERY, NEEDLE = 256, 256 + TYPES  # first query symbol, first needle symbol; below are the 256 filler bytes
VOCAB = NEEDLE + TYPES * HALVES * HALVES
TAIL = 2 * TYPES  # queries stand in the last this many tokens
HIDDEN, HEADS, KV_HEADS = 64, 8, 2
PER_KV_HEAD = TYPES // KV_HEADS
SHARPNESS = 180.0  # logit of a needle; filler has 0, so that dense attention finds it in any context


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RetrievalBatch:
    """Sequences with eight needles and eight queries each. ``answers[i]`` must be predicted *at* query ``i``."""

    tokens: Int[np.ndarray, "batch length"]
    query_positions: Int[np.ndarray, "batch types"]
    answers: Int[np.ndarray, "batch types"]
    needle_positions: Int[np.ndarray, "batch types"]


def build(
    num_layers: int = 6,
    head_dim: int = 64,
    anchor: int = 1,
    reuse: int = 3,
    context: int = 8192,
    *,
    noise: float = 0.0,
    seed: int = 0,
    **overrides: Any,
) -> Transformer:
    """The model, of any depth, head dimension (even, at least 32) and context; 8 query and 2 KV heads.

    ``anchor < reuse`` are the layers with the circuit; all others pass the stream on. ``noise`` adds
    random weights of that relative size everywhere. ``overrides`` replace other fields of the
    configuration (``attention``, ``window_size``, ``dtype``, ...). Raises ValueError.

    >>> build(num_layers=4, head_dim=32).config.num_layers
    4
    """
    if not 0 <= anchor < reuse < num_layers:
        raise ValueError(
            f"anchor={anchor} and reuse={reuse} must be layers with 0 <= anchor < reuse < num_layers={num_layers}."
        )
    if head_dim < 32 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even and at least 32; the circuit needs four slow RoPE pairs.")
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_layers=num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        max_length=max(context, 8192),
        rope_theta=_theta(head_dim, context),
        rope_scaling=RopeScaling(factor=8.0),
        tie_embeddings=False,
    ).replace(**overrides)
    rng = np.random.default_rng(seed)
    layers, silent = [], parameter_shapes(config)["layers"][0]  # attention and MLP of such a layer write nothing
    for i in range(num_layers):
        layer: Any = {name: np.ones(size) if len(size) == 1 else np.zeros(size) for name, size in silent.items()}
        if i in (anchor, reuse):
            _wire(layer, head_dim, source=16 if i == anchor else 20, target=24 if i == anchor else 28)
        layers.append(
            {
                name: x + rng.normal(size=x.shape) * noise / math.sqrt(x.shape[1]) if x.ndim == 2 else x
                for name, x in layer.items()
            }
        )
    embedding, head = _tables(rng)
    params: Params = {"embed_tokens": embedding, "norm": np.ones(HIDDEN), "lm_head": head, "layers": layers}
    return Transformer(config, jax.tree.map(lambda x: jnp.asarray(x, config.param_dtype), params))


def sample(
    rng: np.random.Generator,
    length: int,
    *,
    batch: int = 1,
    gap: int | None = None,
) -> RetrievalBatch:
    """Sequences of ``length`` tokens with each needle at least ``gap`` (default: half the length) before its query.

    The rest are random bytes. Raises ValueError where the needles do not fit.
    """
    gap = length // 2 if gap is None else gap
    positions = length - gap - TAIL
    if gap < 1 or positions < TYPES:
        raise ValueError(
            f"length={length} leaves {positions} places for {TYPES} needles before gap={gap} and {TAIL} query places; "
            f"use a length of at least {gap + TAIL + TYPES}."
        )
    rows = [_sequence(rng, length, positions) for _ in range(batch)]
    return RetrievalBatch(*(np.stack(column).astype(np.int32) for column in zip(*rows, strict=True)))


def hits(logits: Any, batch: RetrievalBatch) -> Bool[np.ndarray, "batch types"]:
    """Whether the likeliest next token at each query of ``batch``, by ``logits [batch, length, vocab]``, is right."""
    rows = np.arange(len(batch.tokens))[:, None]
    return np.asarray(jnp.asarray(logits)[rows, batch.query_positions].argmax(-1)) == batch.answers


def needle(needle_type: Any, a: Any, b: Any) -> Any:
    """The symbol of a needle of that type and those halves."""
    return NEEDLE + (needle_type * HALVES + a) * HALVES + b


def _sequence(rng: np.random.Generator, length: int, positions: int) -> tuple[np.ndarray, ...]:
    tokens = rng.integers(0, 256, length)
    types_ = rng.permutation(TYPES)
    needles = np.sort(rng.choice(positions, TYPES, replace=False))
    queries = np.sort(rng.choice(np.arange(length - TAIL, length), TYPES, replace=False))
    answers = needle(types_, rng.integers(0, HALVES, TYPES), rng.integers(0, HALVES, TYPES))
    order = rng.permutation(TYPES)
    tokens[needles] = answers
    tokens[queries] = QUERY + types_[order]
    return tokens, queries, answers[order], needles[order]


def _theta(head_dim: int, context: int) -> float:
    """A RoPE base at which the four slowest pairs turn by less than 0.3 radians over the context.

    The fastest of them turns by ``theta ** -(1 - 8 / head_dim)`` per token, before the scaling slows it.
    """
    return max(500000.0, (context / 0.3) ** (1.0 / (1.0 - 8.0 / head_dim)))


def _wire(layer: dict[str, Any], head_dim: int, source: int, target: int) -> None:
    """Let each query head find the needle of its type and copy one half of its answer."""
    # Normalised, a needle's type reads 4/sqrt(48/64) and a bare query's 4/sqrt(16/64).
    gain = SHARPNESS * math.sqrt(head_dim) / ((4 / math.sqrt(0.75)) * (4 / math.sqrt(0.25)))
    for needle_type in range(TYPES):
        kv, member = divmod(needle_type, PER_KV_HEAD)
        slow = head_dim // 2 - 1 - member  # a pair of its own among the four slowest
        query = needle_type * head_dim + slow  # query head i reads KV head i // 4
        layer["q_proj"][query, 8 + needle_type] = gain
        layer["k_proj"][kv * head_dim + slow, needle_type] = 1.0
    for j in range(HALVES):
        layer["v_proj"][np.arange(KV_HEADS) * head_dim + j, source + j] = 1.0
        layer["o_proj"][target + j, np.arange(HEADS) * head_dim + j] = 1.0


def _tables(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Embedding and output head."""
    embedding, head = np.zeros((VOCAB, HIDDEN)), np.zeros((VOCAB, HIDDEN))
    embedding[:256, 32:] = rng.normal(size=(256, HIDDEN - 32)) * 0.5
    for needle_type in range(TYPES):
        embedding[QUERY + needle_type, 8 + needle_type] = 4.0
        for a in range(HALVES):
            for b in range(HALVES):
                embedding[needle(needle_type, a, b), [needle_type, 16 + a, 20 + b]] = 4.0
                head[needle(needle_type, a, b), [8 + needle_type, 24 + a, 28 + b]] = 4.0
    return embedding, head
