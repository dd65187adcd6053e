"""The cases about serving: what a cache of fewer bits loses."""

from __future__ import annotations

import pytest

from attnsuite.suite import kinds
from attnsuite.suite.cell import Asked, Means
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds.cache import CACHE, CONTROL, CacheCase


def cells_of(case):
    kind = kinds.kind_of(case.kind)
    return list(kind.cells(case, Asked(rows=kind.rows(case), cases=(case,))))


def outcomes(case):
    kind = kinds.kind_of(case.kind)
    means = Means(reference=None, memory_limit=2**32)
    return {cell.row: kind.prepare(cell, case, means).outcome for cell in cells_of(case)}


@pytest.mark.serving
def test_few_bits_lose_little_and_the_wrong_scales_of_the_control_show():
    found = outcomes(CacheCase(sequence=256, sequences=6))
    assert all(outcome.status == "ok" for outcome in found.values())
    assert found["cache_float32"].quality["nll_difference"] == pytest.approx(0.0, abs=1e-5)
    assert found["cache_int8"].quality["kl_mean"] < 0.001
    assert found[CONTROL].quality["nll_difference_low"] > found["cache_int8"].quality["nll_difference_high"]
    assert found["cache_int8"].kv_bytes_per_token < 0.3 * found["cache_float32"].kv_bytes_per_token


def test_a_cache_case_names_its_rows_and_refuses_a_text_that_is_too_short():
    case = CacheCase()
    assert [cell.exact for cell in cells_of(case)] == [row == "cache_float32" for row in CACHE.rows(case)]
    with pytest.raises(InputError, match="case cache-text-text-s4194304"):
        cells_of(CacheCase(sequence=2**22))
