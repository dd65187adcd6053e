"""Schedules from calibrations whose best answer is known."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attnsuite.backends.kascade import (
    GREEDY_RULES,
    Calibration,
    LayerRole,
    Schedule,
    dynamic_programming,
    greedy,
    greedy_anchors,
    greedy_by_loss,
    layer_similarity,
    load_calibration,
    manual,
    published_schedule,
)


def calibration(between, *, importance=None, heads=2, jaccard=None, crossed=()):
    """Similarity ``between[a][b]`` of layers, straight from head to head but crossed for the layers named."""
    between = np.asarray(between, np.float32)
    layers = len(between)

    def by_heads(similar):
        out = np.zeros((layers, layers, heads, heads), np.float32)
        for a, b in itertools.product(range(layers), repeat=2):
            same = np.eye(heads)[::-1] if b in crossed and a != b else np.eye(heads)
            out[a, b] = similar[a, b] * same if a <= b else 0.0
        return out

    return Calibration(
        importance=np.ones(layers, np.float32) if importance is None else np.asarray(importance, np.float32),
        mass_similarity=by_heads(between),
        jaccard_similarity=by_heads(between if jaccard is None else np.asarray(jaccard, np.float32)),
        mass=np.ones((layers, heads, 3), np.float32),
        settings={"top_k": 0.1},
        text={"name": "none"},
        fingerprint="0" * 64,
    )


def random(seed, layers=7):
    rng = np.random.default_rng(seed)
    return calibration(rng.random((layers, layers)), importance=rng.random(layers))


def value_of(anchors, known):
    gain = known.importance[None] * layer_similarity(known.mass_similarity)
    return sum(gain[max(a for a in anchors if a <= b), b] for b in range(known.num_layers))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("anchors", [1, 2, 3, 5, 7])
def test_dp_finds_the_best_of_all_choices(seed, anchors):
    known = random(seed)
    found = dynamic_programming(known, anchors)
    others = [(0, *rest) for rest in itertools.combinations(range(1, 7), anchors - 1)]
    assert found.anchors in others
    assert value_of(found.anchors, known) == pytest.approx(max(value_of(x, known) for x in others))
    if 1 < anchors < 7:
        assert value_of(found.anchors, known) > min(value_of(x, known) for x in others) + 0.01


def test_dp_weighs_layers_by_their_importance():
    between = [[1, 0.5, 0.5, 0.5], [0, 1, 0.2, 0.2], [0, 0, 1, 0.2], [0, 0, 0, 1]]
    assert dynamic_programming(calibration(between, importance=[1, 9, 1, 1]), 2).anchors == (0, 1)
    assert dynamic_programming(calibration(between, importance=[1, 1, 1, 9]), 2).anchors == (0, 3)


def test_greedy_starts_an_anchor_where_similarity_falls_or_the_anchor_is_too_far():
    near = np.full((8, 8), 0.9)
    near[0, 2:] = 0.6
    assert greedy(calibration(near)).anchors == (0, 2, 7)
    assert greedy(calibration(near), threshold=0.5).anchors == (0, 5)
    assert greedy(calibration(near), max_reuse_dist=2).anchors == (0, 2, 5)
    assert greedy(calibration(near, jaccard=np.full((8, 8), 0.1)), similarity="jaccard").anchors == tuple(range(8))


# The guides' table of Llama-3.2-1B (threshold 0.65, distance 4), each layer with its similarity to the layer before.
# Where the table says "distance" it gives none; the rule then printed a similarity that was high enough.
PUBLISHED = {2: 0.5535, 3: 0.9663, 4: 0.9382, 5: 0.9622, 6: 0.9, 7: 0.9766, 8: 0.9346, 9: 0.8865, 10: 0.9, 11: 0.8604,
             12: 0.8333, 13: 0.9023, 14: 0.9, 15: 0.7643}  # fmt: skip


def published():
    """Similar to the layer before as published, and 0.7 to layers farther back, which only the text's rule looks at."""
    between = np.full((16, 16), 0.7)
    between[0, 1] = between[0, 2] = 0.5  # the text: 0.5535 and 0.4823
    for layer, similarity in PUBLISHED.items():
        between[layer - 1, layer] = similarity
    return between


def test_published_layer_table_comes_out_of_the_rule_that_printed_it():
    found = greedy(calibration(published()), rule="greedy-benchmark")
    assert found.anchors == (0, 1, 2, 6, 10, 14)
    assert [layer.role for layer in found.layers[:3]] == ["dense", "anchor", "anchor"]
    assert [found.layers[i].anchor for i in (3, 4, 5, 7, 9, 11, 13, 15)] == [2, 2, 2, 6, 6, 10, 10, 14]
    assert (found.method, len(found.layers) - len(found.anchors)) == ("greedy-benchmark", 10)
    # The other guide's distance ends at the fourth reuse layer, not at the third.
    assert greedy(calibration(published()), rule="greedy-guide").anchors == (0, 1, 2, 7, 12)
    assert greedy(calibration(published()), rule="greedy-guide", max_reuse_dist=3).anchors == (0, 1, 2, 6, 10, 14)


