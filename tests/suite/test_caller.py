"""The kind of case ``caller``: what people call, judged by the oracle, relative to JAX's or flax's own."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.suite.cell import Means, Request
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds import caller, kind_of, make_case
from attnsuite.suite.measure.program import Draw
from landing import swept

CALLS = (
    ("eager", {"operand": "causal"}),
    ("jit", {"operand": "mask", "gradient": True}),
    ("layers", {"operand": "bias", "layers": 2, "gradient": True}),
    ("nnx", {"query_length": 1}),
    ("linen", {"query_length": 1}),
    ("vmap", {"operand": "mask", "batch": 2}),
    ("jit", {"operand": "learned_bias", "gradient": True, "batch": 2}),
    ("jit", {"kv_layout": "HND", "gradient": True, "kv_heads": 1}),
    ("jit", {"query_length": 1, "page_size": 8, "batch": 2, "kv_layout": "HND"}),
    ("jit", {"query_length": 1, "kv_dtype": "int8", "kv_layout": "NHD"}),
)
MORE = (
    ("vmap", {"operand": "lengths", "batch": 2}),
    ("vmap", {"operand": "key_mask", "batch": 2}),
    ("vmap", {"operand": "bias", "batch": 2}),
    ("jit", {"query_length": 1, "page_size": 8, "batch": 2, "kv_layout": "NHD"}),
    ("jit", {"query_length": 1, "kv_dtype": "int8", "kv_layout": "HND"}),
)


def case_of(way, **fields):
    return make_case(
        {"kind": "caller", "way": way, "sequence": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, **fields}
    )


def prepared(case, row, folder):
    kind, path = kind_of("caller"), folder / "reference.npz"
    kind.write_reference(case, path, None, Draw(0))
    (cell,) = (each for each in kind.cells(case, Request(rows=(row,), cases=(case,))) if each.row == row)
    found = kind.prepare(cell, case, Means(reference=None, memory_limit=2**33))
    errors = kind.judge(case, found.answers(0), path, Draw(0), exact=True)
    return dataclasses.replace(found, outcome=dataclasses.replace(found.outcome, accuracy=errors))


def held_to_its_own_inputs(case, found):
    """The outputs of a timed call are right for its inputs, and wrong for those of another one."""
    assert found.outcome.status == "ok", found.outcome.error
    assert all(error.passed for error in found.outcome.accuracy.values())
    assert math.isfinite(found.timed.sample(7))
    outputs, call, kind = found.named(found.timed.saved_outputs), found.timed.call, kind_of("caller")
    for choice in (0, 1):
        errors = kind.recheck(case, outputs, Draw(7, call), choice)
        assert all(error.passed for error in errors.values()), (call, errors)
        assert not any(error.passed for error in kind.recheck(case, outputs, Draw(7, call + 1), choice).values())


@pytest.mark.parametrize("row", swept(("library", "chunked"), ("chunked",)))
@pytest.mark.parametrize(("way", "fields"), swept(CALLS + MORE, CALLS), ids=str)
def test_a_timed_call_is_judged_by_its_own_inputs_and_holds_no_compilation(way, fields, row, tmp_path):
    case = case_of(way, **fields)
    found, compiled = prepared(case, row, tmp_path), []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        found.timed.sample(3)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "compile" in name]
    assert ("dbias" in found.outcome.accuracy) is (case.operand == "learned_bias")
    held_to_its_own_inputs(case, found)


@pytest.mark.parametrize("way", ["eager", "nnx", "linen"])
def test_a_call_that_is_wrong_is_found(way, tmp_path, monkeypatch):
    def keyless(query, key, value, **options):
        return jnp.zeros_like(query)

    monkeypatch.setattr(caller, "attention", keyless)
    monkeypatch.setattr(caller, "attention_fn", lambda *_, **__: keyless)
    accuracy = prepared(case_of(way, **dict(CALLS)[way]), "standard", tmp_path).outcome.accuracy
    assert not any(error.passed for error in accuracy.values())


def test_a_step_of_flax_is_the_one_behind_a_full_cache(tmp_path):
    """The step does not advance: each sample reads the same slots."""
    program = caller.caller_program(case_of("nnx", query_length=1), "library")
    first, second = (program.function(*program.arguments) for _ in range(2))
    assert (first == second).all()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"way": "nnx"}, "query_length = 1"),
        ({"way": "jit", "layers": 3}, "way = 'layers'"),
        ({"way": "jit", "operand": "mask", "query_length": 1}, "as many queries as keys"),
        ({"way": "linen", "query_length": 1, "operand": "bias"}, "makes the mask of its cache"),
        ({"way": "jit", "operand": "learned_bias"}, "needs gradient = true"),
        ({"way": "vmap", "gradient": True}, "is a forward pass"),
        ({"way": "jit", "page_size": 16}, "of a decode step's cache"),
        ({"way": "jit", "query_length": 1, "page_size": 5}, "does not divide sequence = 32"),
        ({"way": "nnx", "query_length": 1, "kv_layout": "HND"}, "flax's layer keeps its cache as 'NHD'"),
    ],
)
def test_a_case_that_nobody_can_call_is_an_error(fields, word):
    with pytest.raises(InputError, match=word):
        case_of(**fields)


def test_each_row_of_a_chain_has_a_share_in_its_gradient(tmp_path):
    case, path = case_of("layers", operand="causal", layers=32, gradient=True), tmp_path / "reference.npz"
    kind_of("caller").write_reference(case, path, None, Draw(0))
    of_rows = np.abs(np.load(path)["dq"][:, 1:]).max((0, 2, 3))  # the first one sees a single key: always zero
    assert of_rows.min() > of_rows.max() / 1000
