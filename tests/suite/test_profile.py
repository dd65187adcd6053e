"""A profile is one file per reader, named after its cell, and never larger than a limit."""

import gzip
import json

import jax
import jax.numpy as jnp

from attnsuite.reports import timeline
from attnsuite.suite.measure import profile


@jax.jit
def doubled(x):
    return x + x


def sample():
    doubled(jnp.ones((8, 8))).block_until_ready()
    return 0.0


def test_a_profile_holds_what_ran_where_perfetto_and_xprof_look_for_it(tmp_path):
    assert profile.profile(sample, tmp_path, "a-cell") == ()
    events = json.loads(gzip.decompress((tmp_path / "a-cell.trace.json.gz").read_bytes()))["traceEvents"]
    assert any("doubled" in json.dumps(event) for event in events)
    assert (tmp_path / "plugins" / "profile" / "a-cell" / "a-cell.xplane.pb").stat().st_size > 0


def test_a_file_above_the_limit_is_not_kept_and_a_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "LARGEST", 10)
    told = profile.profile(sample, tmp_path, "a-cell")
    assert len(told) == 2
    assert all("not kept" in sentence for sentence in told)
    assert not list(tmp_path.iterdir())


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


def test_a_file_that_is_no_trace_is_told_and_the_others_are_drawn(tmp_path):
    """A directory of profiles is the user's: another program's file there loses nobody's run."""
    for name, content in (("half", b"\x1f\x8b\x08"), ("list", gzip.compress(b"[]")), ("other", b"text")):
        (tmp_path / f"{name}{timeline.SUFFIX}").write_bytes(content)
    trace = write_trace(tmp_path)
    told = timeline.draw_profiles(tmp_path)
    assert [sentence.split(" was not drawn")[0] for sentence in told] == [
        str(tmp_path / f"{name}{timeline.SUFFIX}") for name in ("half", "list", "other")
    ]
    assert timeline.picture_of(trace).exists()
