"""The transformer against a plain float64 NumPy one, and what packing, types and switches promise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import ModelConfig, RopeScaling, Transformer
from attnsuite.models.forward_pass import forward
from attnsuite.models.planning import resolve_attention
from attnsuite.models.rope import inverse_frequencies
from landing import swept

# One layer, where a variant does not say more: "mixed" and "all-types" have what several need.
SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "head_dim": 12, "num_layers": 1}
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 14}
VARIANTS = {
    "llama": {"num_kv_heads": 2, "rope_scaling": RopeScaling(factor=8.0, original_max_length=16)},
    "untied": {"num_kv_heads": 1, "tie_embeddings": False, "norm_eps": 1e-2},
    "sliding": {"attention": "sliding", "window_size": 5},
    "chunked": {"attention": "chunked", "chunk_size": 7},
    "full": {"attention": "full"},
    "mixed": {"attention": ("global", "sliding", "chunked"), "num_layers": 3, "window_size": 3, "chunk_size": 4},
    "latent": {"attention": "latent", "q_lora_rank": 9, "output_bias": True, **LATENT},
    "all-types": {
        "attention": ("latent", "global", "sliding", "chunked", "full"),
        "num_layers": 5,
        "num_kv_heads": 2,
        "rope_scaling": RopeScaling(factor=8.0, original_max_length=16),
        "window_size": 3,
        "chunk_size": 4,
        "norm_eps": 1.0,  # five layers of such sharp attention blow up the rounding of the first; this damps them
        **LATENT,
    },
    "learned-positions": {"use_rope": False, "max_length": 32},
    "layernorm": {"use_rmsnorm": False},
    "gelu": {"use_swiglu": False},
    "qwen2": {"num_kv_heads": 2, "qkv_bias": True, "norm_eps": 1e-2},
    "qwen3": {"num_kv_heads": 2, "qk_norm": True, "qkv_bias": True, "output_bias": True, "norm_eps": 1e-2},
}


def make(name, **overrides):
    """A model whose attention is far from uniform: with small queries and keys a test sees no mask."""
    model = Transformer(ModelConfig.from_preset("debug", **{**SIZES, **VARIANTS[name], **overrides}))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(x + 0.1 * rng.normal(size=x.shape), x.dtype), model.arrays())
    for layer in params["layers"]:
        for projection in {"q_proj", "k_proj", "q_b_proj", "kv_a_proj_with_mqa"} & set(layer):
            layer[projection] = 2.0 * layer[projection]
    return Transformer(model.config, params)


def tokens_for(model, batch=2, length=20, seed=1):
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, (batch, length))


def visible(config, kind, length):
    q, k = np.arange(length)[:, None], np.arange(length)[None]
    mask = np.ones((length, length), bool) if kind == "full" else k <= q
    if kind == "sliding":
        mask &= k > q - config.window_size
    if kind == "chunked":
        mask &= q // config.chunk_size == k // config.chunk_size
    return mask


def norm(config, scope, name, x):
    if not config.use_rmsnorm:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scope[name]
    return x if config.use_rmsnorm else x + scope[f"{name}_bias"]


def linear(scope, name, x, rows=slice(None)):
    bias = scope.get(f"{name}_bias")
    return x @ scope[name][rows].T + (0 if bias is None else bias[rows])


def turn(config, x):
    if not config.use_rope:
        return x
    half = x.shape[1] // 2
    frequencies = inverse_frequencies(2 * half, config.rope_theta, config.rope_scaling)  # test_parity.py holds them
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.arange(len(x))[:, None] * frequencies.astype(np.float64))
    return np.concatenate([turned.real, turned.imag], -1)


def one_head(config, layer, h, n):
    """Queries, keys and values."""
    at = slice(n * config.dim, (n + 1) * config.dim)
    kv = n // (config.num_heads // config.num_kv_heads)
    kv_at = slice(kv * config.dim, (kv + 1) * config.dim)
    q, k, v = (linear(layer, f"{x}_proj", h, place) for x, place in (("q", at), ("k", kv_at), ("v", kv_at)))
    if config.qk_norm:
        q, k = norm(config, layer, "q_norm", q), norm(config, layer, "k_norm", k)
    return turn(config, q), turn(config, k), v


def one_latent_head(config, layer, h, n):
    """Queries, keys and values: equations 37 to 47 of arXiv 2405.04434."""
    nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
    qk, kv = nope + config.qk_rope_head_dim, nope + config.v_head_dim
    if config.q_lora_rank is None:
        q = h @ layer["q_proj"].T
    else:
        q = norm(config, layer, "q_a_layernorm", h @ layer["q_a_proj"].T) @ layer["q_b_proj"].T
    q = q[:, n * qk : (n + 1) * qk]
    down = h @ layer["kv_a_proj_with_mqa"].T
    up = norm(config, layer, "kv_a_layernorm", down[:, :rank]) @ layer["kv_b_proj"][n * kv : (n + 1) * kv].T
    q = np.concatenate([q[:, :nope], turn(config, q[:, nope:])], -1)
    return q, np.concatenate([up[:, :nope], turn(config, down[:, rank:])], -1), up[:, nope:]


def by_the_book(model, tokens, params=None):
    """One sequence through the same architecture in float64, head by head."""
    config = model.config
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params or model.arrays())
    length = len(tokens)
    x = params["embed_tokens"][tokens]
    if not config.use_rope:
        x = x + params["embed_positions"][:length]
    for i, layer in enumerate(params["layers"]):
        h = norm(config, layer, "input_layernorm", x)
        heads = []
        for n in range(config.num_heads):
            q, k, v = (one_latent_head if config.attention[i] == "latent" else one_head)(config, layer, h, n)
            scores = q @ k.T / math.sqrt(k.shape[1])
            scores = np.where(visible(config, config.attention[i], length), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + linear(layer, "o_proj", np.concatenate(heads, -1))
        h = norm(config, layer, "post_attention_layernorm", x)
        up = h @ layer["up_proj"].T
        if config.use_swiglu:
            gate = h @ layer["gate_proj"].T
            up = gate / (1 + np.exp(-gate)) * up
        else:
            up = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
        x = x + up @ layer["down_proj"].T
    return norm(config, params, "norm", x) @ params["embed_tokens" if config.tie_embeddings else "lm_head"].T


@pytest.mark.parametrize("name", swept(VARIANTS, ("all-types", "learned-positions", "gelu", "qwen3")))
def test_logits_are_those_of_plain_numpy(name):
    model = make(name)
    tokens = tokens_for(model)
    with jax.numpy_rank_promotion("raise"):  # as some callers have it
        got = model(tokens, backend="standard")
    expected = np.stack([by_the_book(model, row) for row in tokens])
    assert got.shape == (2, 20, 97)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sliding", {"norm_eps": 1e-3}),
        ("sliding", {"window_size": 6}),
        ("all-types", {"norm_eps": 1.1}),
        ("all-types", {"window_size": 4}),
        ("all-types", {"chunk_size": 5}),
        ("all-types", {"rope_scaling": None}),
    ],
)
def test_the_comparison_notices(name, wrong):
    model = make(name)
    tokens = tokens_for(model, batch=1)
    right = by_the_book(model, tokens[0])
    off = np.abs(by_the_book(model.with_config(**wrong), tokens[0]) - right).max()
    assert off > 1e-4 * np.abs(right).max()


def test_gradients_of_latent_attention_are_the_differences_of_plain_numpy():
    model = make("latent", num_layers=1)
    config, params, tokens = model.config, model.arrays(), tokens_for(model, batch=1)
    weights = np.random.default_rng(2).normal(size=(20, 97))
    found = resolve_attention(
        config, batch=1, query_length=20, backend="chunked", options={"block_kv": 8, "block_q": 8}
    )

    def weighted(layer):
        logits = forward(config, {**params, "layers": [layer]}, tokens, resolutions=found)
        return (logits[0] * weights).sum()

    gradients = jax.jit(jax.grad(weighted))(params["layers"][0])
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    rng, step = np.random.default_rng(3), 1e-5
    for name, gradient in gradients.items():
        direction = rng.normal(size=gradient.shape)

        def moved(by, name=name, direction=direction):
            layer = {**wide["layers"][0], name: wide["layers"][0][name] + by * direction}
            return (by_the_book(model, tokens[0], {**wide, "layers": [layer]}) * weights).sum()

        expected = (moved(step) - moved(-step)) / (2 * step)
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert abs((gradient * direction).sum() - expected) <= 1e-5 * size, name
        assert size > 0.1, f"{name} would be right if it were zero"


def test_every_exact_backend_computes_the_same():
    model = make("mixed")
    tokens = tokens_for(model)
    np.testing.assert_allclose(model(tokens), model(tokens, backend="standard"), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", swept(("llama", "all-types", "learned-positions"), ("all-types",)))
def test_packed_documents_give_what_each_gives_alone(name):
    model = make(name)
    lengths = (5, 9, 6)
    documents_ = [tokens_for(model, 1, n, seed=n) for n in lengths]
    packed = np.concatenate([*documents_, tokens_for(model, 1, 3)], axis=1)
    segments = np.repeat([[4, 2, 4, -1]], [*lengths, 3], axis=1)
    got = model(packed, segment_ids=segments, backend="standard")
    start = 0
    for document in documents_:
        alone = by_the_book(model, document[0])
        part = got[0, start : start + len(alone)]
        np.testing.assert_allclose(part, alone, rtol=0, atol=2e-5 * np.abs(alone).max())
        start += len(alone)
    unpacked = model(packed, backend="standard")
    assert np.abs(unpacked - got)[:, 5:20].max() > 1e-2, "without segment ids documents must see each other"


def test_bfloat16_stays_near_float32_and_gives_float32_logits():
    model = make("llama", param_dtype="float32")
    tokens = tokens_for(model)
    exact, rounded = model(tokens, backend="standard"), model.with_config(dtype="bfloat16")(tokens, backend="standard")
    assert rounded.dtype == jnp.float32
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()
