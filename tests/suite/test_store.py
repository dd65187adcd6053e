from __future__ import annotations

import dataclasses
import json

import pytest

from attnsuite.suite import files
from attnsuite.suite.errors import InputError
from attnsuite.suite.store import MANIFEST, RECORDS, Manifest, RunStore, parse_records, read_manifest, read_record


@pytest.fixture
def other(example_record):
    return dataclasses.replace(example_record, key="c/chunked/cpu/native", requested="chunked")


def fill(folder, *records):
    with RunStore(folder, resume=False) as store:
        store.append(records)
        files.write_json(store.directory / "run.json", {})


def test_records_come_back(tmp_path, example_record, other):
    fill(tmp_path, example_record, other)
    with RunStore(tmp_path, resume=True) as store:
        assert store.records == (example_record, other)
        assert store.finished() == {example_record.key, other.key}
        assert store.warnings == ()


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_truncated_last_line_is_dropped_with_a_warning(tmp_path, cut, example_record, other):
    fill(tmp_path, example_record, other)
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes()[:-cut])
    with RunStore(tmp_path, resume=True) as store:
        assert store.records == (example_record,)
        assert "cut off" in store.warnings[0]
        store.append([other])
    assert parse_records(path)[0] == (example_record, other)


def test_damaged_last_line_is_dropped_and_a_damaged_middle_is_refused(tmp_path, example_record):
    fill(tmp_path, example_record)
    path = tmp_path / RECORDS
    good = path.read_text()
    path.write_text(good + "{}\n")
    records, _, warning = parse_records(path)
    assert (records, "damaged" in (warning or "")) == ((example_record,), True)
    path.write_text("{}\n" + good)
    with pytest.raises(InputError, match="line 1 of"):
        parse_records(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"key": "c/standard/cpu/native", "requested": "standard"}, "more than one record"),
        ({"problem": {"sequence": 128}}, r"means two problems \(c/standard/cpu/native and c/chunked/cpu/native\)"),
        # The last line was edited, and is not dropped.
        ({"mode": "interpret"}, r"line 2 of .* is not c/chunked/cpu/interpret, as its case"),
    ],
)
def test_records_that_contradict_each_other_are_refused(tmp_path, example_record, other, changes, sentence):
    fill(tmp_path, example_record, dataclasses.replace(other, **changes))
    with pytest.raises(InputError, match=sentence):
        RunStore(tmp_path, resume=True)


def test_second_run_into_one_directory_is_refused_until_the_first_ends(tmp_path):
    with RunStore(tmp_path, resume=False), pytest.raises(InputError, match="another run is writing"):
        RunStore(tmp_path, resume=False)
    with RunStore(tmp_path, resume=False):
        pass


IDENTITY = Manifest(
    verb="compile",
    suite="compile",
    options={"steps": 2},
    target="cpu",
    versions={"jax": "1"},
    source="a",
    git_revision=None,
    flags={},
)


def test_a_resumed_run_has_to_be_the_one_that_was_begun(tmp_path):
    with RunStore(tmp_path, resume=False) as store:
        store.settle(IDENTITY)
    with RunStore(tmp_path, resume=True) as store:
        store.settle(IDENTITY)
        with pytest.raises(InputError, match=r'cannot be resumed, .*: options was {"steps": 2}, is {"steps": 3}\.'):
            store.settle(dataclasses.replace(IDENTITY, options={"steps": 3}))
        for changes, said in (({"verb": "tune"}, "verb was compile, is tune"), ({"versions": {}}, "versions was")):
            with pytest.raises(InputError, match=said):
                store.settle(dataclasses.replace(IDENTITY, **changes))
    (tmp_path / MANIFEST).write_text('{"verb": "compile", "options": {"steps": []}}')
    with RunStore(tmp_path, resume=True) as store, pytest.raises(InputError, match=r"options\.steps = a list must be"):
        store.settle(IDENTITY)


def test_a_manifest_and_a_record_of_an_earlier_version_are_read_as_of_this_one(tmp_path, example_record):
    known = {name: value for name, value in dataclasses.asdict(IDENTITY).items() if name != "options"}
    earlier = {"kascade": {"top_k": 0.5}, "checkpoint": {"model": "text", "guide": True}}
    files.write_json(tmp_path / MANIFEST, known | earlier)
    found = read_manifest(tmp_path)
    assert found.options == {"top_k": 0.5}
    assert found.checkpoint == {"model": "text", "suite": IDENTITY.suite}
    files.write_json(tmp_path / MANIFEST, known | {"asked": IDENTITY.options})
    assert read_manifest(tmp_path) == IDENTITY  # and the run can be resumed
    fields = {name: value for name, value in json.loads(example_record.to_json()).items() if name != "figures"}
    line = json.dumps(fields | {"kv_bytes_per_token": 1024}).encode()
    assert read_record(line) == dataclasses.replace(example_record, figures={"kv_bytes_per_token": 1024})
