"""`attnsuite compile` with a fake compiler: what a run keeps, asks again and shows."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from attnsuite import reports
from attnsuite.backends import Target
from attnsuite.backends.tunable import KernelBuild
from attnsuite.reports.pages import compiled
from attnsuite.suite import compile_request, compile_run
from attnsuite.suite.compile import topologies
from attnsuite.suite.compile_run import SEARCH_STEPS, CompileGrid
from attnsuite.suite.errors import CellFailure, InputError
from attnsuite.suite.grid.run_grid import RunGrid
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.store import RECORDS, parse_records
from attnsuite.suite.suites import QUICK, parse_shard
from command import WorkerHere

V5E, H100 = Target("tpu", "v5e"), Target("cuda", "h100")
OP = OpCase(kind="op_forward", sequence=64)
MODEL = ModelCase(kind="model_prefill", model="debug", dtype="bfloat16", new_tokens=1)


class FakeWorker(WorkerHere):
    """Answers as a compiler would whose device holds 5000 tokens."""

    asked: list[tuple[str, str, str]]
    failure: CellFailure | None = None
    dumps: list[str]

    def __init__(self, limit, variables, code, writable):
        self.arguments = variables.get("LIBTPU_INIT_ARGS", "")

    def ask(self, seconds, function, case, backend, target, dump):
        type(self).asked.append((case.name, backend, target.name))
        if self.failure is not None:
            raise self.failure
        if dump:
            assert f"--xla_jf_dump_to={dump} " in self.arguments
            assert dump.is_dir()
            type(self).dumps.append(dump)
        if backend == "cudnn":
            return {"status": "unsupported", "reasons": ["cuDNN does not compile here."], "error": "refused."}
        if case.sequence * case.batch > 5000:
            return {"status": "oom", "error": "JaxRuntimeError: exceeds available HBM (15.75G)."}
        sizes = {"compiled_peak": 3 * 2**30, "compiled_argument": 2**30, "compiled_generated_code": None}
        return {"status": "ok", "error": None, "lower_seconds": 0.1, "compile_seconds": 2.0, "memory": sizes}


class Silent:
    def __init__(self):
        self.total = self.seen = 0

    def begin(self, total, finished):
        self.total += total

    def fewer(self, cells):
        self.total -= cells

    def doing(self, *_):
        pass

    def done(self, record):
        self.seen += record.status != "unsupported"


@pytest.fixture
def compile_with_fakes(tmp_path, monkeypatch):
    """Run a request of one op case and one search with a fake compiler; returns records and what was asked."""

    def run(name, failure=None, **changes):
        FakeWorker.asked, FakeWorker.dumps, FakeWorker.failure = [], [], failure
        monkeypatch.setattr(compile_run, "Worker", FakeWorker)
        request = CompileGrid(
            cases=(OP,),
            searches=(("sequence", MODEL),),
            backends=("standard", "cudnn"),
            targets=(V5E, H100),
            out=tmp_path / name,
            limits=Limits(10.0, 2**30),
            cache=tmp_path / "cache",
            command=("attnsuite", "compile", "--targets", "v5e,h100"),
        )
        watcher = Silent()
        compile_run.compile_all(dataclasses.replace(request, **changes), watcher)
        records = parse_records(tmp_path / name / RECORDS)[0]
        assert watcher.total == watcher.seen == sum(record.status != "unsupported" for record in records)
        return records, FakeWorker.asked

    return run


def test_every_cell_and_every_attempt_of_a_search_has_one_record(compile_with_fakes):
    records, _ = compile_with_fakes("run")
    keys = [record.key for record in records]
    assert len(keys) == len(set(keys)) == 2 * (2 + SEARCH_STEPS + 1)
    assert all(record.samples == () for record in records)
    refused = [record for record in records if record.requested == "cudnn"]
    assert {(r.status, r.mode, r.resolved, r.reasons) for r in refused} == {
        ("unsupported", None, None, ("cuDNN does not compile here.",))
    }


def test_the_largest_batch_of_a_search_is_on_the_page_for_each_chip_that_shares_it(compile_with_fakes, tmp_path):
    asked = dataclasses.replace(MODEL, sequence=512, name="")
    slice_ = Target.named("v5e:4x4")  # 2 of its 16 chips share the heads, 8 the batch
    records, _ = compile_with_fakes("run", cases=(asked,), searches=(("batch", asked),), targets=(V5E, slice_))
    tried = {r.problem["batch"] for r in records if r.target == str(slice_) and r.requested == "standard"}
    assert {batch % 8 for batch in tried - {asked.batch}} == {0}
    page = compiled.compiled_overview(tmp_path / "run")
    assert "on tpu:v5e: fits up to 8 with `standard` (of the batches tried)" in page
    assert "Up to which batch" in page
    assert "Up to which length" not in page


def test_what_was_compiled_is_not_compiled_again(compile_with_fakes):
    first, asked = compile_with_fakes("first")
    second, again = compile_with_fakes("second")
    assert len(asked) == 2 * (2 + SEARCH_STEPS + 1)
    assert {backend for _, backend, _ in again} == {
        "cudnn"
    }  # refusals cost nothing, and may change with what is installed
    kept = [[r for r in records if r.requested == "standard"] for records in (first, second)]
    assert sorted(kept[0], key=lambda r: r.key) == sorted(kept[1], key=lambda r: r.key)


@pytest.mark.parametrize("what", ["versions", "flags", "target"])
def test_another_version_flag_or_device_is_compiled_again(compile_with_fakes, monkeypatch, what):
    compile_with_fakes("first")
    changes = {}
    if what == "versions":
        monkeypatch.setattr(compile_run.environment, "versions", lambda: {"jax": "99.0"})
    elif what == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    else:
        changes = {"targets": (Target("tpu", "v6e"),)}
    _, again = compile_with_fakes("second", **changes)
    assert "standard" in {backend for _, backend, _ in again}


def test_file_of_the_user_that_does_not_load_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_run, "Worker", WorkerHere)
    (tmp_path / "my.py").write_text("1 / 0")
    request = CompileGrid(cases=(OP,), backends=(f"{tmp_path / 'my.py'}:fn",), targets=(V5E,), out=tmp_path,
                             limits=Limits(60.0, 2**33), cache=tmp_path, command=())  # fmt: skip
    with pytest.raises(InputError, match=r"my\.py does not load: ZeroDivisionError"):
        request.look()


def test_damaged_cache_is_compiled_again(compile_with_fakes, tmp_path):
    compile_with_fakes("first")
    for path in (tmp_path / "cache").iterdir():
        path.write_text(path.read_text()[:50])
    _, again = compile_with_fakes("second")
    assert "standard" in {backend for _, backend, _ in again}


def test_compiler_that_dies_or_hangs_is_a_record_and_is_asked_another_time(compile_with_fakes):
    failed, _ = compile_with_fakes("first", CellFailure("timeout", "no answer within 10 s."))
    assert {record.status for record in failed} == {"timeout"}
    too_large, _ = compile_with_fakes("second", CellFailure("oom", "the cell held 9 GiB."))
    assert {record.status for record in too_large} == {"crashed"}  # oom would be about the device
    assert "the compiler: the cell held 9 GiB." in {record.error for record in too_large}
    assert {record.status for record in compile_with_fakes("third")[0]} == {"ok", "oom", "unsupported"}


# What is shown


def test_page_says_of_kernels_whose_program_is_not_here_why_it_has_no_size(compile_with_fakes, tmp_path):
    """The figures of kernels, schedules and what does not fit are on the published pages: tests/reports."""
    compile_with_fakes("run")
    path = tmp_path / "run" / RECORDS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    built = KernelBuild(name="forward", configuration={"num_warps": 8}, registers=208)
    answer = next(line for line in lines if (line["status"], line["target"]) == ("ok", "cuda:h100"))
    answer |= {"memory": {}, "notes": ["no compiler for it."]}
    answer["kernels"] = [dataclasses.asdict(built)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = reports.render(tmp_path / "run").read_text(encoding="utf-8")
    assert "1 compile as kernels alone" in page
    assert "compiles (N1)" in page
    assert "**N1** no compiler for it." in page


def test_schedules_are_asked_for_and_their_dumps_removed(compile_with_fakes):
    plain, _ = compile_with_fakes("plain", targets=(V5E,), searches=())
    _, asked = compile_with_fakes("scheduled", targets=(V5E,), searches=(), schedule=True)
    assert len(asked) == len(plain)  # what was kept without its schedule is compiled again
    assert len(FakeWorker.dumps) == len(asked)
    assert not any(dump.exists() for dump in FakeWorker.dumps)
    _, again = compile_with_fakes("again", targets=(V5E,), searches=(), schedule=True)
    assert {name for _, name, _ in again} == {"cudnn"}


# Kernels that a run of quick only interprets are compiled for an H100 beside it


@pytest.fixture
def request_of(monkeypatch, tmp_path):
    """A run of ``quick`` with a backend whose kernels Triton compiles, and one whose kernels XLA does."""
    backends = {"triton": SimpleNamespace(compile_kernels=print), "pallas": SimpleNamespace()}
    monkeypatch.setattr(compile_request.registry, "get", backends.__getitem__)
    monkeypatch.setattr(compile_request, "support", lambda _, spec, *__: spec.dtype != "float32")

    def of(**changes):
        fields = {"suite": "quick", "cases": QUICK.cases, "backends": tuple(backends), "text": None, "resume": False}
        return RunGrid(**{**fields, "out": tmp_path, "limits": Limits(60.0, 2**30), **changes})

    return of


def interpreted(example_record, *rows):
    cases = [case.name for case in QUICK.cases if getattr(case, "sequence", 0) == 1024]
    return [
        dataclasses.replace(example_record, case=case, requested=row, mode="interpret")
        for case in cases
        for row in rows
    ]


def test_half_precision_cases_of_interpreted_triton_kernels_are_compiled_for_an_h100(request_of, example_record):
    found = compile_request.verdict_request(request_of(), interpreted(example_record, "triton", "pallas"))
    assert [case.name for case in found.cases] == [
        "forward-backward-s1024-h8k2-d64-bf16",
        "forward-s1024-h8k2-d64-bf16",
    ]
    assert (found.backends, found.targets, found.out.name) == (("triton",), (Target.named("h100"),), "h100")


def test_nothing_is_compiled_for_another_suite_shard_or_version_or_if_nothing_was_interpreted(
    request_of, example_record
):
    records = interpreted(example_record, "triton")
    elsewhere = [dataclasses.replace(record, environment={"versions": {"jax": "0.0.1"}}) for record in records]
    native = [dataclasses.replace(record, mode="native") for record in records]
    assert compile_request.verdict_request(request_of(), records) is not None
    for request, found in (
        (request_of(suite="full"), records),
        (request_of(shard=parse_shard("1/2")), records),
        (request_of(), interpreted(example_record, "pallas")),
        (request_of(), native),
        (request_of(), elsewhere),
    ):
        assert compile_request.verdict_request(request, found) is None


def test_half_of_the_cuda_plugin_is_no_compiler(monkeypatch):
    installed = {"jax_cuda12_plugin"}

    def find_spec(module):
        if module == "jax_plugins.xla_cuda12" and "jax_plugins" not in installed:
            raise ModuleNotFoundError(module)
        return module if module in installed else None

    monkeypatch.setattr(topologies.util, "find_spec", find_spec)
    target = Target.named("h100")
    assert ".[compile-cuda]" in topologies.missing(target)
    installed.add("jax_plugins")
    assert ".[compile-cuda]" in topologies.missing(target)
    installed.add("jax_plugins.xla_cuda12")
    assert topologies.missing(target) is None
