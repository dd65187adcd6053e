"""Shards of a run, and the run that they make together."""

from __future__ import annotations

import pytest

from attnsuite import reports
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid.run_grid import new_request
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.kinds import problem_of
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.merge import merge
from attnsuite.suite.store import MANIFEST, RECORDS, Manifest, RunStore, TextIdentity
from attnsuite.suite.suites import Shard, find_suite, parse_shard
from command import code_of, record_of

CASES = tuple(OpCase(kind="op_forward", sequence=length, heads=2, kv_heads=2) for length in (16, 32, 64, 128, 256))
ROWS = ("standard", "chunked")
MACHINE = {"cpu": "a CPU", "cores": 2, "device_kind": "cpu", "device_count": 1}
LIMITS = Limits(1, 1)


def manifest(cases, shard=None, **changes):
    fields = {"suite": "s", "backends": ROWS, "versions": {"jax": "1"}, "source": "a", "git_revision": None}
    fields |= {"target": "cpu", "flags": {}, "cells": len(ROWS) * len(cases), "shard": shard}
    return Manifest(cases=tuple(map(problem_of, cases)), **(fields | changes))


def record(case, row, **environment):
    samples = (1e-3, 1.1e-3, 0.9e-3 if row == "standard" else 0.5e-3)
    shared = MACHINE | {"session": case.name, "versions": {"jax": "1"}}
    return record_of(case, row, samples=samples, environment=shared | environment)


@pytest.fixture
def written(tmp_path):
    def write(name, cases, shard=None, records=None, machine=None, **changes):
        with RunStore(tmp_path / name, resume=False) as store:
            store.settle(manifest(cases, shard, **changes))
            store.append([record(case, row, **(machine or {})) for case in cases for row in ROWS][:records])
        return tmp_path / name

    return write


def test_merged_shards_are_the_run_of_all_cases(tmp_path, written):
    whole = written("whole", CASES)
    shards = [written(f"shard{i}", Shard(i, 3).select(CASES), f"{i}/3") for i in (3, 1, 2)]
    merge(shards, tmp_path / "merged")
    for name in (RECORDS, MANIFEST):
        assert (tmp_path / "merged" / name).read_bytes() == (whole / name).read_bytes()
    pages = [reports.render(folder).read_text() for folder in (whole, tmp_path / "merged")]
    assert pages[0] == pages[1]


def test_runs_of_other_cases_follow_each_other(tmp_path, written):
    merge([written("late", CASES[3:]), written("early", CASES[:3])], tmp_path / "merged")
    again = written("again", (*CASES[3:], *CASES[:3]))
    assert (tmp_path / "merged" / RECORDS).read_bytes() == (again / RECORDS).read_bytes()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"suite": "t"}, r"do not belong together \(suite: s and t\)"),
        ({"versions": {"jax": "2"}}, r"versions jax: 1 and 2"),
        ({"versions": {"jax": "1", "libtpu": "3"}}, r"versions libtpu: None and 3"),
        ({"source": "b"}, "source: a and b"),
        ({"target": "cuda:h100"}, "target: cpu and cuda:h100"),
        ({"machine": {"cpu": "another"}}, r"cpu: \['a CPU'\] and \['another'\]"),
        ({"machine": {"cores": 4}}, r"cores: \['2'\] and \['4'\]"),
        ({"machine": {"source_files": {"k.py:fn": "1"}}}, "source files: .*None.* and .*k.py:fn"),
        ({"backends": ("standard",)}, "backends: "),
        ({"text": TextIdentity(path="p", sha256="0")}, "text: None and "),
        ({"shard": "2/3"}, r"shards of different counts \(.*one is 1/2, .*other is 2/3\)"),
        ({"shard": None}, "no shard"),
        ({"shard": "1/2"}, "shard 2/2 is missing"),
        ({"records": 3}, r"other is not finished \(3 of its 4 cells have a record\); run attnsuite run --resume"),
        ({"cells": None}, "does not say how many cells"),
        ({"cases": CASES[:3]}, f"case {CASES[0].name} is in .*one and in .*other"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_runs_that_do_not_belong_together_are_refused(tmp_path, written, changes, sentence):
    one = written("one", CASES[::2], "1/2")
    other = written("other", **{"cases": CASES[1::2], "shard": "2/2"} | changes)
    with pytest.raises(InputError, match=sentence):
        merge([one, other], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_record_of_no_case_of_its_run_is_not_lost(tmp_path, written):
    one, other = written("one", CASES[:1]), written("other", CASES[1:])
    (one / RECORDS).write_text((one / RECORDS).read_text().replace(CASES[0].name, "else"))
    with pytest.raises(InputError, match=r"one has records of else, which run\.json does not name"):
        merge([one, other], tmp_path / "merged")


def test_a_run_is_not_merged_with_itself_nor_alone_nor_into_another(tmp_path, written):
    one, other = written("one", CASES[:1]), written("other", CASES[1:])
    for runs, out, sentence in (
        ([one, one], tmp_path / "new", "is in .*one and in .*one"),
        ([one], tmp_path / "new", "two runs or more"),
        ([one, other], other, "already has records"),
        ([one, tmp_path / "none"], tmp_path / "new", "none holds no records.jsonl"),
    ):
        with pytest.raises(InputError, match=sentence):
            merge(runs, out)


def test_shards_are_all_cases_each_once_and_whole_rows(tmp_path):
    shards = [
        new_request("quick", None, None, None, tmp_path, LIMITS, shard=parse_shard(f"{number}/3"))
        for number in (1, 2, 3)
    ]
    names = [case.name for shard in shards for case in shard.cases]
    assert sorted(names) == sorted(case.name for case in find_suite("quick").cases)
    assert len({shard.backends for shard in shards}) == 1
    assert all(shard.cases for shard in shards)


@pytest.mark.parametrize("words", ["0/2", "1", "1/0", "a/b", "1/2/3", "-1/2", "", "1/9999999"])
def test_what_is_no_shard_is_refused(words):
    with pytest.raises(InputError, match="must be i/n with i from 1 to n"):
        parse_shard(words)


def test_report_puts_shards_together_in_a_directory_of_their_own(tmp_path, written, capsys):
    one, other = written("one", CASES[:1]), written("other", CASES[1:])
    assert code_of("report", one, other, "--out", tmp_path / "whole") == 0
    assert f"report:  {tmp_path / 'whole' / 'report.md'}" in capsys.readouterr().out
    assert not (one / "report.md").exists()
