"""The allow-list: every part of a spec is a feature or a bound, and what a backend does not declare it refuses."""

import dataclasses
import re

import pytest

from attnsuite.backends import FEATURES, AttentionSpec, Takes, Target, features, registry, support
from attnsuite.backends.features import DTYPES, REQUESTS, FeatureRequest
from attnsuite.backends.masks import Causal, Prefix
from attnsuite.backends.operands import OPERANDS
from declared import LOADING, PLAIN, Declared, home

pytestmark = [pytest.mark.standard, pytest.mark.newest]

ASKING = {
    "causal": {},
    "bidirectional": {"is_causal": False},
    "window": {"local_window_size": (8, 0)},
    "chunk": {"chunk_size": 16},
    "soft_cap": {"logits_soft_cap": 30.0},
    "scale": {"scale": 0.3},
    "segments": {"has_segment_ids": True},
    "positions": {"has_positions": True},
    "lengths": {"has_seq_lengths": True},
    "mask": {"has_mask": True},
    **{operand.name: {f"has_{operand.name}": True} for operand in OPERANDS},
    "gradient": {"needs_grad": True},
    "grouped_queries": {"num_kv_heads": 1},
    "cross_length": {"key_value_length": 32},
    "value_head_dim": {"value_head_dim": 32},
    "log_sum_exp": {"return_log_sum_exp": True},
    "mask_function": {"mask_function": Causal() | Prefix(4)},
    "score_function": {"score_function": lambda score, *_: 2 * score},
    "pages": {"page_size": 16, "num_pages": 9},
    "kv_dtype": {"kv_dtype": "int8"},
    "values_in_keys": {"values_in_keys": True},
}


def asking(feature):
    return dataclasses.replace(PLAIN, **ASKING[feature])


def test_every_field_of_a_spec_is_asked_about():
    """A field that is no feature and no bound would be let through by every backend."""
    requested = {field for each in REQUESTS.values() for field in each.fields}
    # Of the batch any is taken, the dtype is a bound of every backend, and plan swaps a layout that is not read.
    bounds = {"batch", "dtype", "kv_layout"}
    assert requested | bounds == {field.name for field in dataclasses.fields(AttentionSpec)}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_spec_that_asks_for_one_feature_asks_for_that_one(feature):
    other = "bidirectional" if feature == "bidirectional" else "causal"
    assert asking(feature).features() == {feature, other}


def test_a_scale_that_is_the_default_asks_for_nothing():
    assert dataclasses.replace(PLAIN, scale=0.125).features() == {"causal"}


@pytest.mark.parametrize("name", LOADING)
@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_not_declared_is_refused_in_one_sentence_whose_advice_holds(name, feature):
    backend, (target, mode), spec = registry.get(name), home(name), asking(feature)
    found = support(backend, spec, target, mode)
    if feature in backend.takes(target, mode).features:
        assert not any(f"(accepted: {REQUESTS[feature].accepted})" in reason for reason in found.reasons)
        return
    (reason,) = found.reasons
    assert reason.startswith(REQUESTS[feature].describe(spec))
    assert f"is not supported by {name}" in reason
    assert f"(accepted: {REQUESTS[feature].accepted})" in reason
    (instead,) = re.findall(r"use backend='(\w+)'\.$", reason)
    assert support(registry.get(instead), spec, target), reason


@pytest.mark.parametrize("name", LOADING)
def test_a_bound_is_refused_with_the_value_given_and_those_accepted(name):
    backend, (target, mode) = registry.get(name), home(name)
    takes = backend.takes(target, mode)
    wide = dataclasses.replace(PLAIN, head_dim=4096, value_head_dim=4096)
    for spec, word, taken in (
        (wide, "head_dim=4096", takes.head_dims is None or 4096 in takes.head_dims),
        *((dataclasses.replace(PLAIN, dtype=dtype), f"dtype={dtype}", dtype in takes.dtypes) for dtype in DTYPES),
    ):
        found = support(backend, spec, target, mode)
        assert bool(found) == taken
        for reason in found.reasons:
            assert reason.startswith(f"{word} is not supported by {name}")
            assert "(accepted: " in reason
            assert reason.endswith(("use backend='chunked'.", "use backend='standard'."))


def reasons(*, allowed, mode="native", **changes):
    backend = Declared(Takes(**{"features": frozenset(FEATURES)} | allowed))
    return support(backend, dataclasses.replace(PLAIN, **changes), Target("cpu"), mode).reasons


@pytest.mark.parametrize(
    ("changes", "allowed", "said"),
    [
        ({"head_dim": 12, "value_head_dim": 12}, {"head_dims": range(8, 257, 8)}, "multiples of 8 from 8 to 256"),
        ({"value_head_dim": 12}, {"head_dims": (64,), "value_head_dims": (8, 16)}, "(accepted: 8, 16)"),
        ({"query_length": 1}, {"least_length": 2}, "(accepted: 2 or more)"),
        ({"mode": "interpret"}, {"modes": ("native", "compile")}, "(accepted: native, compile); use mode='native'"),
        (
            {"chunk_size": 4},
            {"features": frozenset({"causal"}), "because": {"chunk": "whose blocks are square"}},
            "declared, whose blocks are square (accepted",
        ),
    ],
)
def test_a_bound_is_said_as_it_is_declared(changes, allowed, said):
    (reason,) = reasons(**changes, allowed=allowed)
    assert said in reason


@pytest.mark.wrong_types
def test_a_feature_or_dtype_that_there_is_not_cannot_be_declared():
    with pytest.raises(ValueError, match=r"features \['dropout'\] are not known; the features are causal, "):
        Takes(features=frozenset({"dropout"}))
    with pytest.raises(ValueError, match=r"dtypes \['int32'\] are not known"):
        Takes(dtypes=("int32",))


@pytest.fixture
def a_later_feature(monkeypatch):
    """As if a feature had been added to the contract, and every spec asked for it."""
    monkeypatch.setattr(features, "FEATURES", (*FEATURES, "dropout"))
    dropout = FeatureRequest(("dropout_rate",), lambda _: True, lambda _: "a dropout rate", "none")
    monkeypatch.setattr(features, "REQUESTS", {**REQUESTS, "dropout": dropout})


@pytest.mark.wrong_types  # the type of a feature names those of today
@pytest.mark.usefixtures("a_later_feature")
@pytest.mark.parametrize("name", LOADING)
def test_a_feature_added_later_is_refused_by_every_backend_that_says_nothing(name):
    target, mode = home(name)
    (reason,) = support(registry.get(name), PLAIN, target, mode).reasons
    assert reason.startswith(f"a dropout rate is not supported by {name}")


@dataclasses.dataclass(frozen=True)
class Undeclared:
    name: str = "undeclared"
    exact: bool = True

    def plan(self, *_, **__):
        raise NotImplementedError


def test_a_backend_that_declares_nothing_takes_nothing():
    assert not any(support(Undeclared(), asking(feature), Target("cpu")) for feature in FEATURES)
