"""Schedules from calibrations whose best answer is known."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attnsuite.backends.kascade import (
    Calibration,
    LayerRole,
    Schedule,
    dynamic_programming,
    greedy,
    layer_similarity,
    load_calibration,
    manual,
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
        (lambda: manual((1, 2), num_layers=4, kv_heads=2), "layer 0 must be one of them"),
        (lambda: manual((0, 4), num_layers=4, kv_heads=2), "must be layers from 0 to 3"),
        (lambda: manual((), num_layers=4, kv_heads=2), "layer 0 must be one of them"),
        (lambda: manual((0,), num_layers=4, kv_heads=2, calibration=random(0)), "the calibration has 7 layers"),
        (lambda: dynamic_programming(random(0), 8), "anchors=8 must be from 1 to 7"),
        (lambda: greedy(random(0), threshold=2.0), "threshold=2.0"),
        (lambda: greedy(random(0), max_reuse_dist=0), "max_reuse_dist=0"),
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
        lambda path: path.with_suffix(".json").write_text("{"),
        lambda path: path.with_suffix(".json").write_text("[]"),
        lambda path: path.with_suffix(".json").write_text("[" * 2000),
        lambda path: path.write_bytes(b"nothing"),
        lambda path: rewritten(path, format=2),
        lambda path: rewritten(path, format="1"),
        lambda path: rewritten(path, settings=None),
        lambda path: rewritten(path, fingerprint=1),
        lambda path: rewritten(path, more=1),
        lambda path: with_arrays(path, lambda x: x.pop("mass")),
        lambda path: with_arrays(path, lambda x: x.update(more=x["mass"])),
        lambda path: with_arrays(path, lambda x: x.update(mass=x["mass"].astype(np.int8))),
        lambda path: with_arrays(path, lambda x: x.update(mass=x["mass"][:-1])),
        lambda path: with_arrays(path, lambda x: x.update(importance=x["importance"][None])),
        lambda path: with_arrays(path, lambda x: x.update(importance=x["importance"] * np.nan)),
    ],
    ids=["missing", "json", "list", "nested", "arrays", "format", "type", "settings", "fingerprint", "key", "lacking",
         "more", "int8", "layers", "dimensions", "nan"],
)  # fmt: skip
def test_what_is_no_calibration_is_refused_with_a_sentence(tmp_path, damage):
    path = random(3).save(tmp_path / "calibration")
    damage(path)
    with pytest.raises(ValueError, match="make one with attnsuite calibrate"):
        load_calibration(path)
