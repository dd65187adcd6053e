"""Kvax's own kernels train: forward and backward in their interpreter, within the noise of the standard backend."""

import math
from collections import Counter
from unittest import mock

import jax
import pytest

from attnsuite.models import ModelConfig
from attnsuite.reports.pages.curves import verdicts
from attnsuite.suite.cell import Request
from attnsuite.suite.grid.running import Limits, RunContext, Running
from attnsuite.suite.kinds import curve_training, loss_curve_case
from attnsuite.suite.kinds.loss_curve_case import TrainingCase
from attnsuite.suite.kinds.loss_curve_kind import LOSS_CURVE

CASE = TrainingCase(preset="nano", setting="interpreted", steps=4, batch=1, length=256)
CONFIG = ModelConfig.from_preset(
    "debug", hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, max_length=256
)


@pytest.mark.needs_kvax
def test_kvax_follows_the_loss_curve_of_standard_and_a_wrong_gradient_does_not(monkeypatch):
    from attnsuite.backends.kvax import interpret

    monkeypatch.setattr(loss_curve_case, "CONTROLS", {"dv 1% large": (1.0, 1.0, 1.01)})
    monkeypatch.setattr(curve_training, "config_of", lambda _: CONFIG)
    launched = Counter()

    def execute(kernel, *rest):
        launched[kernel.fn.__name__] += 1
        run_kernel(kernel, *rest)

    run_kernel = interpret.execute
    monkeypatch.setattr(interpret, "execute", execute)
    limits = Limits(math.inf, 2**40)
    context = RunContext(suite="curves", limits=limits, environment={}, text=None, watcher=mock.Mock())
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # strict is for backends only
        cells = LOSS_CURVE.cells(CASE, Request(rows=("kvax",), cases=(CASE,)))
        outcomes = [(cell, LOSS_CURVE.prepare(cell, CASE, mock.Mock()).outcome) for cell in cells]
    curves = [Running(cell, outcome=outcome).record(context) for cell, outcome in outcomes]
    found = {curve.requested: (curve, verdict) for curve, verdict in verdicts(curves)}
    assert found["kvax"][0].mode == "interpret"
    # Not by a difference: the losses of so small a model are those of standard in every bit on some processors.
    assert launched["flash_attention_forward_kernel"] == launched["flash_attention_backward_kernel"] == CASE.steps
    assert found["kvax"][1].is_ready
    assert not found["dv 1% large"][1].is_ready
