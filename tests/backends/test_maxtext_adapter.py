"""MaxText's AttentionOp with a backend of this package computes what ``attention=dot_product`` computes, or refuses.

Everywhere this runs on ``Recorded``, which has the parameters of MaxText 0.2.5 (``maxtext/layers/attention_op.py``,
read on 2026-11-22) and passes them as its ``__call__`` does. Where MaxText is installed, the same tests run on its own
``AttentionOp`` too. No environment of tox.ini installs MaxText: its extras are hundreds of packages. By hand:
``pip install maxtext tokamax aqtp qwix omegaconf pathwaysutils jinja2``, then this file (2026-11-22: passed).
"""

import enum
import importlib
import importlib.util
import inspect
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnsuite import backends
from attnsuite.backends import registry
from attnsuite.backends.adapters import maxtext as adapter
from attnsuite.backends.kascade import manual
from drawn import draw
from landing import swept

# MaxText promotes dtypes and ranks.
pytestmark = [pytest.mark.foreign_numerics, pytest.mark.newest]


class AttentionType(enum.Enum):
    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"
    FULL = "full"
    COMPRESSED = "compressed"


class Recorded:
    """The parameters of MaxText's AttentionOp, without what computes."""

    def __init__(self, config, mesh, attention_kernel, max_target_length, num_query_heads, num_kv_heads, **options):
        self.config, self.mesh, self.attention_kernel = config, mesh, attention_kernel
        self.attention_type = AttentionType(options.pop("attention_type", "global"))
        self.kv_quant = self.attn_logits_soft_cap = self.sliding_window_size = self.chunk_attn_window_size = None
        self.__dict__ |= options

    def _load_balanced_context_parallel(self):
        return False

    def apply_attention(
        self,
        query,
        key,
        value,
        decoder_segment_ids,
        segment_positions,
        lengths,
        model_mode,
        use_ragged_attention=False,
        previous_chunk=None,
        bidirectional_mask=None,
        sinks=None,
        indexer_mask=None,
        compressed_mask=None,
        record_max_logits=False,
        decoder_segment_ids_kv=None,
        pad_kv_total=0,
        compress_ratio=0,
        *,
        qk_product_einsum,
        wv_product_einsum,
    ):
        raise AssertionError("the adapter replaces this method")

    def __call__(self, query, key, value, decoder_segment_ids, inputs_positions, model_mode, cached=None, **keywords):
        if model_mode != "train":
            key, value, decoder_segment_ids = cached[0]
        out, _, total = self.apply_attention(
            query=query,
            key=key,
            value=value,
            decoder_segment_ids=decoder_segment_ids,
            segment_positions=inputs_positions,
            lengths=None,
            model_mode=model_mode,
            **keywords,
            qk_product_einsum=jnp.einsum,
            wv_product_einsum=jnp.einsum,
        )
        return out if total is None else out / total


OPS = {"recorded": Recorded}
if importlib.util.find_spec("maxtext") is not None:
    OPS["installed"] = importlib.import_module("maxtext.layers.attention_op").AttentionOp

each = pytest.mark.parametrize("base", OPS.values(), ids=OPS)

# What a layer is made with, and what it means here.
LAYERS = {
    "global": ({}, {"is_causal": True}),
    "full": ({"attention_type": "full"}, {}),
    "window": (
        {"attention_type": "local_sliding", "sliding_window_size": 5},
        {"is_causal": True, "local_window_size": (4, 0)},
    ),
    "chunk": ({"attention_type": "chunk", "chunk_attn_window_size": 4}, {"is_causal": True, "chunk_size": 4}),
    "soft cap": ({"attn_logits_soft_cap": 2.0}, {"is_causal": True, "logits_soft_cap": 2.0}),
}
LENGTH = 12


