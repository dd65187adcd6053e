from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Plan, Terms, make_spec
from attnsuite.backends.contract import check_options, may_attend

pytestmark = [pytest.mark.standard, pytest.mark.newest]

SIZES = {
    "batch": 2,
    "query_length": 8,
    "key_value_length": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def call(layout: Layout | None = None, **options: Any) -> AttentionSpec:
    return make_spec(
        *(shaped(2, 8, 4, 16), shaped(2, 12, 2, 16), shaped(2, 12, 2, 16)), layout=layout or Layout(), **options
    )


@pytest.mark.wrong_types
@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_sizes_are_integers_of_at_least_one(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field}={value!r} must be an integer of at least 1"):
        AttentionSpec(**{**SIZES, field: value})


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_heads", 3, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ("value_head_dim", 0, "value_head_dim=0 must be an integer of at least 1"),
        ("dtype", "int32", "dtype='int32' is not supported; use one of float32, bfloat16, float16, float64"),
        ("chunk_size", 0, "chunk_size=0 must be an integer of at least 1"),
        ("local_window_size", -1, r"local_window_size=\(-1, -1\) must be an int"),
        ("local_window_size", (1, 2, 3), r"local_window_size=\(1, 2, 3\) must be an int"),
        ("local_window_size", (1.0, 2), r"local_window_size=\(1.0, 2\) must be an int"),
        ("local_window_size", True, "local_window_size=True must be an int"),
        ("scale", 0.0, "scale=0.0 must be a finite Python float above 0"),
        ("scale", float("inf"), "scale=inf must be a finite Python float above 0"),
        ("scale", 1e30, r"scale=1e\+30 must be a finite Python float above 0, at most 1e\+06"),
        ("scale", 10**400, "0 must be a finite Python float above 0, at most 1e"),
        ("logits_soft_cap", -5.0, "logits_soft_cap=-5.0 must be a finite Python float above 0"),
        ("logits_soft_cap", 1e39, r"logits_soft_cap=1e\+39 must be a finite Python float above 0, at most 1e"),
        ("has_mask", 1, "has_mask=1 must be True or False"),
        ("return_log_sum_exp", "yes", "return_log_sum_exp='yes' must be True or False"),
        ("needs_grad", jnp.ones((2,), bool), r"needs_grad=Array\(\[ True,  True\], dtype=bool\) must be True or False"),
    ],
)
def test_spec_says_what_was_given_and_what_is_accepted(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**{**SIZES, field: value})


def test_int_window_is_symmetric() -> None:
    assert AttentionSpec(**SIZES, local_window_size=3).window == (3, 3)


def test_value_head_dim_defaults_to_head_dim() -> None:
    assert AttentionSpec(**SIZES).value_head_dim == 16


def test_scale_defaults_to_one_over_root_of_head_dim() -> None:
    assert AttentionSpec(**SIZES).softmax_scale == 0.25
    assert AttentionSpec(**SIZES, scale=2).softmax_scale == 2.0


@pytest.mark.wrong_types
def test_specs_of_equal_meaning_are_equal_and_hash_alike() -> None:
    windows = (3, (3, 3), [3, 3], np.int64(3))
    specs = [
        AttentionSpec(**SIZES, local_window_size=w, is_causal=kind(1)) for w in windows for kind in (bool, np.bool_)
    ]
    assert len(set(specs)) == 1


