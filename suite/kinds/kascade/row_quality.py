"""What one row of a case loses: its figures beside the dense model's, on the same tokens, sequence by sequence.

Prefill and decoding are measured apart. Decoding reads given tokens (teacher forcing) behind a cache that dense
attention filled, so that only the decode steps are sparse. The exception is the row ``kascade_both_phases``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import AttentionSpec, Target
from attnsuite.backends.kascade import LayerRole, Schedule, kept_fraction
from attnsuite.models import ModelConfig, TextFile, Transformer, retrieval
from attnsuite.models.cache import default_dtype
from attnsuite.models.forward_pass import forward, forward_cached
from attnsuite.models.loss import token_nats
from attnsuite.models.planning import Resolutions, attention_spec

from ...cell import Outcome
from ...errors import CellFailure
from ...measure.tokens import bits
from . import controls, dense
from .controls import Retained
from .methods import settings_of
from .selection_case import SelectionCase

DECODED = 64  # tokens at the end of a text that are decoded


def measure(case: SelectionCase, method: str, reference: Path, text: TextFile | None) -> Outcome:
    """The row ``method`` of ``case``. Raises CellFailure where its logits are not finite."""
    model, questions = dense.case_model(case), dense.problem(case, text)
    theirs = dense.read_dense(reference)
    first = case.sequence - _decoded(case) if case.phase == "decode" else 0
    found = dense.schedules(case, model, reference)
    schedule = found["greedy" if method == "kascade_greedy" else "case"]
    if case.training_steps:
        model = dense.fine_tuned(case, model, method, schedule)
    run = _program(case, model, method, schedule)
    parts = [run(tokens) for tokens in dense.batches(questions.tokens)]
    ours = np.concatenate([np.asarray(logits) for logits, _ in parts])[: len(questions.tokens)]
    if not np.isfinite(ours).all():
        raise CellFailure("wrong", f"{method} gives logits that are not finite.")
    figures, series = _losses(case, questions, ours, theirs[:, first:], first)
    figures |= _retained_figures([retained for _, retained in parts])
    if method.startswith("kascade"):
        figures["anchors"] = float(len(schedule.anchors))
        figures["reuse_layers"] = sum(layer.role == "reuse" for layer in schedule.layers) / len(schedule.layers)
        figures["flops"] = _flops(case, model, method, schedule)
    notes = _schedule_note(method, schedule)
    if controls.runs_kascade(method):
        notes += controls.row_settings(method, settings_of(case), _spec(case, model.config), Target.here())[1]
    return Outcome(quality=figures, series=series, notes=notes)


def refusals(case: SelectionCase, method: str, config: ModelConfig, target: Target) -> tuple[str, ...]:
    """Why the row does not run on ``target``; ``config`` is that of the case's model."""
    return controls.refusals(method, settings_of(case), _spec(case, config), target)


def _spec(case: SelectionCase, config: ModelConfig) -> AttentionSpec:
    """The attention problem of the layers, in the phase that the case is about."""
    lengths: dict[str, Any] = {"query_length": case.sequence}
    if case.phase == "decode":
        lengths = {"query_length": 1, "key_value_length": case.sequence, "dtype": default_dtype(config)}
    return attention_spec(config, "global", batch=dense.AT_ONCE, needs_grad=False, **lengths)


def _decoded(case: SelectionCase) -> int:
    return DECODED if case.kind == "kascade_text" else retrieval.TAIL


def _flops(case: SelectionCase, model: Transformer, method: str, schedule: Schedule) -> float:
    """Share of the causal FLOPs of all layers' attention, selection included, by formula."""
    others: dict[str, Any] = {"schedule": schedule}
    if method == "kascade_token":
        others["granularity"] = "token"
    settings, length = settings_of(case, **others), case.sequence
    layers = model.config.num_layers
    if case.phase == "prefill":
        spec = attention_spec(model.config, "global", batch=1, query_length=length, needs_grad=False)
        return kept_fraction(spec, settings, layers).flops
    spec = attention_spec(model.config, "global", batch=1, query_length=1, key_value_length=length, needs_grad=False)
    steps = range(length - _decoded(case), length)
    shares = np.array([kept_fraction(spec, settings, layers, position=at).flops for at in steps])
    return float(np.average(shares, weights=np.array(steps) + 1))


def _schedule_note(method: str, schedule: Schedule) -> tuple[str, ...]:
    if method not in ("kascade", "kascade_greedy"):
        return ()
    roles = ", ".join(f"{i} {_role(role)}" for i, role in enumerate(schedule.layers))
    return (f"{method}: schedule {schedule.method}: {roles}.",)


def _role(role: LayerRole) -> str:
    if role.role != "reuse":
        return role.role
    return f"reuse of {role.anchor} (heads {' '.join(map(str, role.head_map))})"


