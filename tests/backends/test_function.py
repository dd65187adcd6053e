"""A plain function is a backend: it is told what a problem asks for, and never gets what it does not take."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from attnsuite.backends import (
    FEATURES,
    AttentionSpec,
    Layout,
    Takes,
    Target,
    Terms,
    attention,
    from_function,
    masks,
    plan,
    registry,
    support,
)

pytestmark = pytest.mark.newest

SPEC = {"batch": 2, "query_length": 4, "key_value_length": 4, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
IDS = jnp.zeros((2, 4), jnp.int32)
HERE = Target("cpu")


def divide_by_zero(query, key, value):
    return 1 / 0


def keywords(takes, layout=Layout(), terms=Terms(), **asked):  # noqa: B008 (frozen)
    """What a function that takes these features is called with, beside its arrays."""
    told = {}

    def fn(query, key, value, **given):
        told.update(given)
        return query

    x = jnp.ones((2, 4, 2, 8))
    spec = AttentionSpec(**SPEC, needs_grad=False, **asked)
    plan(from_function(fn, takes=takes), spec, layout, target=HERE).run(x, x, x, terms=terms)
    return told


def test_function_is_told_what_is_asked_for_and_nothing_else():
    assert keywords(FEATURES) == {"is_causal": False}
    asked = {"is_causal": True, "local_window_size": 2, "chunk_size": 3, "logits_soft_cap": 5.0, "scale": 0.5}
    assert keywords(FEATURES, **asked) == asked | {"local_window_size": (2, 2)}


def test_arrays_come_by_their_names():
    layout = Layout(query_segment_ids=IDS, key_value_segment_ids=IDS, key_value_positions=IDS)
    told = keywords(
        FEATURES,
        layout,
        Terms(bias=jnp.ones((1, 1, 4, 4))),
        has_segment_ids=True,
        has_positions=True,
        has_bias=True,
        is_causal=True,
    )
    names = {"query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions"}
    assert set(told) == names | {"bias", "is_causal"}
    assert told["query_positions"].shape == (2, 4)


def test_what_is_learned_and_a_mask_function_reach_the_function():
    """A feature that is declared and not handed over would be computed without a word."""
    learned = {name: jnp.ones(2) for name in ("sinks", "alibi")}
    functions = {"mask_function": masks.Causal() | masks.Prefix(2), "score_function": lambda score, *_: 2 * score}
    told = keywords(FEATURES, terms=Terms(**learned), has_sinks=True, has_alibi=True, **functions)
    assert set(told) == {"sinks", "alibi", "is_causal", *functions}
    assert all(told[name] is function for name, function in functions.items())


def test_function_that_is_always_causal_is_not_told():
    assert keywords({"causal"}, is_causal=True) == {}


@pytest.mark.parametrize("asked", [{"is_causal": True}, {"local_window_size": 2}, {"has_mask": True}])
def test_what_is_not_declared_is_refused_before_the_function_is_called(asked):
    mine = from_function(divide_by_zero)
    assert "is not supported by divide_by_zero" in support(mine, AttentionSpec(**SPEC, **asked), HERE).reasons[0]


def test_allow_list_bounds_sizes_too_and_the_backend_can_be_a_static_argument():
    mine = from_function(divide_by_zero, takes=Takes(head_dims=(64,)))
    assert "head_dim=8" in support(mine, AttentionSpec(**SPEC), HERE).reasons[0]
    assert hash(mine) == hash(from_function(divide_by_zero, takes=Takes(head_dims=(64,))))


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda query, *_: query.astype(jnp.float16), r"float16\[2, 4, 2, 8\]"),
        (lambda query, *_: query[:, :, :1], r"float32\[2, 4, 1, 8\]"),
        (lambda query, *_: (query, query), r"float32\[2, 4, 2, 8\] and float32\[2, 4, 2, 8\]"),
        (lambda *_: None, r"NoneType\[\]"),
    ],
)
def test_what_a_function_returns_beside_the_contract_is_named_by_a_call(monkeypatch, function, returned):
    monkeypatch.setattr(registry, "DEFAULT", registry.Registry())
    registry.register(from_function(function, name="mine"))
    x = jnp.ones((2, 4, 2, 8))
    with pytest.raises(ValueError, match=rf"'mine' returned {returned}; expected float32\[2, 4, 2, 8\]\."):
        attention(x, x, x, backend="mine", on_unavailable="raise")


def test_what_is_no_function_is_a_sentence():
    with pytest.raises(TypeError, match="3 is not a function"):
        from_function(3)
