"""What a worker process is started with."""

from __future__ import annotations

import subprocess
import sys

from attnsuite.suite.grid.process import Worker

STATE = """
import json, sys
import jax
for line in sys.stdin:
    config = jax.config
    print(json.dumps({"ok": [config.jax_enable_compilation_cache, config.jax_compilation_cache_dir]}), flush=True)
"""


def test_worker_compiles_although_the_user_has_a_cache_of_programs(tmp_path, monkeypatch):
    """Compile times would be those of reading a file."""
    (tmp_path / "state_of_the_cache.py").write_text(STATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    with Worker(2**33, "state_of_the_cache") as worker:
        enabled, folder = worker.ask({}, 120)
    assert folder == str(tmp_path / "cache")
    assert not enabled


def test_worker_starts_without_what_a_call_of_attention_does_not_need():
    """A process per cell: what each imports for nothing is paid as often as there are cells."""
    code = "import sys, attnsuite.suite.grid.worker; print(*{'flax', 'scipy.stats', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