def test_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionSpec(**SIZES).batch = 3


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8, 4), (2, 12, 2, 16), (2, 12, 2, 16)), r"query has shape \(2, 8, 4\); expected 4 dimensions"),
        (((2, 8, 4, 16), (3, 12, 2, 16), (3, 12, 2, 16)), r"expected key \[2, S, K, 16\]"),
        (((2, 8, 4, 16), (2, 12, 2, 8), (2, 12, 2, 16)), "do not fit together"),
        (((2, 8, 4, 16), (2, 12, 2, 16), (2, 11, 2, 16)), "do not fit together"),
        (((2, 8, 4, 16), (2, 12, 2, 16), (2, 12, 1, 16)), "do not fit together"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(*(shaped(*shape) for shape in shapes))


def test_values_in_the_keys_come_as_a_number_and_no_array() -> None:
    query, key = jnp.zeros((2, 8, 4, 16)), jnp.zeros((2, 12, 2, 16))
    spec = make_spec(query, key, None, value_head_dim=10)
    assert (spec.values_in_keys, spec.value_head_dim) == (True, 10)
    with pytest.raises(ValueError, match="value_head_dim=10 is given with an array of values; give one"):
        make_spec(query, key, key, value_head_dim=10)
    with pytest.raises(ValueError, match="value_head_dim=17 is more than head_dim=16, and the values are to be the"):
        make_spec(query, key, None, value_head_dim=17)
    for planned, value in ((spec, key), (make_spec(query, key, key), None)):
        with pytest.raises(ValueError, match=f"says values_in_keys={planned.values_in_keys}; give (None|one)"):
            Plan(lambda *_: None, spec=planned).run(query, key, value)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            lambda: {"layout": Layout(key_value_seq_lengths=[3, 4])},
            "key_value_seq_lengths is a list; give an array, such",
        ),
        (lambda: {"layout": Layout(mask=3)}, "mask is a int; give an array"),
        (lambda: {"layout": Layout(page_table=[[0]]), "needs_grad": False}, "page_table is a list; give an array"),
        (lambda: {"terms": Terms(sinks=[0.0] * 4)}, "sinks is a list; give an array"),
        (lambda: {"layout": {"mask": 3}}, "layout={'mask': 3} is no Layout; give Layout"),
        (lambda: {"terms": {"sinks": 3}}, "terms={'sinks': 3} is no Terms; give Terms"),
    ],
)
def test_what_is_no_array_is_named(options: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(**options())
    with pytest.raises(ValueError, match="query is a list; give an array, such as jnp"):
        make_spec([[[[0.0]]]], *[shaped(1, 1, 1, 1)] * 2)


def test_mixed_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match="query is bfloat16, key is float32 and value is float32; cast all three"):
        make_spec(shaped(2, 8, 4, 16, dtype=jnp.bfloat16), shaped(2, 12, 2, 16), shaped(2, 12, 2, 16))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"query_positions": (2, 9)}, r"query_positions has shape \(2, 9\); expected \(2, 8\)"),
        ({"key_value_positions": (1, 12)}, r"key_value_positions has shape \(1, 12\); expected \(2, 12\)"),
        ({"key_value_seq_lengths": (3,)}, r"key_value_seq_lengths has shape \(3,\); expected \(2,\)"),
        ({"query_segment_ids": (2, 8)}, "give both or neither"),
        ({"key_value_segment_ids": (2, 12)}, "give both or neither"),
    ],
)
def test_layout_arrays_that_do_not_fit_are_named(arrays: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Layout(**{name: np.zeros(shape, np.int32) for name, shape in arrays.items()}))


@pytest.mark.wrong_types
def test_mask_is_bool_and_terms_are_floating() -> None:
    ints = np.zeros((1, 1, 8, 12), np.int32)
    with pytest.raises(ValueError, match="mask has dtype int32; expected bool"):
        call(Layout(mask=ints))
    with pytest.raises(ValueError, match="bias has dtype int32; expected a floating"):
        call(terms=Terms(bias=ints))
    with pytest.raises(ValueError, match=r"sinks has shape \(2,\); expected one number per query head, \(4,\)"):
        call(terms=Terms(sinks=np.zeros(2, np.float32)))
    with pytest.raises(ValueError, match="sinks has dtype int32; expected a floating"):
        call(terms=Terms(sinks=np.zeros(4, np.int32)))


@pytest.mark.wrong_types
@pytest.mark.parametrize("shape", [(8, 12), (2, 3, 8, 12), (2, 4, 8, 11)])
def test_mask_that_does_not_broadcast_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"broadcast to \(2, 4, 8, 12\)"):
        call(Layout(mask=np.ones(shape, bool)))


def test_no_mask_where_nothing_is_masked() -> None:
    assert may_attend(call(), Layout()) is None
    assert not call().masks_anything


def test_unknown_option_is_named_beside_those_that_exist() -> None:
    with pytest.raises(ValueError, match="fast has no option 'blok'; its options are: block: rows per step"):
        check_options("fast", {"blok": 3}, {"block": "rows per step"})
