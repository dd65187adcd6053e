"""What a model loses under a backend: perplexity on text, agreement with the standard backend, recall.

Every figure is taken beside the standard backend's on the same tokens in the same process, sequence by
sequence, so that differences are paired: their intervals are an order of magnitude narrower than those of
the figures themselves. Text perplexity alone is blind to short windows; recall on the constructed
checkpoint is the test that can fail.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models import ModelConfig, Transformer, load_text, retrieval
from models.loss import token_nats
from models.text import unigram_bits, windows
from suite import statistics
from suite.accuracy import as_model_error
from suite.cases import RetrievalCase, TextCase
from suite.errors import InputError
from suite.model_cell import open_model, retrieval_model
from suite.record import TensorError

BYTE_VOCABULARY = 256
_PROMPTS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """Figures, the raw values behind them, and the logits' distance from the standard backend's."""

    figures: dict[str, float]
    series: dict[str, tuple[float, ...]]
    accuracy: dict[str, TensorError]


def read_text(case: TextCase, text: str | None) -> Int[np.ndarray, "sequences length"]:
    """Windows of held-out text, spread evenly over it. Raises InputError where the text is too short."""
    try:
        data = load_text().held_out if text is None else load_text(Path(text), held_out=0.0).train
        rows = windows(data, case.sequence - 1)
    except ValueError as error:
        raise InputError(f"case {case.name}: {error}") from error
    if len(rows) < case.sequences:
        raise InputError(
            f"case {case.name}: the text holds {len(rows)} windows of {case.sequence} bytes, but sequences = "
            f"{case.sequences}; give a longer text or fewer sequences."
        )
    return rows[np.linspace(0, len(rows) - 1, case.sequences).astype(int)]


def check_text_case(case: TextCase, config: ModelConfig, text: str | None) -> None:
    """Raise InputError where the model does not read bytes or the text is too short for the case."""
    if config.vocab_size != BYTE_VOCABULARY:
        raise InputError(
            f"case {case.name}: model {case.model!r} has {config.vocab_size} tokens; perplexity reads bytes, "
            f"so it needs a byte-level model ({BYTE_VOCABULARY})."
        )
    read_text(case, text)


def perplexity(case: TextCase, backend: str, text: str | None) -> Quality:
    """Perplexity per token and bits per byte of ``backend``, with KL and top-1 agreement against ``standard``."""
    model = open_model(case)
    rows = read_text(case, text)
    series: dict[str, list[float]] = {name: [] for name in ("nll", "standard_nll", "kl", "top1")}
    errors: list[TensorError] = []
    for row in rows:
        tokens = jnp.asarray(row)[None]
        ours, theirs = (model(tokens, backend=name, needs_grad=False) for name in (backend, "standard"))
        for name, value in zip(series, _compare(ours, theirs, tokens), strict=True):
            series[name].append(float(value))
        if not errors:
            exact = _float32_logits(model, tokens)
            errors.append(as_model_error(ours, exact, theirs, case.dtype))
    raw = {name: tuple(values) for name, values in series.items()}
    # Byte frequencies of the very text, known in hindsight: a model that does not beat them shows nothing.
    figures = _figures(raw) | {"unigram_bits_per_byte": unigram_bits(rows.ravel(), rows.ravel())}
    return Quality(figures, raw, {"logits": errors[0]})


def recall(case: RetrievalCase, backend: str) -> Quality:
    """Share of needles that the constructed checkpoint retrieves under ``backend``, with the standard backend's."""
    model = retrieval_model(case)
    rng = np.random.default_rng([case.seed, 0])
    hits: dict[str, list[float]] = {backend: [], "standard": []}
    distances: list[float] = []
    errors: list[TensorError] = []
    for start in range(0, case.prompts, _PROMPTS_AT_ONCE):
        batch = retrieval.sample(rng, case.sequence, batch=min(_PROMPTS_AT_ONCE, case.prompts - start))
        logits = {name: model(batch.tokens, backend=name, needs_grad=False) for name in hits}
        for name, found in logits.items():
            hits[name] += _hits(found, batch)
        distances += (np.asarray(batch.query_positions) - np.asarray(batch.needle_positions)).ravel().tolist()
        if not errors:
            errors.append(as_model_error(logits[backend], logits["standard"], None, "float32"))
    figures = {
        "recall": float(np.mean(hits[backend])),
        "standard_recall": float(np.mean(hits["standard"])),
        "queries": float(len(distances)),
    }
    series = {"hit": tuple(hits[backend]), "standard_hit": tuple(hits["standard"]), "distance": tuple(distances)}
    return Quality(figures, series, {"logits": errors[0]})


def _hits(logits: Float[Array, "b t v"], batch: Any) -> list[float]:
    """1.0 for each query whose most likely next token is its answer, prompt after prompt."""
    at = np.asarray(batch.query_positions)
    chosen = np.take_along_axis(np.asarray(logits).argmax(-1), at, axis=1)
    return (chosen == np.asarray(batch.answers)).astype(float).ravel().tolist()


@jax.jit
def _compare(ours: Array, theirs: Array, tokens: Array) -> tuple[Array, Array, Array, Array]:
    """Of one sequence: mean nats of both, mean KL(theirs || ours), share of equal most likely tokens."""
    nll = token_nats(ours[:, :-1], tokens[:, 1:]).mean()
    standard_nll = token_nats(theirs[:, :-1], tokens[:, 1:]).mean()
    log_ours, log_theirs = jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs)
    kl = (jnp.exp(log_theirs) * (log_theirs - log_ours)).sum(-1).mean()
    return nll, standard_nll, kl, (ours.argmax(-1) == theirs.argmax(-1)).mean()


def _float32_logits(model: Transformer, tokens: Array) -> Array:
    with jax.default_matmul_precision("highest"):
        return model.with_config(dtype="float32")(tokens, backend="standard", needs_grad=False)


def _figures(series: dict[str, tuple[float, ...]]) -> dict[str, float]:
    nll = float(np.mean(series["nll"]))
    differences = [a - b for a, b in zip(series["nll"], series["standard_nll"], strict=True)]
    difference = statistics.mean(differences)
    figures = {
        "perplexity": math.exp(nll),
        "bits_per_byte": nll / math.log(2),
        "nll_mean": nll,
        "kl_mean": float(np.mean(series["kl"])),
        "kl_max": float(np.max(series["kl"])),
        "top1_agreement": float(np.mean(series["top1"])),
        "sequences": float(len(series["nll"])),
    }
    if difference is not None:
        figures["nll_difference"] = difference.value
        if difference.low is not None and difference.high is not None:
            figures |= {"nll_difference_low": difference.low, "nll_difference_high": difference.high}
    return figures
