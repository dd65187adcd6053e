"""The transformer as pure functions of its parameters: Llama's arithmetic, layer after layer.

It follows Hugging Face's ``modeling_llama.py`` to the order of operations: RMSNorm in float32 with epsilon inside the
root, half-split RoPE, ``down(silu(gate(x)) * up(x))``. The attention of each type is planned once per pass and run by
every layer of that type; its carry goes from layer to layer. A Python loop over layers lets layers differ.

Packed input: a document is a maximal run of equal, non-negative segment ids. Positions restart with each document, so
that a packed document gives the same result as alone. Negative ids are padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnsuite.backends import Layout, Plan
from attnsuite.backends.contract import Carry

from . import latent
from .cache import Slots, write
from .config import AttentionType, ModelConfig
from .parameters import Params
from .planning import Options, Resolutions
from .rematerialise import Remat, rematerialised
from .rope import angles, inverse_frequencies, rotate

Tokens = Int[Array, "batch length"]
Hidden = Float[Array, "batch length hidden"]
Turns = dict[int, tuple[Array, Array]]  # cosines and sines [batch, length, width / 2], by the width that is turned
Observe = Callable[[int, Array, Array, Hidden, Hidden], None]


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Tokens,
    segment_ids: Int[Array, "batch length"] | None = None,
    *,
    resolutions: Resolutions,
    options: Options = (),
    observe: Observe | None = None,
    remat: Remat = "none",
) -> Float[Array, "batch length vocab"]:
    """Logits of every position, float32. ``resolutions`` are those of ``planning.resolve_attention``.

    ``observe(layer, query, key, x, attended)`` is called in each layer with its queries and keys, the stream before
    its attention, and what its attention adds to it; arrays of a layer that is computed again (``remat``) do not leave
    it. ``remat`` says what the backward pass keeps of each layer (``models/rematerialise.py``).
    """
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    if segment_ids is not None:
        segment_ids, positions = documents(segment_ids)
    plans = {}
    for kind, resolution in resolutions:
        placed = positions if resolution.spec.has_positions else None
        layout = Layout(
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            query_positions=placed,
            key_value_positions=placed,
        )
        plans[kind] = resolution.plan(layout, dict(options))
    carries: dict[AttentionType, Carry] = dict.fromkeys(plans, ())
    x = embed(config, params, tokens, positions)
    turns = turns_of(config, positions)
    for i, layer in enumerate(params["layers"]):
        kind = config.layer_types[i]
        run = functools.partial(layer_forward, config, plan=plans[kind], index=i, observe=observe)
        x, carries[kind] = rematerialised(remat, run)(layer, x, turns, carry=carries[kind])
    return logits_of(config, params, x)


def forward_cached(
    config: ModelConfig,
    params: Params,
    tokens: Tokens,
    keys: tuple[Slots, ...],
    values: tuple[Slots, ...],
    start: Int[Array, " batch"],
    end: Int[Array, " batch"],
    *,
    resolutions: Resolutions,
    options: Options = (),
    fresh: bool = False,
    last_only: bool = False,
) -> tuple[Array, tuple[Slots, ...], tuple[Slots, ...]]:
    """Logits of new tokens behind ``start`` cached ones, and the cache with the new tokens written to it.

    ``end - start`` of the tokens are valid in each sequence, the rest is padding on the right. ``fresh``
    says that the cache is empty: attention then runs over the new tokens alone. ``last_only`` gives
    ``[batch, vocab]``, the logits of each sequence's last valid token.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    layout = Layout() if fresh else Layout(query_positions=positions, key_value_seq_lengths=end)
    plans: dict[AttentionType, Plan] = {kind: found.plan(layout, dict(options)) for kind, found in resolutions}
    carries: dict[AttentionType, Carry] = dict.fromkeys(plans, ())
    x = embed(config, params, tokens, positions)
    turns = turns_of(config, positions)
    new_keys, new_values = list(keys), list(values)
    for i, layer in enumerate(params["layers"]):
        kind = config.layer_types[i]
        query, key, value = _project(config, layer, x, turns)
        new_keys[i], new_values[i] = write(keys[i], key, start), write(values[i], value, start)
        if not fresh:
            query = query.astype(keys[i].dtype)
            key, value = jnp.swapaxes(new_keys[i], 1, 2), jnp.swapaxes(new_values[i], 1, 2)
        if _is_latent(layer) and fresh:
            key, value = latent.expand(config, layer["kv_b_proj"], key)
        elif _is_latent(layer):
            query, key, value = latent.absorb(config, layer["kv_b_proj"], query, key)
        mixed, carries[kind] = plans[kind].run(query, key, value, layer=i, carry=carries[kind])
        if _is_latent(layer) and not fresh:
            mixed = latent.release(config, layer["kv_b_proj"], mixed)
        x = _finish(config, layer, x, _attended(layer, mixed.astype(x.dtype)))
    if last_only:
        x = jnp.take_along_axis(x, (end - start - 1)[:, None, None], axis=1)
    logits = logits_of(config, params, x)
    return (logits[:, 0] if last_only else logits), tuple(new_keys), tuple(new_values)


def layer_forward(
    config: ModelConfig,
    layer: Params,
    x: Hidden,
    turns: Turns,
    plan: Plan,
    index: int,
    carry: Carry,
    observe: Observe | None = None,
) -> tuple[Hidden, Carry]:
    """One layer over whole sequences: the hidden state behind it, and what it tells the next of its type."""
    query, key, value = _project(config, layer, x, turns)
    if _is_latent(layer):
        key, value = latent.expand(config, layer["kv_b_proj"], key)
    mixed, carry = plan.run(query, key, value, layer=index, carry=carry)
    attended = _attended(layer, mixed)
    if observe is not None:
        observe(index, query, key, x, attended)
    return _finish(config, layer, x, attended), carry


