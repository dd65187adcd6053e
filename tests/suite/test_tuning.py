"""attnsuite tune: every candidate judged before it is timed, failures kept, a table that plans read."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from attnsuite import reports
from attnsuite.backends import FEATURES, Layout, Takes, Target, load_policy, registry
from attnsuite.backends.tunable import KernelBuild
from attnsuite.reports.pages import tuning as page
from attnsuite.suite import choosing, compile_run, diagnosis, tuning
from attnsuite.suite.choosing import POLICY
from attnsuite.suite.errors import CellFailure, InputError
from attnsuite.suite.grid import references
from attnsuite.suite.grid.progress import ProgressDisplay
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.kinds import checked, problem_of
from attnsuite.suite.kinds.attention_call import ATTENTION, OpCase, spec_of
from attnsuite.suite.kinds.tuning_case import Trial, Trials
from attnsuite.suite.store import RECORDS, parse_records
from command import WorkerHere, code_of, record_of

CASE = OpCase(kind="op_forward", sequence=192, heads=2, kv_heads=2)
CHUNKED = registry.get("chunked")


class Candidates:
    """Chunked, with these block sizes to try."""

    name, exact = "chunked", True

    def __init__(self, *candidates, spoil=None):
        self._candidates, self._spoil = candidates, spoil

    def takes(self, target, mode):
        return CHUNKED.takes(target, mode)

    def plan(self, spec, layout, *, target, mode="native", options=None):
        plan = CHUNKED.plan(spec, layout, target=target, mode=mode, options=options)
        if options != self._spoil:
            return plan
        return type(plan)(lambda *x: (plan.attend(*x)[0] * 1.01, ()))

    def defaults(self, spec, target, given):
        return {"block_q": 64, "block_kv": 64}

    def candidates(self, spec, target, given):
        return self._candidates


def try_all(monkeypatch, tmp_path, backend):
    monkeypatch.setattr(tuning.registry, "get", lambda _: backend)
    ATTENTION.write_reference(CASE, tmp_path / "reference.npz", None, None)
    return tuning.try_candidates(CASE, "chunked", tmp_path / "reference.npz", {})


def test_defaults_come_first_and_failures_are_kept_with_their_error(monkeypatch, tmp_path):
    tried = try_all(monkeypatch, tmp_path, Candidates({"block_q": 64, "block_kv": 64}, {"block_q": 13}))
    assert [attempt.options for attempt in tried] == [{"block_q": 64, "block_kv": 64}, {"block_q": 13}]
    assert len(tried[0].samples) == tuning.FIRST_ROUNDS + tuning.LAST_ROUNDS
    assert tried[1].samples == ()
    assert "block_q=13 is not accepted" in tried[1].error


def test_candidate_with_wrong_numbers_is_never_timed(monkeypatch, tmp_path):
    spoilt = {"block_q": 128, "block_kv": 128}
    tried = try_all(monkeypatch, tmp_path, Candidates(spoilt, spoil=spoilt))
    assert "wrong numbers" in tried[1].error
    assert tried[1].samples == ()


@pytest.mark.thorough
def test_approximate_backend_is_judged_where_it_selects_everything(tmp_path):
    """Its own result differs from the oracle by far; its kernels are right."""
    ATTENTION.write_reference(CASE, tmp_path / "reference.npz", None, None)
    given = {"tile_size": 16, "query_tile": 16, "min_keys": 0, "top_k": 0.125}
    default, native = tuning.try_candidates(CASE, "kascade", tmp_path / "reference.npz", given)
    assert (default.options, default.error) == ({"kernel": "xla"}, None)
    assert len(default.samples) == tuning.FIRST_ROUNDS + tuning.LAST_ROUNDS
    assert native.options == {"kernel": "flash_cpu"}
    assert native.error is None or "flash_cpu kernels do not load here" in native.error


def test_option_that_is_given_is_not_tried_and_a_wrong_one_is_refused(tmp_path):
    ATTENTION.write_reference(CASE, tmp_path / "reference.npz", None, None)
    (only,) = tuning.try_candidates(CASE, "kascade", tmp_path / "reference.npz", {"kernel": "xla"})
    assert only.options == {}
    with pytest.raises(InputError, match="--options: kascade: kernel='mlx' is not accepted"):
        tuning.try_candidates(CASE, "kascade", tmp_path / "reference.npz", {"kernel": "mlx"})


def test_candidate_that_ends_the_compiler_has_another_compiler_after_it(monkeypatch):
    """Splash for a TPU: of the compiled ones the one with the fewest steps wins, whatever comes first."""
    started = []

    class Compiler(WorkerHere):
        def __init__(self, *_):
            started.append(self)

        def ask(self, seconds, function, case, name, target, options, given, dump):
            if options["block_kv"] == 1024:
                raise CellFailure("timeout", "no answer")
            work = {"steps": 4096 // options["block_q"], "loaded_bytes": 1, "buffer_bytes": 1}
            kernel = {"kernel": "attend", "step_bundles": options["block_kv"], "grid_steps": work["steps"]}
            counts = {"bundles": 9, "mxu_bundles": 1, "fills": 0, "spills": 0, "vector_bytes": 0}
            assert dump.is_dir()
            return {"options": options, "error": None, "work": work, "schedules": [kernel | counts]}

    monkeypatch.setattr(compile_run, "Worker", Compiler)
    monkeypatch.setattr(tuning.topologies, "missing", lambda _: None)
    case = OpCase(kind="op_forward", sequence=1024, dtype="bfloat16")
    tried = tuning.rank_candidates(case, "splash", Target("tpu", "v5e"), {"block_kv_compute": 256}, Limits(60, 2**33))
    assert tried[0].options == {"block_q": 512, "block_kv": 512}
    assert {t.options["block_kv"] for t in tried if t.error} == {1024}
    assert len(started) == 1 + sum(t.error is not None for t in tried[:-1])
    record = checked(dataclasses.replace(made_up([1.0]), mode="compile", facts={"tried": tried}))
    assert choosing.winner(record)[0].options == {"block_q": 1024, "block_kv": 256}
    assert "1024 (4096)" in page.files([record], Path())["report.md"]


@pytest.mark.parametrize(("kind", "block"), [("v6e", 1024), ("v5e", 4096)])
def test_expected_time_orders_candidates_where_one_is_known_and_else_the_fewest_steps(kind, block):
    """Causal, 4096 tokens: one block of 4096 is one step, half of whose pairs are hidden."""
    case = OpCase(kind="op_forward", sequence=4096, head_dim=128, dtype="bfloat16")
    tried = []
    for size in (512, 1024, 4096):
        options = {"block_q": size, "block_kv": size, "block_kv_compute": 512}
        work = registry.get("splash").work(spec_of(case), Target("tpu", kind), options)
        tried.append({"options": options, "error": None, "work": dataclasses.asdict(work)})
    record = made_up([1.0])
    changes = {"problem": problem_of(case) | {"kind": "tuning", "op": case.kind}, "target": f"tpu:{kind}"}
    record = dataclasses.replace(record, **changes, requested="splash", mode="compile", facts={"tried": tried})
    choice = choosing.tuned_choice(checked(record))
    assert choice.options["block_q"] == block
    assert ("expected_time_over_default" in choice.details) == (kind == "v6e")
    assert ("(± 2.9%)" in page.files([checked(record)], Path())["report.md"]) == (kind == "v6e")


def made_up(*samples):
    """A record of candidates with these samples, the defaults first."""
    tried = tuple(Trial(options={"n": i}, samples=tuple(s)) for i, s in enumerate(samples))
    tuned_case = {"kind": "tuning", "problem": problem_of(CASE) | {"kind": "tuning", "op": CASE.kind}}
    return record_of(CASE, "chunked", target="cpu:a CPU", facts=Trials(tried=tried), **tuned_case)


def test_winner_must_be_measurably_faster_than_the_defaults():
    def options(*samples):
        return choosing.tuned_choice(made_up(*samples)).options

    level, faster = [1.0, 1.1] * 6, [0.8, 0.9] * 6
    assert options(level, faster) == {"n": 1}
    assert options(level, [1.1, 0.99] * 6) == {"n": 0}
    assert options(level, [0.5] * 3) == {"n": 0}  # left out after the first look


def test_choice_says_the_problem_and_how_much_faster_it_is():
    found = choosing.tuned_choice(made_up([1.0, 1.1] * 6, [0.8, 0.9] * 6))
    assert found.problem == {
        "batch": 1, "query_length": 192, "key_value_length": 192, "num_heads": 2, "num_kv_heads": 2, "head_dim": 64,
        "is_causal": True, "needs_grad": False,
    }  # fmt: skip
    assert found.ratio == pytest.approx(0.809, abs=1e-3)
    assert found.details == {"mode": "native", "tried": 2}


def test_policy_is_written_and_read_back(tmp_path, monkeypatch):
    """Candidates are timed in a process of their own; the machine and the reference are looked at in this one."""
    for module in (diagnosis, references):
        monkeypatch.setattr(module, "Worker", WorkerHere)
    out, words = tmp_path / "out", "tune --backends chunked --cases forward-s512-h8k2-d64-bf16"
    words += " --options block_q=128,block_kv=256"  # which leaves the heads of a tile to be tried
    assert code_of(*words.split(), "--out", out) == 0
    (found,) = load_policy(out / POLICY).entries
    assert (found.choice.backend, found.source.device) == ("chunked", str(Target.here()))
    assert found.source.name == f"attnsuite {words} --out {out}"
    spec = spec_of(OpCase(kind="op_forward", sequence=512, kv_heads=2, dtype="bfloat16"))
    CHUNKED.plan(spec, Layout(), target=Target.here(), options={"tuned": str(out / POLICY)})
    assert found.spec == spec
    (record,) = parse_records(out / RECORDS)[0]
    assert len(record.facts.tried) == found.choice.details["tried"] > 1
    assert "| forward-s512-h8k2-d64-bf16 | chunked" in (out / "report.md").read_text()


def test_cells_are_kept_as_they_are_tuned_and_resumed(tmp_path, monkeypatch, capsys):
    """An interrupted command has each finished cell once; the table is made from all of them."""
    begun = []

    def measure(case, *_):
        begun.append(case.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return [{"options": {"n": 0}, "samples": [1.0] * 12, "error": None}]

    def command(*words):
        return code_of("tune", "--backends", "chunked", "--cases", "forward-s512-*-f32", "--out", tmp_path, *words)

    monkeypatch.setattr(tuning, "_measure", measure)
    monkeypatch.setattr(tuning, "Worker", WorkerHere)
    monkeypatch.setattr(diagnosis, "Worker", WorkerHere)
    assert command() == 130
    before = (tmp_path / RECORDS).read_bytes()
    assert before.count(b"\n") == 1
    assert not (tmp_path / POLICY).exists()
    assert command() == 2
    assert command("--resume") == 0
    assert (tmp_path / RECORDS).read_bytes().startswith(before)
    names = ["forward-s512-h8k8-d64-f32", "forward-s512-h8k2-d64-f32"]
    assert begun == [*names, names[1]]
    code_of("run", "--resume", "--out", tmp_path)
    assert "go on with the same words and --resume." in capsys.readouterr().err
    assert [found.choice.case for found in load_policy(tmp_path / POLICY).entries] == names
    assert code_of("choose", tmp_path, "--out", tmp_path / "chosen.json") == 0
    assert "chunked n=0" in capsys.readouterr().out
    written, chosen = (load_policy(tmp_path / name).entries for name in (POLICY, "chosen.json"))
    assert [found.choice for found in chosen] == [found.choice for found in written]


# Block size -> spilled bytes and shared memory of the kernel; 256 does not fit, 512 is not known to the compiler.
BUILDS = {32: (0, 1000), 64: (0, 2000), 128: (40, 3000), 256: (0, 900_000)}


class Compiles(Candidates):
    """A backend whose kernels are compiled for GPUs that are not here."""

    def takes(self, target, mode):
        return Takes(features=frozenset(FEATURES), dtypes=("bfloat16", "float16"))

    def defaults(self, spec, target, given):
        return {"block_size": 32}

    def compile_kernels(self, spec, target, options=None):
        spilled, shared = BUILDS[options["block_size"]]
        shared *= options.get("num_stages", 1)
        error = "does not fit" if shared > 200_000 else None
        sizes = {
            "spilled_bytes": spilled,
            "shared_bytes": shared,
            "registers": 32,
            "blocks": 50 * options["block_size"],
        }
        return (KernelBuild(name="kernel", configuration={"num_warps": 8}, error=error, **sizes),)


def tune_for_h100(monkeypatch, tmp_path, dtype):
    environment = {"cpu": "a CPU", "target": "cpu:a CPU", "versions": {}, "source": "", "flags": {}}
    monkeypatch.setattr(tuning, "examine_here", lambda *_: {"environment": environment})
    backend = Compiles(*({"block_size": size} for size in (32, 64, 128, 256, 512)))
    monkeypatch.setattr(tuning.registry, "get", lambda _: backend)
    request = tuning.TuneGrid(
        backends=("chunked",),
        cases=(dataclasses.replace(CASE, dtype=dtype, name=""),),
        target=Target("cuda", "h100"),
        limits=Limits(60, 2**33),
        out=tmp_path,
        command="attnsuite tune",
    )
    (record,) = tuning.tune(request, ProgressDisplay(Console(file=io.StringIO())))
    assert "| chunked | cuda:h100 |" in " ".join(reports.render(tmp_path).read_text().split())
    (found,) = load_policy(tmp_path / POLICY).entries
    assert found.source.device == "cuda:h100"
    return found.choice, record.facts.tried


def test_device_that_is_not_here_gets_what_spills_least_and_is_the_largest_of_those(monkeypatch, tmp_path):
    found, tried = tune_for_h100(monkeypatch, tmp_path, "bfloat16")
    assert (found.options, found.ratio, found.details["mode"]) == ({"block_size": 64}, None, "compile")
    errors = {trial.options["block_size"]: trial.error for trial in tried}
    assert errors == {32: None, 64: None, 128: None, 256: "kernel: does not fit", 512: "KeyError: 512"}
    assert {trial.kernels[0].blocks for trial in tried[:2]} == {1600, 3200}
    assert "| 4, 100% (2, 100%) |" in " ".join((tmp_path / "report.md").read_text().split())


def test_defaults_stay_where_nothing_spills_less_in_a_block_that_is_larger(monkeypatch, tmp_path):
    """Neither spilling for a larger block, nor fewer stages for less shared memory."""
    monkeypatch.setitem(BUILDS, 64, (8, 500))
    monkeypatch.setattr(Compiles, "defaults", lambda *_: {"block_size": 32, "num_stages": 3})
    found, tried = tune_for_h100(monkeypatch, tmp_path, "bfloat16")
    assert found.options == {"block_size": 32, "num_stages": 3}
    assert [len(trial.kernels) for trial in tried if not trial.error] == [1] * 4


def test_case_that_is_refused_everywhere_writes_no_file(monkeypatch, tmp_path):
    with pytest.raises(InputError, match=r"nothing could be tuned: .*dtype=float32 is not supported"):
        tune_for_h100(monkeypatch, tmp_path, "float32")
    assert not (tmp_path / POLICY).exists()


def test_what_is_unsupported_costs_no_reference_and_a_budget_ends_before_the_next_cell(monkeypatch, tmp_path, capsys):
    """Kascade selects among earlier keys: of the two cases one is no trial."""
    bidirectional = dataclasses.replace(CASE, name="", causal=False)
    later = dataclasses.replace(CASE, name="", sequence=128)
    wanted, measured = [], [{"options": {}, "samples": [1.0] * 12, "error": None}]
    monkeypatch.setattr(tuning, "_measure", lambda case, *_: wanted.append(case.name) or measured)  # and its reference
    monkeypatch.setattr(tuning, "Worker", WorkerHere)
    monkeypatch.setattr(diagnosis, "Worker", WorkerHere)
    monkeypatch.setattr("attnsuite.suite.tuning.TUNED", (CASE, bidirectional, later))
    words = ["tune", "--backends", "kascade", "--options", "tile_size=16,query_tile=16", "--out", str(tmp_path)]

    def tuned(*more):
        assert code_of(*words, *more) == 0
        return {record.case: record.status for record in parse_records(tmp_path / RECORDS)[0]}

    assert tuned("--minutes", "1e-6") == {bidirectional.name: "unsupported", CASE.name: "ok"}
    assert wanted == [CASE.name]
    assert "1 cells were not begun within --minutes 1e-06; what is done is kept; go on" in capsys.readouterr().out
    assert tuned("--resume") == {bidirectional.name: "unsupported", CASE.name: "ok", later.name: "ok"}
