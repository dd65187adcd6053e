from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsuite.backends.contract import may_attend
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds import make_case, problem_of
from attnsuite.suite.kinds.attention_call import OpCase, judged_case, spec_of
from attnsuite.suite.kinds.formulas import document_ids, op_bytes, op_flops, visible_pairs
from attnsuite.suite.kinds.inputs import make_inputs

CASES = [
    OpCase(kind="op_forward", sequence=37),
    OpCase(kind="op_forward", sequence=37, causal=False),
    OpCase(kind="op_forward", sequence=37, window_size=6),
    OpCase(kind="op_forward", sequence=37, window_size=1, causal=False),
    OpCase(kind="op_forward", sequence=37, window_size=6, causal=False, documents=4),
    OpCase(kind="op_forward", sequence=37, chunk_size=8),
    OpCase(kind="op_forward", sequence=37, chunk_size=8, causal=False, documents=3),
    OpCase(kind="op_forward", sequence=37, documents=37),
    OpCase(kind="op_decode", sequence=37),
    OpCase(kind="op_decode", sequence=37, causal=False),
    OpCase(kind="op_decode", sequence=37, window_size=6),
    OpCase(kind="op_decode", sequence=37, chunk_size=8),
    OpCase(kind="op_forward", sequence=37, causal=False, mask="causal | prefix(9)"),
    OpCase(kind="op_forward", sequence=37, mask="dilated(3)", documents=4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_visible_pairs_are_those_of_the_mask(case):
    mask = may_attend(spec_of(case), make_inputs(case).layout)
    full = (1, 1, case.query_length, case.sequence)
    counted = np.prod(full) if mask is None else np.broadcast_to(np.asarray(mask), full).sum()
    assert visible_pairs(case) == counted


def test_window_size_counts_the_token_itself_as_that_of_a_model_does():
    causal, both = (OpCase(kind="op_forward", sequence=37, window_size=6, causal=causal) for causal in (True, False))
    assert may_attend(spec_of(causal), make_inputs(causal).layout).sum(-1).max() == 6
    assert may_attend(spec_of(both), make_inputs(both).layout).sum(-1).max() == 11
    assert spec_of(causal).window == (6 - 1, 0)
    assert causal.name == "forward-s37-h8k8-d64-sliding6-f32"


def test_window_of_the_first_version_is_refused():
    with pytest.raises(InputError, match=r"no key 'window'.*window_size"):
        make_case({"kind": "op_forward", "sequence": 1024, "window": 512})
    assert make_case({"kind": "op_forward", "sequence": 1024, "window": None}).window_size is None


def test_flops_of_a_small_case_counted_by_hand():
    forward = OpCase(kind="op_forward", sequence=3, heads=2, kv_heads=1, head_dim=4, value_head_dim=8)
    backward = OpCase(kind="op_forward_backward", sequence=3, heads=2, kv_heads=1, head_dim=4, value_head_dim=8)
    pairs = 6 * 2
    assert op_flops(forward) == pairs * (2 * 4 + 2 * 8)
    assert op_flops(backward) == pairs * (2 * 4 + 2 * 8 + 3 * 2 * 4 + 2 * 2 * 8)


@pytest.mark.parametrize("kind", ["op_forward", "op_forward_backward"])
def test_bytes_are_those_of_the_arrays(kind):
    case = OpCase(kind=kind, sequence=5, batch=2, heads=4, kv_heads=2, head_dim=8, value_head_dim=16, dtype="bfloat16")
    inputs = make_inputs(case)
    size = inputs.query.nbytes + inputs.key.nbytes + inputs.value.nbytes + inputs.d_out.nbytes
    assert op_bytes(case) == (size if kind == "op_forward" else 2 * size)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 3))
def test_documents_are_contiguous_and_all_there(sequence, documents, seed):
    documents = min(documents, sequence)
    ids = document_ids(OpCase(kind="op_forward", sequence=sequence, documents=documents, seed=seed))
    assert (np.diff(ids) >= 0).all()
    assert sorted(set(ids.tolist())) == list(range(documents))


def test_a_case_of_many_documents_is_judged_with_those_that_a_shorter_one_takes():
    judged, (note,) = judged_case(OpCase(kind="op_forward", sequence=8192, documents=5000))
    assert (judged.sequence, judged.documents) == (4096, 4096)
    assert note.startswith("accuracy was judged at sequence=4096 with documents=4096: ")
    assert judged_case(OpCase(kind="op_forward", sequence=8, batch=2**30))[0].sequence == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_comes_back_from_its_problem(case):
    assert make_case(problem_of(case)) == case


def test_a_decode_step_need_not_read_what_its_row_may_not_see():
    whole, local = (OpCase(kind="op_decode", sequence=4096, window_size=window) for window in (None, 64))
    assert op_bytes(local) - op_bytes(OpCase(kind="op_decode", sequence=64)) == 0
    assert op_bytes(whole) > 60 * op_bytes(local)