def documents(segment_ids: Int[Array, "batch length"]) -> tuple[Tokens, Tokens]:
    """Documents numbered in order (padding: -1), and each token's position inside its document.

    >>> runs, positions = documents(jnp.array([[7, 7, 2, 2, 2, -1]]))
    >>> runs.tolist(), positions.tolist()
    ([[0, 0, 1, 1, 1, -1]], [[0, 1, 0, 1, 2, 0]])
    """
    slots = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    runs = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
    starts = jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)
    return jnp.where(segment_ids < 0, -1, runs), slots - starts


def embed(config: ModelConfig, params: Params, tokens: Tokens, positions: Tokens) -> Hidden:
    """The hidden state before the first layer."""
    x = params["embed_tokens"][tokens].astype(config.dtype)
    if not config.use_rope:
        x = x + params["embed_positions"][positions].astype(config.dtype)
    return x


def turns_of(config: ModelConfig, positions: Tokens) -> Turns:
    """Cosines and sines that rotate queries and keys to their positions, for all layers; empty without RoPE."""
    if not config.use_rope:
        return {}
    widths = {config.latent.rope if kind == "latent" else config.dim for kind in config.attention_types}
    return {
        width: angles(positions, inverse_frequencies(width, config.rope_theta, config.rope_scaling))
        for width in sorted(widths)
    }


def _project(config: ModelConfig, layer: Params, x: Hidden, turns: Turns) -> tuple[Array, Array, Array]:
    """Normalised input to queries, keys and values, queries and keys turned to their positions."""
    x = _norm(config, layer, "input_layernorm", x)
    if _is_latent(layer):
        return _project_latent(config, layer, x, turns)
    heads = (*x.shape[:2], -1, config.dim)
    query, key, value = (_linear(x, layer, name).reshape(heads) for name in ("q_proj", "k_proj", "v_proj"))
    if config.qk_norm:
        query, key = _norm(config, layer, "q_norm", query), _norm(config, layer, "k_norm", key)
    if config.use_rope:
        query, key = rotate(query, *turns[config.dim]), rotate(key, *turns[config.dim])
    return query, key, value


def _is_latent(layer: Params) -> bool:
    """Decided by the parameters, because a streamed layer does not know its index."""
    return "kv_b_proj" in layer


def _project_latent(config: ModelConfig, layer: Params, x: Hidden, turns: Turns) -> tuple[Array, Array, Array]:
    """Queries of every head, the latents as the only key, and no value; see ``models/latent.py``."""
    sizes = config.latent
    turn = turns[sizes.rope]
    kept, shared = jnp.split(_linear(x, layer, "kv_a_proj_with_mqa")[:, :, None], [sizes.rank], axis=-1)
    key = jnp.concatenate([_norm(config, layer, "kv_a_layernorm", kept), rotate(shared, *turn)], axis=-1)
    if config.q_lora_rank is None:
        query = _linear(x, layer, "q_proj")
    else:
        query = _linear(_norm(config, layer, "q_a_layernorm", _linear(x, layer, "q_a_proj")), layer, "q_b_proj")
    query = query.reshape(*x.shape[:2], config.num_heads, -1)
    plain, placed = jnp.split(query, [sizes.nope], axis=-1)
    return jnp.concatenate([plain, rotate(placed, *turn)], axis=-1), key, key[..., :0]


def _attended(layer: Params, mixed: Float[Array, "batch length heads dim"]) -> Hidden:
    """The output of a layer's attention, which is added to the stream."""
    return _linear(mixed.reshape(*mixed.shape[:2], -1), layer, "o_proj")


def _finish(config: ModelConfig, layer: Params, x: Hidden, attended: Hidden) -> Hidden:
    """The rest of a layer after its attention."""
    x = x + attended
    inner = _norm(config, layer, "post_attention_layernorm", x)
    up = _linear(inner, layer, "up_proj")
    if config.use_swiglu:
        up = jax.nn.silu(_linear(inner, layer, "gate_proj")) * up
    else:
        up = jax.nn.gelu(up, approximate=False)
    return x + _linear(up, layer, "down_proj")


def _norm(config: ModelConfig, params: Params, name: str, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
    wide = x.astype(jnp.float32)
    if not config.use_rmsnorm:
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + config.norm_eps)
    x = params[name].astype(x.dtype) * wide.astype(x.dtype)
    return x if config.use_rmsnorm else x + params[f"{name}_bias"].astype(x.dtype)


def _linear(x: Hidden, layer: Params, name: str) -> Float[Array, "batch length out"]:
    """A projection of a layer, with its bias and its low-rank update (``models/lora.py``) where the layer has them."""
    out = jnp.einsum("bti,oi->bto", x, layer[name].astype(x.dtype))
    bias, adapter = layer.get(f"{name}_bias"), layer.get(f"{name}_lora")
    out = out if bias is None else out + bias.astype(x.dtype)
    return out if adapter is None else out + adapter(x)


def logits_of(config: ModelConfig, params: Params, x: Hidden) -> Float[Array, "batch length vocab"]:
    """Logits, float32, of the hidden state behind the last layer."""
    x = _norm(config, params, "norm", x)
    head: Any = params["embed_tokens" if config.tie_embeddings else "lm_head"]
    return jnp.einsum("bti,oi->bto", x, head.astype(x.dtype), preferred_element_type=jnp.float32)
