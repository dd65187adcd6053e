"""What ``auto`` does with a policy: which choices it follows, and when it does not, why."""

import dataclasses
import json
import sys
import warnings
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import pytest

from attnsuite.backends import (
    Layout,
    PolicyNotUsedWarning,
    Target,
    attention,
    attention_fn,
    load_policy,
    registry,
    resolve,
)
from attnsuite.backends.choices import SHIPPED, VARIABLE, Choice, Source, merged, problem_of, to_json
from attnsuite.backends.devices import usable_cores
from declared import sized

pytestmark = pytest.mark.newest

HERE = Target.here()
SPEC = sized(512, N=8, K=2, is_causal=True)
LISTED = resolve("auto", SPEC, HERE).backend.name


def long(length, **changes):
    return dataclasses.replace(SPEC, query_length=length, key_value_length=length, **changes)


def case(name, spec, backend, **changes):
    described = {"case": name, "problem": problem_of(spec), "backend": backend}
    return described | {"ratio": 0.5, "interval": [0.4, 0.6], "memory": 1024} | changes


def source(*choices, **changes):
    made = {"name": "runs/a", "device": str(HERE), "cores": usable_cores()}
    return made | {"versions": {"jax": metadata.version("jax")}, "choices": list(choices)} | changes


def content(*sources, **changes):
    return {"schema": 2, "sources": list(sources)} | changes


@pytest.fixture
def write(tmp_path):
    def write(*choices, more=(), **changes):
        path = tmp_path / "policy.json"
        path.write_text(json.dumps(content(source(*choices, **changes), *more)))
        return path

    return write


@pytest.fixture
def policy(write):
    """The list's first is never the winner, so that following the policy shows."""
    return write(case("short", SPEC, "standard"), case("long", long(4096), "chunked"))


def test_measured_problem_gets_the_measured_backend_and_says_so(policy):
    found = resolve("auto", SPEC, HERE, policy=policy)
    assert found.backend.name == "standard"
    assert "case short of run runs/a (standard, 0.5 times the time of standard); the same sizes" in found.policy


@pytest.mark.parametrize(("length", "name"), [(513, "short"), (1400, "short"), (1500, "long"), (4096, "long")])
def test_between_measured_lengths_the_nearer_decides(policy, length, name):
    found = resolve("auto", long(length), HERE, policy=policy)
    assert f"case {name} " in found.policy
    assert length == 4096 or f"keys there, {length} here" in found.policy


def test_batch_and_heads_are_free_and_named(policy):
    told = resolve("auto", long(512, batch=4, num_heads=32, num_kv_heads=8), HERE, policy=policy).policy
    assert "1 sequences there, 4 here; 8 heads there, 32 here" in told


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query_length": 8192, "key_value_length": 8192}, "8192 keys are outside of what was measured"),
        ({"query_length": 256, "key_value_length": 256}, "256 keys are outside"),
        ({"dtype": "bfloat16"}, "differs in dtype (float32, here bfloat16)"),
        ({"head_dim": 128, "value_head_dim": 128}, "differs in head_dim (64, here 128), value_head_dim (64, here 128)"),
        ({"needs_grad": False}, "differs in needs_grad (True, here False)"),
        ({"local_window_size": (64, 0)}, "differs in local_window_size (None, here (64, 0))"),
        ({"has_segment_ids": True}, "differs in has_segment_ids (False, here True)"),
        ({"num_kv_heads": 8}, "differs in query heads per KV head (4, here 1)"),
        ({"query_length": 1}, "differs in query_length (as many as keys, here 1)"),
        ({"scale": 0.5}, "differs in scale (None, here its own)"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_unmeasured_problem_gets_the_list_and_the_reason(policy, changes, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a problem beyond the policy is nothing to warn of
        found = resolve("auto", dataclasses.replace(SPEC, **changes), HERE, policy=policy)
    assert found.backend == resolve("auto", dataclasses.replace(SPEC, **changes), HERE).backend
    assert reason in found.policy


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu:Another Processor"}, "it was made on cpu:Another Processor, and this is cpu:"),
        ({"cores": usable_cores() + 1}, f"it was made with {usable_cores() + 1} cores of this processor"),
        ({"versions": {"jax": "0.1"}}, "it was made with jax 0.1, and "),
        ({"versions": {"no-such-package": "2"}}, "it was made with no-such-package 2, and none is here"),
    ],
    ids=["device", "cores", "version", "absent"],
)
def test_policy_of_another_machine_or_version_is_refused_with_the_reason(write, changes, reason):
    path = write(case("short", SPEC, "standard"), **changes)
    with pytest.warns(PolicyNotUsedWarning, match=reason.replace(".", r"\.")):
        found = resolve("auto", SPEC, HERE, policy=path)
    assert found.backend.name == LISTED
    assert reason in found.policy


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("gone", "its backend gone is not registered here"),
        ("kascade", "its backend kascade is approximate, and auto takes exact ones only"),
        ("splash", "splash"),
    ],
)
def test_backend_that_auto_may_not_take_is_not_taken(write, backend, reason):
    spec = dataclasses.replace(SPEC, needs_grad=False)
    found = resolve("auto", spec, HERE, policy=write(case("short", spec, backend)))
    assert found.backend.exact
    assert found.backend.name != backend
    assert reason in found.policy


