"""The data that all rows of a case share: the model, its tokens, its logits under dense attention, its calibration.

Computed once per problem for all phases, and passed to the cells as files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from attnsuite.backends import AttentionSpec, Resolution, Target, registry
from attnsuite.backends.kascade import GREEDY_RULES, Schedule, greedy
from attnsuite.models import ModelConfig, TextFile, Transformer, load_text, open_checkpoint, retrieval
from attnsuite.models.forward_pass import forward
from attnsuite.models.kascade.calibration import calibrate, check_plain_logits, load
from attnsuite.models.optimizer import make_optimizer
from attnsuite.models.planning import Resolutions, attention_spec
from attnsuite.models.training import Batch, compiled_step, training_step

from ...errors import InputError, as_input
from ...measure.tokens import reader_of
from ...named_model import checkpoint_of
from ..model_program import model_config, open_model
from ..model_quality import read_text, retrieval_model
from .controls import Retained, Watched
from .methods import settings_of
from .schedule_flags import ScheduleFlags
from .selection_case import SelectionCase, anchor_layers

PROMPTS = 6  # of a calibration
AT_ONCE = 4  # sequences of a batch
# Every row trains from the same weights, on the same batches of training text, by the same updates. The dense model
# that the rows are compared with is trained so too. Sparse attention has the gradient of the pairs that it kept.
ROWS_PER_UPDATE, LEARNING_RATE = 4, 1e-3


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """The tokens of a case; for a retrieval case also the queries' positions, the right answers, and the distances."""

    tokens: Int[np.ndarray, "sequences length"]
    query_positions: Int[np.ndarray, "sequences types"] | None = None
    answers: Int[np.ndarray, "sequences types"] | None = None
    distances: Int[np.ndarray, "sequences types"] | None = None
    bytes_per_token: float = 1.0


def case_model(case: SelectionCase) -> Transformer:
    """The model: the case's own for text, the constructed checkpoint for retrieval. Raises InputError."""
    return open_model(case) if case.kind == "kascade_text" else retrieval_model(case)


def checked_config(case: SelectionCase, text: TextFile | None) -> ModelConfig:
    """The configuration of the case's model.

    Raises InputError for an unknown model, a text too short, a calibration of another model, or anchors out of range.
    """
    if case.kind == "kascade_text":
        config = model_config(case)
        with as_input(f"case {case.name}: "):
            check_plain_logits(config)
        read_text(case, config, text)
        if case.calibration:
            with as_input("--calibration "), checkpoint_of(case.model) as directory:
                load(case.calibration, open_checkpoint(directory))
    else:
        config = case_model(case).config
    beyond = [layer for layer in anchor_layers(case) if layer > config.num_layers - (case.schedule == "manual")]
    if beyond or (case.schedule == "manual" and 0 not in anchor_layers(case)):
        raise InputError(
            f"case {case.name}: anchors = {case.anchors!r} does not fit a model of {config.num_layers} layers; "
            "a list has to begin with layer 0."
        )
    return config


def problem(case: SelectionCase, text: TextFile | None) -> Questions:
    """The tokens and questions for the model; the same for every row."""
    if case.kind == "kascade_text":
        held_out = read_text(case, model_config(case), text)
        return Questions(held_out.rows, bytes_per_token=held_out.bytes_per_token)
    batch = retrieval.sample(np.random.default_rng([case.seed, 0]), case.sequence, batch=case.sequences, gap=_gap(case))
    at, needles = np.asarray(batch.query_positions), np.asarray(batch.needle_positions)
    return Questions(np.asarray(batch.tokens), at, np.asarray(batch.answers), at - needles)


def write_dense(case: SelectionCase, path: Path, text: TextFile | None) -> None:
    """Write dense logits to ``path`` (.npz). Without a calibration of the case's own, write one beside it."""
    model, questions = case_model(case), problem(case, text)
    measured = fine_tuned(case, model, "dense") if case.training_steps else model
    logits = [np.asarray(measured(part, backend="standard", needs_grad=False)) for part in batches(questions.tokens)]
    np.savez(path, allow_pickle=False, logits=np.concatenate(logits)[: len(questions.tokens)])
    if case.calibration:
        return
    options = {name: getattr(settings_of(case), name) for name in ("top_k", "min_keys", "granularity", "tile_size")}
    options["query_tile"] = case.tile_size
    calibrate(model, _calibration_prompts(case, model.config), options, text={"from": case.kind}).save(
        _calibration_path(path)
    )


