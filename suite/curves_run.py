"""Train the standard backend, its noise runs, its controls and every other backend, and write their loss curves.

``loss_curves.py`` says how the curves are judged. Every run starts from the same parameters and sees the same batches.
Each curve is written as soon as its run ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from attnsuite.backends import AttentionSpec, Layout, Plan, Takes, Target, Terms, plan, registry, support
from attnsuite.backends.contract import Carry
from attnsuite.backends.features import Mode
from attnsuite.models import ModelConfig, Transformer, load_text
from attnsuite.models.optimizer import make_optimizer
from attnsuite.models.parameters import Params
from attnsuite.models.planning import Resolutions, attention_spec, freeze_options, resolve_attention
from attnsuite.models.sharded_training import MeshSizes, Placement, place_on
from attnsuite.models.text import random_windows
from attnsuite.models.training import Batch, Step, compiled_step, training_step

from . import files, record
from .errors import InputError
from .grid.executors import now
from .grid.keeping import GridWatcher, identity, keep
from .loss_curves import TrainingCase
from .measure.environment import describe
from .names import known_backend
from .record import LossCurve, Record

SUITE = "curves"
NOISE_RUNS = 5
SEED_RUNS = 2
# The axis of a parameter that runs over the hidden coordinates; those that are not named have none.
_HIDDEN_AXIS = {
    **dict.fromkeys(("embed_tokens", "embed_positions", "lm_head"), 1),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1),
    **dict.fromkeys(("o_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm"), 0),
}
# Factors on the gradients of query, key and value: an error of 5%, a missing gradient, an error of 1%.
CONTROLS = {"dk 5% small": (1.0, 0.95, 1.0), "dk dropped": (1.0, 0.0, 1.0), "dv 1% large": (1.0, 1.0, 1.01)}

# Blocks so small that a short row spans several of them; the defaults of the other backends are small enough.
BLOCKS: dict[str, dict[str, int]] = {
    "chunked": {"block_q": 64, "block_kv": 64, "block_backward": 64},
    "splash": dict.fromkeys(("block_q", "block_kv", "block_q_backward", "block_kv_backward"), 128),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurvesRequest:
    """What to train: a preset, the backends beside standard, and the number of updates in each setting.

    With a mesh standard and the backends that run natively train on it too.
    """

    preset: str
    backends: tuple[str, ...]
    steps: int
    interpreted_steps: int
    mesh: MeshSizes | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingRun:
    """One curve: the resolutions of its attention (None where refused, with the ``reasons``), and how the run differs.

    ``order`` numbers an order of the hidden coordinates, ``batches`` a set of batches; 0 is the usual one of each.
    ``placement`` is that of a run on several devices.
    """

    role: Literal["standard", "noise", "batches", "backend", "control"]
    name: str
    resolutions: Resolutions
    reasons: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    order: int = 0
    batches: int = 0
    placement: Placement | None = None

    @property
    def mode(self) -> record.Mode | None:
        """How its attention runs; None where it does not."""
        return self.resolutions[0][1].mode if self.resolutions else None


@dataclasses.dataclass(frozen=True, slots=True)
class WrongGradients:
    """The standard backend with its gradients multiplied: a negative control."""

    factors: tuple[float, float, float]
    name: str = "wrong-gradients"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """The features that the standard backend takes, as far as they pass through here."""
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
        """The standard backend's plan, with multiplied gradients."""
        inner = plan(registry.get("standard"), spec, layout, target=target, mode=mode, options=options)

        def attend(query: Array, key: Array, value: Array, layer: int, carry: Carry, *terms: Terms) -> Any:
            of_query, of_key, of_value = self.factors
            query, key = _with_gradient(of_query, query), _with_gradient(of_key, key)
            return inner.attend(query, key, _with_gradient(of_value, value), layer, carry, *terms)

        return Plan(attend)


