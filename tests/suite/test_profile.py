"""A profile is one file per reader, named after its cell, and never larger than a limit."""

import gzip
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from attnsuite.reports import timeline
from attnsuite.suite.grid import running
from attnsuite.suite.kinds.op_case import OpCase
from attnsuite.suite.measure import profile
from command import cell_of, context_of


@jax.jit
def doubled(x):
    return x + x


def sample():
    doubled(jnp.ones((8, 8))).block_until_ready()
    return 0.0


def test_a_profile_holds_what_ran_where_perfetto_and_xprof_look_for_it(tmp_path):
    profile.trace(sample, tmp_path / "raw")
    assert profile.keep(tmp_path / "raw", tmp_path, "a-cell") == ()
    events = json.loads(gzip.decompress((tmp_path / "a-cell.trace.json.gz").read_bytes()))["traceEvents"]
    assert any("doubled" in json.dumps(event) for event in events)
    assert (tmp_path / "plugins" / "profile" / "a-cell" / "a-cell.xplane.pb").stat().st_size > 0


def test_a_file_above_the_limit_is_not_kept_and_a_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "LARGEST", 10)
    profile.trace(sample, tmp_path / "raw")
    told = profile.keep(tmp_path / "raw", tmp_path / "kept", "a-cell")
    assert len(told) == 2
    assert all("not kept" in sentence for sentence in told)
    assert not (tmp_path / "kept").exists()


def test_profile_of_a_users_function_is_taken_in_the_folder_of_its_process(tmp_path):
    """It may be confined to that; the row is the path of a file, and a name has no folders."""

    def ask(seconds, function, key, raw):
        assert raw.parent == tmp_path / "its own"
        profile.trace(sample, raw)

    worker, folder = SimpleNamespace(ask=ask, folder=tmp_path / "its own"), tmp_path / "kept"
    case = OpCase(kind="op_forward", sequence=64, name="a-case")
    running.profile(running.Running(cell_of(case, "own/my.py:fn"), worker), context_of(profile=folder))
    assert [path.name for path in folder.glob("*.gz")] == ["a-case-own-my.py-fn.trace.json.gz"]


def test_nothing_is_kept_through_a_link(tmp_path):
    """The folder is that of a function of the user."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.trace.json.gz").symlink_to("/etc/hostname")
    assert profile.keep(tmp_path / "raw", tmp_path / "kept", "a-cell") == ()
    assert not (tmp_path / "kept").exists()


def write_trace(folder):
    thread = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "tf_XLAEigen/1"), (2, "python"))
    ]
    ran = [("ThunkExecutor::Execute", 1, 0, 9000), ("while.2", 1, 1000, 6000), ("fusion.3", 1, 2000, 1000),
           ("end: fusion.3", 1, 3000, 5), ("fusion.4", 1, 4000, 2000), ("call", 2, 0, 9000)]  # fmt: skip
    events = [{"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": at, "dur": us} for name, tid, at, us in ran]
    trace = folder / f"a-cell{timeline.SUFFIX}"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": thread + events}).encode()))
    return trace


def test_a_picture_shows_each_operation_while_it_is_the_innermost(tmp_path):
    trace = write_trace(tmp_path)
    bars = [(bar.operation, bar.start, bar.length) for bar in timeline.bars(trace.read_bytes())]
    pieces = [("while", 1, 1), ("fusion", 2, 1), ("while", 3, 1), ("fusion", 4, 2), ("while", 6, 1)]
    assert bars == pieces
    assert timeline.draw_profiles(tmp_path) == ()
    picture = timeline.picture_of(trace)
    assert picture.read_bytes().startswith(b"\x89PNG")
    before = picture.stat().st_mtime_ns
    timeline.draw_profiles(tmp_path)
    assert picture.stat().st_mtime_ns == before  # drawn once


def test_a_file_that_is_no_trace_is_told_and_the_others_are_drawn(tmp_path, monkeypatch):
    """A directory of profiles is the user's: another program's file there loses nobody's run."""
    monkeypatch.setattr(timeline, "LARGEST", 2**20)
    large = gzip.compress(b" " * 2**20 + b'{"traceEvents": []}')
    files = {"half": b"\x1f\x8b\x08", "large": large, "list": gzip.compress(b"[]"), "other": b"text"}
    for name, content in files.items():
        (tmp_path / f"{name}{timeline.SUFFIX}").write_bytes(content)
    trace = write_trace(tmp_path)
    told = timeline.draw_profiles(tmp_path)
    assert [sentence.split(" was not drawn")[0] for sentence in told] == [
        str(tmp_path / f"{name}{timeline.SUFFIX}") for name in files
    ]
    assert "unpacked it is larger than 1 MiB" in told[1]
    assert timeline.picture_of(trace).exists()
