"""What a model loses under a backend, or behind a cache of some dtype: perplexity on text, agreement, recall.

Every figure stands beside the standard backend's on the same tokens, from the same process, sequence by sequence. The
differences are therefore paired, and their intervals are an order of magnitude narrower than those of the figures.
Perplexity on text does not show a window that is too short; recall on the constructed checkpoint does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnsuite.models import KVCache, ModelConfig, TextFile, Transformer, load_text, retrieval
from attnsuite.models.cache import Quantised, Slots
from attnsuite.models.loss import token_nats

from .. import statistics
from ..cell import Outcome
from ..errors import as_input
from ..measure.tensor_errors import as_model_error
from ..measure.tokens import bits, reader_of, unigram_bits
from ..record import TensorError
from .model_program import model_config, open_model, resolutions_of_sequence, selected_shares

_PROMPTS_AT_ONCE = 8
_LEAST_CONTEXT = 1024


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Windows of held-out text, and the number of its bytes per token."""

    rows: Int[np.ndarray, "sequences length"]
    bytes_per_token: float


def read_text(case: Any, config: ModelConfig, text: TextFile | None, windows: int | None = None) -> HeldOut:
    """The text of a case as tokens of its model, in ``windows`` (default: its ``sequences``).

    Raises InputError if it is too short, or the model cannot read it.
    """
    with as_input(f"case {case.name}: "):
        data = load_text().held_out if text is None else load_text(text, held_out=0.0).train
        return HeldOut(*reader_of(case.model, config).spread(data, case.sequence, windows or case.sequences))


def checked_config(case: Any, text: TextFile | None, windows: int | None = None) -> ModelConfig:
    """The configuration of a case's model. Raises InputError for an unknown model, and as :func:`read_text`."""
    config = model_config(case)
    read_text(case, config, text, windows)
    return config


def perplexity(case: Any, backend: str, text: TextFile | None) -> Outcome:
    """Perplexity per token and bits per byte in a ``TextCase``, with KL and top-1 agreement against ``standard``."""
    model = open_model(case)
    errors: dict[str, TensorError] = {}

    def logits_of(tokens: Array) -> tuple[Array, Array]:
        ours, theirs = (model(tokens, backend=name, needs_grad=False) for name in (backend, "standard"))
        if not errors:
            with jax.default_matmul_precision("highest"):
                exact = model.with_config(dtype="float32")(tokens, backend="standard", needs_grad=False)
            errors["logits"] = as_model_error(ours, exact, theirs, case.dtype)
        return ours, theirs

    outcome = window_by_window(read_text(case, model.config, text), logits_of)
    return _with_selection(dataclasses.replace(outcome, accuracy=errors), model.config, case, backend)


def window_by_window(held_out: HeldOut, logits_of: Callable[[Array], tuple[Array, Array]], first: int = 0) -> Outcome:
    """The figures of a model's logits beside the standard backend's, both from token ``first`` of each window."""
    found = []
    for row in held_out.rows:
        tokens = jnp.asarray(row)[None]
        found.append(_compared(*logits_of(tokens), tokens[:, first:]))
    names = ("nll", "standard_nll", "kl", "top1")
    raw = {name: tuple(map(float, values)) for name, values in zip(names, zip(*found, strict=True), strict=True)}
    figures = _figures_of(raw, held_out.bytes_per_token)
    # A model that does not beat the frequencies of the tokens shows nothing.
    figures["unigram_bits_per_byte"] = unigram_bits(held_out.rows[:, first:]) / held_out.bytes_per_token
    return Outcome(quality=figures, series=raw)


def retrieval_model(case: Any) -> Transformer:
    """The constructed checkpoint, with room for the length of a ``RetrievalCase``."""
    return retrieval.build(context=max(case.sequence, _LEAST_CONTEXT))


def recall(case: Any, backend: str, text: TextFile | None = None) -> Outcome:
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
            hits[name] += retrieval.hits(found, batch).astype(float).ravel().tolist()
        distances += (np.asarray(batch.query_positions) - np.asarray(batch.needle_positions)).ravel().tolist()
        if not errors:
            errors.append(as_model_error(logits[backend], logits["standard"], None, "float32"))
    figures = {
        "recall": float(np.mean(hits[backend])),
        "standard_recall": float(np.mean(hits["standard"])),
        "queries": float(len(distances)),
    }
    series = {"hit": tuple(hits[backend]), "standard_hit": tuple(hits["standard"]), "distance": tuple(distances)}
    return _with_selection(
        Outcome(quality=figures, series=series, accuracy={"logits": errors[0]}), model.config, case, backend
    )


