"""Mask functions: the named ones show what their names say, they compose, and blocks are judged by every pair."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, attention, masks
from attnsuite.backends.blocks import FULL, PARTIAL, SKIP, classify, pad_layout

pytestmark = pytest.mark.standard

Q, K = np.arange(48)[:, None], np.arange(48)[None, :]
SPEC = AttentionSpec(batch=1, query_length=48, key_value_length=48, num_heads=1, num_kv_heads=1, head_dim=8)
NAMED: dict[masks.Mask, Any] = {
    masks.Causal(): lambda q, k: k <= q,
    masks.Window(5, 2): lambda q, k: q - 5 <= k <= q + 2,
    masks.Prefix(7): lambda _, k: k < 7,
    masks.Documents((10, 3, 20)): lambda q, k: any(q in run and k in run for run in RUNS),
    masks.Dilated(4): lambda q, k: abs(q - k) in range(0, 48, 4),
    masks.Neighbourhood(8, 1): lambda q, k: max(abs(q // 8 - k // 8), abs(q % 8 - k % 8)) <= 1,
    masks.Causal() & masks.Dilated(3): lambda q, k: k <= q and (q - k) % 3 == 0,
    masks.Causal() | masks.Prefix(7): lambda q, k: k <= q or k < 7,
    ~masks.Window(2, 2): lambda q, k: abs(q - k) > 2,
}
OWN = masks.Where(lambda q, k: jnp.abs(q - k) % 16 == 0)
RUNS = (range(10), range(10, 13), range(13, 33))


@pytest.mark.parametrize("mask", NAMED, ids=str)
def test_a_named_mask_shows_what_its_name_says(mask: masks.Mask) -> None:
    one_by_one = [[NAMED[mask](q, k) for k in range(48)] for q in range(48)]
    np.testing.assert_array_equal(mask(Q, K), one_by_one)
    np.testing.assert_array_equal(jax.jit(mask)(Q, K), one_by_one)


def test_masks_of_the_same_kind_and_numbers_are_equal_and_can_be_kept() -> None:
    made = masks.Causal() & (masks.Prefix(3) | ~masks.Dilated(2))
    again = masks.Causal() & (masks.Prefix(3) | ~masks.Dilated(2))
    assert made == again == pickle.loads(pickle.dumps(made))  # noqa: S301 (made here)
    assert hash(made) == hash(again)
    assert made != masks.Causal() | (masks.Prefix(3) | ~masks.Dilated(2))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("mask", [*NAMED, OWN], ids=lambda mask: "own" if mask is OWN else str(mask))
def test_a_block_is_skipped_only_if_empty_and_unmasked_only_if_full(mask: masks.Mask, traced: bool) -> None:
    spec = dataclasses.replace(SPEC, mask_function=mask, query_length=44)

    def kinds(positions: Any) -> Any:
        layout = pad_layout(spec, Layout(query_positions=positions), 16, 8)
        return classify(spec, layout, 16, 8)

    found = np.asarray((jax.jit(kinds) if traced else kinds)(np.arange(44, dtype=np.int32)[None]))[0]
    seen = np.asarray(mask(Q[:44], K))
    for row, column in np.ndindex(3, 6):
        block = seen[16 * row : 16 * row + 16, 8 * column : 8 * column + 8]
        assert found[row, column] == (FULL if block.all() else PARTIAL if block.any() else SKIP), (row, column)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param(
            3, "mask_function=3 must be a hashable function of query and key positions", marks=pytest.mark.wrong_types
        ),
        (lambda _, k: k, r"gives int32 \(1, 3\) .* has to give bool \(2, 3\)"),
        (lambda _, k: k < 4, r"gives bool \(1, 3\) .* has to give bool \(2, 3\)"),
    ],
    ids=["number", "positions", "one side"],
)
def test_what_is_no_mask_function_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SPEC, mask_function=function)


def test_a_function_of_jax_numpy_is_planned_inside_of_jit() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 160, 1, 8)).astype(np.float32))
    far = masks.Where(lambda q, k: jnp.abs(q - k) % 5 < 2)

    def run(x: jax.Array, backend: str) -> jax.Array:
        return attention(x, x, x, mask_function=far & masks.Causal(), backend=backend)

    chunked, standard = (jax.jit(run, static_argnums=1)(x, name) for name in ("chunked", "standard"))
    np.testing.assert_allclose(chunked, standard, atol=1e-6)