def _program(
    case: SelectionCase, model: Transformer, method: str, schedule: Schedule
) -> Callable[[Any], tuple[jax.Array, list[Retained]]]:
    """Maps tokens to the logits of the phase, and to what each layer retained (in decoding: stacked over the steps)."""
    config, params = model.config, model.arrays()
    spec = _spec(case, config)

    def resolutions(retained: list[Retained], tokens: jax.Array) -> Resolutions:
        return dense.resolutions(method, spec, dense.row(case, config, method, schedule, tokens, retained))

    @jax.jit
    def prefill(params: Any, tokens: jax.Array) -> tuple[jax.Array, list[Retained]]:
        retained: list[Retained] = []
        return forward(config, params, tokens, resolutions=resolutions(retained, tokens)), retained

    decoded = _decoded(case)
    start = case.sequence - decoded

    @jax.jit
    def decode(params: Any, tokens: jax.Array, held: Any) -> tuple[jax.Array, list[Retained]]:
        def step(state: Any, token: jax.Array) -> tuple[Any, Any]:
            held, at = state
            retained: list[Retained] = []
            found = resolutions(retained, token[:, None])
            logits, held = forward_cached(
                config, params, token[:, None], held, at, at + 1, resolutions=found, last_only=True
            )
            return (held, at + 1), (logits, retained)

        first = jnp.full((dense.AT_ONCE,), start, jnp.int32)
        _, (logits, retained) = jax.lax.scan(step, (held, first), tokens.T)
        return logits.swapaxes(0, 1), retained

    if case.phase == "prefill":
        return lambda tokens: prefill(params, tokens)

    def run(tokens: jax.Array) -> tuple[jax.Array, list[Retained]]:
        cache = model.new_cache(dense.AT_ONCE, case.sequence)
        call: dict[str, Any] = {"backend": "standard"}
        if method == "kascade_both_phases":
            chosen = settings_of(case, schedule=schedule)
            call = {"backend": "kascade", "backend_options": chosen.as_options(), "on_unavailable": "raise"}
        _, cache = model.prefill(tokens[:, :start], cache, last_only=True, **call)
        return decode(params, tokens[:, start:], (cache.keys, cache.values))

    return run


def _retained_figures(parts: list[list[Retained]]) -> dict[str, float]:
    """Measured: share of the causal pairs that the layers but the dense first computed, and of attention mass."""
    layers = [retained for part in parts for retained in part]
    if not layers:
        return {"kept_pairs": 1.0, "mass_mean": 1.0, "mass_min": 1.0}
    pairs = sum(float(np.asarray(retained.pairs, np.float64).sum()) for retained in layers)
    causal = sum(float(np.asarray(retained.causal, np.float64).sum()) for retained in layers)
    mass = np.concatenate([np.asarray(retained.mass).ravel() for retained in layers])
    return {"kept_pairs": pairs / causal, "mass_mean": float(mass.mean()), "mass_min": float(mass.min())}


def _losses(
    case: SelectionCase, questions: dense.Questions, ours: np.ndarray, theirs: np.ndarray, first: int
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Figures and series; ``ours`` and ``theirs`` begin at token ``first``."""
    if questions.query_positions is None or questions.answers is None or questions.distances is None:
        tokens = jnp.asarray(questions.tokens[:, first:])
        # Row by row: of a vocabulary of 128256 tokens one sequence's distributions are a quarter of a GiB.
        rows = [_divergence(one, other) for one, other in zip(ours, theirs, strict=True)]
        kl, same = (np.stack(part) for part in zip(*rows, strict=True))
        nll = np.asarray(token_nats(jnp.asarray(ours[:, :-1]), tokens[:, 1:])).mean(-1)
        dense_nll = np.asarray(token_nats(jnp.asarray(theirs[:, :-1]), tokens[:, 1:])).mean(-1)
        series = {"nll": nll, "standard_nll": dense_nll, "kl": kl.mean(-1), "top1": same.mean(-1)}
        figures = {
            "perplexity": math.exp(nll.mean()),
            "dense_perplexity": math.exp(dense_nll.mean()),
            "bits_per_byte": bits(float(nll.mean()), questions.bytes_per_token),
        }
    else:
        rows, at = np.arange(len(ours))[:, None], questions.query_positions - first
        kl, same = _divergence(ours[rows, at], theirs[rows, at])
        hits = (ours[rows, at].argmax(-1) == questions.answers).astype(float).ravel()
        dense_hits = (theirs[rows, at].argmax(-1) == questions.answers).astype(float).ravel()
        series = {"hit": hits, "standard_hit": dense_hits, "distance": questions.distances.astype(float).ravel()}
        figures = {"recall": float(hits.mean()), "dense_recall": float(dense_hits.mean()), "queries": float(hits.size)}
    figures |= {
        "kl_mean": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "top1_agreement": float(same.mean()),
    }
    return figures, {name: tuple(map(float, values)) for name, values in series.items()}


def _divergence(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL(dense || ours) in nats, and whether the likeliest token is the same, per token."""
    log_ours, log_theirs = jax.nn.log_softmax(jnp.asarray(ours)), jax.nn.log_softmax(jnp.asarray(theirs))
    kl = (jnp.exp(log_theirs) * (log_theirs - log_ours)).sum(-1)
    return np.asarray(kl, np.float64), np.asarray(ours.argmax(-1) == theirs.argmax(-1))
