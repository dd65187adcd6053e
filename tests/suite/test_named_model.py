"""The names of models are the same in every verb, and open the same models."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from attnsuite.backends import Target
from attnsuite.models import ModelConfig, Transformer, load_shipped, save
from attnsuite.models.weights import shipped
from attnsuite.suite import suites as model_suite
from attnsuite.suite.compile_request import compile_request
from attnsuite.suite.compile_run import cache_path, cell_of
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.named_model import checkpoint_of, config_of, model_of
from attnsuite.suite.verbs.compile import Compile


@pytest.fixture
def directory():
    with shipped() as found:
        yield str(found)


def test_text_and_its_directory_are_the_same_model(directory):
    assert config_of("text") == config_of(directory) == load_shipped().config
    leaves = jax.tree.leaves(model_of("text").arrays())
    assert all(map(np.array_equal, leaves, jax.tree.leaves(model_of(directory).arrays())))
    with checkpoint_of("text") as place:
        assert (place / "config.json").read_bytes() == (Path(directory) / "config.json").read_bytes()


def test_random_weights_follow_from_the_seed():
    first, again, other = (jax.tree.leaves(model_of("debug", seed=n).arrays()) for n in (1, 1, 2))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


@pytest.mark.parametrize("model", ["text", "directory"])
def test_run_and_compile_take_the_names_of_the_others(model, directory, tmp_path):
    name, place = (directory, str(Path(directory).resolve())) if model == "directory" else ("text", "text")
    words = model_suite.ModelSuiteFlags(model=name, sequence=64)
    assert {case.model for case in model_suite.model_suite(words, ["kascade"]).cases} == {place}
    assert words.as_json()["model"] == place
    flags = Compile(backends="standard", targets="v5e", model=name, seq_lens="64", phases="prefill")
    request = compile_request(flags, tmp_path, Limits(1.0, 2**30), ())
    assert [case.model for case in request.cases] == [place]


def test_a_preset_comes_before_a_directory_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(load_shipped(), tmp_path / "debug")
    assert config_of("debug").num_layers != load_shipped().config.num_layers
    assert config_of("./debug") == load_shipped().config
    flags = Compile(backends="standard", targets="v5e", model="debug,./debug", seq_lens="64", phases="prefill")
    request = compile_request(flags, tmp_path / "out", Limits(1.0, 2**30), ())
    assert [case.model for case in request.cases] == ["debug", str(tmp_path / "debug")]


def test_answer_of_a_compiler_is_not_that_for_a_directory_with_another_model(directory, tmp_path):
    said = json.loads((Path(directory) / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(Path(directory).resolve() / "model.safetensors")
    case = ModelCase(kind="model_prefill", model=str(tmp_path))
    environment, target = {"versions": {}, "source": "", "flags": {}}, Target.named("v5e")
    found = set()
    for theta in (10000.0, 20000.0):
        (tmp_path / "config.json").write_text(json.dumps(said | {"rope_theta": theta}))
        found.add(cache_path(tmp_path, cell_of(case, "standard", target), target, environment))
    assert len(found) == 2


def test_guides_of_kascade_run_on_the_named_model(tmp_path, directory):
    for model in ("text", directory):
        suite = model_suite.model_suite(model_suite.ModelSuiteFlags(model=model, suite="kascade-guide"))
        cases = {case.name: case for case in suite.cases}
        assert suite.name == "kascade-guide"
        assert cases["guide-1b-prefill"].schedule == "greedy-benchmark"
        assert {cases[f"guide-stack-{length}"].layers for length in (128, 512)} == {load_shipped().config.num_layers}
        assert len({case.model for case in suite.cases if hasattr(case, "model")}) == 1


def test_guides_of_kascade_are_refused_for_layers_that_do_not_see_all(tmp_path):
    config = ModelConfig.from_preset("debug", attention=("sliding", "global"), window_size=16)
    save(Transformer(config), tmp_path / "model")
    words = model_suite.ModelSuiteFlags(model=str(tmp_path / "model"), suite="kascade-guide")
    with pytest.raises(InputError, match=r"layers of type sliding; --suite kascade-guide is for models whose layers"):
        model_suite.model_suite(words)
