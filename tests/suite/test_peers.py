"""Peers: measured like backends, judged like backends, refused with reasons, never a fallback."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from unittest import mock

import pytest

from attnsuite.suite import peers
from attnsuite.suite.grid import executors, running, work
from attnsuite.suite.grid.work import find_cells
from attnsuite.suite.kinds import kind_of
from attnsuite.suite.kinds.attention_call import ATTENTION, OpCase
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.measure import tensor_errors
from attnsuite.suite.measure.program import named_outputs
from attnsuite.suite.peers import PEERS, mkl
from attnsuite.suite.reportable import shows_speed
from command import WorkerHere, cell_of, context_of
from landing import swept

# What is compared here is compared on every machine; PyTorch and tokamax where they are installed (extra "peers").
CASES = [
    OpCase(kind="op_forward", sequence=96),
    OpCase(kind="op_forward_backward", sequence=96, kv_heads=2),
    OpCase(kind="op_forward", sequence=96, dtype="bfloat16", causal=False),
    OpCase(kind="op_decode", sequence=96, kv_heads=2),
    OpCase(kind="op_forward", sequence=96, window_size=17),
    OpCase(kind="op_forward", sequence=96, window_size=17, causal=False),
    OpCase(kind="op_forward", sequence=96, documents=3),
    OpCase(kind="op_forward", sequence=96, mask="causal | prefix(16)", causal=False),
]
PAIRS = [(name, case) for name in PEERS for case in CASES if name in kind_of(case.kind).peers]
# A gradient, a decode step, a window and documents.
FIRST = [(name, case) for name, case in PAIRS if case in (CASES[1], CASES[3], CASES[4], CASES[6])]


@pytest.mark.parametrize(("name", "case"), swept(PAIRS, FIRST), ids=lambda x: x if isinstance(x, str) else x.name)
def test_peer_computes_the_same_problem_or_says_why_not(tmp_path, name, case):
    reasons = peers.refusals(name, case)
    if reasons:
        assert all(reason.startswith(f"{name}: ") and reason.endswith(".") for reason in reasons)
        return
    program = peers.program(name, case)
    outputs = program.function(*program.arguments)
    if program.arrays is not None:
        outputs = program.arrays(outputs)
    ATTENTION.write_reference(case, tmp_path / "reference.npz", None, None)
    errors = tensor_errors.judge_outputs(named_outputs(outputs), tmp_path / "reference.npz", case.dtype)
    assert tensor_errors.describe_failure(errors) is None


PREFILL = ModelCase(kind="model_prefill")


@pytest.mark.parametrize(
    ("name", "case", "said"),
    [
        ("jax_nn", CASES[0], None),
        ("transformers", PREFILL, "transformers: torch and transformers not installed; pip install '.[peers]'."),
        ("transformers", dataclasses.replace(PREFILL, batch=2, ragged=True, name=""), "ragged=True is outside"),
        (
            "jax_nn",
            OpCase(kind="op_forward", sequence=96, soft_cap=30.0),
            "soft_cap=30.0 is outside of what is compared",
        ),
        (
            "jax_nn",
            OpCase(kind="op_decode", sequence=96, window_size=17),
            "compared in forward and backward passes alone",
        ),
    ],
)
def test_what_is_not_compared_is_named_without_any_package_installed(monkeypatch, name, case, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    reasons = peers.refusals(name, case)
    assert said in " ".join(reasons) if said else not reasons


def test_unthrottled_row_is_refused_where_there_is_no_brake(monkeypatch):
    assert "no brake on Intel(R) Xeon(R)" in mkl.refusals("Intel(R) Xeon(R)")[-1]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in mkl.refusals("Apple M3")[0]


@pytest.mark.filterwarnings("ignore::attnsuite.backends.BackendFallbackWarning")
def test_plans_hold_a_cell_per_peer_of_the_kind_and_one_for_all_cores(monkeypatch):
    monkeypatch.setattr("attnsuite.suite.kinds.attention_call.usable_cores", lambda: 4)
    rows = ("standard", "chunked", "cudnn", "jax_nn", "transformers")
    found = find_cells(rows, (CASES[0],), all_cores=True)
    cells = [(cell.row, cell.devices, cell.mode) for cell in found["cells"]]
    assert cells == [
        ("standard", 1, "native"),
        ("chunked", 1, "native"),
        ("cudnn", 1, "fallback"),
        ("chunked", 4, "native"),
        ("jax_nn", 1, "native"),
    ]
    monkeypatch.setattr("attnsuite.suite.kinds.attention_call.usable_cores", lambda: 3)  # which do not divide the heads
    assert [cell.devices for cell in find_cells(("chunked",), (CASES[0],), all_cores=True)["cells"]] == [1]


@pytest.mark.parametrize(("row", "status"), [("torch", "wrong"), ("torch", "ok"), ("chunked", "wrong")])
def test_a_peer_outside_the_bound_is_timed_and_a_backend_is_not(row, status):
    """A goal must not be met because a rival was left out."""

    class Outside(WorkerHere):
        """A worker whose cell ran with wrong numbers."""

        def ask(self, seconds, function, *_):
            if function is work.prepare:
                return {"outcome": {"status": status, "error": "dq is off", "calls": 1}, "named": True}
            return {"seconds": 0.5, "spent": 0.5}

    judging = mock.Mock(recheck=mock.Mock(side_effect=AssertionError))  # torch has the same inputs in every call
    case, context = CASES[0], context_of(suite="cpu-speed", references=judging)
    each = running.Running(cell_of(case, row), Outside())
    ended = running.prepare(each, None, context)
    (record,) = [ended] if ended else executors._sample(case, [each], context)
    assert (record.status, len(record.samples)) == (status, 6 if row == "torch" else 0)
    assert shows_speed(record) is (row == "torch")
