"""One training step, shared by everything that trains here: loss, gradients of all parts of a batch, an update.

A batch comes in ``parts``. Their gradients are added up in float32 before the update, each weighted by its number of
counted targets, so the update is that of the whole batch at once. Parameters are updated in the dtype in which they are
kept, and computed with in ``config.dtype``: float32 parameters under bfloat16 are mixed precision with master weights.
With adapters only the adapters are trained; the base model gets no gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.stages import Wrapped
from jaxtyping import Array, Float, Int

from . import lora
from .config import ModelConfig
from .forward_pass import forward
from .loss import counted_targets, next_token_loss
from .parameters import Params
from .planning import Resolutions
from .rematerialise import Remat

Trained = Any  # the parameters of a model, or the adapters on top of them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one update, int32, in parts; with ``segment_ids`` where documents are packed."""

    tokens: Int[Array | np.ndarray, "parts batch length"]
    segment_ids: Int[Array | np.ndarray, "parts batch length"] | None = None


Step = Callable[[Trained, Any, Batch, Params | None], tuple[Trained, Any, Float[Array, ""]]]


def training_step(
    config: ModelConfig,
    resolutions: Resolutions,
    update: optax.GradientTransformation,
    *,
    remat: Remat = "none",
) -> Step:
    """A function of ``(trained, state, batch, base)`` to the updated two and the loss before the update.

    ``trained`` are all parameters where ``base`` is None, and else the adapters on ``base``, which stays.
    The loss is the mean over all counted targets of the batch, nats, float32.
    """
    gradient = loss_and_gradient(config, resolutions, remat=remat)

    def step(trained: Trained, state: Any, batch: Batch, base: Params | None = None) -> tuple[Trained, Any, Array]:
        loss, gradients = gradient(trained, batch, base)
        updates, state = update.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state, loss

    return step


def loss_and_gradient(
    config: ModelConfig, resolutions: Resolutions, *, remat: Remat = "none"
) -> Callable[[Trained, Batch, Params | None], tuple[Float[Array, ""], Trained]]:
    """A function of ``(trained, batch, base)`` to the loss and its gradient; see :func:`training_step`."""

    def part_loss(
        trained: Trained, tokens: Array, segment_ids: Array | None, total: Array, base: Params | None
    ) -> Array:
        params = trained if base is None else lora.attach(base, trained)
        logits = forward(config, params, tokens, segment_ids, resolutions=resolutions, remat=remat)
        return next_token_loss(logits, tokens, segment_ids, total=total)

    part_gradient = jax.value_and_grad(part_loss)

    def gradient(trained: Trained, batch: Batch, base: Params | None = None) -> tuple[Array, Trained]:
        batch = jax.tree.map(jnp.asarray, batch)
        total = counted_targets(batch.tokens, batch.segment_ids).sum()  # pyright: ignore[reportArgumentType]

        def of_part(part: Batch) -> tuple[Array, Trained]:
            return part_gradient(trained, part.tokens, part.segment_ids, total, base)

        if batch.tokens.shape[0] == 1:
            return of_part(jax.tree.map(lambda x: x[0], batch))

        def add(sums: tuple[Array, Trained], part: Batch) -> tuple[tuple[Array, Trained], None]:
            return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums, of_part(part)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
        (loss, sums), _ = jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), batch)
        return loss, jax.tree.map(lambda total, x: total.astype(x.dtype), sums, trained)

    return gradient


def compiled_step(step: Step) -> Wrapped:
    """The step under ``jax.jit``; what it updates is donated, the base model is not."""
    return jax.jit(step, donate_argnums=(0, 1))
