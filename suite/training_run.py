"""``attnsuite train``: train a model, or adapters on top of one, on text; saved at intervals, resumable bit for bit.

The directory of a run holds ``training.json`` (the request, the text and the environment), ``losses.jsonl`` (a line per
step), ``saved/`` (the state for resuming), and at the end the model for ``models.load`` or the adapters for
``models.lora.load``. The batches of a step depend on the seed and the step only.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.stages import Compiled

from attnsuite.backends import BackendUnavailableError, PolicyNotUsedWarning, Target
from attnsuite.backends.contract import Mode
from attnsuite.models import ModelConfig, TextFile, Transformer, load_text, lora
from attnsuite.models.optimizer import OptimizerName, make_optimizer
from attnsuite.models.packing import Packed, pack
from attnsuite.models.parameters import Params, initialise
from attnsuite.models.planning import Resolutions, resolve_attention
from attnsuite.models.rematerialise import Remat
from attnsuite.models.resume import missing, open_saved
from attnsuite.models.sharded_training import MeshSizes, Placement, place_on
from attnsuite.models.text import random_windows
from attnsuite.models.training import Batch, Trained, compiled_step, training_step
from attnsuite.models.weights import save

from . import files, typed
from .errors import InputError, as_input
from .layerwise_perplexity import options_of
from .measure.environment import describe
from .measure.memory import available_bytes, compiled_sizes, device_statistics
from .named_model import config_of, model_of
from .store import LOCK, locked
from .typed import Count, Real

SETTINGS, LOSSES, SAVED = "training.json", "losses.jsonl", "saved"
_BYTES = 256
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_ENVIRONMENT = ("versions", "source", "target", "device_kind", "device_count", "flags")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """The flags of a training: model, text and settings. Raises InputError for numbers out of range."""

    model: str = "tiny"
    text: TextFile | None = None
    steps: int = 200
    batch: int = 8
    length: int = 256
    accumulate: int = 1
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dtype: str = "float32"
    remat: Remat = "none"
    packed: bool = False
    lora: lora.LoraConfig | None = None
    backend: str = "auto"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    calibration: Path | None = None
    mode: Mode = "native"
    save_every: int = 50
    seed: int = 0
    mesh: MeshSizes | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "accumulate"):
            least = 2 if name == "length" else 1
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)} must be at least {least}.")
        for name in ("save_every", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 0.")
        if self.seed >= 2**32:  # JAX drops the higher bits
            raise InputError(f"--seed {self.seed} must be at most {2**32 - 1}.")
        if self.batch % self.accumulate:
            raise InputError(
                f"--batch {self.batch} is not a multiple of --accumulate {self.accumulate}: an update's rows are "
                "computed in that many equal parts."
            )
        if self.lora is not None and self.optimizer == "muon":
            raise InputError(
                "--optimizer muon is for the matrices of layers, and would train adapters by Adam at a fifth of "
                "--learning-rate; give --optimizer adamw with --lora-rank."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """A line of the losses file: nats before the update."""

    step: Count
    loss: Real


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Training:
    """Everything that the steps of a run depend on, opened and checked; without a mesh ``placement`` is None."""

    config: ModelConfig
    resolutions: Resolutions
    batch_of: Callable[[int], Batch]
    trained: Trained
    base: Params | None
    update: optax.GradientTransformation
    text_sha256: str
    placement: Placement | None = None


# Each array where it lies: trained, state, base; the compiled step; and the batches by step.
_Started = tuple[Trained, Any, Params | None, Compiled, Callable[[int], Batch]]


def open_training(request: TrainRequest) -> Training:
    """Load everything that a request names. Raises InputError with a sentence for input that cannot be used."""
    try:
        update = make_optimizer(
            request.optimizer,
            steps=request.steps,
            learning_rate=request.learning_rate,
            weight_decay=request.weight_decay,
        )
        dtypes = {"dtype": request.dtype} | ({"param_dtype": "float32"} if request.lora is None else {})
        config = config_of(request.model, **dtypes)
        config.check_length("length", request.length)
        if config.vocab_size != _BYTES:
            raise InputError(
                f"--model {request.model} has a vocabulary of {config.vocab_size}; training reads text as bytes, "
                f"which needs one of {_BYTES}."
            )
        _check_memory(request, config, update)
        model = model_of(request.model, seed=request.seed, **dtypes)
        data = load_text(request.text, held_out=0.0 if request.text else 0.1).train
        flags = {} if request.calibration is None else {"calibration": request.calibration}
        options, _ = options_of(request.backend, request.options, flags, model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyNotUsedWarning)  # execute says it
            resolutions = resolve_attention(
                config,
                batch=request.batch // request.accumulate,
                query_length=request.length,
                packed=request.packed,
                backend=request.backend,
                mode=request.mode,
                on_unavailable="raise",
                options=options,
            )
        placement = None if request.mesh is None else place_on(request.mesh)
        if placement is not None:
            resolutions = placement.resolutions(resolutions)
        base = None if request.lora is None else model.arrays()
        trained: Trained = model.arrays()
        if request.lora is not None:
            trained = lora.initialise(config, request.lora, jax.random.key(request.seed))
        batch_of = packed_batches(request, data) if request.packed else window_batches(request, data)
    except (ValueError, BackendUnavailableError) as error:
        raise error if isinstance(error, InputError) else InputError(str(error)) from error
    return Training(config, resolutions, batch_of, trained, base, update, _digest(data), placement)


def window_batches(request: TrainRequest, data: np.ndarray) -> Callable[[int], Batch]:
    """Batches of windows from anywhere in ``data``, by step."""
    random_windows(data, request.length, 1, np.random.default_rng(0))  # refuses a text that is too short

    def batch_of(step: int) -> Batch:
        rng = np.random.default_rng([request.seed, step])
        return Batch(_parts(random_windows(data, request.length, request.batch, rng), request.accumulate))

    return batch_of


def packed_batches(request: TrainRequest, data: np.ndarray) -> Callable[[int], Batch]:
    """Batches of rows packed with the paragraphs of ``data``, by step."""
    paragraphs = [np.frombuffer(part, np.uint8) for part in _BLANK_LINE.split(data.tobytes()) if part.strip()]
    rows: Packed = pack(paragraphs, request.length)

    def batch_of(step: int) -> Batch:
        chosen = np.random.default_rng([request.seed, step]).integers(0, len(rows.tokens), request.batch)
        return Batch(
            _parts(rows.tokens[chosen], request.accumulate), _parts(rows.segment_ids[chosen], request.accumulate)
        )

    return batch_of


def execute(request: TrainRequest, out: Path, *, resume: bool = False, say: Callable[[str], None] = print) -> None:
    """Train and write the results to ``out``. Raises InputError for input that cannot be used.

    With ``resume`` the run in ``out`` continues after its last saved step. The request, the text, versions, source and
    device must be the same.
    """
    if request.save_every and (reason := missing()):
        raise InputError(f"{reason}, or train without saving (--save-every 0).")
    if resume and not request.save_every:
        raise InputError("--resume: a run with --save-every 0 saves nothing to go on with; start it again.")
    opened = open_training(request)
    for sentence in dict.fromkeys(found.policy for _, found in opened.resolutions if found.policy):
        say(sentence)
    settings = _settings(request, opened)
    _check_out(out, settings, resume=resume)
    started = _started(request, opened)
    with locked(out), files.writing(out, " What is saved is kept: go on with --resume."):
        _check_out(out, settings, resume=resume)  # another run may have written there meanwhile
        files.write_text(out / SETTINGS, json.dumps(settings, indent=1) + "\n")
        _steps(request, opened, started, out, resume=resume, say=say)


def _steps(
    request: TrainRequest, opened: Training, started: _Started, out: Path, *, resume: bool, say: Callable[[str], None]
) -> None:
    trained, state, base, step, batch_of = started
    with nullcontext() if request.save_every == 0 else open_saved(out / SAVED) as saved:
        done = 0
        latest = saved.latest() if resume and saved is not None else None
        if resume and latest is None:
            say("nothing was saved yet: starting over")
        elif saved is not None and latest is not None:
            with as_input("--resume: "):
                (trained, state), done = saved.restore(latest, (trained, state)), latest
            say(f"resuming behind step {done}")
        losses = _keep(out / LOSSES, done)
        with open(out / LOSSES, "a", encoding="utf-8", opener=files.open_here) as file:
            for number in range(done + 1, request.steps + 1):
                trained, state, loss = step(trained, state, batch_of(number), base)
                losses.append(float(loss))
                if not np.isfinite(losses[-1]):
                    raise InputError(f"the loss of step {number} is {losses[-1]}; lower --learning-rate.")
                file.write(json.dumps({"step": number, "loss": losses[-1]}) + "\n")
                file.flush()
                last = number == request.steps
                if saved is not None and (last or number % request.save_every == 0):
                    saved.save(number, (trained, state))
                if last or number % max(1, request.steps // 20) == 0:
                    say(f"step {number}/{request.steps}: loss {losses[-1]:.4f} nats")
    _write(request, opened, trained, out)


def _started(request: TrainRequest, opened: Training) -> _Started:
    """What the steps begin with. Raises InputError for options that the backend refuses, and for a batch too large."""
    _check_batch(request)
    step = training_step(opened.config, opened.resolutions, opened.update, remat=request.remat)
    trained, place = opened.trained, opened.placement  # the step donates the arrays
    if place is None:
        state, base, jitted = opened.update.init(trained), opened.base, compiled_step(step)
    else:
        trained = place.put(trained)
        state = place.state(opened.update, trained)
        base = None if opened.base is None else place.put(opened.base)
        jitted = place.compiled_step(step, trained, state)

    def batch_of(number: int) -> Batch:
        batch = opened.batch_of(number)
        return batch if place is None else place.batch(batch)

    with as_input():
        program = jitted.lower(trained, state, batch_of(1), base).compile()
    _check_batch(request, program)
    return trained, state, base, program, batch_of


def _check_batch(request: TrainRequest, program: Compiled | None = None) -> None:
    """Raise InputError where a step needs more memory than is free beside what is updated, by the compiler's sizes.

    Without a program, before there is a batch: where its tokens alone do, int64 and int32 on the host.
    """
    is_cpu, stats = program is None or jax.default_backend() == "cpu", device_statistics()
    devices = request.mesh.count if request.mesh and is_cpu else 1  # on a CPU, they share one memory
    free = available_bytes() if is_cpu else stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    needed = 12 * request.batch * request.length
    if program is not None:
        needed = compiled_sizes(program, devices)["compiled_temp"] or 0
    if needed > free:
        raise InputError(
            f"--batch {request.batch} of --length {request.length} needs {needed / 2**30:.2f} GiB beside the model and "
            f"the optimizer, and {free / 2**30:.2f} GiB of memory are free; give --remat layer, more parts "
            "(--accumulate), or a smaller --batch or --length."
        )


def _check_memory(request: TrainRequest, config: ModelConfig, update: optax.GradientTransformation) -> None:
    """Raise InputError where what every batch needs is larger than the memory, before any of it is made."""
    key, mesh, target = jax.random.key(request.seed), request.mesh or MeshSizes(), Target.here()
    params = jax.eval_shape(functools.partial(initialise, config), key)
    trained = params
    if request.lora is not None:
        trained = jax.eval_shape(functools.partial(lora.initialise, config, request.lora), key)
    held = {
        "parameters": (params, trained) if request.lora else params,
        "gradients": trained,
        f"the state of {request.optimizer}": jax.eval_shape(update.init, trained),
    }
    shares = mesh.fsdp * mesh.heads  # on a CPU, the devices of a mesh share one memory
    sizes = {name: _gib(tree) / shares for name, tree in held.items()}
    memory, where = target.memory_bytes, "each device"
    if target.platform == "cpu":
        sizes = {name: size * mesh.count for name, size in sizes.items()}
        memory, where = available_bytes(), "this machine"
    if memory is not None and sum(sizes.values()) > memory / 2**30:
        parts = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items())
        raise InputError(
            f"--model {request.model} needs {sum(sizes.values()):.2f} GiB to train ({parts}) and more for a batch, and "
            f"{where} has {memory / 2**30:.2f} GiB of memory free; train a smaller model, or adapters (--lora-rank 8)."
        )


def _gib(tree: Any) -> float:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 2**30


def _parts(rows: np.ndarray, parts: int) -> np.ndarray:
    return rows.reshape(parts, len(rows) // parts, *rows.shape[1:])


def _settings(request: TrainRequest, opened: Training) -> dict[str, Any]:
    found = describe()
    settings = {
        "request": dataclasses.asdict(request),
        "config": dataclasses.asdict(opened.config),
        "text_sha256": opened.text_sha256,
        "base_sha256": None if opened.base is None else _digest(opened.base),
        "calibration_sha256": None if request.calibration is None else _digest(_files_of(request.calibration)),
        "backend": {kind: f"{found.backend.name} ({found.mode})" for kind, found in opened.resolutions},
        "environment": {name: value for name, value in found.items() if name in _ENVIRONMENT},
    }
    return json.loads(json.dumps(settings, default=str))  # as it will be read back


def _files_of(calibration: Path) -> list[bytes]:
    """What ``Calibration.save`` wrote; the path may be without a suffix."""
    return [calibration.with_suffix(suffix).read_bytes() for suffix in (".json", ".safetensors")]


def _digest(arrays: Any) -> str:
    """Of bytes or arrays, of one tree."""
    found = hashlib.sha256()
    for x in jax.tree.leaves(arrays):
        found.update(x if isinstance(x, bytes) else np.asarray(x).tobytes())
    return found.hexdigest()


def _check_out(out: Path, settings: dict[str, Any], *, resume: bool) -> None:
    path = out / SETTINGS
    if resume:
        try:
            before = typed.convert(typed.read_json(path), dict[str, Any])
        except ValueError as error:
            raise InputError(f"--resume: {str(path)!r} is no record of a training run; start one without.") from error
        for key, now in settings.items():
            if before.get(key) != now:
                raise InputError(_difference(key, before.get(key), now))
        return
    files.check_directory(out)
    if any(path.name != LOCK for path in out.iterdir()):
        raise InputError(f"--out {out} is not empty; give a new directory, or --resume to go on with its run.")


def _difference(key: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in now:
            if before.get(name) != now[name]:
                was, found = _shown(before.get(name)), _shown(now[name])
                return f"--resume: the run had {name}={was}, now it is {found}; they must be equal."
    return f"--resume: {key} differs from that of the run; resume with what it was started with."


def _shown(value: Any) -> str:
    """A setting as its flag has it: of a table, such as a mesh, each name with its value."""
    if not isinstance(value, dict):
        return typed.quoted(value)
    return ",".join(f"{name}={typed.quoted(each)}" for name, each in value.items())


def _keep(path: Path, done: int) -> list[float]:
    """Cut the losses file after ``done`` lines, since later steps run again; returns the losses that are kept."""
    lines = path.read_bytes().splitlines()[:done] if path.is_file() else []
    with as_input(f"--resume: {path} holds a line that is no loss (", "); start the run again."):
        losses = [typed.convert(typed.parse_json(line), Loss).loss for line in lines]
    if len(losses) < done:
        raise InputError(f"--resume: {path} has {len(losses)} losses, but step {done} was saved; start the run again.")
    files.write_text(path, "".join(f"{line.decode()}\n" for line in lines))
    return losses


def _write(request: TrainRequest, opened: Training, trained: Trained, out: Path) -> None:
    if request.lora is not None:
        lora.save(trained, request.lora, out, base=request.model)
        return
    save(Transformer(opened.config, trained), out)
