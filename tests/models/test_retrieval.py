import numpy as np
import pytest

from attnsuite.models import retrieval
from attnsuite.models.rope import inverse_frequencies
from landing import swept

CALL = {"backend": "standard"}


@pytest.mark.parametrize(
    ("num_layers", "head_dim", "anchor", "reuse", "length"),
    swept([(6, 64, 1, 3, 256), (2, 32, 0, 1, 512), (3, 34, 0, 2, 128), (4, 128, 2, 3, 64)], [(3, 34, 0, 2, 128)]),
)
def test_dense_attention_always_answers(num_layers, head_dim, anchor, reuse, length):
    model = retrieval.build(num_layers, head_dim, anchor, reuse, context=length)
    batch = retrieval.sample(np.random.default_rng(0), length, batch=4)
    assert retrieval.hits(model(batch.tokens, **CALL), batch).mean() == 1.0


def test_recall_collapses_where_the_needles_are_out_of_the_window():
    model = retrieval.build(4, 32, 1, 2)
    batch = retrieval.sample(np.random.default_rng(0), 256, batch=8)
    windowed = model.with_config(attention="sliding", window_size=64)
    assert retrieval.hits(windowed(batch.tokens, **CALL), batch).mean() < 0.2
    wide = model.with_config(attention="sliding", window_size=256)
    assert retrieval.hits(wide(batch.tokens, **CALL), batch).mean() == 1.0


@pytest.mark.parametrize("blind", swept([1, 2], [1]), ids=["anchor", "reuse"])
def test_each_layer_alone_finds_only_its_half(blind):
    """A wrong reuse layer leaves about one answer in four right, and so does a wrong anchor."""
    types = tuple("sliding" if layer == blind else "global" for layer in range(4))
    model = retrieval.build(4, 32, 1, 2).with_config(attention=types, window_size=32)
    batch = retrieval.sample(np.random.default_rng(1), 256, batch=16)
    assert 0.1 < retrieval.hits(model(batch.tokens, **CALL), batch).mean() < 0.4


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("context", [2048, 131_072, 4_000_000])
def test_the_circuit_hardly_turns_over_its_whole_context(head_dim, context):
    """The four pairs that carry it; with the base of a short context the farthest needles would turn away."""

    def turned(model):
        config = model.config
        return context * inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)[-4:].max()

    assert turned(retrieval.build(2, head_dim, 0, 1, context=context)) < 0.31
    if context > 1_000_000 and head_dim < 64:
        assert turned(retrieval.build(2, head_dim, 0, 1, context=2048)) > 1.5


def test_noise_in_every_weight_does_not_break_the_circuit():
    model = retrieval.build(4, 32, 1, 2, noise=0.02)
    batch = retrieval.sample(np.random.default_rng(0), 256, batch=4)
    assert retrieval.hits(model(batch.tokens, **CALL), batch).mean() == 1.0
    assert all(np.any(np.asarray(layer["up_proj"])) for layer in model.arrays()["layers"])


def test_samples_are_what_they_say():
    batch = retrieval.sample(np.random.default_rng(0), 100, batch=20, gap=60)
    rows = np.arange(20)[:, None]
    assert (batch.tokens[rows, batch.needle_positions] == batch.answers).all()
    assert (batch.query_positions - batch.needle_positions >= 60).all()
    kinds = batch.tokens[rows, batch.query_positions] - retrieval.QUERY
    assert (kinds == (batch.answers - retrieval.NEEDLE) // 16).all()
    assert (np.sort(kinds) == np.arange(8)).all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: retrieval.build(3, 64, 2, 2), "anchor=2 and reuse=2 must be layers with 0 <= anchor < reuse"),
        (lambda: retrieval.build(3, 64, 1, 3), "num_layers=3"),
        (lambda: retrieval.build(4, 16), "head_dim=16 must be even and at least 32"),
        (lambda: retrieval.build(4, 33), "head_dim=33 must be even"),
        (lambda: retrieval.sample(np.random.default_rng(0), 40, gap=20), "use a length of at least 44"),
    ],
)
def test_what_cannot_be_built_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
