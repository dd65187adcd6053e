"""What a worker process is started with."""

from __future__ import annotations

import subprocess
import sys

from attnsuite.suite.grid.process import Worker
from attnsuite.suite.kinds import problem_of
from attnsuite.suite.kinds.attention import OpCase


def test_worker_compiles_although_the_user_has_a_cache_of_programs(tmp_path, monkeypatch):
    """Compile times would be those of reading a file."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    case = problem_of(OpCase(kind="op_forward", sequence=16, heads=1, kv_heads=1))
    with Worker(2**33) as worker:
        worker.ask({"do": "reference", "case": case, "path": str(tmp_path / "judge.npz"), "text": None}, 120)
    assert (tmp_path / "judge.npz").is_file()
    assert not (tmp_path / "cache").exists()


def test_worker_starts_without_what_a_call_of_attention_does_not_need():
    """A process per cell: what each imports for nothing is paid as often as there are cells."""
    code = "import sys, attnsuite.suite.grid.worker; print(*{'flax', 'scipy.stats', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