def read_dense(path: Path) -> Float[np.ndarray, "sequences length vocab"]:
    """The logits that :func:`write_dense` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["logits"]


def schedules(case: SelectionCase, model: Transformer, path: Path) -> dict[str, Schedule]:
    """The case's own schedule, and the greedy one, from the case's calibration or the one beside ``path``."""
    calibration = load(case.calibration or _calibration_path(path), model)
    limits: dict[str, Any] = {"threshold": case.threshold, "max_reuse_dist": case.max_reuse_dist}
    flags = ScheduleFlags(schedule=case.schedule, anchors=",".join(map(str, anchor_layers(case))), **limits)
    rule = case.schedule if case.schedule in GREEDY_RULES else "greedy"
    return {"case": flags.made(calibration), "greedy": greedy(calibration, **limits, rule=rule)}


def _calibration_path(path: Path) -> Path:
    return path.with_name(path.stem + "-calibration.safetensors")


def _calibration_prompts(case: SelectionCase, config: ModelConfig) -> list[Any]:
    """Training text, or prompts of another seed: never the tokens that are measured."""
    rng = np.random.default_rng([case.seed, 1])
    if case.kind == "kascade_text":
        return list(reader_of(case.model, config).drawn(load_text().train, case.sequence, PROMPTS, rng))
    return list(retrieval.sample(rng, case.sequence, batch=PROMPTS, gap=_gap(case)).tokens)


def _gap(case: SelectionCase) -> int:
    """Least distance of a needle. It is larger in the gate; elsewhere recall is reported by distance."""
    return case.sequence // (2 if case.kind == "kascade_gate" else 8)


def fine_tuned(case: SelectionCase, model: Transformer, method: str, schedule: Schedule | None = None) -> Transformer:
    """The model after the case's ``training_steps`` with the attention of the row ``method``; float32."""
    config = dataclasses.replace(model.config, dtype="float32", param_dtype="float32")
    spec = attention_spec(config, "global", batch=ROWS_PER_UPDATE, query_length=case.sequence)
    update = make_optimizer("adamw", steps=case.training_steps, learning_rate=LEARNING_RATE, weight_decay=0.0)
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), model.arrays())

    def train(trained: Any, state: Any, batch: Batch, base: Any) -> Any:
        watched = None if schedule is None else row(case, config, method, schedule, batch.tokens[0], retained=None)
        return training_step(config, resolutions(method, spec, watched), update)(trained, state, batch, base)

    state, step = update.init(params), compiled_step(train)
    reader, text = reader_of(case.model, config), load_text().train
    for number in range(case.training_steps):
        rng = np.random.default_rng([case.seed, 2, number])
        rows = reader.drawn(text, case.sequence, ROWS_PER_UPDATE, rng)
        params, state, _ = step(params, state, Batch(rows[None]), None)
    return Transformer(config, params)


def row(
    case: SelectionCase,
    config: ModelConfig,
    method: str,
    schedule: Schedule,
    tokens: Any,
    retained: list[Retained] | None,
) -> Watched:
    """The row ``method`` as the backend of the case's model on ``tokens [batch, length]``."""
    others = _other_model(case, config, tokens) if method == "other_model" else ()
    return Watched(method, settings_of(case), schedule, retained, others)


def resolutions(method: str, spec: AttentionSpec, watched: Watched | None) -> Resolutions:
    """The attention of all layers: the row's, or ``standard`` for the row ``dense``."""
    backend: Any = registry.get("standard") if watched is None or method == "dense" else watched
    return (("global", Resolution(method, backend, "native", spec, Target.here())),)


def _other_model(case: SelectionCase, config: ModelConfig, tokens: Any) -> list[tuple[Any, Any]]:
    """Queries and keys of each layer of a model of the same sizes with random weights, on the same tokens."""
    spec = attention_spec(config, "global", batch=len(tokens), query_length=tokens.shape[1], needs_grad=False)
    other, streams = Transformer(config, rngs=nnx.Rngs(case.seed + 1)), []
    forward(config, other.arrays(), tokens, resolutions=resolutions("dense", spec, None),
            observe=lambda _, query, key, *__: streams.append((query, key)))  # fmt: skip
    return streams


def batches(tokens: np.ndarray) -> list[np.ndarray]:
    """The tokens in batches of one shape; rows beyond the last sequence repeat the first ones."""
    short = -len(tokens) % AT_ONCE
    filled = np.concatenate([tokens, tokens[:short]]) if short else tokens
    return np.split(filled, len(filled) // AT_ONCE)
