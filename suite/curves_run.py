"""Train the standard backend, its noise, its controls and every other backend, and write down their loss curves.

What the curves are held to is in ``loss_curves.py``. Every run starts from the same parameters and sees the same
batches; the curves are written as they end.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from attnsuite.backends import AttentionSpec, Layout, Plan, Takes, Target, Terms, plan, registry, support
from attnsuite.backends.contract import Carry
from attnsuite.backends.features import Mode
from attnsuite.models import PRESETS, ModelConfig, Transformer, load_text
from attnsuite.models.optimizer import make_optimizer
from attnsuite.models.parameters import Params
from attnsuite.models.planning import Resolutions, attention_spec, freeze_options, resolve_attention
from attnsuite.models.text import random_windows
from attnsuite.models.training import Batch, Step, compiled_step, training_step

from . import files
from .errors import InputError
from .loss_curves import CURVES, MANIFEST, Curve, Role, Setting
from .measure.environment import describe

NOISE_RUNS = 5
SEED_RUNS = 2
LEARNING_RATE = 2e-3
# The axis of a parameter that runs over the hidden coordinates; those that are not named have none.
_HIDDEN_AXIS = {
    **dict.fromkeys(("embed_tokens", "embed_positions", "lm_head"), 1),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1),
    **dict.fromkeys(("o_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm"), 0),
}
# Factors on the gradients of query, key and value: a slip of the hand, a forgotten gradient, a lost percent.
CONTROLS = {"dk 5% small": (1.0, 0.95, 1.0), "dk dropped": (1.0, 0.0, 1.0), "dv 1% large": (1.0, 1.0, 1.01)}

# Blocks so small that the sums of a short row are taken over several; the others' own are small enough.
BLOCKS: dict[str, dict[str, int]] = {
    "chunked": {"block_q": 64, "block_kv": 64, "block_backward": 64},
    "splash": dict.fromkeys(("block_q", "block_kv", "block_q_backward", "block_kv_backward"), 128),
}


@dataclasses.dataclass(frozen=True, slots=True)
class WrongGradients:
    """The standard backend with its gradients multiplied: a negative control."""

    factors: tuple[float, float, float]
    name: str = "wrong-gradients"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """What the standard backend does of the features that pass through here."""
        return Takes(modes=("native", "compile"))

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """The standard backend's plan, with the faults."""
        inner = plan(registry.get("standard"), spec, layout, target=target, mode=mode, options=options)

        def attend(query: Array, key: Array, value: Array, layer: int, carry: Carry, *terms: Terms) -> Any:
            of_query, of_key, of_value = self.factors
            query, key = _with_gradient(of_query, query), _with_gradient(of_key, key)
            return inner.attend(query, key, _with_gradient(of_value, value), layer, carry, *terms)

        return Plan(attend)


