"""MaxText's ``AttentionOp`` through a backend of this package.

Every attention layer of MaxText makes an ``AttentionOp``, whose method ``apply_attention`` chooses a kernel.
:func:`attention_op` makes a subclass with another ``apply_attention``. The method and what it means were read in
MaxText 0.2.5 (``maxtext/layers/attention_op.py``, ``nnx_decoders.py``). This module does not import MaxText.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..attention import attention
from ..contract import Carry
from ..layer_stack import LayerStack
from ..registry import get, names
from ..sharding import Sharded
from .hook import check_options, signature_of

READ = "MaxText 0.2.5"

# Parameters with one accepted value: what they ask for is not in the contract, or is not passed on.
_REFUSED = {
    "lengths": None,
    "previous_chunk": None,
    "bidirectional_mask": None,
    "sinks": None,
    "indexer_mask": None,
    "compressed_mask": None,
    "record_max_logits": False,
    "pad_kv_total": 0,
    "compress_ratio": 0,
}
PARAMETERS = (
    *("self", "query", "key", "value", "decoder_segment_ids", "segment_positions", "lengths", "model_mode"),
    *("use_ragged_attention", "previous_chunk", "bidirectional_mask", "sinks", "indexer_mask", "compressed_mask"),
    *("record_max_logits", "decoder_segment_ids_kv", "pad_kv_total", "compress_ratio"),
    *("qk_product_einsum", "wv_product_einsum"),
)
_KERNELS = ("dot_product", "autoselected")
_MODES = ("train", "prefill")
_TYPES = ("global", "mla", "local_sliding", "chunk", "full")


def attention_op(base: type, backend: str = "auto", **options: Any) -> type:
    """A subclass of MaxText's ``AttentionOp``, given as ``base``, that computes attention with ``backend``.

    ``options`` are ``on_unavailable``, ``mode``, ``needs_grad``, ``backend_options``, ``policy`` and ``layer`` of
    :func:`attnsuite.backends.attention`. The subclass computes what MaxText's ``attention=dot_product`` computes, with
    segments, sliding windows, chunks and the soft cap, in the modes ``train`` and ``prefill``. MaxText scales the
    query itself. Softmax and accumulation are float32 whatever ``float32_logits`` says. A row with no visible key is
    zero, where MaxText averages values. Attention weights have no dropout, as with ``dot_product``.

    Raises ValueError for an unknown option, and for an ``AttentionOp`` whose method has a parameter that this adapter
    does not know. The subclass raises ValueError, when it is called, for everything else: decoding
    (``autoregressive``), another ``attention=`` than ``dot_product`` or ``autoselected``, quantized keys and values,
    sinks, masks by index, images or compression, MoBA, chunked prefill, recorded logits, load-balanced context
    parallelism, and a mesh of several devices unless ``backend`` is a registered :class:`attnsuite.backends.Sharded`.
    """
    check_options("attention_op", options)
    method: Any = getattr(base, "apply_attention", None)
    if method is None or not hasattr(base, "_load_balanced_context_parallel"):
        raise ValueError(f"{base.__name__} is not the AttentionOp that this adapter was written for; use {READ}.")
    signature = signature_of(method, PARAMETERS, name=f"{base.__name__}.apply_attention", read=READ)

    def apply_attention(self: Any, *args: Any, **keywords: Any) -> tuple[Array, None, None]:
        arguments = dict.fromkeys(PARAMETERS) | _REFUSED | signature.bind(self, *args, **keywords).arguments
        _check_layer(self, backend)
        _check_call(arguments)
        return _attend(self, arguments, backend, options), None, None

    # nnx looks at the annotations of a module's class body, so the method is added to a class without one.
    return type(base)(f"{base.__name__}By{backend.title()}", (base,), {"apply_attention": apply_attention})


def decoder(base: type, stack: LayerStack) -> type:
    """A subclass of MaxText's ``NNXDecoder``, given as ``base``, whose scan hands a selection from layer to layer.

    It is for :func:`attention_op` with ``layer=stack``. MaxText's scan over layers carries the hidden states. That of
    the subclass carries the layer's number and what the layer before handed on, too; rematerialisation stays.

    Raises ValueError for a ``base`` without MaxText's scan, and when it is called for a scan of another number of
    layers than the stack has (two kinds of layers, or blocks of several).
    """
    scan: Any = getattr(base, "_apply_layers_sequentially", None)
    if scan is None:
        raise ValueError(f"{base.__name__} is not the NNXDecoder that this adapter was written for; use {READ}.")

    def scan_layers(self: Any, layers: Any, x_in: Any, *args: Any, length: int, **keywords: Any) -> Any:
        if length != stack.num_layers:
            raise ValueError(f"MaxText scans over {length} blocks of layers; the stack has {stack.num_layers} layers.")
        carries: list[Carry] = []
        kind: Any = type(layers)

        def first(layer: Any, x: Any, *args: Any, **keywords: Any) -> Any:
            out, carry = stack.step(functools.partial(kind.__call__, layer), x, *args, layer=0, **keywords)
            carries.append(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), carry))
            return out

        def each(layer: Any, handed: Any, *args: Any, **keywords: Any) -> Any:
            x, number, carry = handed
            call = functools.partial(kind.__call__, layer)
            out, carry = stack.step(call, x, *args, layer=number, carry=carry, **keywords)
            return (out[0], number + 1, carry), None

        def scanned(call: Callable[..., Any], layers: Any, x: Any) -> Any:
            # The scan takes the class of a layer from ``layers``.
            layers.__class__ = type(kind)(kind.__name__, (kind,), {"__call__": functools.wraps(kind.__call__)(call)})
            try:
                return scan(self, layers, x, *args, length=length, **keywords)
            finally:
                layers.__class__ = kind

        # An nnx module is a tree: the trace has its own copy of the layers.
        jax.eval_shape(lambda layers, x: scanned(first, layers, x)[0], layers, x_in)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), carries[0])
        (x, _, _), layers, caches = scanned(each, layers, (x_in, jnp.int32(0), nothing))
        return x, layers, caches

    return type(base)(f"{base.__name__}Of{stack.num_layers}", (base,), {"_apply_layers_sequentially": scan_layers})


def _attend(layer: Any, arguments: dict[str, Any], backend: str, options: dict[str, Any]) -> Array:
    kind = layer.attention_type.value
    segments = arguments["decoder_segment_ids"]
    other = arguments["decoder_segment_ids_kv"]
    return attention(
        arguments["query"],
        arguments["key"],
        arguments["value"],
        scale=1.0,  # the query is scaled
        is_causal=kind != "full",
        local_window_size=(layer.sliding_window_size - 1, 0) if kind == "local_sliding" else None,
        chunk_size=layer.chunk_attn_window_size if kind == "chunk" else None,
        logits_soft_cap=layer.attn_logits_soft_cap or None,  # MaxText reads 0 as no cap
        query_segment_ids=segments,
        key_value_segment_ids=segments if other is None else other,
        backend=backend,
        **options,
    )


def _check_layer(layer: Any, backend: str) -> None:
    _accept("attention", layer.attention_kernel, _KERNELS)
    _accept("attention_type", layer.attention_type.value, _TYPES)
    for name, value in (
        ("quantize_kvcache", layer.kv_quant),
        ("moba", getattr(layer.config, "moba", False)),
        ("use_mla_absorbed_mqa", getattr(layer, "is_absorbed_mqa", False)),
        ("context_parallel_load_balance", layer._load_balanced_context_parallel()),  # noqa: SLF001
    ):
        if value:
            raise ValueError(f"MaxText's {name} is not taken by attention_op; switch it off.")
    is_sharded = backend in names() and isinstance(get(backend), Sharded)
    if layer.mesh is not None and layer.mesh.size > 1 and not is_sharded:
        raise ValueError(
            f"attention_op got a mesh of {layer.mesh.size} devices and backend={backend!r}, which runs on one; "
            "register attnsuite.backends.Sharded(backend, mesh, axes) and give its name."
        )


def _check_call(arguments: dict[str, Any]) -> None:
    _accept("model_mode", arguments["model_mode"], _MODES)
    for name, accepted in _REFUSED.items():
        if arguments[name] is not None and arguments[name] != accepted:
            raise ValueError(f"attention_op does not take {name}, only {name}={accepted}; switch off what passes it.")
    for name in ("qk_product_einsum", "wv_product_einsum"):
        if arguments[name] not in (None, jnp.einsum):
            raise ValueError(f"attention_op does not take {name}: the backend computes its own products.")


def _accept(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"attention_op does not take {name}={value!r}, only {' or '.join(map(repr, accepted))}.")
