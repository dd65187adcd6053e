import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Plan, Terms, make_spec
from attnsuite.backends.contract import check_options, may_attend

pytestmark = [pytest.mark.standard, pytest.mark.newest]

SIZES = {"batch": 2, "query_length": 8, "key_value_length": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def call(layout=None, **options):
    return make_spec(
        *(shaped(2, 8, 4, 16), shaped(2, 12, 2, 16), shaped(2, 12, 2, 16)), layout=layout or Layout(), **options
    )


@pytest.mark.wrong_types
@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_sizes_are_integers_of_at_least_one(field, value):
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
        ("kv_layout", "BHSD", r"kv_layout='BHSD' is not supported; use 'NHD' \(\[batch, length"),
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
def test_spec_says_what_was_given_and_what_is_accepted(field, value, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**{**SIZES, field: value})


def test_defaults_of_a_spec():
    spec = AttentionSpec(**SIZES, local_window_size=3)
    assert (spec.window, spec.value_head_dim, spec.softmax_scale) == ((3, 3), 16, 0.25)
    assert AttentionSpec(**SIZES, scale=2).softmax_scale == 2.0


@pytest.mark.wrong_types
def test_specs_of_equal_meaning_are_equal_and_hash_alike():
    windows = (3, (3, 3), [3, 3], np.int64(3))
    specs = [
        AttentionSpec(**SIZES, local_window_size=w, is_causal=kind(1)) for w in windows for kind in (bool, np.bool_)
    ]
    assert len(set(specs)) == 1


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
def test_shapes_and_dtypes_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        make_spec(*(shaped(*shape) for shape in shapes))
    with pytest.raises(ValueError, match="query is bfloat16, key is float32 and value is float32; cast all three"):
        make_spec(shaped(2, 8, 4, 16, dtype=jnp.bfloat16), shaped(2, 12, 2, 16), shaped(2, 12, 2, 16))


def test_values_in_the_keys_come_as_a_number_and_no_array():
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


def numbers(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("key_value_seq_lengths", [3, 4], "key_value_seq_lengths is a list; give an array, such"),
        ("mask", 3, "mask is a int; give an array"),
        ("page_table", [[0]], "page_table is a list; give an array"),
        ("sinks", [0.0] * 4, "sinks is a list; give an array"),
        ("query_positions", numbers(2, 9), r"query_positions has shape \(2, 9\); expected \(2, 8\)"),
        ("key_value_positions", numbers(1, 12), r"key_value_positions has shape \(1, 12\); expected \(2, 12\)"),
        ("query_positions", numbers(2, 8, dtype=np.float32), "query_positions has dtype float32"),
        ("key_value_seq_lengths", numbers(3), r"key_value_seq_lengths has shape \(3,\); expected \(2,\)"),
        ("query_segment_ids", numbers(2, 8), "give both or neither"),
        ("key_value_segment_ids", numbers(2, 12), "give both or neither"),
        ("mask", numbers(1, 1, 8, 12), "mask has dtype int32; expected bool"),
        ("mask", numbers(8, 12, dtype=bool), r"broadcast to \(2, 4, 8, 12\)"),
        ("mask", numbers(2, 3, 8, 12, dtype=bool), r"broadcast to \(2, 4, 8, 12\)"),
        ("mask", numbers(2, 4, 8, 11, dtype=bool), r"broadcast to \(2, 4, 8, 12\)"),
        ("bias", numbers(1, 1, 8, 12), "bias has dtype int32; expected a floating"),
        ("sinks", numbers(2, dtype=np.float32), r"sinks has shape \(2,\); expected one number per query head, \(4,"),
        ("sinks", numbers(4), "sinks has dtype int32; expected a floating"),
    ],
)
def test_array_that_does_not_fit_is_named(name, array, message):
    given = {"terms": Terms} if name in ("bias", "sinks") else {"layout": Layout}
    with pytest.raises(ValueError, match=message):
        call(needs_grad=not name.startswith("page"), **{kind: make(**{name: array}) for kind, make in given.items()})


@pytest.mark.wrong_types
def test_what_is_none_of_these_classes_is_named():
    with pytest.raises(ValueError, match="query is a list; give an array, such as jnp"):
        make_spec([[[[0.0]]]], *[shaped(1, 1, 1, 1)] * 2)
    for options, message in (
        ({"layout": {"mask": 3}}, "layout={'mask': 3} is no Layout; give Layout"),
        ({"terms": {"sinks": 3}}, "terms={'sinks': 3} is no Terms; give Terms"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call(**options)


def test_no_mask_where_nothing_is_masked():
    assert may_attend(call(), Layout()) is None
    assert not call().masks_anything


def test_unknown_option_is_named_beside_those_that_exist():
    with pytest.raises(ValueError, match="fast has no option 'blok'; its options are: block: rows per step"):
        check_options("fast", {"blok": 3}, {"block": "rows per step"})
