"""The transformer as pure functions of its parameters: Llama's arithmetic, layer after layer.

It follows Hugging Face's ``modeling_llama.py`` to the order of operations: RMSNorm in float32 with epsilon inside the
root, half-split RoPE, ``down(silu(gate(x)) * up(x))``. Other families replace a part each, as ``ModelConfig`` says. The
attention of each type is planned once per pass and run by every layer of that type; its carry goes from layer to layer.
A Python loop over layers lets layers differ.

Packed input: a document is a maximal run of equal, non-negative segment ids. Positions restart with each document, so
that a packed document gives the same result as alone. Negative ids are padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnsuite.backends import Layout, Plan, masks
from attnsuite.backends.contract import NO_TERMS, Carry, Terms
from attnsuite.backends.kv_cache import ragged_layout

from . import latent
from .cache import Held, SlotMapping, Slots, read, with_scales, write, write_pages
from .config import AttentionType, ModelConfig
from .experts import gated, mixture
from .parameters import LAYER_NORMS, Params
from .planning import Resolutions
from .rematerialise import Remat, rematerialised
from .rope import along_last, angles, grown_frequencies, inverse_frequencies, rotate
from .rope_scaling import DynamicScaling

Tokens = Int[Array, "batch length"]
Hidden = Float[Array, "batch length hidden"]
# How positions enter a layer. With RoPE: cosines and sines [batch, length, width / 2], for queries and keys.
# Without RoPE: factors [batch, length] by which the queries are multiplied, or None.
Turn = tuple[Array, Array] | Array | None
Put = Callable[[Slots, Array], Slots]
Observe = Callable[[int, Array, Array, Hidden, Hidden], None]


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Tokens,
    segment_ids: Int[Array, "batch length"] | None = None,
    *,
    resolutions: Resolutions,
    observe: Observe | None = None,
    remat: Remat = "none",
) -> Float[Array, "batch length vocab"]:
    """Logits of every position, float32. ``resolutions`` are those of ``planning.resolve_attention``.

    ``observe(layer, query, key, x, attended)`` is called in each layer with its queries and keys, the stream before
    its attention, and what its attention adds to it; arrays of a layer that is computed again (``remat``) do not leave
    it. ``remat`` says what the backward pass keeps of each layer (``models/rematerialise.py``).
    """
    positions, lengths = whole_sequence(tokens.shape[1])
    if segment_ids is not None:
        segment_ids, positions, lengths = documents(segment_ids)
    plans = {}
    for kind, resolution in resolutions:
        placed = positions if resolution.spec.has_positions else None
        layout = Layout(
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            query_positions=placed,
            key_value_positions=placed,
        )
        plans[kind] = resolution.plan(layout)
    carries: dict[AttentionType, Carry] = dict.fromkeys(plans, ())
    x = embed(config, params, tokens, positions)
    turns = turns_of(config, positions, lengths)
    for i, layer in enumerate(params["layers"]):
        kind = config.layer_types[i]
        run = functools.partial(layer_forward, config, plan=plans[kind], index=i, observe=observe)
        x, carries[kind] = rematerialised(remat, run)(layer, x, turns[kind], carry=carries[kind])
    return logits_of(config, params, x)


def forward_cached(
    config: ModelConfig,
    params: Params,
    tokens: Tokens,
    held: Held,
    start: Int[Array, " batch"],
    end: Int[Array, " batch"],
    *,
    resolutions: Resolutions,
    fresh: bool = False,
    last_only: bool = False,
    tree: masks.Tree | None = None,
    page_table: Int[Array, "batch pages_per_sequence"] | None = None,
) -> tuple[Array, Held]:
    """Logits of new tokens behind ``start`` cached ones, and the cache with the new tokens written to it.

    ``end - start`` of the tokens are valid in each sequence, the rest is padding on the right. ``fresh``
    says that the cache is empty: attention then runs over the new tokens alone. ``last_only`` gives
    ``[batch, vocab]``, the logits of each sequence's last valid token. ``tree`` says that the new tokens are its nodes:
    each is turned to the position of its depth, and masked by its slot. ``page_table`` is that of a paged cache; it
    has the pages of the new tokens already.
    """
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32) if tree is None else jnp.array(tree.depths, jnp.int32)
    positions = start[:, None] + offsets[None]
    layout = Layout() if fresh else Layout(query_positions=positions, key_value_seq_lengths=end)
    pool = (held[0][0].shape[0], held[0][0].shape[2])
    capacity = pool[1] * (1 if page_table is None else page_table.shape[1])
    if tree is not None:
        layout = _layout_of(tree, capacity, start, end)
    if page_table is None:
        put: Put = functools.partial(write, start=start)
    else:
        layout = layout if fresh else dataclasses.replace(layout, page_table=page_table)
        slots = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        put = functools.partial(
            write_pages, slot_mapping=SlotMapping.of(page_table, rows, slots, slots < end[:, None], pool)
        )
    # A node's path is as long as it would be in a decode step, whatever other nodes there are.
    turns = turns_of(config, positions, end[:, None] if tree is None else positions + 1)
    x = embed(config, params, tokens, positions)
    x, held = _through_layers(config, params, x, turns, held, put, layout, resolutions=resolutions, fresh=fresh)
    if last_only:
        x = jnp.take_along_axis(x, (end - start - 1)[:, None, None], axis=1)
    logits = logits_of(config, params, x)
    return (logits[:, 0] if last_only else logits), held


def forward_ragged(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "1 tokens"],
    held: Held,
    lengths: Int[Array, " sequences"],
    query_starts: Int[Array, " sequences_plus_one"],
    page_table: Int[Array, "sequences pages_per_sequence"],
    *,
    resolutions: Resolutions,
) -> tuple[Float[Array, "sequences vocab"], Held]:
    """Logits of the last token of each sequence in a ragged batch, and the paged cache with the tokens written to it.

    Arguments are those of :func:`attnsuite.backends.kv_cache.ragged_layout`: ``lengths`` count the new tokens, and a
    sequence may have none; its logits then mean nothing.
    """
    pool = (held[0][0].shape[0], held[0][0].shape[2])
    layout = ragged_layout(page_table, lengths, query_starts, page_size=pool[1], num_tokens=tokens.shape[1])
    of_token: Any = layout.query_segment_ids
    sequences, positions = jnp.maximum(of_token, 0), jnp.maximum(jnp.asarray(layout.query_positions), 0)
    put: Put = functools.partial(
        write_pages, slot_mapping=SlotMapping.of(page_table, sequences, positions, of_token >= 0, pool)
    )
    x = embed(config, params, tokens, positions)
    turns = turns_of(config, positions, lengths[sequences])
    x, held = _through_layers(config, params, x, turns, held, put, layout, resolutions=resolutions, fresh=False)
    last = x[:, jnp.maximum(query_starts[1:] - 1, 0)]
    return logits_of(config, params, last)[0], held


def _through_layers(
    config: ModelConfig,
    params: Params,
    x: Hidden,
    turns: dict[AttentionType, Turn],
    held: Held,
    put: Put,
    layout: Layout,
    *,
    resolutions: Resolutions,
    fresh: bool,
) -> tuple[Hidden, Held]:
    """The hidden state behind the last layer, and the cache, to which each layer puts its new keys and values first."""
    plans: dict[AttentionType, Plan] = {kind: found.plan(layout) for kind, found in resolutions}
    specs = {kind: found.spec for kind, found in resolutions}
    carries: dict[AttentionType, Carry] = dict.fromkeys(plans, ())
    keys, values = map(list, held)
    for i, layer in enumerate(params["layers"]):
        kind = config.layer_types[i]
        query, key, value = _project(config, layer, x, turns[kind])
        keys[i], values[i] = put(keys[i], key), put(values[i], value)
        terms = _terms(layer)
        if not fresh:
            query, in_keys = query.astype(specs[kind].dtype), specs[kind].values_in_keys
            key, value = read(keys[i]), None if in_keys else read(values[i])
            terms = with_scales(terms, keys[i], None if in_keys else values[i])
        if _is_latent(layer) and fresh:
            key, value = latent.expand(config, layer["kv_b_proj"], key)
        elif _is_latent(layer):
            query = latent.absorb(config, layer["kv_b_proj"], query)
            value = None if value is None else key[..., : config.latent.rank]
        mixed, carries[kind] = plans[kind].run(query, key, value, layer=i, carry=carries[kind], terms=terms)
        if _is_latent(layer) and not fresh:
            mixed = latent.release(config, layer["kv_b_proj"], mixed)
        x = _finish(config, layer, x, _attended(config, layer, mixed.astype(x.dtype)))
    return x, (tuple(keys), tuple(values))


def _layout_of(tree: masks.Tree, capacity: int, start: Int[Array, " batch"], end: Int[Array, " batch"]) -> Layout:
    """Positions count from the first node of the tree in each sequence: cached tokens lie at negative ones."""
    nodes = jnp.arange(len(tree.parents), dtype=jnp.int32)
    return Layout(
        query_positions=jnp.broadcast_to(nodes, (start.shape[0], nodes.shape[0])),
        key_value_positions=jnp.arange(capacity, dtype=jnp.int32)[None] - start[:, None],
        key_value_seq_lengths=end,
    )


def layer_forward(
    config: ModelConfig,
    layer: Params,
    x: Hidden,
    turn: Turn,
    plan: Plan,
    index: int,
    carry: Carry,
    observe: Observe | None = None,
) -> tuple[Hidden, Carry]:
    """One layer over whole sequences: the hidden state behind it, and the carry for the next layer of its type."""
    query, key, value = _project(config, layer, x, turn)
    if _is_latent(layer):
        key, value = latent.expand(config, layer["kv_b_proj"], key)
    mixed, carry = plan.run(query, key, value, layer=index, carry=carry, terms=_terms(layer))
    attended = _attended(config, layer, mixed)
    if observe is not None:
        observe(index, query, key, x, attended)
    return _finish(config, layer, x, attended), carry


def whole_sequence(length: int) -> tuple[Tokens, Tokens]:
    """The position of each token, ``[1, length]``, and the length of its document, ``[1, 1]``, without segment ids."""
    return jnp.arange(length, dtype=jnp.int32)[None], jnp.full((1, 1), length, jnp.int32)


def documents(segment_ids: Int[Array, "batch length"]) -> tuple[Tokens, Tokens, Tokens]:
    """Documents numbered in order (padding: -1), each token's position inside its document, and its document's length.

    >>> runs, positions, lengths = documents(jnp.array([[7, 7, 2, 2, 2, -1]]))
    >>> runs.tolist(), positions.tolist(), lengths.tolist()
    ([[0, 0, 1, 1, 1, -1]], [[0, 1, 0, 1, 2, 0]], [[2, 2, 3, 3, 3, 1]])
    """
    slots = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    runs = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
    starts = jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)
    begins_next = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    ends = jax.lax.cummin(jnp.where(begins_next, slots + 1, segment_ids.shape[1]), axis=1, reverse=True)
    return jnp.where(segment_ids < 0, -1, runs), slots - starts, ends - starts


def embed(config: ModelConfig, params: Params, tokens: Tokens, positions: Tokens) -> Hidden:
    """The hidden state before the first layer."""
    x = params["embed_tokens"][tokens].astype(config.dtype)
    if config.scale_embeddings:
        x = x * jnp.asarray(config.hidden_size**0.5, config.dtype)
    if not config.use_rope:
        x = x + params["embed_positions"][positions].astype(config.dtype)
    return x


def turns_of(config: ModelConfig, positions: Tokens, lengths: Tokens) -> dict[AttentionType, Turn]:
    """What rotates queries and keys to their positions, for the layers of each type.

    ``lengths``, broadcast against ``positions``, are those of the documents; only dynamic scaling uses them.
    """
    return {kind: _turn(config, kind, positions, lengths) for kind in config.attention_types}


def _turn(config: ModelConfig, kind: AttentionType, positions: Tokens, lengths: Tokens) -> Turn:
    if not config.use_rope:
        return None
    if kind == "nope":
        return _sharpened(config, positions)
    width = config.latent.rope if kind == "latent" else config.dim
    if kind == "sliding" and config.sliding_rope_theta is not None:
        return angles(positions, inverse_frequencies(width, config.sliding_rope_theta))
    scaling = config.rope_scaling
    if isinstance(scaling, DynamicScaling):
        return angles(positions, grown_frequencies(width, config.rope_theta, scaling, lengths))
    cos, sin = angles(positions, inverse_frequencies(width, config.rope_theta, scaling))
    factor = 1.0 if scaling is None else scaling.attention_factor or 1.0
    return cos * factor, sin * factor


def _sharpened(config: ModelConfig, positions: Tokens) -> Float[Array, "batch length"] | None:
    """The factors of the queries of layers without RoPE, float32."""
    if config.floor_scale is None or config.attn_scale is None:
        return None
    floors = jnp.floor((positions.astype(jnp.float32) + 1.0) / config.floor_scale)
    return 1.0 + config.attn_scale * jnp.log1p(floors)


def _project(config: ModelConfig, layer: Params, x: Hidden, turn: Turn) -> tuple[Array, Array, Array]:
    """A layer's input to queries, keys and values, queries and keys turned to their positions."""
    x = _norm(config, layer, LAYER_NORMS[config.norms].before_attention, x)
    if _is_latent(layer):
        return _project_latent(config, layer, x, turn)
    query, key, value = (_linear(x, layer, name) for name in ("q_proj", "k_proj", "v_proj"))
    heads = (*x.shape[:2], -1, config.dim)
    if config.qk_norm and config.qk_norm_over == "projection":
        query, key = _norm(config, layer, "q_norm", query), _norm(config, layer, "k_norm", key)
    query, key, value = (y.reshape(heads) for y in (query, key, value))
    if config.qk_norm and config.qk_norm_over == "head":
        query, key = _norm(config, layer, "q_norm", query), _norm(config, layer, "k_norm", key)
    if isinstance(turn, tuple):
        query, key = rotate(query, *turn), rotate(key, *turn)
        if config.qk_norm and config.qk_norm_over == "rotated":
            query, key = _unit(config, query), _unit(config, key)
    elif turn is not None:
        query = (query.astype(jnp.float32) * turn[..., None, None]).astype(query.dtype)
    return query, key, value


