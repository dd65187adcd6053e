"""Policies from records, and a policy held against the records of other problems."""

import dataclasses
import json
from importlib import metadata

import pytest

from attnsuite.backends import Target, load_policy, resolve
from attnsuite.backends.devices import usable_cores
from attnsuite.suite.choosing import measured, score, sources_of
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds import make_case
from attnsuite.suite.kinds.attention_call import OpCase, spec_of
from command import code_of, record_of

HERE = str(Target.here())
ENVIRONMENT = {
    "versions": {"jax": metadata.version("jax"), "numpy": "0.0"},
    "cores": usable_cores(),
    "session": "one",
    "source": "0123",
}


@pytest.fixture
def write_run(tmp_path):
    """A factory of run directories: for each case the seconds of each backend, sampled ten times."""

    def write(name, cases, **changes):
        folder = tmp_path / name
        folder.mkdir()
        lines = []
        for case, cells in cases.items():
            for backend, seconds in cells.items():
                fields = {
                    "target": HERE, "environment": ENVIRONMENT,
                    "samples": tuple(seconds * (1 + 0.001 * i) for i in range(10)),
                    "memory": {"compiled_argument": 1, "compiled_output": 2, "compiled_temp": 4},
                }  # fmt: skip
                made = record_of(case, backend, **fields | changes)
                row = made.requested if made.devices == 1 else f"{made.requested}@{made.devices}"
                key = f"{case.name}/{row}/{made.target}/{made.mode}"
                lines.append(dataclasses.replace(made, key=key).to_json() + "\n")
        (folder / "records.jsonl").write_text("".join(lines))
        return folder

    return write


def op(length, **fields):
    return OpCase(kind="op_forward", sequence=length, **fields)


def test_policy_names_the_fastest_of_each_case_and_is_followed(write_run, tmp_path, capsys):
    run = write_run("run", {op(64): {"standard": 1.0, "chunked": 2.0}, op(256): {"standard": 4.0, "chunked": 2.0}})
    out = tmp_path / "policy.json"
    assert code_of("choose", run, "--out", out) == 0
    assert f"export ATTNSUITE_POLICY={out}" in capsys.readouterr().out
    told = json.loads(out.read_text())
    (source,) = told["sources"]
    choices = source.pop("choices")
    assert [choice["backend"] for choice in choices] == ["standard", "chunked"]
    assert choices[0] == {
        "case": "forward-s64-h8k8-d64-f32", "backend": "standard", "memory": 7,
        "problem": {"batch": 1, "query_length": 64, "key_value_length": 64, "num_heads": 8, "num_kv_heads": 8,
                    "head_dim": 64, "is_causal": True, "needs_grad": False},
    }  # fmt: skip
    assert choices[1]["ratio"] == pytest.approx(0.5)
    assert source == {
        "name": str(run), "device": HERE, "cores": usable_cores(), "suite": "s", "date": "2026-11-20", "digest": "0123",
        "versions": {"jax": metadata.version("jax")},  # of numpy no backend's speed depends
    }  # fmt: skip
    found = [resolve("auto", spec_of(op(length)), policy=out).backend.name for length in (64, 80, 200, 256)]
    assert found == ["standard", "standard", "chunked", "chunked"]


@pytest.mark.parametrize(
    "changes",
    [
        {"exact": False},
        {"mode": "fallback", "requested": "kvax"},
        {"mode": "interpret"},
        {"devices": 2},
        {"status": "wrong"},
        {"requested": "torch", "resolved": "torch"},
        {"requested": "my.py:fn", "resolved": "my.py:fn"},
    ],
    ids=str,
)
def test_only_exact_backends_that_ran_here_are_chosen(write_run, changes):
    with pytest.raises(InputError, match="has no speed of an exact backend"):
        sources_of([write_run("run", {op(64): {"standard": 1.0}}, **changes)])


def test_cells_of_another_session_are_not_compared(write_run):
    run = write_run("run", {op(64): {"standard": 1.0, "chunked": 2.0}})
    other = write_run("other", {op(64): {"flash_cpu": 0.1}}, environment=ENVIRONMENT | {"session": "two"})
    path = run / "records.jsonl"
    path.write_text(path.read_text() + (other / "records.jsonl").read_text())
    assert [(found.winner, set(found.cells)) for found in measured(run)] == [("standard", {"standard", "chunked"})]


def test_run_whose_last_record_is_cut_off_is_refused(write_run):
    path = write_run("a", {op(64): {"standard": 2.0, "chunked": 1.0}}) / "records.jsonl"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(InputError, match=r"the last line of records\.jsonl is damaged"):
        sources_of([path.parent])


def test_later_run_replaces_the_same_problem_of_an_earlier_one(write_run):
    runs = [write_run(name, {op(64): {"standard": 1.0, "chunked": time}}) for name, time in (("a", 0.5), ("b", 2.0))]
    assert [(source.name, source.choices[0].backend) for source in sources_of(runs)] == [(str(runs[1]), "standard")]


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"versions": {"jax": "0.9"}}, "jax 0.9"),
        ({"versions": ENVIRONMENT["versions"] | {"tokamax": "0.0.17"}}, "tokamax 0.0.17"),
        ({"cores": usable_cores() + 1}, "the number of cores"),
    ],
)
def test_runs_of_two_machines_are_two_sources_and_one_run_of_both_is_refused(write_run, environment, what):
    run = write_run("a", {op(64): {"standard": 1.0}})
    other = write_run("b", {op(256): {"standard": 1.0}}, environment=ENVIRONMENT | environment)
    one, two = sources_of([run, other])
    assert (one.cores, one.versions) != (two.cores, two.versions)
    (run / "records.jsonl").write_text((run / "records.jsonl").read_text() + (other / "records.jsonl").read_text())
    with pytest.raises(InputError, match=f"a was measured with {what}.*; choose from runs that each have one device"):
        sources_of([run])


