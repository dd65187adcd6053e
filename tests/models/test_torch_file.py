"""``pytorch_model.bin`` is read without PyTorch; files are written by hand, so that hostile ones can be."""

import json
import zipfile

import jax
import numpy as np
import pytest

from attnsuite.models import CheckpointError, ModelConfig, Transformer, convert, load, save
from attnsuite.models.parameters import checkpoint_names
from attnsuite.models.torch_file import TorchFile

STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "float64": "DoubleStorage"}


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def integers(*values):
    return b"(" + b"".join(b"J" + int(value).to_bytes(4, "little", signed=True) for value in values) + b"t"


def tensor(key, dtype, shape, strides, offset=0):
    """The instructions by which ``torch.save`` describes a tensor."""
    storage = b"(" + text("storage") + f"ctorch\n{STORAGES[dtype]}\n".encode() + text(key) + text("cpu") + b"K\x01tQ"
    start = b"J" + offset.to_bytes(4, "little", signed=True)
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + start
        + integers(*shape)
        + integers(*strides)
        + hooks
        + b"tR"
    )


def write(path, described, storages, compression=zipfile.ZIP_STORED):
    """A file of ``torch.save``: the instructions of each value by its name, and the bytes of the storages."""
    items = b"".join(text(name) + instructions for name, instructions in described.items())
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}(" + items + b"u.")
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)


def write_arrays(path, arrays):
    described = {
        name: tensor(str(i), x.dtype.name, x.shape, np.array(x.strides, int) // x.itemsize)
        for i, (name, x) in enumerate(arrays.items())
    }
    write(path, described, {str(i): x.tobytes() for i, x in enumerate(arrays.values())})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("files", [1, 3])
def test_a_checkpoint_of_pytorch_is_converted_to_the_same_model(files, dtype, tmp_path):
    model = Transformer(ModelConfig.from_preset("debug", dtype=dtype, param_dtype=dtype))
    save(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = jax.tree.leaves(checkpoint_names(model.config))
    arrays = dict(zip(names, map(np.asarray, jax.tree.leaves(model.arrays())), strict=True))
    if files == 1:
        write_arrays(tmp_path / "pytorch_model.bin", arrays)
    else:
        shards = {f"pytorch_model-{i + 1:05d}-of-{files:05d}.bin": names[i::files] for i in range(files)}
        for file, part in shards.items():
            write_arrays(tmp_path / file, {name: arrays[name] for name in part})
        mapping = {name: file for file, part in shards.items() for name in part}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": mapping}))
    convert(tmp_path, tmp_path / "out", chunked=True)
    for again in (load(tmp_path), load(tmp_path / "out")):
        assert again.config == model.config
        jax.tree.map(np.testing.assert_array_equal, again.arrays(), model.arrays())


def test_views_of_one_storage_are_read_by_offset_and_stride(tmp_path):
    data = np.arange(12, dtype=np.float32)
    views = {"turned": tensor("0", "float32", (4, 3), (1, 4)), "end": tensor("0", "float32", (2,), (1,), 10)}
    write(tmp_path / "x.bin", views, {"0": data.tobytes()})
    file = TorchFile(tmp_path / "x.bin")
    np.testing.assert_array_equal(file.read("turned"), data.reshape(3, 4).T)
    np.testing.assert_array_equal(file.read("end"), [10, 11])


GOOD = tensor("0", "float32", (2,), (1,))


@pytest.mark.parametrize(
    ("instructions", "sentence"),
    [
        (b"cposix\nsystem\n(X%btR", "is refused: it asks for more than tensors .*posix.system"),
        (b"cbuiltins\neval\n(X%btR", "is refused: it asks for more than tensors .*builtins.eval"),
        (b"ctorch._utils\n_rebuild_sparse_tensor\n)R", "is refused: it asks for more than tensors"),
        (b"(iposix\nsystem\n", r"is refused: it asks for more than tensors \('INST'\)"),
        (b"r\xff\xff\xff\x7f" + GOOD, "numbers more objects than it has bytes"),
        (b"K\x01", "does not hold a dictionary of tensors"),
        (tensor("0", "float32", (3,), (1,)), "lies outside of its storage"),
        (tensor("0", "float32", (2,), (1,), 1), "lies outside of its storage"),
        (tensor("1", "float32", (2,), (1,)), "lies outside of its storage"),
        (tensor("0", "float32", (-2,), (1,)), "described in a way that no tensor is"),
        (tensor("0", "float32", (2, 1), (1,)), "described in a way that no tensor is"),
        (tensor("0", "float32", (2**30, 2**30), (0, 0)), "has elements that overlap"),
        (GOOD + b"}" + text("accepted") + b"K\x01sb", "cannot be read as a PyTorch checkpoint"),
    ],
)
def test_a_file_that_describes_more_than_tensors_is_refused_and_runs_nothing(instructions, sentence, tmp_path):
    bait = tmp_path / "bait"
    call = text(f"touch {bait}")
    write(tmp_path / "x.bin", {"w": instructions.replace(b"X%b", call)}, {"0": bytes(8)})
    with pytest.raises(CheckpointError, match=sentence):
        TorchFile(tmp_path / "x.bin")
    assert not bait.exists()


def test_a_compressed_archive_is_refused(tmp_path):
    write(tmp_path / "x.bin", {"w": GOOD}, {"0": bytes(8)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"a file of torch\.save is not compressed"):
        TorchFile(tmp_path / "x.bin")
