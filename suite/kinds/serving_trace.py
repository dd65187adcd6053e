"""The requests of a serving case, what each gets alone, and the measured run of a server."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from attnsuite.models import KVCache, ModelConfig, TextFile, Transformer, generate
from attnsuite.models.planning import Resolutions, resolve_attention
from attnsuite.models.serving import Request, Served, Sizes, ragged_problem, serve

from ..cell import Outcome
from .model_program import cache_figures, open_model
from .model_quality import read_text
from .serving_case import ServingCase


def resolutions_of(case: ServingCase, config: ModelConfig, backend: str) -> Resolutions:
    """The resolution of each attention type in a step of the server."""
    sizes = sizes_of(case)
    # Shapes alone: a cache of a large model is gigabytes, and this is asked of every backend.
    cache = jax.eval_shape(lambda: KVCache.create(config, sizes.sequences, sizes.capacity, page_size=sizes.page_size))
    return resolve_attention(config, backend=backend, **ragged_problem(cache, sizes))


def sizes_of(case: ServingCase) -> Sizes:
    """What the server has room for."""
    return Sizes(
        sequences=case.batch,
        capacity=case.sequence + case.new_tokens,
        tokens_per_step=case.tokens_per_step,
        page_size=case.page_size,
    )


def trace_of(case: ServingCase, config: ModelConfig, text: TextFile | None) -> list[Request]:
    """The requests, which arrive as a Poisson process."""
    rng = np.random.default_rng([case.seed, 0])
    gaps = rng.exponential(1.0 / case.per_second, case.requests)
    lengths = rng.integers(max(1, case.sequence // 4), case.sequence, case.requests, endpoint=True)
    rows = read_text(case, config, text, case.requests).rows
    return [
        Request(prompt=tuple(row[:length].tolist()), new_tokens=case.new_tokens, arrives=float(at))
        for row, length, at in zip(rows, lengths, np.cumsum(gaps) - gaps[0], strict=True)
    ]


def write_alone(case: ServingCase, path: Path, text: TextFile | None) -> None:
    """Write to ``path`` (.npz) the tokens of each request, generated alone."""
    model = open_model(case)
    requests = trace_of(case, model.config, text)
    np.savez(path, allow_pickle=False, tokens=np.stack([_alone(case, model, request) for request in requests]))


def _alone(case: ServingCase, model: Transformer, request: Request) -> np.ndarray:
    padded = np.zeros((1, case.sequence), np.int32)
    padded[0, : len(request.prompt)] = request.prompt
    return generate(model, padded, case.new_tokens, lengths=[len(request.prompt)], backend="standard")[0]


def measure(case: ServingCase, backend: str, reference: Path, text: TextFile | None) -> Outcome:
    """Times of the requests, and whether their tokens are those that they get alone."""
    model = open_model(case)
    requests = trace_of(case, model.config, text)
    serve(model, requests[:1], sizes_of(case), backend=backend)
    found = serve(model, requests, sizes_of(case), backend=backend)
    with np.load(reference, allow_pickle=False) as arrays:
        alone = arrays["tokens"]
    wrong = [i for i, one in enumerate(found) if list(one.tokens) != alone[i].tolist()]
    if wrong:
        error = (
            f"{len(wrong)} of {len(found)} requests got other tokens than alone, the first of them request {wrong[0]}."
        )
        return Outcome(status="wrong", error=error)
    return Outcome(
        quality=_figures(requests, found),
        series={"ttft_seconds": tuple(one.ttft for one in found), "tpot_seconds": _tpots(found)},
        tokens=sum(len(one.tokens) for one in found),
        figures=cache_figures(model.config),
    )


def _figures(requests: list[Request], found: list[Served]) -> dict[str, float]:
    ended = max(request.arrives + one.seconds[-1] for request, one in zip(requests, found, strict=True))
    ttft, tpots = [one.ttft for one in found], _tpots(found)
    times = {"ttft_median_seconds": np.median(ttft), "ttft_p90_seconds": np.quantile(ttft, 0.9)}
    times |= {"tpot_median_seconds": np.median(tpots), "tpot_p90_seconds": np.quantile(tpots, 0.9)} if tpots else {}
    new = sum(len(one.tokens) for one in found)
    return {name: float(value) for name, value in times.items()} | {"tokens_per_second": new / ended}


def _tpots(found: list[Served]) -> tuple[float, ...]:
    return tuple(one.tpot for one in found if one.tpot is not None)
