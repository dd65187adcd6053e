"""Tuning: measured where the device is, ranked by what compiles where it is not, failures kept with their errors."""

import dataclasses
import json

import pytest

from backends import Layout, Registry, Support, Target
from backends.contract import KernelBuild
from backends.kvax import KVAX, backend
from backends.standard import STANDARD
from suite import tuning
from suite.cases import OpCase, spec_of
from suite.errors import InputError

CASE = OpCase(kind="op_forward_backward", sequence=64, heads=2, kv_heads=2)
H100 = Target("cuda", "h100")
# block size -> spilled bytes, shared memory; 256 does not fit, 512 is not known to the compiler
BUILDS = {32: (0, 1000), 64: (0, 2000), 128: (40, 3000), 256: (0, 900_000)}


@dataclasses.dataclass(frozen=True)
class Adjustable:
    """Standard attention with a block size that changes nothing, is wrong at 16 and raises at 512."""

    name: str = "adjustable"
    exact: bool = True

    def supports(self, spec, target, mode="native"):
        return Support(mode)

    def tuning_candidates(self, spec):
        passes = {"forward": "block_size", "backward": "backward_block_size"}
        return {name: tuple({option: size} for size in (16, 32, 64, 128, 256, 512)) for name, option in passes.items()}

    def plan(self, spec, layout, *, target, mode="native", options=None):
        size = min(options.values())
        if max(options.values()) == 512:
            raise RuntimeError("512 is too much\nfor anybody")
        plan = STANDARD.plan(spec, layout, target=target)
        factor = 1.1 if size == 16 else 1.0
        return dataclasses.replace(plan, attend=lambda *given: (plan.attend(*given)[0] * factor, ()))

    def compile_kernels(self, spec, target, options=None):
        size = options["backward_block_size" if spec.needs_grad else "block_size"]
        if size not in BUILDS:
            return (KernelBuild(name="kernel", configuration=(), error="no such size"),)
        spilled, shared = BUILDS[size]
        error = "does not fit" if shared > 200_000 else None
        return (KernelBuild(name="kernel", configuration=(), spilled_bytes=spilled, shared_bytes=shared, error=error),)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    registry = Registry()
    registry.register(Adjustable())
    monkeypatch.setattr("backends.registry.DEFAULT", registry)


def test_compiled_winner_spills_least_and_is_the_largest_of_those():
    tuned = tuning.tune("adjustable", CASE, H100)
    assert tuned.method == "compiled"
    assert tuned.options == {"block_size": 64, "backward_block_size": 64}
    assert {trial.seconds for trial in tuned.trials} == {None}
    failed = {(trial.stage, *trial.options.values()): trial.error for trial in tuned.trials if trial.error}
    assert failed["forward", 256] == "kernel: does not fit"
    assert failed["backward", 512] == "kernel: no such size"
    assert "no time was measured" in tuning.describe(tuned, CASE.name)[0]


def test_measured_winner_is_right_and_the_failed_ones_say_why():
    tuned = tuning.tune("adjustable", CASE, Target.named("cpu"))
    assert tuned.method == "measured"
    assert set(tuned.options) == {"block_size", "backward_block_size"}
    assert not {16, 512} & set(tuned.options.values())
    for trial in tuned.trials:
        size = next(iter(trial.options.values()))
        if size == 16:
            assert trial.error.startswith("wrong: ")
        elif size == 512:
            assert trial.error == "RuntimeError: 512 is too much"
        assert (trial.seconds is None) == (size in {16, 512})
    fastest = min((t for t in tuned.trials if t.stage == "forward" and t.seconds), key=lambda t: t.seconds)
    assert tuned.options["block_size"] == fastest.options["block_size"]


def test_file_keeps_what_was_in_it_and_kvax_reads_its_own(tmp_path):
    path, spec = tmp_path / "tuned.json", dataclasses.replace(spec_of(CASE), dtype="bfloat16")
    tuned = tuning.tune("adjustable", CASE, H100)
    fields = json.loads(json.dumps(dataclasses.asdict(spec)))
    own = dataclasses.replace(tuned, backend="kvax", spec=fields, options={"kv_block_size": 32, "num_stages": 2})
    tuning.write(path, [tuned])
    tuning.write(path, [own])
    assert [entry["backend"] for entry in json.loads(path.read_text())["entries"]] == ["adjustable", "kvax"]
    blocks = backend._blocks(spec, H100, {"tuned": str(path), "num_stages": 4})
    assert dataclasses.astuple(blocks.forward) == (128, 32, 8, 4)  # the generation's, the file's, the caller's
    with pytest.raises(ValueError, match="has no entry for cuda:a100"):
        backend._blocks(spec, Target("cuda", "a100"), {"tuned": str(path)})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not a file that"),
        ("[]", "is not a file that"),
        ('{"schema": 2, "entries": []}', "schema 2"),
    ],
)
def test_file_that_is_no_tuning_is_refused_in_a_sentence(tmp_path, content, words):
    path = tmp_path / "tuned.json"
    if content is not None:
        path.write_text(content)
        with pytest.raises(InputError, match="choose another"):
            tuning.write(path, [])
    spec = dataclasses.replace(spec_of(CASE), dtype="bfloat16")
    with pytest.raises(ValueError, match=words):
        KVAX.plan(spec, Layout(), target=H100, options={"tuned": str(path)})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--backends", "chunked"], "backend chunked has nothing to tune; use kvax."),
        (["--backends", "fastest"], "backend 'fastest' is not registered"),
        (["--target", "h1000"], "--target: target 'h1000' is not known"),
        (["--cases", "retrieval*"], "is not one attention call"),
        (["--target", "here"], "Kvax's kernels run on NVIDIA GPUs"),
    ],
)
def test_bad_request_is_one_sentence(attnsuite, tmp_path, flags, sentence):
    code, stdout, stderr = attnsuite.finish(attnsuite.start("tune", *flags, "--out", tmp_path / "tuned.json"))
    assert code == 2
    assert stdout == ""
    assert sentence in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert not (tmp_path / "tuned.json").exists()