def run_curves(request: CurvesRequest, out: Path, watcher: GridWatcher, *, resume: bool = False) -> tuple[Record, ...]:
    """Train with every backend, in both settings where possible; the records, written to ``out``. Raises InputError.

    The native setting is for backends that run on this device. The interpreted setting is short and includes all
    backends.
    """
    preset = request.preset
    try:
        config = ModelConfig.from_preset(preset, dtype="float32", param_dtype="float32")
    except ValueError as error:
        raise InputError(f"--{error}") from error  # the sentence begins with "preset"
    for name in request.backends:
        known_backend(name)
    data = load_text().train
    if config.vocab_size <= int(data.max()):
        raise InputError(f"--preset {preset} has a vocabulary of {config.vocab_size}; the text's bytes need 256.")
    files.check_directory(out)
    native = TrainingCase(preset=preset, setting="native", steps=request.steps, batch=2, length=256)
    interpreted = TrainingCase(
        preset=preset, setting="interpreted", steps=request.interpreted_steps, batch=1, length=256
    )
    modes: dict[TrainingCase, tuple[Mode, ...]] = {native: ("native",), interpreted: ("native", "interpret")}
    runs = {case: runs_of(config, case, request.backends, modes[case]) for case in modes}
    if request.mesh is not None:
        runs[native] += runs_on_mesh(config, native, request.backends, request.mesh)
    found = describe()
    target = found.get("target", "")

    def records(finished: frozenset[str]) -> Iterator[Record]:
        for case, members in runs.items():
            missing = [run for run in members if key_of(case, run, target) not in finished]
            for curve in curves_of(config, case, missing, data, target, watcher):
                yield dataclasses.replace(curve, environment=found)

    keys = [key_of(case, run, target) for case, members in runs.items() for run in members]
    asked = dataclasses.asdict(request) | {"backends": ",".join(request.backends)}
    asked |= {"mesh": None if request.mesh is None else str(request.mesh)}
    return keep(out, identity("curves", asked, target, found), keys, records, watcher, resume=resume)


def runs_of(
    config: ModelConfig, case: TrainingCase, backends: Sequence[str], modes: Sequence[Mode]
) -> tuple[TrainingRun, ...]:
    """The standard backend, its noise and its controls, and each backend in the first of ``modes`` that takes it."""
    standard = resolve_attention(
        config, batch=case.batch, query_length=case.length, backend="standard", on_unavailable="raise"
    )
    runs = [TrainingRun("standard", "standard", standard)]
    runs += [TrainingRun("noise", f"standard, order {i}", standard, order=i) for i in range(1, NOISE_RUNS + 1)]
    runs += [TrainingRun("batches", f"standard, batches {i}", standard, batches=i) for i in range(1, SEED_RUNS + 1)]
    for name, factors in CONTROLS.items():
        wrong: Resolutions = tuple(
            (kind, dataclasses.replace(found, backend=WrongGradients(factors))) for kind, found in standard
        )
        runs.append(TrainingRun("control", name, wrong))
    for name in backends:
        if name != "standard":
            found, reasons = _resolve(config, case, name, modes)
            runs.append(TrainingRun("backend", name, found or (), reasons, options=freeze_options(BLOCKS.get(name))))
    return tuple(runs)


def runs_on_mesh(
    config: ModelConfig, case: TrainingCase, backends: Sequence[str], sizes: MeshSizes
) -> tuple[TrainingRun, ...]:
    """The standard backend and the others, natively on a mesh of devices. Raises InputError where it cannot be made."""
    try:
        placement = place_on(sizes)
    except ValueError as error:
        raise InputError(f"--mesh {error}") from error
    runs = []
    for name in dict.fromkeys(("standard", *backends)):
        found, reasons = _resolve(config, case, name, ("native",))
        try:
            found = placement.resolutions(found or ())
        except ValueError as error:
            found, reasons = (), (str(error),)
        options = freeze_options(BLOCKS.get(name))
        runs.append(TrainingRun("backend", f"{name}@{sizes}", found, reasons, options, placement=placement))
    return tuple(runs)


def key_of(case: TrainingCase, run: TrainingRun, target: str) -> str:
    """The key of a run's record."""
    return f"{case.name}/{run.name}/{target}/{run.mode or 'native'}"