def test_benchmark_rule_looks_at_the_layer_before_and_takes_layer_1_as_an_anchor():
    drifting = np.full((6, 6), 0.1)
    drifting[np.arange(5), np.arange(1, 6)] = 0.9
    assert greedy_anchors(drifting, GREEDY_RULES["greedy-benchmark"], max_reuse_dist=9) == (0, 1)
    assert greedy_anchors(drifting, GREEDY_RULES["greedy-dynamic"], max_reuse_dist=9) == (0,)
    assert greedy_anchors(drifting, GREEDY_RULES["greedy-guide"], max_reuse_dist=9) == (0, 2, 4)
    assert greedy_anchors(np.ones((12, 12)), GREEDY_RULES["greedy-dynamic"], threshold=0.1) == (0, 4, 8)


# Losses by the layers that select. Reusing in layer 1 is cheapest at first, so the search never sees (0, 1), the best
# pair; a search that adds layers one by one would find it.
LOSSES = {(0, 2, 3): 1.0, (0, 1, 3): 2.0, (0, 1, 2): 3.0, (0, 3): 5.0, (0, 2): 4.0, (0, 1): 0.0, (0,): 9.0}


def test_greedy_by_loss_turns_the_layer_that_costs_least_into_a_reuse_layer_round_by_round():
    rounds = []

    def losses(schedules):
        rounds.append([schedule.anchors for schedule in schedules])
        return [LOSSES[schedule.anchors] for schedule in schedules]

    known = calibration(np.full((4, 4), 0.9), crossed=(3,))
    found = greedy_by_loss(known, 2, losses)
    assert (found.anchors, found.method) == ((0, 2), "greedy-loss")
    assert rounds == [[(0, 2, 3), (0, 1, 3), (0, 1, 2)], [(0, 3), (0, 2)]]
    assert found.layers == manual((0, 2), num_layers=4, kv_heads=2, calibration=known).layers
    assert found.layers[3].head_map == (1, 0)
    assert greedy_by_loss(known, 4, losses).anchors == (0, 1, 2, 3)
    assert greedy_by_loss(known, 1, losses).anchors == (0,)
    assert greedy_by_loss(known, 3, lambda schedules: [1.0] * len(schedules)).anchors == (0, 2, 3)  # a tie


def test_head_maps_follow_the_best_head():
    found = greedy(calibration(np.full((4, 4), 0.9), crossed=(2,)))
    assert [layer.head_map for layer in found.layers] == [(0, 1), (0, 1), (1, 0), (0, 1)]
    assert [layer.role for layer in found.layers] == ["dense", "reuse", "reuse", "reuse"]
    assert found.layers[2].similarity == pytest.approx(0.9)


def test_one_anchor_head_may_serve_several():
    known = calibration(np.full((2, 2), 0.9))
    known.mass_similarity[0, 1] = [[0.9, 0.8], [0.1, 0.2]]
    assert greedy(known).layers[1].head_map == (0, 0)
    assert greedy(known).layers[1].similarity == pytest.approx(0.85)


def test_the_table_says_everything():
    text = greedy(calibration(np.full((3, 3), 0.9), crossed=(2,))).table()
    assert text.splitlines()[0].split() == ["layer", "role", "anchor", "similarity", "head", "map"]
    assert text.splitlines()[-1].split() == ["2", "reuse", "0", "0.900", "1", "0"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: manual((0, 4), num_layers=4, kv_heads=2), "must be layers from 0 to 3"),
        (lambda: manual((0,), num_layers=4, kv_heads=2, calibration=random(0)), "the calibration has 7 layers"),
        (lambda: dynamic_programming(random(0), 8), "anchors=8 must be an integer from 1 to 7"),
        (lambda: greedy_by_loss(random(0), 2.5, list), "anchors=2.5 must be an integer from 1 to 7"),
        (lambda: greedy_by_loss(random(0), 6, lambda asked: [np.nan] * len(asked)), "are not finite"),
        (lambda: greedy(random(0), threshold=2.0), "threshold=2.0"),
        (lambda: greedy(random(0), max_reuse_dist=0), "max_reuse_dist=0"),
        (lambda: greedy(random(0), rule="best"), "rule='best' must be one of greedy, greedy-guide"),
        (lambda: greedy(random(0), similarity="cosine"), "similarity='cosine'"),
        (lambda: Schedule((LayerRole("reuse", 0),)), "names layer 0 as its anchor"),
        (
            lambda: Schedule((LayerRole("dense", 0), LayerRole("anchor", 1), LayerRole("reuse", 0))),
            "is 1, and only its",
        ),
        (lambda: Schedule((LayerRole("skip", 0),)), "role='skip'"),
    ],
)
def test_what_is_no_schedule_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    known = random(3)
    path = known.save(tmp_path / "some.name")
    assert {x.name for x in tmp_path.iterdir()} == {"some.safetensors", "some.json"}
    again = load_calibration(path)
    for name in ("importance", "mass_similarity", "jaccard_similarity", "mass"):
        np.testing.assert_array_equal(getattr(again, name), getattr(known, name))
    assert (again.settings, again.text, again.fingerprint) == (known.settings, known.text, known.fingerprint)


