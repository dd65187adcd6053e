"""Compile for an absent GPU the kernels that a run of the suite ``quick`` could only interpret.

An interpreter shows that a kernel's numbers are right. The compiler shows whether the same kernel is accepted on a GPU,
with its registers, spills and shared memory. It takes seconds for each case.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnsuite.backends import Target, registry, support
from attnsuite.backends.tunable import CompilesKernels

from .compile_request import default_cache
from .compile_run import CompileGrid
from .grid.run import RunGrid
from .kinds.attention import OpCase, spec_of
from .measure.environment import versions
from .record import Record

TARGET = "h100"


def verdict_request(request: RunGrid, records: Sequence[Record]) -> CompileGrid | None:
    """The cases whose interpreted kernels are compiled for an H100; None if there are none.

    Left out are cases that the backend refuses there (Kvax: float32), and runs of nodes with other versions than the
    driver's, which compiles: a page holds one version.
    """
    if request.suite != "quick" or request.shard is not None or _of_other_versions(records):
        return None
    target = Target.named(TARGET)
    interpreted = {(record.case, record.requested) for record in records if record.mode == "interpret"}
    asked = [
        (case, row)
        for case in request.cases
        for row in request.backends
        if isinstance(case, OpCase)
        and (case.name, row) in interpreted
        and isinstance(registry.get(row), CompilesKernels)
        and support(registry.get(row), spec_of(case), target, "compile")
    ]
    if not asked:
        return None
    cases, rows = tuple(dict.fromkeys(case for case, _ in asked)), tuple(dict.fromkeys(row for _, row in asked))
    out = request.out / TARGET
    words = ("--suite", "quick", "--cases", ",".join(case.name for case in cases), "--backends", ",".join(rows))
    return CompileGrid(
        cases=cases,
        searches=(),
        backends=rows,
        targets=(target,),
        out=out,
        limits=request.limits,
        cache=default_cache(),
        command=("attnsuite", "compile", *words, "--targets", TARGET, "--out", str(out)),
    )


def _of_other_versions(records: Sequence[Record]) -> bool:
    mine = versions()
    return any(
        version != mine.get(name, version)
        for record in records
        for name, version in record.environment.get("versions", {}).items()
    )