def run_curves(
    preset: str,
    backends: Sequence[str],
    native: Setting,
    interpreted: Setting,
    out: Path,
    *,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> None:
    """Train with every backend, in both settings where it can, and write the curves to ``out`` as they end.

    ``native`` is for what runs on this device itself, ``interpreted`` is short and for all. Raises InputError.
    """
    if preset not in PRESETS:
        raise InputError(f"--preset {preset!r} is not known; use one of {', '.join(PRESETS)}.")
    config = ModelConfig.from_preset(preset, dtype="float32", param_dtype="float32")
    for name in backends:
        if name not in registry.names():
            raise InputError(f"--backends: {name!r} is not registered; use {', '.join(registry.names())}.")
    data = load_text().train
    if config.vocab_size <= int(data.max()):
        raise InputError(f"--preset {preset} has a vocabulary of {config.vocab_size}; the text's bytes need 256.")
    files.check_directory(out)
    manifest = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "preset": preset,
        "seed": seed,
        "learning_rate": LEARNING_RATE,
        "optimizer": "adamw",
        "settings": [dataclasses.asdict(setting) for setting in (native, interpreted)],
        "environment": describe(),
    }
    files.write_text(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    files.write_text(out / CURVES, "")

    def keep(curve: Curve) -> None:
        with files.writing(out / CURVES, " What is trained is kept."), (out / CURVES).open("a") as file:
            file.write(curve.to_json() + "\n")
        end = f"{curve.values[0]:.3f} -> {curve.values[-1]:.6f} nats" if curve.losses else curve.reasons[0]
        say(f"{curve.setting}: {curve.name} ({curve.mode}): {end}")

    for setting in (native, interpreted):
        curves_of(
            config, setting, backends, ("native",) if setting is native else ("native", "interpret"), data, seed, keep
        )


def curves_of(
    config: ModelConfig,
    setting: Setting,
    backends: Sequence[str],
    modes: Sequence[Mode],
    data: np.ndarray,
    seed: int,
    keep: Callable[[Curve], None],
) -> None:
    """Train the standard backend, its noise runs and controls, and each backend in the first mode that takes it."""
    trainer = _Trainer(config, setting, data, seed)
    standard = resolve_attention(
        config, batch=setting.batch, query_length=setting.length, backend="standard", on_unavailable="raise"
    )
    step = trainer.compiled(standard)
    keep(trainer.run("standard", "standard", "native", step))
    for i in range(1, NOISE_RUNS + 1):
        keep(trainer.run("noise", f"standard, order {i}", "native", step, order=i))
    for i in range(1, SEED_RUNS + 1):
        keep(trainer.run("batches", f"standard, batches {i}", "native", step, batches=i))
    for name, factors in CONTROLS.items():
        wrong: Resolutions = tuple(
            (kind, dataclasses.replace(found, backend=WrongGradients(factors))) for kind, found in standard
        )
        keep(trainer.run("control", name, "native", trainer.compiled(wrong)))
    for name in backends:
        if name == "standard":
            continue
        found, reasons = _resolve(config, setting, name, modes)
        if found is None:
            keep(Curve(setting.name, "refused", name, ", ".join(modes), (), reasons))
        else:
            keep(trainer.run("backend", name, found[0][1].mode, trainer.compiled(found, BLOCKS.get(name))))


def reordered(params: Params, order: np.ndarray) -> Params:
    """The same model with its hidden coordinates stored in another order."""

    def move(path: Any, x: Array) -> Array:
        axis = _HIDDEN_AXIS.get(path[-1].key.removesuffix("_bias") if x.ndim == 1 else path[-1].key)
        return x if axis is None or axis >= x.ndim else jnp.take(x, jnp.asarray(order), axis=axis)

    return jax.tree_util.tree_map_with_path(move, params)


@dataclasses.dataclass(frozen=True, slots=True)
class _Trainer:
    config: ModelConfig
    setting: Setting
    data: np.ndarray
    seed: int

    def compiled(self, resolutions: Resolutions, options: Mapping[str, Any] | None = None) -> Step:
        return compiled_step(training_step(self.config, resolutions, self._update(), options=freeze_options(options)))

    def run(self, role: Role, name: str, mode: str, step: Step, *, order: int = 0, batches: int = 0) -> Curve:
        params = Transformer(self.config, rngs=nnx.Rngs(self.seed)).arrays()
        if order:
            params = reordered(params, np.random.default_rng(order).permutation(self.config.hidden_size))
        state = self._update().init(params)
        losses = []
        for number in range(self.setting.steps):
            rng = np.random.default_rng([self.seed, batches, number])
            rows = random_windows(self.data, self.setting.length, self.setting.batch, rng)
            params, state, loss = step(params, state, Batch(rows[None]), None)
            losses.append(float(loss) if np.isfinite(loss) else None)
        return Curve(self.setting.name, role, name, mode, tuple(losses))

    def _update(self) -> optax.GradientTransformation:
        return make_optimizer("adamw", steps=self.setting.steps, learning_rate=LEARNING_RATE, weight_decay=0.1)


def _resolve(
    config: ModelConfig, setting: Setting, name: str, modes: Sequence[Mode]
) -> tuple[Resolutions | None, tuple[str, ...]]:
    """What runs for ``name`` in the first of the modes that it takes, or every reason why none."""
    target, reasons = Target.here(), []
    specs = [
        attention_spec(config, kind, batch=setting.batch, query_length=setting.length)
        for kind in config.attention_types
    ]
    for mode in modes:
        answers = [support(registry.get(name), spec, target, mode) for spec in specs]
        if all(answers):
            return resolve_attention(
                config,
                batch=setting.batch,
                query_length=setting.length,
                backend=name,
                mode=mode,
                on_unavailable="raise",
            ), ()
        reasons += [reason for found in answers for reason in found.reasons]
    return None, tuple(dict.fromkeys(reasons))


def _with_gradient(factor: float, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``x``, whose gradient is multiplied."""
    stopped = jax.lax.stop_gradient(x)
    return stopped if factor == 0.0 else stopped + factor * (x - stopped)