def op(base, **options):
    """A layer's op as MaxText makes it: 4 heads, 2 of keys."""
    config = SimpleNamespace(
        matmul_precision="highest",
        moba=False,
        use_mla_absorbed_mqa=False,
        context_parallel_strategy="all_gather",
        ici_context_autoregressive_parallelism=1,
        shard_mode=None,
        debug_sharding=False,
        ulysses_context_sharding="",
        logical_axis_rules=(),
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    call = {"attention_kernel": "dot_product", "float32_logits": True, "float32_qk_product": True} | options
    return base(config, mesh, max_target_length=LENGTH, num_query_heads=4, num_kv_heads=2, **call)


QUERY, KEY, VALUE = draw(2, LENGTH, 4, 8), draw(2, LENGTH, 2, 8, seed=1), draw(2, LENGTH, 2, 8, seed=2)
SEGMENTS = jnp.array([[1] * 5 + [2] * 7, [1] * 8 + [0] * 4])


def expected(segments, of_keys=None, **asked):
    """By the standard backend; MaxText's query brings the scale."""
    of_keys = segments if of_keys is None else of_keys
    ids = {} if segments is None else {"query_segment_ids": segments, "key_value_segment_ids": of_keys}
    return backends.attention(QUERY, KEY, VALUE, scale=1.0, **{"is_causal": True} | asked, **ids, backend="standard")


@each
@pytest.mark.parametrize(
    ("layer", "is_packed"),
    swept(
        itertools.product(LAYERS, (True, False)),
        [("global", False), ("window", True), ("soft cap", True), ("chunk", True)],
    ),
)
def test_op_gives_what_dot_product_gives(base, layer, is_packed):
    segments, (options, meaning) = SEGMENTS if is_packed else None, LAYERS[layer]
    ours = op(adapter.attention_op(base, "chunked", on_unavailable="raise"), **options)
    call = QUERY, KEY, VALUE, segments, jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)), "train"
    wanted = expected(segments, **{"is_causal": False} | meaning)
    np.testing.assert_allclose(ours(*call), wanted, atol=3e-6)
    if base is not Recorded:
        np.testing.assert_allclose(op(base, **options)(*call), wanted, atol=3e-6)


@each
def test_prefill_attends_to_the_cache_that_it_is_given(base):
    ours = op(adapter.attention_op(base, "standard"))
    out = ours(QUERY, KEY * 0, VALUE * 0, None, None, "prefill", ((KEY, VALUE, SEGMENTS), None))
    np.testing.assert_allclose(out, expected(SEGMENTS), atol=3e-6)


@each
def test_segments_of_keys_are_their_own(base):
    of_keys = SEGMENTS.at[:, 2:4].set(7)
    ours = op(adapter.attention_op(base, "standard"))
    out = ours(QUERY, KEY, VALUE, SEGMENTS, None, "train", decoder_segment_ids_kv=of_keys)
    np.testing.assert_allclose(out, expected(SEGMENTS, of_keys), atol=3e-6)


REFUSED = {
    "decoding": ({}, {"model_mode": "autoregressive"}, "does not take model_mode='autoregressive', only 'train'"),
    "sinks": ({}, {"sinks": jnp.zeros(4)}, "does not take sinks, only sinks=None"),
    "recorded logits": ({}, {"record_max_logits": True}, "does not take record_max_logits"),
    "quantized products": ({}, {"qk_product_einsum": lambda *_: None}, "does not take qk_product_einsum"),
    "MaxText's kernel": ({"attention_kernel": "flash"}, {}, "attention='flash', only 'dot_product' or 'autoselected'"),
    "mask type": ({"attention_type": AttentionType.COMPRESSED}, {}, "does not take attention_type='compressed'"),
    "quantized cache": ({"kv_quant": object()}, {}, "MaxText's quantize_kvcache is not taken"),
    "load balance": ({"_load_balanced_context_parallel": lambda: True}, {}, "context_parallel_load_balance is not"),
    "mesh": ({"mesh": SimpleNamespace(size=4)}, {}, "mesh of 4 devices and backend='standard', which runs on one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_contract_does_not_have_is_refused(case):
    attributes, changed, message = REFUSED[case]
    layer = op(adapter.attention_op(Recorded, "standard"))
    layer.__dict__ |= attributes
    call = dict.fromkeys(("decoder_segment_ids", "segment_positions", "lengths")) | {"model_mode": "train"}
    einsums = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
    with pytest.raises(ValueError, match=message):
        layer.apply_attention(query=QUERY, key=KEY, value=VALUE, **call | einsums | changed)


def test_sharded_backend_takes_a_mesh_of_several_devices(monkeypatch):
    monkeypatch.setattr(registry, "DEFAULT", registry.Registry())
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharded = backends.Sharded(backends.get("chunked"), mesh, backends.MeshAxes(data="data"))
    backends.register(sharded)
    layer = op(adapter.attention_op(Recorded, sharded.name, on_unavailable="raise"))
    layer.mesh = SimpleNamespace(size=4)
    np.testing.assert_allclose(layer(QUERY, KEY, VALUE, SEGMENTS, None, "train"), expected(SEGMENTS), atol=3e-6)


def test_method_with_a_parameter_of_a_later_version_is_refused_before_any_layer_is_made():
    class Later(Recorded):
        def apply_attention(self, query, key, value, temperature=1.0):
            raise AssertionError

    with pytest.raises(ValueError, match=r"parameter temperature=1.0, which this adapter does not know .*0\.2\.5"):
        adapter.attention_op(Later, "standard")
    with pytest.raises(ValueError, match="object is not the AttentionOp"):
        adapter.attention_op(object)


def test_unknown_option_is_refused():
    with pytest.raises(ValueError, match="attention_op has no option is_causal; its options are backend_options"):
        adapter.attention_op(Recorded, "standard", is_causal=True)


@each
def test_recorded_parameters_are_those_of_the_op(base):
    assert tuple(inspect.signature(base.apply_attention).parameters) == adapter.PARAMETERS


SCHEDULED = {
    "schedule": manual((0, 2), num_layers=4, kv_heads=2),
    "min_keys": 0,
    "top_k": 0.1,
    "tile_size": 16,
    "query_tile": 16,
}
KASCADE = {"on_unavailable": "raise", "needs_grad": False, "backend_options": SCHEDULED}


@each
def test_layers_of_a_stack_have_their_numbers(base):
    """What a stack does with them: test_layer_stack.py."""
    stack = backends.LayerStack(2)
    made = op(adapter.attention_op(base, "standard", layer=stack[1]))
    with pytest.raises(ValueError, match="layer 1 ran where layer 0 was expected"):
        stack.run(lambda: made(QUERY, KEY, VALUE, None, jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)), "train"))


