"""Fine-tuning with a row's own attention, before what the row loses is measured.

Every row trains from the same weights, on the same batches of training text, by the same updates. The dense model that
the rows are compared with is trained so too. Sparse attention has the gradient of the pairs that it kept.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import Resolution, Target, registry
from attnsuite.backends.kascade import Schedule
from attnsuite.models import Transformer, load_text
from attnsuite.models.optimizer import make_optimizer
from attnsuite.models.planning import Resolutions, attention_spec
from attnsuite.models.training import Batch, compiled_step, training_step

from ...measure.text import reader_of
from .controls import Watched
from .selection import SelectionCase
from .settings import settings_of

ROWS_PER_UPDATE = 4
LEARNING_RATE = 1e-3


def fine_tuned(case: SelectionCase, model: Transformer, method: str, schedule: Schedule | None = None) -> Transformer:
    """The model after the case's ``training_steps`` with the attention of the row ``method``; float32."""
    config = dataclasses.replace(model.config, dtype="float32", param_dtype="float32")
    spec = attention_spec(config, "global", batch=ROWS_PER_UPDATE, query_length=case.sequence)
    backend = registry.get("standard")
    if schedule is not None and method != "dense":
        backend = Watched(method, settings_of(case), schedule, kept=None)
    resolutions: Resolutions = (("global", Resolution(method, backend, "native", spec, Target.here())),)
    update = make_optimizer("adamw", steps=case.training_steps, learning_rate=LEARNING_RATE, weight_decay=0.0)
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), model.arrays())
    state, step = update.init(params), compiled_step(training_step(config, resolutions, update))
    reader, text = reader_of(case.model, config), load_text().train
    for number in range(case.training_steps):
        rng = np.random.default_rng([case.seed, 2, number])
        rows = reader.drawn(text, case.sequence, ROWS_PER_UPDATE, rng)
        params, state, _ = step(params, state, Batch(rows[None]), None)
    return Transformer(config, params)
