"""An attention block between its projections: judged by float64 in every output, timed in rows of its own."""

from __future__ import annotations

import dataclasses

import pytest

from attnsuite.backends import Plan, plan
from attnsuite.suite.cell import Means, Request
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds import block, make_case
from attnsuite.suite.kinds.block import BLOCK, BlockCase
from attnsuite.suite.measure.program import Draw
from attnsuite.suite.measure.tensor_errors import judged
from landing import swept

DRAW = Draw(7)

CASE = BlockCase(
    kind="block_forward_backward", sequence=48, width=40, heads=4, kv_heads=2, head_dim=16, value_head_dim=8,
    documents=2, batch=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "block.npz"
    BLOCK.write_reference(CASE, path, None, DRAW)
    return path


def prepared(case, row, reference):
    (cell,) = BLOCK.cells(case, Request(rows=(row,), cases=(case,)))
    found = BLOCK.prepare(cell, case, Means(reference=None, memory_limit=2**32))
    errors = BLOCK.judge(case, found.answers(DRAW.seed), reference, DRAW, exact=True)
    return dataclasses.replace(found, outcome=judged(dataclasses.replace(found.outcome, accuracy=errors), exact=True))


@pytest.mark.parametrize("row", swept(("standard", "chunked"), ("chunked",)))
def test_all_six_outputs_of_a_block_agree_with_products_and_oracle_in_float64(reference, row):
    found = prepared(CASE, row, reference)
    assert found.outcome.status == "ok", found.outcome.error
    assert set(found.outcome.accuracy) == set(block._OUTPUTS)
    assert all(error.max_error < 3e-6 for error in found.outcome.accuracy.values())
    assert found.timed.sample(1) > 0
    errors = BLOCK.recheck(CASE, found.named(found.timed.saved_outputs), Draw(1, found.timed.call), 0)
    assert all(error.passed for error in errors.values())


def test_block_around_a_wrong_kernel_is_wrong_in_every_output(reference, monkeypatch):
    def half_scaled(backend, spec, layout, *, target):
        right = plan(backend, spec, layout, target=target)
        return Plan(lambda q, k, v, layer, carry: right.attend(q / 2, k, v, layer, carry))

    monkeypatch.setattr(block, "plan", half_scaled)
    outcome = prepared(CASE, "standard", reference).outcome
    assert outcome.status == "wrong"
    assert not any(error.passed for name, error in outcome.accuracy.items())


def test_half_precision_of_the_standard_block_passes_its_absolute_bound(tmp_path):
    case = dataclasses.replace(CASE, dtype="bfloat16", name="")
    BLOCK.write_reference(case, tmp_path / "block.npz", None, DRAW)
    outcome = prepared(case, "standard", tmp_path / "block.npz").outcome
    assert outcome.status == "ok", outcome.error


def test_case_of_a_block_is_named_after_its_call_and_refuses_what_the_call_refuses():
    fields = {"kind": "block_forward", "sequence": 64, "heads": 4}
    with pytest.raises(InputError, match="must be a multiple of"):
        make_case(fields | {"kv_heads": 3})
    case = make_case(fields | {"kv_heads": 2})
    assert case.name == "block-forward-s64-h4k2-d64-f32"
    assert make_case(fields | {"kv_heads": 2, "width": 96}).name == "block-w96-forward-s64-h4k2-d64-f32"
    assert case.features == 256
    # 4096 pairs halved by causality, and 256 features to 4, 2, 2 heads and back.
    assert block.block_flops(case) == 2 * (64 * 65 / 2) * 4 * 128 + 2 * 64 * 256 * 64 * (4 + 2 + 2 + 4)
