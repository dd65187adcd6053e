"""Expected times on absent TPUs: what they order, what they do not cover, and that the page has the same weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from attnsuite.backends import Target
from attnsuite.backends.splash import SPLASH
from attnsuite.suite.compile.expected import CHIPS, TERMS, expected_seconds
from declared import sized

PAGE = Path(__file__).parents[2] / "reports" / "published" / "expected-tpu-times" / "times.md"
SPEC = sized(4096, B=4, N=16, H=128, dtype="bfloat16", is_causal=True, needs_grad=False)


def expected(kind, block, spec=SPEC):
    options = {"block_q": block, "block_kv": block, "block_kv_compute": 128}
    return expected_seconds(kind, spec, options, SPLASH.work(spec, Target("tpu", "v6e"), options))


@pytest.mark.parametrize("kind", CHIPS)
def test_small_blocks_pay_for_steps_and_large_ones_for_hidden_pairs(kind):
    times = {block: expected(kind, block) for block in (128, 1024, 4096)}
    assert min(times, key=times.__getitem__) == 1024


def test_measured_time_of_one_problem_is_near():
    """tokamax 0.0.17, tpu7x: 1.355 ms with blocks of 1024."""
    assert expected("tpu7x", 1024) == pytest.approx(1.355e-3, rel=0.15)


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"needs_grad": True}, {"head_dim": 512}, {"head_dim": 32}])
def test_nothing_is_expected_of_what_was_not_measured(changes):
    assert expected("v6e", 1024, dataclasses.replace(SPEC, **changes)) is None
    assert expected("v5e", 1024) is None
    assert expected_seconds("v6e", SPEC, {"block_q": 1024}, None) is None


def test_page_has_these_weights():
    if not PAGE.is_file():
        pytest.skip("a source distribution has no published pages; the repository has")
    page = PAGE.read_text(encoding="utf-8")
    for term, *weights in zip(TERMS, *(chip.weights for chip in CHIPS.values()), strict=True):
        shown = [f"{1e9 * weight:.3g} ns" if term in ("steps", "rows") else f"{weight:.3g}" for weight in weights]
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {term} |"))
        assert row.endswith(f"| {' | '.join(shown)} |")
    for kind, chip in CHIPS.items():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {kind} |") and "| the sum |" in line)
        assert float(line.split("|")[5]) == pytest.approx(100 * chip.error)
