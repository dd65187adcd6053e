import dataclasses
import re
from unittest import mock

import jax
import numpy as np
import pytest

from attnsuite.backends import registry
from attnsuite.backends.kv_cache import quantize
from attnsuite.backends.standard import Standard
from attnsuite.models import KVCache, ModelConfig, Transformer, generate
from attnsuite.models.cache import Quantised, write
from attnsuite.models.planning import resolve_attention
from attnsuite.models.speculation import keep
from attnsuite.models.transformer import compiled_forward_cached
from landing import swept

LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 14}
TYPES = {
    "global": {},
    "sliding": {"attention": "sliding", "window_size": 4},
    "chunked": {"attention": "chunked", "chunk_size": 5},
    "mixed": {"attention": ("sliding", "global"), "window_size": 3},
    "latent": {"attention": ("latent", "global"), "q_lora_rank": 9, **LATENT},
    "learned-positions": {"use_rope": False, "max_length": 32},
    "nope": {"attention": ("chunked", "nope"), "chunk_size": 5, "qk_norm": True, "qk_norm_over": "rotated"}
    | {"floor_scale": 3, "attn_scale": 0.5},
}
CALL = {"backend": "standard"}


def make(name):
    return Transformer(ModelConfig.from_preset("debug", num_heads=4, num_kv_heads=2, **TYPES[name]))


def tokens_for(batch, length):
    return np.random.default_rng(3).integers(0, 256, (batch, length))


@pytest.mark.parametrize("name", swept(TYPES, ("latent",)))
def test_prefill_and_decode_give_the_logits_of_a_full_pass(name):
    model, tokens = make(name), tokens_for(2, 14)
    full = model(tokens, **CALL)
    first, cache = model.prefill(tokens[:, :6], model.new_cache(2, 20), **CALL)
    more, cache = model.prefill(tokens[:, 6:9], cache, **CALL)
    parts = [first, more]
    for step in range(9, 14):
        logits, cache = model.decode(tokens[:, step], cache, **CALL)
        parts.append(logits[:, None])
    np.testing.assert_allclose(np.concatenate(parts, axis=1), full, rtol=0, atol=2e-6)
    assert cache.lengths.tolist() == [14, 14]


