"""OmniKV and LessIsMore, against their rules written once more in NumPy, token by token and head by head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Target
from attnsuite.backends.kascade import Settings, Tiling, manual
from attnsuite.suite.kinds.kascade.controls import SCORES, Watched

HEADS, LENGTH, TILE = 4, 88, 4
SETTINGS = Settings(top_k=0.5, min_keys=0, tile_size=TILE, query_tile=TILE)
SCHEDULE = manual((0, 1), num_layers=3, kv_heads=2)
DECODE = {"query_length": 1, "has_positions": True, "has_seq_lengths": True}
PROBLEMS = {
    "prefill by tiles": (SETTINGS, {}),
    "decode by keys": (Settings(top_k=0.3, min_keys=0, granularity="token", query_tile=TILE), DECODE),
}


def attention(query, key, first):
    """Probabilities [heads, queries, keys], float64, of the queries from position ``first`` on."""
    logits = np.einsum("tnh,snh->nts", query, np.repeat(key, HEADS // key.shape[1], axis=1)) / np.sqrt(query.shape[-1])
    seen = np.arange(LENGTH) <= first + np.arange(len(query))[:, None]
    weights = np.where(seen, np.exp(logits - logits.max(-1, keepdims=True)), 0.0)
    return weights / weights.sum(-1, keepdims=True)


def omnikv(mass_of, units, count, *, over_heads=max):
    """The ``count`` units with the largest score; that of a key is the largest probability of any head."""
    score = [over_heads(mass_of(head, unit) for head in range(HEADS)).sum() for unit in range(units)]
    return set(np.argsort(-np.array(score), kind="stable")[:count])


def lessismore(mass_of, units, count, *, share=0.75, by_turns=True):
    """The latest units, then the union of the heads' rankings, in the order of the ranks, cut to what is left."""
    middle = int(share * count)
    recent = range(units - (count - middle), units)
    ranked = [sorted(range(recent.start), key=lambda u: (-mass_of(head, u).sum(), u)) for head in range(HEADS)]
    in_turn = (
        [unit for rank in zip(*ranked, strict=True) for unit in rank] if by_turns else [u for r in ranked for u in r]
    )
    return {*recent, *list(dict.fromkeys(in_turn))[:middle]}


class Largest:
    """max over heads, of arrays, element by element."""

    def __call__(self, arrays):
        return np.maximum.reduce(list(arrays))


def mean(arrays):
    return np.mean(list(arrays), axis=0)


RULES = {"omnikv": (omnikv, {"over_heads": Largest()}), "lessismore": (lessismore, {})}
# Each is another rule that a careless reading of the paper gives; the test has to tell it apart.
OTHERS = {"omnikv": [{"over_heads": mean}], "lessismore": [{"share": 1.0}, {"by_turns": False}]}


def chosen_by(rule, options, probabilities, settings, first):
    """Per query tile the set of units, by a NumPy rule."""
    unit = 1 if settings.granularity == "token" else TILE
    rows = min(TILE, probabilities.shape[1])
    sets = []
    for begin in range(0, probabilities.shape[1], rows):
        of_tile = probabilities[:, begin : begin + rows]
        units = (first + begin) // unit
        count = min(int(np.ceil(settings.top_k * units - 1e-9)), units)
        mass_of = lambda head, u, p=of_tile: p[head, :, u * unit : (u + 1) * unit]  # noqa: E731
        sets.append(rule(mass_of, units, count, **options) if units else set())
    return sets


@pytest.mark.parametrize(
    ("method", "name"), [*((method, "prefill by tiles") for method in SCORES), ("lessismore", "decode by keys")]
)
def test_layers_that_reuse_attend_to_what_the_rule_selects_in_the_layer_before_and_that_layer_is_dense(method, name):
    settings, changes = PROBLEMS[name]
    spec = dataclasses.replace(
        AttentionSpec(batch=1, query_length=LENGTH, key_value_length=LENGTH, num_heads=HEADS, num_kv_heads=2,
                      head_dim=8, is_causal=True, needs_grad=False), **changes)  # fmt: skip
    first = LENGTH - spec.query_length
    at = jnp.full((1, 1), first, jnp.int32)
    layout = Layout(query_positions=at, key_value_seq_lengths=at[0] + 1) if first else Layout()
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((2, 1, length, heads, 8)).astype(np.float32) * 2
        for length, heads in ((spec.query_length, HEADS), (LENGTH, 2), (LENGTH, 2))
    )
    watched = Watched(method, settings, SCHEDULE)

    @jax.jit
    def layers(query, key, value):
        attend = watched._attend(spec, layout, Target("cpu"))
        dense, carry, everything = attend(query[0], key[0], value[0], 1, ())
        out, _, mask = attend(query[1], key[1], value[1], 2, carry)
        return dense, jnp.broadcast_to(everything, mask.shape), out, mask

    dense, everything, out, mask = map(np.asarray, layers(query, key, value))
    selecting, reusing = (attention(query[i, 0], key[i, 0], first) for i in (0, 1))
    values = np.repeat(value[:, 0], HEADS // 2, axis=2)
    np.testing.assert_allclose(dense[0], np.einsum("nts,snh->tnh", selecting, values[0]), atol=1e-5)
    np.testing.assert_array_equal(everything[0], np.broadcast_to(selecting[0] > 0, everything[0].shape))

    rule, options = RULES[method]
    expected = mask_of(chosen_by(rule, options, selecting, settings, first), Tiling.of(spec, settings), first)
    np.testing.assert_array_equal(mask[0], np.broadcast_to(expected, mask[0].shape))
    kept = np.where(expected, reusing, 0.0)
    kept /= kept.sum(-1, keepdims=True)
    np.testing.assert_allclose(out[0], np.einsum("nts,snh->tnh", kept, values[1]), atol=1e-5)
    for other in OTHERS[method]:
        wrong = mask_of(chosen_by(rule, options | other, selecting, settings, first), Tiling.of(spec, settings), first)
        assert (wrong != expected).any(), other
    stale = mask_of(chosen_by(rule, options, reusing, settings, first), Tiling.of(spec, settings), first)
    assert (stale != expected).any()


def mask_of(sets, tiling, first):
    """The pairs [queries, keys] of the selected units and of the tile itself, none in the future."""
    rows = np.arange(first, LENGTH)
    mask = np.zeros((len(rows), LENGTH), bool)
    for n, units in enumerate(sets):
        tile = slice(n * tiling.query_tile, (n + 1) * tiling.query_tile)
        own = (first + n * tiling.query_tile) // tiling.unit * tiling.unit
        mask[tile, own:] = True
        for unit in units:
            mask[tile, unit * tiling.unit : (unit + 1) * tiling.unit] = True
    return mask & (np.arange(LENGTH) <= rows[:, None])
