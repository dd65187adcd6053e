import json

import numpy as np
import optax
import pytest

from attnsuite.models import PRESETS, Corpus, ModelConfig, Transformer, load, load_text
from attnsuite.models.planning import resolve_attention
from attnsuite.models.text import random_windows
from attnsuite.models.training import Batch, compiled_step, training_step
from pretrain import Train, evaluate, main, train

PROSE = load_text()


def test_training_steps_lower_the_loss_of_an_ablated_model_too():
    """That of a model as it is: test_training.py."""
    config = ModelConfig.from_preset("debug", max_length=64, use_rope=False, use_rmsnorm=False, use_swiglu=False)
    resolutions = resolve_attention(config, batch=4, query_length=64, backend="standard")
    update = optax.adam(3e-3)
    step = compiled_step(training_step(config, resolutions, update))
    params = Transformer(config).arrays()
    state, rng, losses = update.init(params), np.random.default_rng(0), []
    for _ in range(20):
        batch = Batch(random_windows(PROSE.train, 64, 4, rng)[None])
        params, state, value = step(params, state, batch, None)
        losses.append(float(value))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 1.0


def test_training_learns_is_reproducible_and_saves_what_it_did(tmp_path, monkeypatch):
    # One small layer: Muon takes long to compile.
    monkeypatch.setitem(
        PRESETS, "nano", PRESETS["debug"] | {"num_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    )
    arguments = Train(out=tmp_path, preset="nano", stages=((20, 4, 64),))
    first, record = train(arguments, [PROSE])
    main(arguments)
    again = load(tmp_path)
    assert np.array_equal(first.arrays()["embed_tokens"], again.arrays()["embed_tokens"])
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["tokens"] == record["tokens"] == 20 * 4 * 64
    assert written["texts"][0]["bytes"] == len(PROSE.train)
    assert written["final_bits_per_byte"] < 7.5


def test_evaluation_of_an_untrained_model_finds_nothing_learned():
    data = PROSE.held_out[:2049]
    figures = evaluate(Transformer(ModelConfig.from_preset("debug")), PROSE.train, data, length=256, backend="standard")
    assert figures["model"] == pytest.approx(8.0, abs=0.3)
    assert figures["bigram"] < figures["unigram"] < figures["model"]


def test_a_corpus_says_what_it_is():
    corpus = Corpus("x", np.zeros(3, np.uint8), np.ones(2, np.uint8))
    assert len(corpus.sha256) == 64