def test_a_case_of_two_devices_in_one_run_is_refused(write_run):
    """Of the two cells of the case one would be left out before devices are compared."""
    run = write_run("a", {op(64): {"standard": 1.0}})
    other = write_run("b", {op(64): {"standard": 1.0}}, target="cuda:h100", environment=ENVIRONMENT | {"session": "2"})
    (run / "records.jsonl").write_text((run / "records.jsonl").read_text() + (other / "records.jsonl").read_text())
    with pytest.raises(InputError, match=r"a was measured with the device cuda:h100 and with cpu.*; choose from runs"):
        sources_of([run])


def test_model_of_one_attention_type_is_a_problem_and_a_call_of_the_same_problem_goes_before(write_run):
    case = make_case({"kind": "model_decode", "model": "debug", "sequence": 64, "new_tokens": 8})
    (found,) = measured(write_run("run", {case: {"standard": 1.0}}))
    assert (found.spec.query_length, found.spec.key_value_length) == (1, 72)
    assert found.spec.has_seq_lengths
    prefill = make_case({"kind": "model_prefill", "model": "debug", "sequence": 64})
    (model,) = measured(write_run("prefill", {prefill: {"standard": 1.0}}))
    call = op(64, heads=model.spec.num_heads, kv_heads=model.spec.num_kv_heads, head_dim=model.spec.head_dim)
    both = write_run("both", {prefill: {"standard": 1.0, "chunked": 2.0}, call: {"standard": 2.0, "chunked": 1.0}})
    assert [choice.backend for source in sources_of([both]) for choice in source.choices] == ["chunked"]


@pytest.mark.parametrize(("held_out", "code"), [(0.9, 0), (1.2, 3)])
def test_check_holds_auto_with_the_policy_against_the_best_fixed_backend(write_run, tmp_path, capsys, held_out, code):
    run = write_run("run", {op(64): {"standard": 1.0, "chunked": 2.0}, op(256): {"standard": 4.0, "chunked": 2.0}})
    check = write_run("check", {op(80): {"standard": held_out, "chunked": 1.0}})
    assert code_of("choose", run, "--out", tmp_path / "p.json", "--check", check) == code
    best = "standard" if held_out < 1 else "chunked"
    verdict = "within" if code == 0 else "NOT within"
    factor = max(held_out, 1.0) if code else 1.0
    told = f"auto with the policy takes {factor:.3f} times as long as {best}, the best fixed backend: {verdict} 1.05."
    assert told in capsys.readouterr().out


def test_sums_of_a_check(write_run, tmp_path):
    run = write_run("run", {op(64): {"standard": 1.0, "chunked": 2.0}, op(256): {"standard": 4.0, "chunked": 2.0}})
    check = write_run(
        "check",
        {
            op(80): {"standard": 1.0, "chunked": 3.0},
            op(200): {"standard": 3.0, "chunked": 1.5},
            op(512): {"standard": 9.0},  # beyond the policy: what auto lists, which is all that has a time
        },
    )
    out = tmp_path / "p.json"
    code_of("choose", run, "--out", out)
    found = score(load_policy(out), check)
    step = 1.0045  # the median of ten samples that grow by a thousandth
    assert found.with_policy == pytest.approx(step * (1.0 + 1.5 + 9.0))
    assert found.without == pytest.approx(step * (3.0 + 1.5 + 9.0))
    assert found.fixed == pytest.approx({"standard": step * 13.0, "chunked": step * 13.5})
    assert found.best_each == pytest.approx(step * 11.5)
    assert found.over_fixed == pytest.approx(11.5 / 13.0)


def test_check_refuses_a_run_of_another_machine(write_run, tmp_path, capsys):
    run = write_run("run", {op(64): {"standard": 1.0}})
    other = write_run("other", {op(64): {"standard": 1.0}}, target="cpu:Another Processor")
    assert code_of("choose", run, "--out", tmp_path / "p.json", "--check", other) == 2
    assert "was measured with another device (cpu:Another Processor)" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_policy_that_exists_is_extended_and_what_is_no_policy_is_left_alone(write_run, tmp_path, capsys):
    first = write_run("first", {op(64): {"standard": 1.0}, op(256): {"standard": 1.0}})
    second = write_run("second", {op(256): {"standard": 2.0, "chunked": 1.0}})
    out = tmp_path / "policy.json"
    assert code_of("choose", first, "--out", out) == code_of("choose", second, "--out", out) == 0
    assert "1 more choices were in the file, and stay" in capsys.readouterr().out
    sources = load_policy(out).sources
    assert [(source.name, len(source.choices)) for source in sources] == [(str(first), 1), (str(second), 1)]
    out.write_text('{"schema": 1, "device": "cpu", "cases": []}')
    assert code_of("choose", first, "--out", out) == 2
    assert "would be extended, but schema in policy" in capsys.readouterr().err
    assert out.read_text().startswith('{"schema": 1')
