"""Several tokens against a cache: a draft that is verified in one call gives what its tokens give one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from attnsuite.backends import masks
from attnsuite.models import KVCache, ModelConfig, Transformer
from attnsuite.models.speculation import keep
from landing import swept

LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 14}
MODELS: dict[str, dict[str, Any]] = {
    "rotated": {"num_layers": 1},
    "latent and global": {"attention": ("latent", "global"), **LATENT},
}
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 40}
CALL = {"backend": "standard"}
#        0
#      1   2      and a second root 5, whose only child is 6
#    3     4
PARENTS = (-1, 0, 0, 1, 2, -1, 5)
PATHS = ((0, 1, 3), (0, 2, 4), (5, 6))


def make(name: str) -> Transformer:
    return Transformer(ModelConfig.from_preset("debug", **{**SIZES, **MODELS[name]}))


def drawn(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 40, (2, length))


def after(model: Transformer, tokens: list[int]) -> np.ndarray:
    """The logits behind these tokens, by one program for up to ten of them."""
    return model([[*tokens, *[0] * (10 - len(tokens))]], **CALL)[0, len(tokens) - 1]


def prompted(model: Transformer) -> KVCache:
    """A cache of two prompts of unequal length."""
    return model.prefill(drawn(6), model.new_cache(2, 20), lengths=[6, 4], **CALL)[1]


@pytest.mark.parametrize("name", swept(MODELS, ("latent and global",)))
def test_a_draft_in_one_call_is_the_same_as_its_tokens_one_by_one(name: str) -> None:
    model, draft, following = make(name), drawn(4), drawn(1)
    one_by_one, cache = [], prompted(model)
    for token in draft.T:
        logits, cache = model.decode(token, cache, **CALL)
        one_by_one.append(logits)
    together, cache = model.prefill(draft, prompted(model), **CALL)
    np.testing.assert_allclose(together, np.stack(one_by_one, axis=1), rtol=0, atol=2e-6)
    # One row accepts two tokens, the other one none: the rejected ones leave no trace.
    cache = keep(cache, 4, [[0, 1], [0, 1]], lengths=[2, 0])
    assert cache.lengths.tolist() == [8, 4]
    logits, _ = model.decode(following[:, 0], cache, **CALL)
    for row, accepted in enumerate((2, 0)):
        tokens = [*drawn(6)[row, : 6 - 2 * row], *draft[row, :accepted], *following[row]]
        np.testing.assert_allclose(logits[row], after(model, tokens), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", swept(MODELS, ("latent and global",)))
def test_a_tree_in_one_call_is_the_same_as_each_of_its_paths_alone(name: str) -> None:
    model, tree, following = make(name), drawn(len(PARENTS)), drawn(1)
    together, cache = model.prefill(tree, prompted(model), parents=PARENTS, **CALL)
    for path in PATHS:
        alone, joined = model.prefill(tree[:, path], prompted(model), **CALL)
        np.testing.assert_allclose(together[:, path], alone, rtol=0, atol=2e-6)
    cache = keep(cache, PARENTS, np.array([PATHS[1], PATHS[0]]))
    logits, _ = model.decode(following[:, 0], cache, **CALL)
    for row, path in enumerate((PATHS[1], PATHS[0])):
        tokens = [*drawn(6)[row, : 6 - 2 * row], *tree[row, path], *following[row]]
        np.testing.assert_allclose(logits[row], after(model, tokens), rtol=0, atol=2e-6)
    assert joined.lengths.tolist() == [8, 6]


def test_a_node_sees_the_context_its_path_and_itself() -> None:
    seen = masks.Tree(PARENTS)(np.arange(7)[:, None], np.arange(-2, 7)[None])
    assert seen[:, :2].all()
    assert [np.flatnonzero(row).tolist() for row in seen[:, 2:]] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [5], [5, 6],
    ]  # fmt: skip
    assert masks.Tree(PARENTS).depths == (0, 1, 1, 2, 2, 0, 1)


@pytest.mark.parametrize("parents", [(), (0,), (-1, 2, 0), (-2,), [-1, 0], ("a",)], ids=str)
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"parents=.* must hold for each node the index of an earlier one"):
        masks.Tree(parents)


def test_a_tree_that_does_not_fit_is_refused_in_a_sentence() -> None:
    model = make("rotated")
    with pytest.raises(ValueError, match="parents has 2 entries for 3 tokens per row"):
        model.prefill(drawn(3), model.new_cache(2, 8), parents=(-1, 0))
    with pytest.raises(ValueError, match="with an empty cache; prefill the tokens that the draft follows first"):
        model.prefill(drawn(2), model.new_cache(2, 8), parents=(-1, 0))
    cache = model.new_cache(2, 8)
    with pytest.raises(ValueError, match="lengths and parents are both given"):
        model.prefill(drawn(2), cache, parents=(-1, 0), lengths=[2, 1])
    sliding = Transformer(ModelConfig.from_preset("debug", **SIZES, attention="sliding", window_size=4))
    with pytest.raises(ValueError, match="a model with 'sliding' attention, where slots of a tree are no distances"):
        sliding.prefill(drawn(2), prompted(sliding), parents=(-1, 0), **CALL)
    for path, lengths, words in (
        ([[0, 1]], None, r"path has shape \(1, 2\); expected \[2, 1 to 2\]"),
        ([[0], [2]], None, "path reaches from 0 to 2 in a draft of 2 tokens"),
        ([[0], [2**32]], None, "path reaches from 0 to 4294967296 in a draft of 2 tokens"),
        ([[0.9], [0.0]], None, "path has dtype float64; expected integers"),
        ([[0], [1]], [0, 2], r"lengths=\[0, 2\] must hold 2 integers from 0 to 1"),
        ([[0], [0]], [0, 1.9], r"lengths=\[0.0, 1.9\] must hold 2 integers from 0 to 1"),
        ([[0, 1], [1, 0]], [2, 1], r"path \[1\] of row 1 does not follow the parents \[-1, 0\]"),
    ):
        with pytest.raises(ValueError, match=words):
            keep(dataclasses.replace(cache, lengths=np.array([4, 4], np.int32)), 2, path, lengths)
    for parents in (PARENTS, np.array(PARENTS)):
        with pytest.raises(ValueError, match=r"path \[0, 2, 3\] of row 1 does not follow the parents \[-1, 0, 0, 1"):
            keep(dataclasses.replace(cache, lengths=np.array([8, 8], np.int32)), parents, [[0, 2, 4], [0, 2, 3]])
