"""A profile is one file per reader, named after its cell, and never larger than a limit."""

import gzip
import json

import jax
import jax.numpy as jnp

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