def _is_latent(layer: Params) -> bool:
    """Decided by the parameters, because a streamed layer does not know its index."""
    return "kv_b_proj" in layer


def _project_latent(config: ModelConfig, layer: Params, x: Hidden, turn: Turn) -> tuple[Array, Array, Array]:
    """Queries of every head, the latents as the only key, and no value; see ``models/latent.py``."""
    sizes = config.latent
    if not isinstance(turn, tuple):
        raise ValueError("attention='latent' needs use_rope=True.")  # noqa: TRY004  (the config is wrong)
    latents, shared = jnp.split(_linear(x, layer, "kv_a_proj_with_mqa")[:, :, None], [sizes.rank], axis=-1)
    key = jnp.concatenate([_norm(config, layer, "kv_a_layernorm", latents), rotate(shared, *turn)], axis=-1)
    if config.q_lora_rank is None:
        query = _linear(x, layer, "q_proj")
    else:
        query = _linear(_norm(config, layer, "q_a_layernorm", _linear(x, layer, "q_a_proj")), layer, "q_b_proj")
    query = query.reshape(*x.shape[:2], config.num_heads, -1)
    plain, placed = jnp.split(query, [sizes.nope], axis=-1)
    return jnp.concatenate([plain, rotate(placed, *turn)], axis=-1), key, key[..., :0]