class Decoder:
    """MaxText's scan over layers, the method that the adapter replaces: it carries the hidden states alone."""

    config = SimpleNamespace(param_scan_axis=0, parameter_memory_host_offload=False, prevent_cse=True, scan_layers=True)

    def get_remat_policy(self):
        return None

    def _apply_layers_sequentially(self, layers, x_in, *args, length, **keywords):
        graph, state = nnx.split(layers)

        def one_layer(x, one):
            layer = nnx.merge(graph, one)
            return layer(x, *args, **keywords)[0], nnx.state(layer)

        x, state = jax.lax.scan(jax.checkpoint(one_layer), x_in, state, length=length)
        nnx.update(layers, state)
        return x, layers, None


DECODERS = {"recorded": Decoder}
if importlib.util.find_spec("maxtext") is not None and importlib.util.find_spec("grain") is not None:
    DECODERS["installed"] = importlib.import_module("maxtext.layers.nnx_decoders").NNXDecoder


class Block(nnx.Module):
    """A decoder layer as MaxText calls it; each of the stacked layers has its own ``weights``."""

    def __init__(self, attend, weights):
        self.attend, self.weights = attend, nnx.Param(weights)

    def __call__(self, inputs, decoder_positions, model_mode):
        q, k, v = (inputs[:, :, :heads] * self.weights[n] for n, heads in enumerate((4, 2, 2)))
        return inputs + self.attend(q, k, v, None, decoder_positions, model_mode), None


@pytest.mark.thorough
@pytest.mark.parametrize("base", DECODERS.values(), ids=DECODERS)
def test_scan_of_the_decoder_hands_number_and_selection_on(base):
    """Values and gradients are those of the same layers in a list; the decoder's own scan is refused."""
    call = {"length": 4, "model_mode": "train"}
    stack, made = backends.LayerStack(4), adapter.attention_op
    attend = op(made(Recorded, "kascade", layer=stack, **KASCADE | {"needs_grad": True}))
    weights, start, places = draw(4, 3, 8), draw(1, 256, 4, 8), jnp.arange(256)[None]

    def by(decoder):
        def loss(weights):
            x, *_ = decoder._apply_layers_sequentially(Decoder(), Block(attend, weights), start, places, **call)
            return (x**2).sum()

        return jax.value_and_grad(loss)

    def in_a_list(weights):
        x = start
        for one in weights:
            x, _ = Block(attend, one)(x, places, "train")
        return (x**2).sum()

    scanning = adapter.decoder(base, stack)
    expected = jax.value_and_grad(lambda weights: stack.run(in_a_list, weights))(weights)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-3), by(scanning)(weights), expected)
    with pytest.raises(ValueError, match=r"adapters\.maxtext\.decoder"):
        stack.run(by(base), weights)
    with pytest.raises(ValueError, match="scans over 4 blocks of layers; the stack has 3"):
        by(adapter.decoder(base, backends.LayerStack(3)))(weights)


def test_decoder_without_the_scan_is_refused():
    with pytest.raises(ValueError, match=r"object is not the NNXDecoder .*0\.2\.5"):
        adapter.decoder(object, backends.LayerStack(4))