def curves_of(
    config: ModelConfig,
    case: TrainingCase,
    runs: Sequence[TrainingRun],
    data: np.ndarray,
    target: str,
    watcher: GridWatcher | None = None,
) -> Iterator[Record]:
    """The record of each run, trained one after the other in this process."""
    trainer = _Trainer(config, case, data)
    for run in runs:
        if watcher is not None:
            watcher.doing(case.name, run.name, f"{case.steps} steps")
        started, begin = now(), time.perf_counter()
        outcome: dict[str, Any]
        if not run.resolutions:
            outcome = {"status": "unsupported", "error": "refused before anything was trained."}
        else:
            try:
                outcome = {"status": "ok", "facts": LossCurve(role=run.role, losses=trainer.losses(run))}
            except Exception as error:  # noqa: BLE001 (whatever a backend raises becomes its record)
                outcome = {"status": "crashed", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        yield Record(
            key=key_of(case, run, target),
            suite=SUITE,
            case=case.name,
            kind=case.kind,
            problem=dataclasses.asdict(case),
            requested=run.name,
            resolved="+".join(dict.fromkeys(found.backend.name for _, found in run.resolutions)) or None,
            mode=run.mode,
            exact=all(found.backend.exact for _, found in run.resolutions) if run.resolutions else None,
            target=target,
            reasons=run.reasons,
            started=started,
            wall_seconds=time.perf_counter() - begin,
            **outcome,
        )


def reordered(params: Params, order: np.ndarray) -> Params:
    """The same model, with its hidden coordinates stored in another order."""

    def move(path: Any, x: Array) -> Array:
        axis = _HIDDEN_AXIS.get(path[-1].key.removesuffix("_bias") if x.ndim == 1 else path[-1].key)
        return x if axis is None or axis >= x.ndim else jnp.take(x, jnp.asarray(order), axis=axis)

    return jax.tree_util.tree_map_with_path(move, params)


@dataclasses.dataclass(frozen=True, slots=True)
class _Trainer:
    config: ModelConfig
    case: TrainingCase
    data: np.ndarray
    steps: dict[Any, Step] = dataclasses.field(default_factory=dict)  # compiled once for all runs that share them

    def losses(self, run: TrainingRun) -> tuple[float | None, ...]:
        params = Transformer(self.config, rngs=nnx.Rngs(self.case.seed)).arrays()
        if run.order:
            params = reordered(params, np.random.default_rng(run.order).permutation(self.config.hidden_size))
        if run.placement is None:
            state = self._update().init(params)
        else:
            params = run.placement.put(params)
            state = run.placement.state(self._update(), params)
        step = self._step(run, params, state)
        losses = []
        for number in range(self.case.steps):
            rng = np.random.default_rng([self.case.seed, run.batches, number])
            rows = random_windows(self.data, self.case.length, self.case.batch, rng)
            batch = Batch(rows[None]) if run.placement is None else run.placement.batch(Batch(rows[None]))
            params, state, loss = step(params, state, batch, None)
            losses.append(float(loss) if np.isfinite(loss) else None)
        return tuple(losses)

    def _step(self, run: TrainingRun, params: Params, state: Any) -> Step:
        shared = run.resolutions, run.options
        if shared not in self.steps:
            step = training_step(self.config, run.resolutions, self._update(), options=run.options)
            place = run.placement
            self.steps[shared] = compiled_step(step) if place is None else place.compiled_step(step, params, state)
        return self.steps[shared]

    def _update(self) -> optax.GradientTransformation:
        case = self.case
        return make_optimizer(case.optimizer, steps=case.steps, learning_rate=case.learning_rate, weight_decay=0.1)


def _resolve(
    config: ModelConfig, case: TrainingCase, name: str, modes: Sequence[Mode]
) -> tuple[Resolutions | None, tuple[str, ...]]:
    """The resolutions of ``name`` in the first of ``modes`` that it takes; None and every reason if it takes none."""
    target, reasons = Target.here(), []
    specs = [
        attention_spec(config, kind, batch=case.batch, query_length=case.length) for kind in config.attention_types
    ]
    for mode in modes:
        answers = [support(registry.get(name), spec, target, mode) for spec in specs]
        if all(answers):
            return resolve_attention(
                config,
                batch=case.batch,
                query_length=case.length,
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