def rewritten(path, **changes):
    """The .json with other values."""
    about = path.with_suffix(".json")
    about.write_text(json.dumps(json.loads(about.read_text()) | changes))


def with_arrays(path, change):
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_text("[" * 2000),
        lambda path: path.write_bytes(b"nothing"),
        lambda path: rewritten(path, format=2),
        lambda path: with_arrays(path, lambda x: x.pop("mass")),
        lambda path: with_arrays(path, lambda x: x.update(more=x["mass"])),
        lambda path: with_arrays(path, lambda x: x.update(mass=x["mass"].astype(np.int8))),
        lambda path: with_arrays(path, lambda x: x.update(mass=x["mass"][:-1])),
        lambda path: with_arrays(path, lambda x: x.update(importance=x["importance"] * np.nan)),
    ],
    ids=["missing", "nested", "arrays", "format", "lacking", "more", "int8", "layers", "nan"],
)
def test_what_is_no_calibration_is_refused_with_a_sentence(tmp_path, damage):
    path = random(3).save(tmp_path / "calibration")
    damage(path)
    with pytest.raises(ValueError, match="make one with attnsuite calibrate"):
        load_calibration(path)


# Head maps in the form of Kascade's authors; the files themselves are theirs and are not here.

# The first nine rows of results/head_mappings/Qwen3-8B_layers_0_2_7_14_23.npy (microsoft/kascade, 76aea84), read there.
QWEN_3 = [
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 1, 1, 1, 1, 1, 1, 1],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [6, 5, 3, 7, 1, 4, 5, 5],
    [0, 1, 5, 5, 5, 1, 1, 3],
    [4, 4, 1, 3, 4, 5, 5, 4],
    [4, 4, 4, 4, 4, 6, 4, 4],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [3, 0, 3, 3, 5, 6, 0, 0],
]
NAME = "Qwen3-8B_layers_0_2_7.npy"


def head_maps(directory, maps, name=NAME):
    path = directory / name
    with path.open("wb") as file:
        np.save(file, maps)
    return path


def test_a_published_head_map_is_a_schedule_with_its_anchors_and_maps(tmp_path):
    schedule = published_schedule(head_maps(tmp_path, np.array(QWEN_3, np.int32)))
    assert schedule.anchors == (0, 2, 7)
    assert [layer.role for layer in schedule.layers[:4]] == ["dense", "reuse", "anchor", "reuse"]
    assert [layer.anchor for layer in schedule.layers] == [0, 0, 2, 2, 2, 2, 2, 7, 7]
    assert [list(layer.head_map) for layer in schedule.layers] == QWEN_3


@pytest.mark.parametrize(
    ("maps", "name", "sentence"),
    [
        (QWEN_3, "Qwen3-8B.npy", "does not end in _layers_A_B"),
        (QWEN_3, "Qwen3-8B_layers_0_2_9.npy", "expected layers from 0 to 8 in ascending order"),
        (QWEN_3, "Qwen3-8B_layers_2_7.npy", "with layer 0 first"),
        (QWEN_3, "Qwen3-8B_layers_0_3.npy", "layer 3 is an anchor, but its head map is not the identity"),
        ([[0, 1], [2, 0]], "m_layers_0.npy", "holds 0 to 2; a KV head is from 0 to 1"),
        ([[0.0, 1.0]], "m_layers_0.npy", r"is float64\[1, 2\]; expected integers"),
        ([0, 1], "m_layers_0.npy", r"is int64\[2\]; expected integers \[layers, KV heads\]"),
        (np.array([[0, None]], object), "m_layers_0.npy", "cannot be read as a NumPy array: Object arrays cannot be"),
    ],
    ids=["name", "beyond", "no-layer-0", "no-identity", "head", "real", "flat", "pickle"],
)
def test_what_is_no_head_map_is_refused_with_a_sentence(maps, name, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        published_schedule(head_maps(tmp_path, np.asarray(maps), name))


def test_a_file_that_is_no_array_is_refused(tmp_path):
    (tmp_path / NAME).write_bytes(b"PK no array")
    with pytest.raises(ValueError, match="cannot be read as a NumPy array"):
        published_schedule(tmp_path / NAME)
    with pytest.raises(ValueError, match="cannot be read as a NumPy array"):
        published_schedule(tmp_path / "gone_layers_0.npy")
