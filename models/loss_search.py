"""A schedule chosen by what it costs: the next-token loss of the model on calibration text (IndexCache, 2603.12201).

Every layer selects at first. In each round one more layer reuses: the one whose loss is then the lowest. A round reads
each layer once and applies it to all candidates of the round. Candidates that agree up to a layer share the hidden
states behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import Layout, Resolution
from attnsuite.backends.contract import Carry
from attnsuite.backends.kascade import Calibration, LayerRole, Schedule, greedy_by_loss

from .checkpoint import Checkpoint
from .config import ModelConfig
from .forward import Hidden, embed, layer_forward, logits_of, turns_of, whole_sequence
from .loss import token_nats
from .parameters import Params
from .planning import Options, freeze_options, resolve_attention
from .transformer import Transformer

_ROLES = ("dense", "anchor", "reuse")
_ROLE_BY_ROLE = Schedule((LayerRole("dense", 0), LayerRole("anchor", 1), LayerRole("reuse", 1)))  # a layer of each role


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
    of L layers needs L - ``anchors`` rounds; a round keeps the hidden states of at most L candidates. ``progress`` is
    told what begins. Raises ValueError for another number of layers, and for a number of anchors that the model cannot
    have.
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
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    names = ("embed_tokens",) if config.use_rope else ("embed_tokens", "embed_positions")
    options = freeze_options({**settings, "schedule": _ROLE_BY_ROLE})
    resolution = _resolution(config, tokens.shape[0], length, options)
    states: dict[tuple[LayerRole, ...], tuple[Hidden, Carry]] = {
        (): (embed(config, _outer(model, *names), tokens[:, :-1], positions), ())
    }
    for i in range(config.num_layers):
        layer = model.layer(i) if isinstance(model, Checkpoint) else model.arrays()["layers"][i]
        behind: dict[tuple[LayerRole, ...], tuple[Hidden, Carry]] = {}
        for roles in dict.fromkeys(schedule.layers[: i + 1] for schedule in schedules):
            role, (x, carry) = roles[-1], states[roles[:-1]]
            index = _ROLES.index(role.role)
            # A head map is applied here, so that layers with different maps share a compiled program.
            handed = carry.remapped(role.head_map) if role.role == "reuse" and role.head_map else carry
            x, made = _layer(config, layer, x, handed, index=index, resolution=resolution, options=options)
            behind[roles] = x, carry if role.role == "reuse" else made
        states = behind
    last = [name for name in ("norm", "norm_bias") if name != "norm_bias" or not config.use_rmsnorm]
    outer = _outer(model, *last, "embed_tokens" if config.tie_embeddings else "lm_head")
    # Prompt by prompt: the logits of all of them would not fit in memory for a large vocabulary.
    return [
        float(np.mean([_nats(config, outer, x[n : n + 1], tokens[n : n + 1, 1:]) for n in range(len(tokens))]))
        for x, _ in (states[schedule.layers] for schedule in schedules)
    ]


def _outer(model: Transformer | Checkpoint, *names: str) -> Params:
    return model.outer(*names) if isinstance(model, Checkpoint) else model.arrays()


def _resolution(config: ModelConfig, batch: int, length: int, options: Options) -> Resolution:
    found = resolve_attention(
        config,
        batch=batch,
        query_length=length,
        needs_grad=False,
        backend="kascade",
        on_unavailable="raise",
        options=dict(options),
    )
    return dict(found)["global"]


@functools.partial(jax.jit, static_argnames=("config", "index", "resolution", "options"))
def _layer(
    config: ModelConfig,
    layer: Params,
    x: Hidden,
    carry: Carry,
    *,
    index: int,
    resolution: Resolution,
    options: Options,
) -> tuple[Hidden, Carry]:
    turns = turns_of(config, *whole_sequence(x.shape[1]))
    return layer_forward(config, layer, x, turns["global"], resolution.plan(Layout(), dict(options)), index, carry)


@functools.partial(jax.jit, static_argnames=("config",))
def _nats(config: ModelConfig, outer: Params, x: Hidden, targets: jax.Array) -> jax.Array:
    return token_nats(logits_of(config, outer, x), targets)
