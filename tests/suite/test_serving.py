"""The cases about serving: what a cache of fewer bits loses, and continuous batching."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from attnsuite.backends import BackendFallbackWarning
from attnsuite.suite import kinds
from attnsuite.suite.cell import Means, Request
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds.quality_case import CACHE, CONTROL, CacheCase
from attnsuite.suite.kinds.serving_case import ServingCase
from attnsuite.suite.kinds.serving_kind import SERVING


def cells_of(case):
    kind = kinds.kind_of(case.kind)
    return list(kind.cells(case, Request(rows=kind.rows(case), cases=(case,))))


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
    assert found["cache_int8"].figures == {"kv_bytes_per_token": 576}
    assert found["cache_float32"].figures == {"kv_bytes_per_token": 2048}


def test_a_cache_case_names_its_rows_and_refuses_a_text_that_is_too_short():
    case = CacheCase()
    assert [cell.exact for cell in cells_of(case)] == [row == "cache_float32" for row in CACHE.rows(case)]
    with pytest.raises(InputError, match="case cache-text-text-s4194304"):
        cells_of(CacheCase(sequence=2**22))


@pytest.mark.serving
def test_requests_served_together_get_the_tokens_that_they_get_alone_or_the_cell_is_wrong(tmp_path):
    case = ServingCase(requests=3, sequence=64, new_tokens=4, batch=2, tokens_per_step=24, per_second=1000.0)
    (cell,) = SERVING.cells(case, Request(rows=("standard",), cases=(case,)))
    assert (cell.resolved, cell.mode, cell.exact) == ("standard", "native", True)
    reference = tmp_path / "alone.npz"
    SERVING.write_reference(case, reference, None, None)
    means = Means(reference=reference, memory_limit=2**32)
    found = SERVING.prepare(cell, case, means).outcome
    assert (found.status, found.tokens) == ("ok", 12)
    assert len(found.series["ttft_seconds"]) == len(found.series["tpot_seconds"]) == 3
    assert 0 < found.quality["ttft_median_seconds"] <= found.quality["ttft_p90_seconds"]
    with np.load(reference) as arrays:
        other = arrays["tokens"] + np.array([[0, 0, 0, 1], [0] * 4, [0] * 4])
    np.savez(reference, tokens=other)
    wrong = SERVING.prepare(cell, case, means).outcome
    assert (wrong.status, wrong.quality, wrong.series) == ("wrong", {}, {})
    assert wrong.error == "1 of 3 requests got other tokens than alone, the first of them request 0."


def test_a_serving_case_is_refused_where_a_step_has_no_room_for_each_sequence():
    with pytest.raises(InputError, match="tokens_per_step = 3 is below batch = 4"):
        ServingCase(tokens_per_step=3)
    assert dataclasses.asdict(ServingCase())["name"] == "serving-text-s256-n12-b4"


def test_a_backend_that_takes_no_pages_is_shown_with_its_reason():
    case = ServingCase(requests=2)
    with pytest.warns(BackendFallbackWarning):
        (cell,) = SERVING.cells(case, Request(rows=("kascade",), cases=(case,)))
    assert cell.mode == "fallback"
    assert any("page_size=16" in reason for reason in cell.reasons)
