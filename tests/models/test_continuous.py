"""Continuous batching: every request gets the tokens that it gets alone, however the others come and go."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from attnsuite.models import ModelConfig, Transformer, generate
from attnsuite.models.cache import SlotMapping
from attnsuite.models.serving import Request, Sizes, serve

CALL = {"backend": "standard"}
SIZES = Sizes(sequences=3, capacity=24, tokens_per_step=7, page_size=4, num_pages=11)


def make() -> Transformer:
    return Transformer(
        ModelConfig.from_preset(
            "debug", num_heads=4, num_kv_heads=2, hidden_size=32, attention=("sliding", "global"), window_size=5
        )
    )


def trace() -> list[Request]:
    rng = np.random.default_rng(5)
    lengths = ((9, 4), (1, 6), (17, 3), (4, 8), (12, 1))
    prompts = [tuple(int(x) for x in rng.integers(0, 256, length)) for length, _ in lengths]
    return [
        Request(prompt=p, new_tokens=n, arrives=2.0 * i)
        for i, (p, (_, n)) in enumerate(zip(prompts, lengths, strict=True))
    ]


def alone(model: Transformer, request: Request) -> tuple[int, ...]:
    padded = np.zeros((1, 17), int)
    padded[0, : len(request.prompt)] = request.prompt
    return tuple(generate(model, padded, 8, lengths=[len(request.prompt)], **CALL)[0, : request.new_tokens].tolist())


def ticking():
    """A clock that moves a second each time it is read."""
    ticks = iter(range(10_000))
    return lambda: float(next(ticks))


@pytest.mark.serving
def test_every_request_gets_the_tokens_that_it_gets_alone() -> None:
    model, requests = make(), trace()
    found = serve(model, requests, SIZES, clock=ticking(), **CALL)
    assert [one.tokens for one in found] == [alone(model, request) for request in requests]
    # Alone on the server, a prompt of 9 takes two steps of at most 7 tokens, and each further token one step.
    assert found[0].seconds[:2] == (2.0, 3.0)
    assert all(one.seconds == tuple(sorted(one.seconds)) for one in found)


@pytest.mark.serving
def test_a_token_in_another_sequences_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SlotMapping.of
    monkeypatch.setattr(SlotMapping, "of", lambda table, rows, *rest: right(table, 0 * rows, *rest))
    model, requests = make().with_config(max_length=2049), trace()
    found = serve(model, requests, SIZES, clock=ticking(), **CALL)
    monkeypatch.undo()
    assert [one.tokens for one in found] != [alone(make(), request) for request in requests]


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="request 0 needs 24 slots; a sequence has 23, and all pages together 44"):
        serve(make(), [Request(prompt=(1,) * 20, new_tokens=5)], dataclasses.replace(SIZES, capacity=23))
    with pytest.raises(ValueError, match="tokens_per_step=2 is below sequences=3"):
        Sizes(sequences=3, capacity=8, tokens_per_step=2)
    with pytest.raises(ValueError, match="tokens reach from 1 to 9999; this model has tokens 0 to 255"):
        serve(make(), [Request(prompt=(1, 9999), new_tokens=1)], SIZES)
    with pytest.raises(ValueError, match="attention='full' sees later tokens, so it cannot be cached"):
        serve(make().with_config(attention="full"), [Request(prompt=(1,), new_tokens=1)], SIZES)
    with pytest.raises(ValueError, match="prompt is empty"):
        Request(prompt=(), new_tokens=1)
    for arrives in (float("nan"), "0", None, True):
        with pytest.raises(ValueError, match=f"arrives={arrives!r} must be a finite number"):
            Request(prompt=(1,), new_tokens=1, arrives=arrives)
