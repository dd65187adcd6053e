"""Kvax's own kernels train: forward and backward in their interpreter, within the noise of the standard backend."""

import jax
import pytest

from attnsuite.models import ModelConfig, load_text
from attnsuite.reports.pages.curves import verdicts
from attnsuite.suite import curves_run
from attnsuite.suite.curves_run import curves_of, runs_of
from attnsuite.suite.loss_curves import TrainingCase

CASE = TrainingCase(preset="nano", setting="interpreted", steps=4, batch=1, length=256)
CONFIG = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, max_length=256)


@pytest.mark.needs_kvax
def test_kvax_follows_the_loss_curve_of_standard_and_a_wrong_gradient_does_not(monkeypatch):
    monkeypatch.setattr(curves_run, "CONTROLS", {"dv 1% large": (1.0, 1.0, 1.01)})
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # strict is for backends only
        runs = runs_of(CONFIG, CASE, ["kvax"], ("interpret",))
        curves = list(curves_of(CONFIG, CASE, runs, load_text().train, "cpu"))
    found = {curve.requested: (curve, verdict) for curve, verdict in verdicts(curves)}
    assert found["kvax"][0].mode == "interpret"
    assert found["kvax"][1].ratio > 0
    assert found["kvax"][1].is_ready
    assert not found["dv 1% large"][1].is_ready