def test_the_default_backend_decodes_to_the_same_logits():
    model, tokens = make("mixed"), tokens_for(2, 14)
    _, cache = model.prefill(tokens[:, :13], model.new_cache(2, 16))
    logits, _ = model.decode(tokens[:, 13:], cache)
    np.testing.assert_allclose(logits, model(tokens, **CALL)[:, -1], rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", swept(("global", "sliding", "latent"), ("latent",)))
def test_ragged_rows_give_what_each_gives_alone(name):
    model, tokens = make(name), tokens_for(3, 9)
    lengths, steps = [9, 2, 5], tokens_for(3, 12)[:, 9:]
    last, cache = model.prefill(tokens, model.new_cache(3, 16), lengths=lengths, last_only=True, **CALL)
    got = [last]
    for step in range(3):
        logits, cache = model.decode(steps[:, step], cache, **CALL)
        got.append(logits)
    joined = np.zeros((3, 12), int)
    for row, n in enumerate(lengths):
        joined[row, : n + 3] = [*tokens[row, :n], *steps[row]]
    alone = model(joined, **CALL)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose([x[row] for x in got], alone[row, n - 1 : n + 3], rtol=0, atol=2e-6)


def test_a_bfloat16_model_decodes_from_a_float32_cache():
    model = one_layer("global").with_config(dtype="bfloat16")
    tokens = tokens_for(1, 6)
    cache = model.new_cache(1, 8, dtype="float32")
    _, cache = model.prefill(tokens[:, :5], cache, **CALL)
    logits, cache = model.decode(tokens[:, 5], cache, **CALL)
    assert cache.dtype == "float32"
    full = model(tokens, **CALL)[:, -1]
    np.testing.assert_allclose(logits, full, rtol=0, atol=0.05 * float(np.abs(full).max()))


def test_the_given_cache_is_donated():
    model = make("global")
    cache = model.new_cache(1, 4)
    assert cache.is_empty
    model.prefill(tokens_for(1, 4), cache, **CALL)
    assert all(x.is_deleted() for x in (*cache.keys, *cache.values))
    for call in (lambda: model.decode([1], cache), lambda: keep(cache, 1, [[0]])):
        with pytest.raises(ValueError, match=r"cache was donated .*; go on with the cache that the call returned"):
            call()


def test_what_is_no_cache_or_is_traced_is_refused_in_a_sentence():
    model, tokens = make("global"), tokens_for(1, 4)
    with pytest.raises(TypeError, match=r"cache is a NoneType; give one that model.new_cache"):
        model.prefill(tokens, None)
    with pytest.raises(ValueError, match=r"an argument of jax.jit, .* call prefill and decode outside of jit"):
        jax.jit(lambda cache: model.prefill(tokens, cache)[0])(model.new_cache(1, 8))


def test_a_latent_layer_keeps_its_latent_and_one_key_of_a_token_and_nothing_else():
    config = ModelConfig.from_preset("debug", num_heads=4, **TYPES["latent"])
    cache = KVCache.create(config, 3, 7, "bfloat16")
    latent, ordinary = (config.kv_lora_rank + config.qk_rope_head_dim) * 2, 2 * 4 * 16 * 2
    bytes_per_token = [(k.nbytes + v.nbytes) // (3 * 7) for k, v in zip(cache.keys, cache.values, strict=True)]
    assert bytes_per_token == [latent, ordinary]
    _, cache = Transformer(config).prefill(tokens_for(3, 5), cache, **CALL)
    assert cache.nbytes == 3 * 7 * (latent + ordinary), "after use, too"


def decode_step(kind, capacity=512, **changes):
    """What XLA compiles for a token behind a cache of one layer; ``changes`` are to the specs of its attention."""
    model = one_layer(kind)
    cache = model.new_cache(1, capacity)
    found = resolve_attention(model.config, batch=1, query_length=1, needs_grad=False, **cache.problem, **CALL)
    found = tuple((name, dataclasses.replace(x, spec=dataclasses.replace(x.spec, **changes))) for name, x in found)
    arrays = np.zeros((1, 1), np.int32), (cache.keys, cache.values), np.array([3], np.int32), np.array([4], np.int32)
    lowered = compiled_forward_cached.lower(model.config, model.arrays(), *arrays, resolutions=found, last_only=True)
    return lowered.compile()


def test_latents_are_copied_no_more_often_than_values_of_their_own():
    """Values that are not cut out of the keys are read with the numbers behind them, and no other byte is moved."""
    capacity, rope = 512, ModelConfig.from_preset("debug", num_heads=4, **TYPES["latent"]).qk_rope_head_dim
    hinted, cut = (decode_step("latent", capacity, **x).cost_analysis() for x in ({}, {"values_in_keys": False}))
    assert hinted["bytes accessed"] <= cut["bytes accessed"] + capacity * rope * 4


def test_a_decode_step_writes_its_token_into_the_cache_once():
    writes = re.findall(r"= f32\[1,2,512,8\]\S* dynamic-update-slice\(", decode_step("global").as_text())
    assert len(writes) == 2, "of keys and of values"


def test_a_backend_that_takes_no_values_in_keys_gets_values():
    class Declining(Standard):
        def takes(self, target, mode):
            takes = super().takes(target, mode)
            return dataclasses.replace(takes, features=takes.features - {"values_in_keys"})

    config = one_layer("latent").config
    problem = {"batch": 1, "query_length": 1, "key_value_length": 8, "needs_grad": False, "backend": "declining"}
    with mock.patch.object(registry, "get", return_value=Declining(name="declining")):
        ((_, found),) = resolve_attention(config, **problem)
    assert (found.backend.name, found.mode, found.spec.values_in_keys) == ("declining", "native", False)
    ((_, found),) = resolve_attention(config, **problem | CALL)
    assert found.spec.values_in_keys


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda m: m.prefill(tokens_for(1, 9), m.new_cache(1, 8)),
            "8 slots per sequence, 0 of them filled, and 9 more",
        ),
        (
            lambda m: m.decode([1], m.prefill(tokens_for(1, 4), m.new_cache(1, 4), **CALL)[1], **CALL),
            "4 slots per sequence, 4 of them filled, and 1 more do not fit",
        ),
        (lambda m: m.prefill(tokens_for(2, 4), m.new_cache(1, 8)), "tokens has 2 rows, but the cache was made for 1"),
        (lambda m: m.prefill(tokens_for(1, 4), m.new_cache(1, 8), lengths=[5]), r"lengths=\[5\] must hold 1 integers"),
        (lambda m: m.prefill(tokens_for(1, 4), m.new_cache(1, 8), lengths=[0]), r"lengths=\[0\] must hold"),
        (lambda m: m.prefill(tokens_for(1, 4), m.new_cache(1, 8), lengths=[3.5]), r"lengths=\[3.5\] must hold"),
        (
            lambda m: m.prefill(tokens_for(1, 4), one_layer("global").new_cache(1, 8)),
            r"the cache has keys of shapes .* make it one of its own",
        ),
        (lambda m: m.decode(tokens_for(1, 2), m.new_cache(1, 8)), "decoding takes one token per row"),
        (lambda m: m.new_cache(1, 0), "capacity=0 must be an integer"),
        (lambda m: m.new_cache(1, 8, "int4"), "dtype='int4' is not supported; use one of float32,.*, float8_e4m3fn"),
        (lambda m: m.with_config(attention="full").new_cache(1, 8), "attention='full' sees later tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(make("global"))


def one_layer(kind):
    types = LATENT if kind == "latent" else {"window_size": 4}
    return Transformer(
        ModelConfig.from_preset(
            "debug", num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, attention=kind, **types
        )
    )


def rounded_write(slots, new, start):
    """Float32 slots with what a quantised cache would make of keys and values."""
    if not new.shape[-1]:
        return slots
    numbers, scales = quantize(new, rounded_write.kv_dtype)
    return write(slots, numbers.astype("float32") * scales[..., None], start)


@pytest.mark.parametrize(
    ("kind", "kv_dtype", "page_size"),
    [
        ("sliding", "int8", 4),
        pytest.param("sliding", "int8", None, marks=pytest.mark.serving),
        pytest.param("latent", "float8_e4m3fn", None, marks=pytest.mark.serving),
    ],
)
def test_a_quantised_cache_is_a_cache_of_rounded_keys_and_values(kind, kv_dtype, page_size, monkeypatch):
    def run(model, dtype, factor=1.0, page_size=None):
        cache = model.new_cache(2, 12, dtype, page_size=page_size)
        cache = model.prefill(tokens_for(2, 6), cache, lengths=[6, 4], **CALL)[1]
        if factor != 1.0:
            wrong = tuple(Quantised(x.numbers, factor * x.scales) for x in cache.keys)
            cache = dataclasses.replace(cache, keys=wrong)
        logits, cache = model.prefill(tokens_for(2, 5), cache, **CALL)
        return np.asarray(logits), cache

    model = one_layer(kind)
    found, cache = run(model, kv_dtype, page_size=page_size)
    rounded_write.kv_dtype = kv_dtype
    monkeypatch.setattr("attnsuite.models.forward_pass.write", rounded_write)
    # Another length of the model has programs of its own, which are traced with the other writer.
    wanted, _ = run(model.with_config(max_length=2049), "float32")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
    wrong, _ = run(model, kv_dtype, factor=2.0, page_size=page_size)
    assert np.abs(wrong - wanted).max() > 1e-4, "a wrong scale shows"
    assert cache.dtype == kv_dtype
    assert cache.nbytes < 0.5 * model.new_cache(2, 12, "float32").nbytes


# A sequence of 15 tokens has pages for 16, or for 33 where 32 positions are learned.
@pytest.mark.serving
@pytest.mark.parametrize(("name", "page_size"), [("mixed", 4), ("learned-positions", 33)])
def test_generation_takes_the_dtype_and_the_pages_of_its_cache(name, page_size, monkeypatch):
    model, made, create = make(name), [], Transformer.new_cache
    monkeypatch.setattr(
        Transformer, "new_cache", lambda *given, **named: made.append(create(*given, **named)) or made[-1]
    )
    plain, paged, _ = (
        generate(model, tokens_for(2, 6), 9, lengths=[6, 3], **how, **CALL).tolist()
        for how in ({}, {"page_size": page_size}, {"cache_dtype": "int8"})
    )
    assert paged == plain
    assert [(cache.dtype, cache.page_table is None) for cache in made] == [
        ("float32", True), ("float32", False), ("int8", True),
    ]  # fmt: skip


def read_in_parts(model, **cache):
    """Prompts of unequal length, a draft of which a part is kept, and a decode step."""
    cache = model.new_cache(2, 14, **cache)
    parts = []
    for tokens, lengths in ((tokens_for(2, 6), [6, 3]), (tokens_for(2, 3), [1, 3])):
        logits, cache = model.prefill(tokens, cache, lengths=lengths, **CALL)
        parts += [logits[row, :n] for row, n in enumerate(lengths)]
    parents = (-1, 0, 0) if model.config.attention_types == ("latent",) else None  # a window takes no tree
    logits, cache = model.prefill(tokens_for(2, 3), cache, parents=parents, **CALL)
    cache = keep(cache, parents or 3, [[0, 2 if parents else 1], [0, 1]], lengths=[2, 1])
    logits, cache = model.decode(tokens_for(2, 1), cache, **CALL)
    return np.concatenate([*parts, logits]), cache


@pytest.mark.serving
@pytest.mark.parametrize(
    ("name", "dtype", "num_pages"), [("sliding", None, None), ("latent", "int8", None), ("mixed", None, 7)]
)
def test_a_paged_cache_gives_what_a_contiguous_one_gives(name, dtype, num_pages):
    model = one_layer(name) if name != "mixed" else make(name)
    wanted, _ = read_in_parts(model, dtype=dtype)
    found, cache = read_in_parts(model, dtype=dtype, page_size=4, num_pages=num_pages)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
    assert cache.lengths.tolist() == [10, 8]
    used = cache.page_table[cache.page_table >= 0].tolist()
    assert len(set(used)) == len(used), "no page has two owners"
    assert sorted([*used, *cache.free_pages]) == list(range(cache.keys[0].shape[0]))


def test_pages_are_taken_when_needed_refused_when_gone_and_free_after_a_release():
    cache = KVCache.create(ModelConfig.from_preset("debug"), 2, 14, page_size=4, num_pages=3)
    assert (cache.capacity, cache.pages, cache.free_pages.tolist()) == (16, (3, 4), [0, 1, 2])
    filled = np.array([5, 3], np.int32)
    cache = dataclasses.replace(cache, lengths=filled, page_table=cache.table_after(filled))
    assert cache.page_table.tolist() == [[0, 1, -1, -1], [2, -1, -1, -1]]
    with pytest.raises(ValueError, match="the cache has 3 pages, 0 of them free, and 2 more are needed; release"):
        cache.table_after(np.array([9, 5]))
    assert cache.table_after(np.array([8, 4])).tolist() == cache.page_table.tolist()
    assert cache.released([0]).free_pages.tolist() == [0, 1]
    assert cache.released([0]).lengths.tolist() == [0, 3]
    assert cache.released([False, True]).lengths.tolist() == [5, 0]
    for rows in ([2], [-1], [0.0], [True], ["a"]):
        with pytest.raises(ValueError, match="must hold integers from 0 to 1, the sequences"):
            cache.released(rows)
    with pytest.raises(ValueError, match="num_pages=3 is about a paged cache"):
        KVCache.create(ModelConfig.from_preset("debug"), 2, 14, num_pages=3)
    with pytest.raises(ValueError, match="page_size=0"):
        KVCache.create(ModelConfig.from_preset("debug"), 2, 14, page_size=0)