def cache_loss(case: Any, row: str, text: TextFile | None) -> Outcome:
    """The figures of a row of a ``CacheCase``, from the second half of every sequence."""
    dtype, wrong, _ = row.removeprefix("cache_").partition("_wrong_scales")
    model, half = open_model(case), case.sequence // 2
    errors: dict[str, TensorError] = {}

    def logits_of(tokens: Array) -> tuple[Array, Array]:
        dense = model(tokens, backend="standard", needs_grad=False)[:, half:]
        ours = _behind_cache(model, tokens, half, dtype, wrong_scales=bool(wrong))
        if not errors:
            errors["logits"] = as_model_error(ours, dense, None, "float32")
        return ours, dense

    outcome = window_by_window(read_text(case, model.config, text), logits_of, half)
    bytes_per_token = KVCache.create(model.config, 1, 1, dtype).nbytes
    return dataclasses.replace(outcome, accuracy=errors, figures={"kv_bytes_per_token": bytes_per_token})


MEASURED = {"perplexity": perplexity, "cache_text": cache_loss, "retrieval": recall}  # by kind of case


def _behind_cache(
    model: Transformer, tokens: Int[Array, "batch length"], half: int, dtype: str, *, wrong_scales: bool
) -> Float[Array, "batch rest vocab"]:
    """Logits of the tokens from ``half``, read in one call behind a cache of this dtype that holds the others.

    A token reads the keys and values of every token before it, and its own, as the cache keeps them: one call gives
    what the decode steps give one after the other.
    """
    batch, length = tokens.shape
    cache = model.new_cache(batch, length, dtype)
    _, cache = model.prefill(tokens[:, :half], cache, last_only=True, backend="standard")
    if wrong_scales:
        keys, values = (tuple(_with_other_scales(x, half) for x in of) for of in (cache.keys, cache.values))
        cache = dataclasses.replace(cache, keys=keys, values=values)
    return model.prefill(tokens[:, half:], cache, backend="standard")[0]


def _with_other_scales(slots: Slots, filled: int) -> Slots:
    """The slots with scales of others: those of the KV head before, one filled slot earlier."""
    if not isinstance(slots, Quantised):
        return slots
    rolled = jnp.roll(slots.scales[:, :, :filled], (1, 1), axis=(1, 2))
    return dataclasses.replace(slots, scales=slots.scales.at[:, :, :filled].set(rolled))


def _with_selection(outcome: Outcome, config: ModelConfig, case: Any, backend: str) -> Outcome:
    """The outcome with what an approximate backend selected; without that its figures cannot be read."""
    selected = selected_shares(resolutions_of_sequence(config, case.sequence, backend), config)
    figures = {name: value for one in selected for name, value in one.figures.items()}
    notes = tuple(line for one in selected for line in one.lines)
    return dataclasses.replace(outcome, quality={**outcome.quality, **figures}, notes=notes)


@jax.jit
def _compared(ours: Array, theirs: Array, tokens: Array) -> tuple[Array, Array, Array, Array]:
    """Of one sequence: mean nats of both, mean KL(theirs || ours), share of equal most likely tokens."""
    nll = token_nats(ours[:, :-1], tokens[:, 1:]).mean()
    standard_nll = token_nats(theirs[:, :-1], tokens[:, 1:]).mean()
    log_ours, log_theirs = jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs)
    kl = (jnp.exp(log_theirs) * (log_theirs - log_ours)).sum(-1).mean()
    return nll, standard_nll, kl, (ours.argmax(-1) == theirs.argmax(-1)).mean()


def _figures_of(series: dict[str, tuple[float, ...]], bytes_per_token: float) -> dict[str, float]:
    """The figures that follow from ``nll``, ``standard_nll``, ``kl`` and ``top1`` of each sequence."""
    nll = float(np.mean(series["nll"]))
    differences = [a - b for a, b in zip(series["nll"], series["standard_nll"], strict=True)]
    difference = statistics.mean(differences)
    figures = {
        "perplexity": math.exp(nll),
        "bits_per_byte": bits(nll, bytes_per_token),
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
