"""The model object: a configuration and its parameters, and the calls that run them.

Parameters are :class:`flax.nnx.Param`, so that nnx optimizers, gradients and sharding apply. The computation is the
pure core of ``forward_pass.py`` under ``jax.jit`` over plain arrays (``nnx.jit`` costs 63 ms a call for a small
32-layer model, ``jax.jit`` 13). The backends are resolved before every call, outside the compiled function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float

from attnsuite.backends import Resolution, masks
from attnsuite.backends.layout import as_int32, known_shape

from .cache import KVCache, default_dtype, slot_shapes
from .config import AttentionType, ModelConfig
from .forward_pass import forward, forward_cached
from .padding import segment_ids_of
from .parameters import Params, initialise, parameter_shapes
from .planning import Call, planned

compiled_forward = jax.jit(forward, static_argnames=("config", "resolutions"))
compiled_forward_cached = jax.jit(
    forward_cached,
    static_argnames=("config", "resolutions", "fresh", "last_only", "tree"),
    donate_argnames="held",
)


class Transformer(nnx.Module):
    """A decoder-only transformer. ``params`` is a tree of arrays as ``models.parameters`` describes it.

    Without ``params`` it is initialised from ``rngs`` (default: seed 0). Raises ValueError where an array
    does not have the shape that the configuration gives it.

    >>> model = Transformer(ModelConfig.from_preset("debug"))
    >>> model(jnp.zeros((1, 8), int)).shape
    (1, 8, 256)
    """

    def __init__(self, config: ModelConfig, params: Params | None = None, *, rngs: nnx.Rngs | None = None) -> None:
        if params is None:
            params = initialise(config, (rngs or nnx.Rngs(0)).params())
        _check_shapes(config, params)
        self.config = config
        self.params = nnx.data(jax.tree.map(nnx.Param, params))

    def arrays(self) -> Params:
        """The parameters as a tree of plain arrays: what the pure functions take."""
        return _arrays_of(self.params)

    def outer(self, *names: str) -> Params:
        """The parameters of these names outside of the layers, as a checkpoint gives them."""
        return {name: _arrays_of(self.params[name]) for name in names}

    def layer(self, index: int) -> Params:
        """The parameters of one layer, as a checkpoint gives them."""
        return _arrays_of(self.params["layers"][index])

    def leaves(self) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays, each with its path, in the order of the tree, as a checkpoint gives them."""
        for path, array in jax.tree_util.tree_leaves_with_path(self.arrays()):
            yield jax.tree_util.keystr(path), np.asarray(array)

    def with_config(self, **overrides: Any) -> Transformer:
        """The same parameters (shared, not copied) under another attention, dtype or RoPE."""
        return Transformer(self.config.replace(**overrides), self.arrays())

    def resolutions(
        self,
        batch: int,
        length: int,
        *,
        capacity: int | None = None,
        packed: bool = False,
        needs_grad: bool = True,
        **call: Unpack[Call],
    ) -> dict[AttentionType, Resolution]:
        """What would compute each attention type of this model, with every rejection and its reason.

        ``capacity`` is that of a cache of default dtype that is attended to (decoding: ``length=1``), or None
        for a full pass. ``call`` are the keywords of :class:`attnsuite.models.planning.Call`.
        """
        dtype = None if capacity is None else default_dtype(self.config)
        problem = {"key_value_length": capacity, "dtype": dtype, "packed": packed, "needs_grad": needs_grad}
        return dict(planned(self.config, call, batch=batch, query_length=length, **problem))

    def __call__(
        self,
        tokens: Any,
        *,
        segment_ids: Any = None,
        padding_mask: Any = None,
        needs_grad: bool = True,
        **call: Unpack[Call],
    ) -> Float[Array, "batch length vocab"]:
        """Logits ``[batch, length, vocab]``, float32, of integer ``tokens [batch, length]``.

        ``segment_ids [batch, length]`` packs documents: a document is a maximal run of equal ids, sees
        only itself, and its positions start at 0; negative ids are padding. ``padding_mask [batch, length]``,
        boolean, is True for the tokens of a row and False for its padding, at the left or at the right end; where both
        are given, it must be True exactly where ``segment_ids`` is not negative. Logits at padding have no meaning.
        ``needs_grad=False`` admits backends without a backward pass. ``call`` are the keywords of
        :class:`attnsuite.models.planning.Call`: ``backend``, ``mode``, ``backend_options``, ``on_unavailable`` and
        ``policy``. Raises ValueError for shapes that do not fit, and what :func:`attnsuite.backends.resolve` raises.
        """
        tokens = check_tokens(tokens, self.config.vocab_size)
        batch, length = tokens.shape
        self.config.check_length("length", length)
        if segment_ids is not None:
            ids = segment_ids if isinstance(segment_ids, jax.Array) else np.asarray(segment_ids)
            if ids.shape != tokens.shape:
                raise ValueError(f"segment_ids has shape {ids.shape}; expected that of tokens, {tokens.shape}.")
            if not jnp.issubdtype(ids.dtype, jnp.integer):
                raise ValueError(f"segment_ids has dtype {ids.dtype}; expected integers (for booleans: padding_mask).")
            segment_ids = jnp.asarray(as_int32("segment_ids", ids, are_ids=True))
        if padding_mask is not None:
            segment_ids = segment_ids_of(padding_mask, tokens.shape, segment_ids)
        packed = segment_ids is not None
        found = planned(self.config, call, batch=batch, query_length=length, packed=packed, needs_grad=needs_grad)
        return compiled_forward(self.config, self.arrays(), tokens, segment_ids, resolutions=found)

    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: str | None = None,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> KVCache:
        """An empty cache for this model; arguments as for :meth:`attnsuite.models.cache.KVCache.create`."""
        return KVCache.create(self.config, batch, capacity, dtype, page_size=page_size, num_pages=num_pages)

    def prefill(
        self,
        tokens: Any,
        cache: KVCache,
        *,
        lengths: Any = None,
        last_only: bool = False,
        parents: Sequence[int] | None = None,
        **call: Unpack[Call],
    ) -> tuple[Array, KVCache]:
        """Logits of ``tokens [batch, length]`` behind what the cache holds, and the cache with them in it.

        ``lengths [batch]`` says how many tokens of each row are valid, the rest being padding on the right.
        Logits are ``[batch, length, vocab]``, or with ``last_only`` the ``[batch, vocab]`` of each row's
        last valid token. ``parents`` says that the tokens are a tree that drafts what follows the cached tokens:
        ``parents[i]`` is the index of the token before token i, or -1 (:class:`attnsuite.backends.masks.Tree`).
        :func:`attnsuite.models.speculation.keep` then keeps a path. ``call`` are the keywords of
        :class:`attnsuite.models.planning.Call`. The given cache is donated. Raises ValueError where the tokens do not
        fit, and what :meth:`attnsuite.models.cache.KVCache.check` raises.
        """
        KVCache.check(cache)
        tokens = check_tokens(tokens, self.config.vocab_size)
        batch, length = tokens.shape
        if batch != cache.batch:
            raise ValueError(f"tokens has {batch} rows, but the cache was made for {cache.batch}; they must be equal.")
        shapes = tuple(x.shape for x in cache.keys)
        if shapes != (expected := slot_shapes(self.config, shapes[0][0], shapes[0][2])[0]):
            raise ValueError(f"the cache has keys of shapes {shapes}, this model {expected}; make it one of its own.")
        after = cache.lengths_after(length, lengths)
        self.config.check_length("length", int(after.max()))  # a paged cache may have more slots
        table = cache.table_after(after)
        tree = None if parents is None else _tree(tuple(parents), length, cache, lengths)
        problem = {} if cache.is_empty else cache.problem
        logits, (keys, values) = compiled_forward_cached(
            self.config,
            self.arrays(),
            tokens,
            (cache.keys, cache.values),
            cache.lengths,
            after,
            resolutions=planned(
                self.config, call, batch=batch, query_length=length, needs_grad=False, tree=tree, **problem
            ),
            fresh=cache.is_empty,
            last_only=last_only,
            tree=tree,
            page_table=table,
        )
        return logits, KVCache(keys=keys, values=values, lengths=after, page_table=table)

    def decode(self, tokens: Any, cache: KVCache, **call: Unpack[Call]) -> tuple[Float[Array, "batch vocab"], KVCache]:
        """Logits ``[batch, vocab]`` behind one more token per row (``[batch]`` or ``[batch, 1]``), and the cache.

        ``call`` are the keywords of :class:`attnsuite.models.planning.Call`. The cache is donated.
        """
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)  # prefill checks what is on the host
        tokens = tokens[:, None] if tokens.ndim == 1 else tokens
        if tokens.ndim != 2 or tokens.shape[1] != 1:
            raise ValueError(
                f"tokens has shape {tokens.shape}; decoding takes one token per row: [batch] or [batch, 1]."
            )
        return self.prefill(tokens, cache, last_only=True, **call)