def _terms(layer: Params) -> Terms:
    return Terms(sinks=layer["sinks"]) if "sinks" in layer else NO_TERMS


def _attended(config: ModelConfig, layer: Params, mixed: Float[Array, "batch length heads dim"]) -> Hidden:
    """The output of a layer's attention, which is added to the stream."""
    out = _linear(mixed.reshape(*mixed.shape[:2], -1), layer, "o_proj")
    return _norm(config, layer, LAYER_NORMS[config.norms].after_attention, out)


def _finish(config: ModelConfig, layer: Params, x: Hidden, attended: Hidden) -> Hidden:
    """The rest of a layer after its attention."""
    norms = LAYER_NORMS[config.norms]
    x = x + attended
    inner = _norm(config, layer, norms.before_mlp, x)
    if config.num_experts is not None:
        out = mixture(config, layer, inner)
    else:
        up = _linear(inner, layer, "up_proj")
        if config.use_swiglu:
            # Gradients keep the two inputs and compute what lies between again.
            up = jax.checkpoint(gated, static_argnums=0)(config.activation, _linear(inner, layer, "gate_proj"), up)
        else:
            up = jax.nn.gelu(up, approximate=False)
        out = _linear(up, layer, "down_proj")
    return x + _norm(config, layer, norms.after_mlp, out)


