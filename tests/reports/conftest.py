import dataclasses

import pytest

from attnsuite.suite.record import TensorError
from command import EMPTY

ENVIRONMENT = {
    "versions": {"python": "3.11.7", "jax": "0.10.1", "jaxlib": "0.10.1", "numpy": "2.4.6"},
    "git_revision": "0123abc",
    "target": "cpu",
    "device_kind": "cpu",
    "cpu": "Example CPU 9000",
    "cores": 2,
    "machine_memory": 16 * 2**30,
    "machine": {"matmul_flops": {"float32": 4e11, "bfloat16": 8e11}, "copy_bytes_per_second": 4.1e10},
}
PROBLEM = {
    "kind": "op_forward",
    "name": "forward-s4096-h8k8-d64-f32",
    "sequence": 4096,
    "batch": 1,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 64,
    "value_head_dim": None,
    "dtype": "float32",
    "causal": True,
    "window": None,
    "documents": 1,
    "seed": 0,
}
BASE = dataclasses.replace(
    EMPTY,
    key="",
    suite="smoke",
    case="forward-s4096-h8k8-d64-f32",
    problem=PROBLEM,
    samples=tuple(0.2 + 0.001 * i for i in range(10)),
    compile_seconds=0.4,
    flops=3.4e10,
    memory={"compiled_argument": 2**24, "compiled_output": 2**23, "compiled_temp": 2**30, "process_high_water": 2**30},
    accuracy={"out": TensorError(max_error=4e-7, rms_error=2e-7, standard_error=4e-7, allowed=1e-6, passed=True)},
    environment=ENVIRONMENT,
    started="2026-11-20T12:00:00+00:00",
    wall_seconds=12.0,
)


@pytest.fixture
def record():
    """A factory of records: the standard cell of one case, with the given fields changed."""

    def make(backend="standard", **fields):
        changed = dataclasses.replace(BASE, **{"requested": backend, "resolved": backend, **fields})
        named = {"kind": changed.kind, "name": changed.case}
        problem = {name: named.get(name, value) for name, value in changed.problem.items()}
        changed = dataclasses.replace(changed, problem=problem)
        if changed.key:
            return changed
        row = changed.requested if changed.devices == 1 else f"{changed.requested}@{changed.devices}"
        key = f"{changed.case}/{row}/{changed.target}/{changed.mode or 'native'}"
        return dataclasses.replace(changed, key=key)

    return make


@pytest.fixture
def write_run(tmp_path):
    """A factory of run directories that hold the given records."""

    def write(*records, name="run"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "records.jsonl").write_text("".join(r.to_json() + "\n" for r in records), encoding="utf-8")
        return folder

    return write
