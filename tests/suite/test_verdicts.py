"""Kernels that a run of ``quick`` only interprets are compiled for an H100 beside it; which, and when not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from attnsuite.backends import Target
from attnsuite.suite import compile_request
from attnsuite.suite.compile import topologies
from attnsuite.suite.grid.run_grid import RunGrid
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.suites import QUICK, parse_shard


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
    assert compile_request.verdict_request(request_of(), records) is not None
    assert compile_request.verdict_request(request_of(suite="full"), records) is None
    assert compile_request.verdict_request(request_of(shard=parse_shard("1/2")), records) is None
    assert compile_request.verdict_request(request_of(), interpreted(example_record, "pallas")) is None
    native = [dataclasses.replace(record, mode="native") for record in records]
    assert compile_request.verdict_request(request_of(), native) is None
    elsewhere = [dataclasses.replace(record, environment={"versions": {"jax": "0.0.1"}}) for record in records]
    assert compile_request.verdict_request(request_of(), elsewhere) is None


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
