import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnsuite import backends
from attnsuite.backends.standard import Standard
from attnsuite.models import ModelConfig, Transformer, generate
from attnsuite.models.planning import resolve_attention
from attnsuite.models.transformer import compiled_forward, compiled_forward_cached

TOKENS = np.arange(24).reshape(2, 12)
SYMBOLIC = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 12"), jnp.int32)


@functools.cache
def model():
    return Transformer(ModelConfig.from_preset("debug"))


def test_parameters_are_nnx_params_and_gradients_reach_all_of_them():
    assert all(
        isinstance(p, nnx.Param) for p in jax.tree.leaves(model().params, is_leaf=lambda p: isinstance(p, nnx.Param))
    )
    gradients = nnx.grad(lambda model: (model(TOKENS, backend="standard") ** 2).mean())(model())
    leaves = jax.tree.leaves(gradients)
    assert len(leaves) == len(jax.tree.leaves(model().arrays()))
    assert all(np.isfinite(x).all() and np.any(x) for x in leaves)


def test_same_seed_same_parameters_other_seed_others():
    config = model().config
    same, other = Transformer(config, rngs=nnx.Rngs(0)), Transformer(config, rngs=nnx.Rngs(1))
    assert np.array_equal(same.arrays()["embed_tokens"], model().arrays()["embed_tokens"])
    assert not np.array_equal(other.arrays()["embed_tokens"], model().arrays()["embed_tokens"])


def test_a_second_call_does_not_trace_again():
    model()(TOKENS, backend="standard")
    traced = compiled_forward._cache_size()
    model()(TOKENS + 1, backend="standard")
    model().with_config()(TOKENS, backend="standard", backend_options={})
    assert compiled_forward._cache_size() == traced
    model()(TOKENS[:, :7], backend="standard")
    assert compiled_forward._cache_size() == traced + 1, "another length must trace, or this test sees nothing"


def test_decoding_traces_once():
    cache = model().new_cache(2, 16)
    _, cache = model().prefill(TOKENS[:, :4], cache, backend="standard")
    _, cache = model().decode(TOKENS[:, 4], cache, backend="standard")
    traced = compiled_forward_cached._cache_size()
    for step in range(5, 10):
        _, cache = model().decode(TOKENS[:, step], cache, backend="standard")
    assert compiled_forward_cached._cache_size() == traced


@pytest.fixture
def only(monkeypatch):
    """Registers a backend, as the only one beside those of the package."""

    def register(backend):
        registry = backends.Registry()
        registry.register(backend)
        monkeypatch.setattr("attnsuite.backends.registry.DEFAULT", registry)

    return register


def test_a_refused_backend_is_reported_on_every_call_not_only_when_tracing(only):
    class Refusing(Standard):
        def refuses(self, spec, target, mode, options):
            return ("refusing takes nothing; use another.",)

    only(Refusing(name="refusing"))
    for _ in range(2):
        with pytest.warns(backends.BackendFallbackWarning, match="refusing takes nothing"):
            model()(TOKENS, backend="refusing")
    with pytest.raises(backends.BackendUnavailableError, match="refusing takes nothing"):
        model()(TOKENS, backend="refusing", on_unavailable="raise")


def test_resolutions_say_what_would_run_per_attention_type():
    both = model().with_config(attention=("global", "sliding"), window_size=4)
    found = both.resolutions(2, 1, capacity=64, needs_grad=False, backend="standard")
    assert list(found) == ["global", "sliding"]
    spec = found["sliding"].spec
    assert (spec.query_length, spec.key_value_length, spec.window, spec.needs_grad) == (1, 64, (3, 0), False)
    assert found["global"].backend.name == "standard"


def test_each_type_is_planned_once_and_threads_its_own_carry(only):
    planned, seen = [], []

    class Counting(Standard):
        """Counts layers in its carry."""

        def plan(self, spec, layout, *, target, mode="native", options=None):
            planned.append(spec.is_causal)

            def attend(query, key, value, layer, carry):
                count = carry if isinstance(carry, int) else 0
                seen.append((layer, count))
                return query * 0, count + 1

            return backends.Plan(attend)

    only(Counting(name="counting"))
    config = ModelConfig.from_preset("debug", num_layers=4, attention=("global", "full", "global", "full"))
    Transformer(config)(TOKENS, backend="counting")
    assert planned == [True, False]
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1)]


def learned():
    return Transformer(ModelConfig.from_preset("debug", use_rope=False, max_length=8))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: model()(TOKENS[0]), r"tokens is int64\[12\]|tokens is int32\[12\]"),
        (lambda: model()(TOKENS * 1.0), "expected integers"),
        (
            lambda: model()(TOKENS, segment_ids=TOKENS[:, :3]),
            r"segment_ids has shape \(2, 3\); expected that of tokens",
        ),
        (
            lambda: model()(TOKENS, segment_ids=np.asarray(TOKENS) >= 0),
            r"segment_ids has dtype bool; expected integers \(for booleans: padding_mask\)",
        ),
        (  # they would wrap, so that two documents are one
            lambda: model()(TOKENS, segment_ids=np.asarray(TOKENS, np.int64) + 2**32),
            r"segment_ids has numbers from \d+ to \d+; expected numbers that int32 holds",
        ),
        (lambda: model()(TOKENS, backend="nope"), "'nope' is not registered"),
        (lambda: model()(TOKENS, backend="standard", backend_options={"x": 1}), "standard has no option 'x'"),
        (lambda: model()(TOKENS, backend_options={"x": [1]}), r"backend_options\['x'\] is a list"),
        (lambda: model().with_config(hidden_size=32), r"has shape .*; expected"),
        (lambda: model().with_config(num_layers=3), "params is a tree"),
        (lambda: model()([[0, 256]]), "tokens reach from 0 to 256; this model has tokens 0 to 255"),
        (lambda: model()(jnp.array([[0, 256]]).block_until_ready()), "tokens reach from 0 to 256"),
        (
            lambda: jax.export.export(jax.jit(model()))(SYMBOLIC),
            r"tokens has the symbolic shape \(b, 12\); a backend is",
        ),
        (lambda: learned()(TOKENS), "length=12 is more than the 8 positions that this model has learned"),
        (lambda: learned().new_cache(1, 9), "capacity=9 is more than the 8 positions"),
        (  # its pages have ten slots
            lambda: learned().prefill([[1] * 9], learned().new_cache(1, 8, page_size=5)),
            "length=9 is more than the 8 positions",
        ),
    ],
)
def test_wrong_calls_are_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_every_call_of_a_model_takes_a_policy():
    cache = model().new_cache(2, 16)
    calls = (
        functools.partial(model(), TOKENS),
        functools.partial(model().resolutions, 2, 12),
        functools.partial(model().prefill, TOKENS, cache),
        functools.partial(model().decode, TOKENS[:, 0], cache),
        functools.partial(generate, model(), TOKENS, 2),
        functools.partial(resolve_attention, model().config, batch=2, query_length=12),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"policy 'nowhere.json' cannot be read"):
            call(policy="nowhere.json")


@pytest.mark.parametrize("keyword", ["dtype", "target", "key_value_length", "options", "bakend"])
def test_keyword_that_a_call_does_not_have_is_refused(keyword):
    """Those of ``resolve_attention`` among them: they would resolve another problem than is computed."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'; a call of a model takes backend, "):
        model()(np.zeros((1, 4), int), **{keyword: "float16"})
