"""Head maps in the form of Kascade's authors; the files themselves are theirs and are not here."""

import numpy as np
import pytest

from attnsuite.backends.kascade import published_schedule

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


def written(directory, maps, name=NAME):
    path = directory / name
    with path.open("wb") as file:
        np.save(file, maps)
    return path


def test_a_published_head_map_is_a_schedule_with_its_anchors_and_maps(tmp_path):
    schedule = published_schedule(written(tmp_path, np.array(QWEN_3, np.int32)))
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
        published_schedule(written(tmp_path, np.asarray(maps), name))


def test_a_file_that_is_no_array_is_refused(tmp_path):
    (tmp_path / NAME).write_bytes(b"PK no array")
    with pytest.raises(ValueError, match="cannot be read as a NumPy array"):
        published_schedule(tmp_path / NAME)
    with pytest.raises(ValueError, match="cannot be read as a NumPy array"):
        published_schedule(tmp_path / "gone_layers_0.npy")
