"""``attnsuite perplexity``: a checkpoint's perplexity on text, layer by layer, in a fraction of its memory.

For a model that does not fit; one that does is compared among backends by ``attnsuite run --model``. Beside the
perplexity stands what a unigram model reaches on the same tokens, and how much memory the process took.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from models import ModelConfig, load_text, open_checkpoint, streamed_nats
from suite.errors import InputError
from suite.memory import high_water, mark_baseline
from suite.text import bits, reader_of, unigram_bits

INVALID = "INVALID: no better than a unigram model that knows the frequencies of these tokens"
_GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What to measure. ``text`` is a file, or None for the text that ships; ``random_tokens`` takes its place."""

    model: Path
    text: Path | None
    random_tokens: bool
    sequence: int
    sequences: int
    batch: int
    backend: str
    dtype: str | None


def run(request: StreamRequest) -> Iterator[str]:
    """Measure, and say what was found, line by line. Raises InputError."""
    baseline, begin = mark_baseline(), time.perf_counter()
    try:
        overrides = {} if request.dtype is None else {"dtype": request.dtype}
        checkpoint = open_checkpoint(request.model, **overrides)
        config = checkpoint.config
        rows, bytes_per_token = _tokens(request, config)
        nats = streamed_nats(checkpoint, rows, batch=request.batch, backend=request.backend)
    except ValueError as error:
        raise InputError(str(error)) from error
    seconds, mean = time.perf_counter() - begin, float(nats.mean())
    low = unigram_bits(rows)
    yield f"perplexity per token: {np.exp(mean):.4f} over {nats.size} tokens ({mean:.4f} nats)"
    if bytes_per_token is not None:
        yield f"bits per byte: {bits(mean, bytes_per_token):.4f}, unigram model: {low / bytes_per_token:.4f}"
    if mean / np.log(2) >= low:
        yield INVALID
    stored = config.num_parameters * jax.numpy.dtype(config.param_dtype).itemsize
    yield (
        f"memory: {high_water(baseline) / _GIB:.2f} GiB more than at the start ({baseline.method}), "
        f"for parameters of {stored / _GIB:.2f} GiB, read layer by layer"
    )
    yield f"time: {seconds:.0f} s, backend {request.backend}"


def _tokens(request: StreamRequest, config: ModelConfig) -> tuple[np.ndarray, float | None]:
    """Windows of tokens, and the bytes that one stands for; None where they are no text."""
    if request.random_tokens:
        shape = (request.sequences, request.sequence)
        return np.random.default_rng(0).integers(0, config.vocab_size, shape), None
    data = load_text().held_out if request.text is None else load_text(request.text, held_out=0.0).train
    return reader_of(str(request.model), config).spread(data, request.sequence, request.sequences)
