from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsuite.suite.kinds import checked
from attnsuite.suite.kinds.conformance_case import ConformanceFacts
from attnsuite.suite.kinds.loss_curve_case import LossCurve
from attnsuite.suite.kinds.sharded_case import Share
from attnsuite.suite.kinds.tuning_case import Trial, Trials
from attnsuite.suite.record import Record, RecordError, TensorError
from attnsuite.suite.store import read_record
from attnsuite.suite.typed import printable

PASSED = {"rms_error": None, "standard_error": None, "allowed": 0.1, "passed": True}
numbers = st.floats(-1e100, 1e100)
texts = st.text().map(printable)  # what controls a terminal is spelled when it is read


@given(samples=st.lists(numbers), reasons=st.lists(texts), error=st.none() | numbers, word=texts)
def test_record_comes_back_from_its_line(example_record, samples, reasons, error, word):
    verdict = TensorError(max_error=error, rms_error=error, standard_error=error, allowed=1.0, passed=False)
    record = dataclasses.replace(
        example_record,
        samples=tuple(samples),
        reasons=tuple(reasons),
        accuracy={"out": verdict},
        quality={word: 1.0},
        series={word: tuple(samples)},
    )
    line = record.to_json()
    assert "\n" not in line
    assert Record.from_json(line.encode()) == record


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("loss_curve", LossCurve(role="noise", losses=(1.0, None))),
        ("sharded", Share(shape=(1, 2), one_device={"out": None})),
        ("tuning", Trials(tried=(Trial(options={"block_q": 64}, samples=(1.0,)), Trial(options={}, error="no")))),
    ],
)
def test_facts_of_a_kind_come_back_from_their_line(example_record, kind, facts):
    record = dataclasses.replace(example_record, kind=kind, facts=facts)
    assert checked(record) == read_record(record.to_json().encode()) == record


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_what_is_no_record_is_refused_with_a_reason(line):
    with pytest.raises(RecordError, match=r"."):
        Record.from_json(line.encode())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": 2}, "schema = 2; this version reads schema 1"),
        ({"schema": 1.0}, "schema = 1.0 must be one of 1"),
        ({"status": "fine"}, "fine"),
        ({"kind": "op_sideways"}, "op_sideways"),
        ({"surprise": 1}, "surprise"),
        ({"samples": 3}, "samples = 3 must be a list"),
        ({"samples": [1.0, "2"]}, r"samples.1 = '2' must be a number"),
        ({"samples": [1e200]}, r"samples.0 = 1e\+200 must be a number up to 1e\+100"),
        ({"tokens": -1}, "tokens = -1 must be an integer from 0"),
        ({"tokens": 10**4000}, "tokens = an integer of 13288 bits"),
        ({"accuracy": [1]}, "accuracy = a list must be a table"),
        ({"accuracy": {"out": {"max_error": 1.0}}}, r"accuracy.out lacks the key rms_error"),
        ({"accuracy": {"out": {"surprise": 1.0}}}, "no key 'surprise'"),
        ({"kernels": [{"name": "f", "configuration": {"a": []}}]}, r"kernels.0.configuration.a = a list"),
        ({"environment": {"clock": {"a": []}}}, r"environment.clock.a = a list"),
        ({"environment": {"own": {}, "source_files": {}}}, "no key 'own'"),
        ({"facts": {"tried": []}}, "facts = a table must be nothing"),
        ({"kind": "tuning"}, "facts = nothing must be a table where tuning has status ok"),
        ({"kind": "tuning", "facts": {"losses": []}}, "no key 'losses'; its keys are tried"),
        ({"kind": "tuning", "facts": {"said": "yes"}}, "no key 'said'; its keys are tried"),
        (
            {"kind": "loss_curve", "facts": {"role": "tuba", "losses": []}},
            "facts.role = 'tuba' must be one",
        ),
        ({"kind": "loss_curve", "facts": {"role": "noise", "losses": ["x"]}}, r"facts.losses.0 = 'x' must be a number"),
        ({"mode": "interpret"}, "key = 'c/standard/cpu/native' is not c/standard/cpu/interpret, as its case, backend,"),
        ({"devices": 2}, "is not c/standard@2/cpu/native, as"),
        ({"requested": "chunked"}, "is not c/chunked/cpu/native, as"),
        ({"problem": {"kind": "op_decode"}}, "problem.kind = 'op_decode' is not the record's, 'op_forward'"),
        ({"problem": {"name": "d"}}, "problem.name = 'd' is not the record's, 'c'"),
        ({"accuracy": {"out": PASSED | {"max_error": 0.2}}}, "out passed with an error of 0.2, and 0.1 is allowed"),
        ({"accuracy": {"out": PASSED | {"max_error": None}}}, "out passed with an error that is not finite"),
        ({"accuracy": {"out": PASSED | {"max_error": 0.2, "passed": False}}}, "status = 'ok' with out outside its"),
    ],
)
def test_damaged_record_is_refused(example_record, change, match):
    with pytest.raises(RecordError, match=match):
        read_record(json.dumps(json.loads(example_record.to_json()) | change).encode())