def _text(**changes):
    return json.dumps(content(source(case("short", SPEC, "standard", **changes))))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be used"),
        ('{"schema":2,\n"sources":[\n}', "invalid character (byte 25), line 3; make it"),
        (json.dumps(content(schema=1)), "schema in policy"),
        (json.dumps(content(extra=1)), "unknown field `extra`"),
        (_text(ratio=-1), "sources[0].choices[0].ratio in policy"),
        (_text(options={"block_q": {}}), "sources[0].choices[0].options[...] in policy"),
        (_text(problem={"batch": 1}), "sources[0].choices[0], case 'short': the problem lacks the field query_length"),
        (_text(problem=problem_of(SPEC) | {"sinks_of": 1}), "has no field 'sinks_of'; its fields are batch, "),
        (_text(problem=problem_of(SPEC) | {"dtype": "float8"}), "dtype='float8' is not supported"),
    ],
)
def test_damaged_policy_is_refused_with_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the sentence is checked below)
        load_policy(path)
    assert sentence in str(refused.value)
    assert str(refused.value).endswith("make it with attnsuite choose (backends) or attnsuite tune (options).")


def test_missing_file_and_a_backend_by_name_are_refused(policy, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\); give a file of attnsuite"):
        resolve("auto", SPEC, HERE, policy=tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"is for backend='auto'; leave it out where backend='chunked' is named"):
        resolve("chunked", SPEC, HERE, policy=policy)


def test_spec_survives_the_file(write):
    spec = long(64, local_window_size=(63, 0), logits_soft_cap=30.0, value_head_dim=32, has_bias=True, scale=0.5)
    assert [each.spec for each in load_policy(write(case("all", spec, "standard"))).entries] == [spec]


def test_environment_names_a_policy_and_says_so_where_it_is_damaged(policy, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(policy))
    assert resolve("auto", SPEC, HERE).backend.name == "standard"
    assert resolve("chunked", SPEC, HERE).policy == ""  # a backend by name follows no policy
    policy.write_text("")
    with pytest.raises(ValueError, match=r"^\$ATTNSUITE_POLICY: policy "):
        resolve("auto", SPEC, HERE)


def test_file_is_read_once_and_again_when_it_changed(write, monkeypatch):
    path, read = write(case("first", SPEC, "standard")), []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self) or real(self))
    for _ in range(3):
        assert resolve("auto", SPEC, HERE, policy=path).backend.name == "standard"
    assert read == [path]
    write(case("the second", SPEC, "chunked"))
    assert resolve("auto", SPEC, HERE, policy=path).backend.name == "chunked"
    assert read == [path] * 2


def test_attention_and_attention_fn_follow_the_policy(write, monkeypatch):
    problem = sized(8, H=8, is_causal=True)
    path = write(case("tiny", problem, "standard"))
    found = []

    def watched(*arguments, **words):
        found.append(resolve(*arguments, **words))
        return found[-1]

    monkeypatch.setattr(sys.modules[attention.__module__], "resolve", watched)
    x = jnp.zeros((1, 8, 2, 8))
    attention(x, x, x, is_causal=True, policy=path)
    attention_fn("auto", is_causal=True, policy=path)(x, x, x)
    assert [each.backend.name for each in found] == ["standard"] * 2


SIZES = {"block_q": 64, "block_kv": 64, "heads_per_tile": 2}
FORWARD = dataclasses.replace(SPEC, needs_grad=False)


def test_auto_takes_the_options_of_its_backend_and_those_of_the_caller_hold_over_them(write):
    path = write(case("short", FORWARD, "chunked"), case("tuned", FORWARD, "chunked", options=SIZES))
    found = resolve("auto", FORWARD, HERE, policy=path)
    assert found.policy.endswith("The options of chunked are those of case tuned of runs/a.")
    sizes = [
        registry.get("chunked")._program(FORWARD, Layout(), HERE, dict(found.mode_and(given)[1])).sizes
        for given in (None, {"block_q": 128})
    ]
    assert [(each.block_q, each.block_kv, each.heads_per_tile) for each in sizes] == [(64, 64, 2), (128, 64, 2)]


def test_options_are_not_for_a_problem_with_a_mask_array_that_they_were_measured_without(write):
    path = write(case("tuned", FORWARD, LISTED, options={}))
    found, masked = (
        resolve("auto", dataclasses.replace(FORWARD, has_mask=has_mask), HERE, policy=path)
        for has_mask in (False, True)
    )
    assert found.backend == masked.backend
    assert (found.tuned is None, masked.tuned) == (False, None)


@pytest.mark.parametrize("stale", [{"versions": {"jax": "0.1"}}, {"device": "cpu:Another"}], ids=["version", "device"])
def test_each_source_holds_for_its_own_device_and_versions(write, stale):
    other = source(case("other", SPEC, "chunked"), case("tuned", SPEC, "standard", options={"a": 1}), **stale)
    found = resolve("auto", SPEC, HERE, policy=write(case("short", SPEC, "standard"), more=[other]))
    assert (found.backend.name, found.tuned) == ("standard", None)
    path = write(case("tuned", SPEC, LISTED, options={}), more=[other])
    with pytest.warns(PolicyNotUsedWarning, match="it was made "):  # the backends are stale, the options are not
        assert resolve("auto", SPEC, HERE, policy=path).tuned is not None


def test_later_choice_replaces_that_of_the_same_problem_device_and_kind(tmp_path):
    def made(name, backend, device="cpu", **fields):
        choice = Choice(case=name, problem=problem_of(SPEC), backend=backend, **fields)
        return Source(name=name, device=device, choices=(choice,))

    first = made("a", "standard"), made("gpu", "standard", "cuda:h100"), made("tuned", "chunked", options={})
    later = made("b", "chunked"), made("other", "kvax", options={}), made("c", "chunked", options={})
    together = merged([*first, *later])
    assert [each.name for each in together] == ["gpu", "b", "other", "c"]
    (tmp_path / "policy.json").write_text(to_json(together))
    assert load_policy(tmp_path / "policy.json").sources == together


def test_shipped_file_is_as_it_would_be_written_again():
    assert to_json(load_policy(SHIPPED).sources) == SHIPPED.read_text(encoding="utf-8")
