"""A few hostile inputs of each kind; ``python tests/mutations.py`` draws any number."""

from __future__ import annotations

import os

import pytest

import mutations
from attnsuite import reports
from hostile_checkpoints import NEEDS
from landing import is_landing

COUNT, SEED = (3 if is_landing() else 8), 0


@pytest.fixture(scope="module")
def valid():
    with mutations.valid_places() as places:
        yield places


KINDS = [
    pytest.param(kind, id=f"{kind}-by-libraries", marks=pytest.mark.llama) if kind in NEEDS else kind
    for kind in mutations.KINDS
]


@pytest.fixture(params=KINDS)
def kind(request):
    if (names := mutations.missing(request.param)) and "ATTNSUITE_REQUIRE_TRANSFORMERS" not in os.environ:
        pytest.skip(f"{', '.join(names)} is not installed; tox -e llama")
    return request.param


def test_hostile_input_is_no_traceback_and_quick(kind, valid):
    tally = mutations.run_kind(kind, COUNT, SEED, valid)
    assert tally.tried >= COUNT
    assert not tally.tracebacks, "\n".join(tally.tracebacks)
    assert not tally.slow, "\n".join(tally.slow)


def test_what_the_hostile_input_is_made_from_is_taken(kind, valid):
    tally = mutations.run_kind(kind, 2, SEED, valid, spoils=False)
    assert tally.tried
    assert set(tally.codes) <= {0, "begins"}, tally.refused


def _raises(error):
    def wrong(*_):
        raise error

    return wrong


@pytest.mark.parametrize("error", [KeyError("key"), DeprecationWarning("old"), MemoryError(), SystemExit(4)], ids=repr)
def test_what_is_no_sentence_is_found(valid, monkeypatch, error):
    monkeypatch.setattr(reports, "render", _raises(error))
    assert mutations.run_kind("records", 1, SEED, valid, spoils=False).tracebacks


def test_input_that_takes_long_is_found(valid, monkeypatch):
    monkeypatch.setattr(mutations, "SLOW_SECONDS", 0.0)
    assert mutations.run_kind("machines", 1, SEED, valid).slow