def test_an_approximation_may_pass_with_an_error_above_the_bound_of_exact_backends(example_record):
    changed = {"exact": False, "accuracy": {"out": PASSED | {"max_error": 0.2}}}
    found = read_record(json.dumps(json.loads(example_record.to_json()) | changed).encode())
    assert found.accuracy["out"].passed


@pytest.mark.parametrize("value", ["1e400", "NaN", "9" * 5000, "[" * 2000 + "]" * 2000])
def test_number_or_nesting_that_json_readers_choke_on_is_refused(example_record, value):
    line = example_record.to_json().replace('"samples":[]', f'"samples":[{value}]')
    with pytest.raises(RecordError, match=r"not JSON|nested too deeply|a list must be a number"):
        Record.from_json(line.encode())


def test_lone_surrogate_becomes_a_question_mark_in_records_old_and_new(example_record):
    assert (
        Record.from_json(dataclasses.replace(example_record, error="half \ud800").to_json().encode()).error == "half ?"
    )
    old = json.dumps(json.loads(example_record.to_json()) | {"error": "half \udc80", "notes": ["\ud83d\ude00"]})
    assert "\\udc80" in old
    found = Record.from_json(old.encode())
    assert (found.error, found.notes) == ("half ?", ("\N{GRINNING FACE}",))


def test_what_could_not_be_read_again_is_not_made(example_record):
    with pytest.raises(RecordError, match=r"samples\.0 = inf"):
        dataclasses.replace(example_record, samples=(float("inf"),))
    facts = LossCurve(role="noise", losses=(1.0, float("inf")))
    with pytest.raises(RecordError, match=r"facts\.losses\.1 = inf must be a number"):
        checked(dataclasses.replace(example_record, kind="loss_curve", facts=facts))


@pytest.mark.parametrize(
    ("problem", "layout"),
    [
        ({"kind": "op_forward"}, "NHD"),
        ({"kind": "op_decode"}, "HND"),
        ({"kind": "op_decode", "kv_layout": "NHD"}, "NHD"),
    ],
)
def test_calls_of_before_kv_layout_read_as_they_were_measured(example_record, problem, layout):
    record = dataclasses.replace(example_record, kind=problem["kind"], problem=problem)
    assert read_record(record.to_json().encode()).problem == {**problem, "kv_layout": layout}


def test_names_of_earlier_versions_are_read_as_those_of_this_one(example_record):
    facts = ConformanceFacts(gradients=False, share=None, answer="yes", message="nothing differs.")
    environment = {"source": "a", "source_files": {"mine.py:f": "0123"}}
    record = dataclasses.replace(example_record, kind="conformance", environment=environment, facts=facts)
    line = json.loads(record.to_json())
    line["environment"]["own"] = line["environment"].pop("source_files")
    line["facts"]["said"] = line["facts"].pop("message")
    assert read_record(json.dumps(line).encode()) == record


def test_missing_field_is_refused(example_record):
    data = json.loads(example_record.to_json())
    del data["status"]
    with pytest.raises(RecordError, match="status"):
        Record.from_json(json.dumps(data).encode())