def _arrays_of(tree: Any) -> Any:
    # get_raw_value: a tenth of the time of p[...], which counts with hundreds of parameters per decoded token.
    return jax.tree.map(lambda p: p.get_raw_value(), tree, is_leaf=lambda p: isinstance(p, nnx.Variable))


def _tree(parents: tuple[int, ...], length: int, cache: KVCache, lengths: Any) -> masks.Tree:
    """The tree of a draft. Raises ValueError where it does not fit the tokens, or there is nothing that it follows."""
    if len(parents) != length:
        raise ValueError(f"parents has {len(parents)} entries for {length} tokens per row; give one for each token.")
    if lengths is not None:
        raise ValueError("lengths and parents are both given; a tree has the same nodes in every row, without padding.")
    if cache.is_empty:
        raise ValueError("parents is given with an empty cache; prefill the tokens that the draft follows first.")
    return masks.Tree(parents)


def check_tokens(tokens: Any, vocab_size: int) -> Array:
    """The tokens as an array; their range is checked where that needs no wait for a device."""
    on_device = isinstance(tokens, jax.Array)
    try:
        tokens = tokens if on_device else np.asarray(tokens)
    except ValueError as error:
        raise ValueError(
            f"tokens makes no array ({error}); pad its rows to one length, and give padding_mask or lengths."
        ) from error
    shape = known_shape("tokens", tokens)
    if len(shape) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or 0 in shape:
        raise ValueError(f"tokens is {tokens.dtype}{list(shape)}; expected integers [batch, length], not empty.")
    known = not on_device or (not isinstance(tokens, Tracer) and tokens.is_fully_addressable and tokens.is_ready())
    if known and not 0 <= (numbers := np.asarray(tokens)).min() <= numbers.max() < vocab_size:
        raise ValueError(
            f"tokens reach from {numbers.min()} to {numbers.max()}; this model has tokens 0 to {vocab_size - 1}."
        )
    return jnp.asarray(tokens)


def _check_shapes(config: ModelConfig, params: Params) -> None:
    expected = parameter_shapes(config)
    if jax.tree.structure(params) != jax.tree.structure(expected, is_leaf=lambda x: isinstance(x, tuple)):
        layers = params.get("layers", ()) if isinstance(params, dict) else ()
        if any(name.endswith("_lora") for layer in layers for name in layer):
            raise ValueError("params has LoRA adapters beside its arrays; give lora.merge(params, adapters).params.")
        raise ValueError(
            f"params is a tree {jax.tree.structure(params)}; expected the one of models.parameters.parameter_shapes."
        )

    def check(path: Any, array: Array, shape: tuple[int, ...]) -> None:
        if tuple(array.shape) != shape:
            raise ValueError(f"params{jax.tree_util.keystr(path)} has shape {tuple(array.shape)}; expected {shape}.")

    jax.tree_util.tree_map_with_path(check, params, expected)
