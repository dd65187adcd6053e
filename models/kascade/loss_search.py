"""A schedule chosen by what it costs: the next-token loss of the model on calibration text (IndexCache, 2603.12201).

Every layer selects at first. In each round one more layer reuses: the one whose loss is then the lowest. A round reads
each layer once and applies it to all candidates of the round. Candidates that agree up to a layer share the hidden
states behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends.contract import Carry
from attnsuite.backends.kascade import Calibration, LayerRole, Schedule, greedy_by_loss
from attnsuite.models.checkpoint import Checkpoint
from attnsuite.models.forward_pass import Hidden
from attnsuite.models.planning import resolve_attention
from attnsuite.models.streaming import LAYER_STATICS, embedded, last_nats, outer_of_head, run_layer
from attnsuite.models.transformer import Transformer

_ROLES = ("dense", "anchor", "reuse")
_ROLE_BY_ROLE = Schedule((LayerRole("dense", 0), LayerRole("anchor", 1), LayerRole("reuse", 1)))  # a layer of each role
_run_layer = jax.jit(run_layer, static_argnames=LAYER_STATICS)  # candidates share what goes in, so nothing is donated


def schedule_by_loss(
    model: Transformer | Checkpoint,
    prompts: Any,
    calibration: Calibration,
    anchors: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Schedule:
    """The schedule with ``anchors`` layers that select, found by turning one layer after the other into a reuse layer.

    ``prompts [prompts, length]`` are tokens. Head maps and the settings of the selection are the calibration's. A model
    of L layers needs L - ``anchors`` rounds; a round keeps the hidden states of at most L candidates. ``progress``
    gets the name of each step. Raises ValueError for another number of layers, and for a number of
    anchors that the model cannot have.
    """

    def losses(schedules: Sequence[Schedule]) -> list[float]:
        progress(f"losses of {len(schedules)} schedules with {len(schedules[0].anchors)} layers that select")
        return schedule_losses(model, prompts, schedules, calibration.settings)

    if calibration.num_layers != model.config.num_layers:
        raise ValueError(f"the calibration has {calibration.num_layers} layers, the model {model.config.num_layers}.")
    return greedy_by_loss(calibration, anchors, losses)


def schedule_losses(
    model: Transformer | Checkpoint, prompts: Any, schedules: Sequence[Schedule], settings: dict[str, Any]
) -> list[float]:
    """The mean next-token loss in nats over ``prompts [prompts, length]`` under each schedule.

    ``settings`` are the options of ``kascade`` beside the schedule.
    """
    config, tokens = model.config, jnp.asarray(prompts, jnp.int32)
    length = tokens.shape[1] - 1
    (x,) = embedded(model, [tokens[:, :-1]])
    found = resolve_attention(
        config,
        batch=tokens.shape[0],
        query_length=length,
        needs_grad=False,
        backend="kascade",
        on_unavailable="raise",
        options={**settings, "schedule": _ROLE_BY_ROLE},
    )
    resolution = dict(found)["global"]
    states: dict[tuple[LayerRole, ...], tuple[Hidden, Carry]] = {(): (x, ())}
    for i in range(config.num_layers):
        layer = model.layer(i)
        behind: dict[tuple[LayerRole, ...], tuple[Hidden, Carry]] = {}
        for roles in dict.fromkeys(schedule.layers[: i + 1] for schedule in schedules):
            role, (x, carry) = roles[-1], states[roles[:-1]]
            index = _ROLES.index(role.role)
            # A head map is applied here, so that layers with different maps share a compiled program.
            handed = carry.remapped(role.head_map) if role.role == "reuse" and role.head_map else carry
            x, made = _run_layer(config, layer, x, handed, kind="global", index=index, resolution=resolution)
            behind[roles] = x, carry if role.role == "reuse" else made
        states = behind
    outer = outer_of_head(model)
    # Prompt by prompt: the logits of all of them would not fit in memory for a large vocabulary.
    return [
        float(np.mean([last_nats(config, outer, x[n : n + 1], tokens[n : n + 1, 1:]) for n in range(len(tokens))]))
        for x, _ in (states[schedule.layers] for schedule in schedules)
    ]
