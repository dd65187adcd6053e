from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.record import Record, RecordError, TensorError

numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(samples=st.lists(numbers), reasons=st.lists(st.text()), error=st.none() | numbers, word=st.text())
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
    assert Record.from_json(line) == record


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_what_is_no_record_is_refused_with_a_reason(line):
    with pytest.raises(RecordError, match=r"."):
        Record.from_json(line)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": 2}, "schema 2"),
        ({"status": "fine"}, "fine"),
        ({"kind": "op_sideways"}, "op_sideways"),
        ({"surprise": 1}, "surprise"),
        ({"samples": 3}, "."),
        ({"accuracy": [1]}, "."),
        ({"accuracy": {"out": {"max_error": 1.0}}}, "."),
    ],
)
def test_damaged_record_is_refused(example_record, change, match):
    with pytest.raises(RecordError, match=match):
        Record.from_json(json.dumps(json.loads(example_record.to_json()) | change))


def test_missing_field_is_refused(example_record):
    data = json.loads(example_record.to_json())
    del data["status"]
    with pytest.raises(RecordError, match="status"):
        Record.from_json(json.dumps(data))