def _norm(
    config: ModelConfig, params: Params, name: str | None, x: Float[Array, "*rows dim"]
) -> Float[Array, "*rows dim"]:
    """The norm of that name; None is no norm."""
    if name is None:
        return x
    wide = x.astype(jnp.float32)
    if not config.use_rmsnorm:
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + config.norm_eps)
    if config.norm_plus_one:  # rounded once, after the product; Llama rounds before it
        return ((1.0 + along_last(params[name], x.ndim).astype(jnp.float32)) * wide).astype(x.dtype)
    x = along_last(params[name], x.ndim).astype(x.dtype) * wide.astype(x.dtype)
    return x if config.use_rmsnorm else x + along_last(params[f"{name}_bias"], x.ndim).astype(x.dtype)


def _unit(config: ModelConfig, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
    """An RMSNorm without weights."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + config.norm_eps)).astype(x.dtype)


def _linear(x: Hidden, layer: Params, name: str) -> Float[Array, "batch length out"]:
    """A projection of a layer, with its bias and its low-rank update (``models/lora.py``) where the layer has them."""
    out = _slope_once(jnp.einsum("bti,oi->bto", x, layer[name].astype(x.dtype)))
    bias, adapter = layer.get(f"{name}_bias"), layer.get(f"{name}_lora")
    out = out if bias is None else out + along_last(bias, 3).astype(x.dtype)
    return out if adapter is None else out + adapter(x)


@jax.custom_vjp
def _slope_once(x: Array) -> Array:
    """``x`` itself, with a barrier on its cotangent: on a CPU, XLA would compute it again for the weights' gradient."""
    return x


def _slope_once_backward(_: None, slope: Array) -> tuple[Array]:
    return (jax.lax.platform_dependent(slope, cpu=jax.lax.optimization_barrier, default=lambda same: same),)


_slope_once.defvjp(lambda x: (x, None), _slope_once_backward)


def logits_of(config: ModelConfig, params: Params, x: Hidden) -> Float[Array, "batch length vocab"]:
    """Logits, float32, of the hidden state behind the last layer."""
    x = _norm(config, params, "norm", x)
    head: Any = params["embed_tokens" if config.tie_embeddings else "lm_head"]
    logits = jnp.einsum("bti,oi->bto", x, head.astype(x.dtype), preferred_element_type=jnp.float32)
    cap = config.final_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
