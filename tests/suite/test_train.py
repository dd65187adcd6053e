"""attnsuite train: a run that was cut off goes on to the same bits; what cannot be used is a sentence."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
import warnings

import numpy as np
import pytest

from attnsuite.backends.choices import problem_of
from attnsuite.models import PRESETS, TextFile, load, load_shipped, lora, save
from attnsuite.models.kascade import calibration
from attnsuite.models.resume import SavedSteps, missing
from attnsuite.models.sharded_training import MeshSizes
from attnsuite.suite.errors import InputError
from attnsuite.suite.named_model import model_of
from attnsuite.suite.store import RunStore
from attnsuite.suite.training_run import LOSSES, TrainRequest, execute, open_training
from command import code_of
from declared import sized

SELECT = {"top_k": 0.25, "min_keys": 0, "tile_size": 8, "query_tile": 8}
SIZES = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "max_length": 64}
WORDS = {"model": "nano", "steps": 4, "batch": 2, "length": 32, "save_every": 2, "learning_rate": 0.01}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax", "ignore::UserWarning:orbax")
needs_orbax = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(autouse=True)
def _nano(monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", PRESETS["debug"] | SIZES)


def silent(_line):
    pass


def losses(out):
    return [json.loads(line)["loss"] for line in (out / LOSSES).read_text().splitlines()]


class CutError(Exception):
    """Stands for a kill."""


@needs_orbax
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    execute(TrainRequest(**WORDS), whole, say=silent)

    def stop_at_three(line):
        if line.startswith("step 3/"):
            raise CutError

    with pytest.raises(CutError):
        execute(TrainRequest(**WORDS), cut, say=stop_at_three)
    assert len(losses(cut)) == 3  # one more than what was saved: it runs again
    with pytest.raises(InputError, match=r"the run had learning_rate=0.01, now it is 0.02; they must be equal"):
        execute(TrainRequest(**WORDS | {"learning_rate": 0.02}), cut, resume=True, say=silent)
    with pytest.raises(InputError, match=r"the run had mesh=nothing, now it is data=1,fsdp=1,heads=1,context=1; they"):
        execute(TrainRequest(**WORDS | {"mesh": MeshSizes()}), cut, resume=True, say=silent)
    said = []
    execute(TrainRequest(**WORDS), cut, resume=True, say=said.append)
    assert said[0] == "resuming behind step 2"
    assert losses(cut) == losses(whole)
    assert len(losses(cut)) == 4
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    # Nothing that was saved is needed to use the model, and nothing of it is a pickle.
    assert load(cut).config.num_layers == 1
    with pytest.raises(InputError, match="is no record of a training run; start one without"):
        execute(TrainRequest(**WORDS), tmp_path / "nowhere", resume=True, say=silent)
    assert not [path for path in cut.rglob("*") if path.suffix in (".pkl", ".pickle", ".pt", ".pth")]


@needs_orbax
def test_adapters_are_trained_on_a_loaded_model_and_saved_apart(tmp_path):
    base, out = tmp_path / "base", tmp_path / "adapters"
    save(model_of("nano", param_dtype="float32"), base)
    weights = (base / "model.safetensors").read_bytes()
    adapted = lora.LoraConfig(rank=2, alpha=4.0, targets=("k_proj", "down_proj"))
    words = WORDS | {"steps": 2, "model": str(base), "lora": adapted, "packed": True, "accumulate": 2}
    words |= {"dtype": "bfloat16"}
    execute(TrainRequest(**words), out, say=silent)
    assert (base / "model.safetensors").read_bytes() == weights
    assert not (out / "model.safetensors").exists()
    adapters, config = lora.load(out, load(base).config)
    assert config == adapted
    assert all(np.asarray(layer[name].b).any() for layer in adapters for name in adapted.targets)
    (base / "model.safetensors").write_bytes(weights[:-4] + bytes(4))
    with pytest.raises(InputError, match="base_sha256 differs from that of the run"):
        execute(TrainRequest(**words), out, resume=True, say=silent)


@needs_orbax
@pytest.mark.thorough
def test_a_run_goes_on_with_the_calibration_that_it_began_with(tmp_path):
    path = tmp_path / "mine"  # without a suffix, as calibrate says it
    found = calibration.calibrate(model_of("nano", param_dtype="float32"), [np.arange(64)], SELECT)
    found.save(path)
    request = TrainRequest(**WORDS | {"steps": 2, "backend": "kascade", "calibration": path})
    execute(request, tmp_path / "out", say=silent)
    said = []
    execute(request, tmp_path / "out", resume=True, say=said.append)
    assert said[0] == "resuming behind step 2"
    dataclasses.replace(found, text={"name": "another"}).save(path)
    with pytest.raises(InputError, match="calibration_sha256 differs from that of the run"):
        execute(request, tmp_path / "out", resume=True, say=silent)


def test_the_shipped_model_takes_adapters_and_its_loss_is_that_of_a_trained_one():
    opened = open_training(TrainRequest(model="text", lora=lora.LoraConfig(), backend="chunked"))
    assert opened.base is not None
    assert opened.config == load_shipped().config
    assert [found.backend.name for _, found in opened.resolutions] == ["chunked"]
    assert len(opened.trained) == opened.config.num_layers


def test_rows_longer_than_the_learned_positions_are_refused(monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", PRESETS["nano"] | {"use_rope": False, "max_length": 16})
    with pytest.raises(InputError, match="length=32 is more than the 16 positions that this model has learned"):
        open_training(TrainRequest(**WORDS))


def test_batches_follow_from_seed_and_step_alone_and_packed_rows_hold_whole_paragraphs():
    first, again = (open_training(TrainRequest(**WORDS, packed=True)).batch_of for _ in range(2))
    assert (first(3).tokens == again(3).tokens).all()
    assert (first(3).tokens != first(4).tokens).any()
    assert first(3).tokens.shape == (1, 2, 32)
    assert first(3).segment_ids.shape == (1, 2, 32)
    other = open_training(TrainRequest(**WORDS | {"seed": 1})).batch_of
    assert (other(3).tokens != open_training(TrainRequest(**WORDS)).batch_of(3).tokens).any()


def test_blank_lines_of_windows_end_paragraphs_too(tmp_path):
    (tmp_path / "text").write_bytes(b"\r\n\r\n".join(b"paragraph %d" % i for i in range(99)))
    request = TrainRequest(**WORDS, packed=True, text=TextFile(str(tmp_path / "text")))
    rows = open_training(request).batch_of(0)
    assert (np.asarray(rows.tokens) != ord("\r")).all()
    assert np.asarray(rows.segment_ids).max() == 1


@needs_orbax
def test_a_run_does_not_go_on_with_a_model_that_computes_something_else(tmp_path):
    save(model_of("nano", param_dtype="float32"), tmp_path / "base")
    request = TrainRequest(**WORDS | {"model": str(tmp_path / "base"), "steps": 2})
    execute(request, tmp_path / "out", say=silent)
    config = tmp_path / "base/config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    with pytest.raises(InputError, match=r"the run had rope_theta=10000.0, now it is 500.0; they must be equal"):
        execute(request, tmp_path / "out", resume=True, say=silent)


def test_a_directory_that_is_in_use_or_holds_no_run_is_refused(refused, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    words = ("train", "--model", "nano", "--save-every", "0", "--out", tmp_path)
    assert "is not empty; give a new directory, or --resume" in refused(*words)
    assert "saves nothing to go on with" in refused(*words, "--resume")
    with RunStore(tmp_path / "new", resume=False):
        assert "another run is writing to" in refused(*words[:-1], tmp_path / "new")


@needs_orbax
def test_a_save_is_whole_before_an_interrupt_is_heard():
    class Manager:
        is_whole = False

        def save(self, *_, **__):
            time.sleep(0.1)  # until the other thread waits
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            self.is_whole = True

        def wait_until_finished(self):
            pass

    manager = Manager()
    with pytest.raises(KeyboardInterrupt):
        SavedSteps(manager).save(1, {})
    assert manager.is_whole


@pytest.mark.parametrize(
    ("every", "words"),
    [(2, "go on with: attnsuite train --model nano --out {} --resume --save-every 2"), (0, "start again.")],
)
def test_an_interrupted_training_says_how_it_goes_on(tmp_path, monkeypatch, capsys, every, words):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("attnsuite.suite.training_run._steps", interrupted)
    monkeypatch.setattr("attnsuite.suite.training_run.missing", lambda: None)
    assert code_of("train", "--model", "nano", "--save-every", every, "--out", tmp_path) == 128 + signal.SIGINT
    assert words.format(tmp_path) in capsys.readouterr().err


def test_a_model_that_is_larger_than_the_memory_is_refused_before_it_is_made(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("attnsuite.suite.training_run.available_bytes", lambda: 2**31)
    monkeypatch.setattr("attnsuite.suite.training_run.model_of", None)
    said = refused("train", "--model", "large", "--save-every", "0", "--out", tmp_path)
    assert "needs 4.22 GiB to train (parameters 1.06, gradients 1.06, the state of adamw 2.11)" in said
    assert "this machine has 2.00 GiB of memory free" in said


def test_a_batch_that_is_larger_than_the_memory_is_refused_before_the_first_step(refused, tmp_path, monkeypatch):
    words = ("train", "--model", "nano", "--batch", "16", "--length", "64", "--save-every", "0", "--out", tmp_path)
    monkeypatch.setattr("attnsuite.suite.training_run.available_bytes", lambda: 2**21)
    said = refused(*words, "--backend", "standard")
    assert re.search(r"--batch 16 of --length 64 needs 0.0\d GiB beside the model and the optimizer", said)
    assert not any(tmp_path.iterdir())
    assert "standard has no option 'top_k'" in refused(*words, "--backend", "standard", "--options", "top_k=1")
    assert "--seed 4294967296 must be at most 4294967295" in refused(*words, "--seed", 2**32)


def test_without_orbax_the_sentence_says_what_to_install(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("attnsuite.suite.training_run.missing", lambda: "saving needs orbax-checkpoint; pip install it")
    said = refused("train", "--model", "nano", "--out", tmp_path / "out")
    assert "pip install it, or train without saving (--save-every 0)" in said


def test_policy_that_auto_does_not_follow_is_told_once_and_is_no_warning(tmp_path, monkeypatch):
    spec = sized(64, H=16, is_causal=True)
    chosen = {"case": "a", "problem": problem_of(spec), "backend": "splash"}
    source = {"name": "runs/v5e", "device": "tpu:v5e", "cores": None, "versions": {}, "choices": [chosen]}
    made = {"schema": 2, "sources": [source]}
    (tmp_path / "policy.json").write_text(json.dumps(made))
    monkeypatch.setenv("ATTNSUITE_POLICY", str(tmp_path / "policy.json"))
    monkeypatch.setattr("attnsuite.suite.training_run._steps", lambda *_, **__: None)
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        execute(TrainRequest(model="debug", save_every=0), tmp_path / "out", say=said.append)
    (sentence,) = said
    assert "is not used: it was made on tpu:v5e, and this is cpu" in sentence


SPARSE = ("--backend", "kascade", "--options")
TILES = "min_keys=0,tile_size=16,query_tile=16"


def trained(out, *words):
    sizes = ("--model", "text", "--steps", "3", "--batch", "2", "--length", "128", "--save-every", "0")
    assert code_of("train", *sizes, "--out", out, *words) == 0
    return losses(out)


@pytest.mark.thorough
def test_sparse_attention_trains_and_with_everything_selected_it_is_dense(tmp_path):
    dense = trained(tmp_path / "dense", "--backend", "chunked")
    everything = trained(tmp_path / "all", *SPARSE, f"top_k=1.0,{TILES}")
    np.testing.assert_allclose(everything, dense, rtol=1e-5)
    sparse = trained(tmp_path / "sparse", *SPARSE, f"top_k=0.1,{TILES}", "--lora-rank", "2")
    packed = trained(tmp_path / "packed", *SPARSE, f"top_k=1.0,{TILES}", "--packed")
    np.testing.assert_allclose(
        packed, trained(tmp_path / "dense packed", "--packed", "--backend", "chunked"), rtol=1e-5
    )
    adapters = trained(tmp_path / "adapters", "--backend", "chunked", "--lora-rank", "2")
    apart = np.abs(np.subtract(sparse, adapters))
    assert (apart > 1e-3).all()
    assert (apart < 0.3).all()
