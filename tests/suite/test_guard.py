"""The workflow file of docs/guard.md, executed step by step on a small repository that uses this package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

GUARD = Path(__file__).parents[2] / "docs" / "guard.md"
KERNELS = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from attnsuite.backends import from_function


def kernel(q, k, v, out):
    scores = q[...].astype(jnp.float32) @ k[...].astype(jnp.float32).T / q.shape[-1] ** 0.5
    out[...] = (jax.nn.softmax(scores) @ v[...].astype(jnp.float32)).astype(out.dtype)


def one_head(q, k, v):
    shape = jax.ShapeDtypeStruct((q.shape[0], v.shape[1]), q.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(q, k, v)


def forward(q, k, v):
    return jax.vmap(jax.vmap(one_head, 1, 1))(q, k, v)


attend = from_function(forward, takes={"bidirectional"})
"""
MODEL = """
import jax.numpy as jnp
from attnsuite import backends

x = jnp.ones((1, 64, 2, 32))
backends.attention(x, x, x, is_causal=True, backend="chunked", on_unavailable="raise")
"""
SHAPES = '[[case]]\nkind = "op_forward"\nsequence = 64\nheads = 2\nkv_heads = 2\nhead_dim = 32\ncausal = false\n'
PLANTED = {
    "kernels.py": KERNELS.replace("** 0.5", "** 0.51"),
    "model.py": MODEL.replace("chunked", "cudnn"),
}
# The command without its ten seconds for the peaks of the machine, which no step compares.
COMMAND = f"""#!{sys.executable}
from attnsuite.suite.grid import run
rates = {{"float32": 1e11, "bfloat16": 1e11}}
run.measured_machine = lambda: {{"matmul_flops": rates, "copy_bytes_per_second": 1e10, "read_bytes_per_second": 1e10}}
from attnsuite.suite.entry import main
main()
"""


def steps():
    """The commands of the published workflow by the names of their steps."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```", GUARD.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return {step["name"]: step["run"] for step in yaml.safe_load(text)["jobs"]["attention"]["steps"] if "run" in step}


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """A function that runs a step in a clone whose branch plants a wrong kernel and asks for a GPU's backend."""
    folder = tmp_path_factory.mktemp("guard")
    origin, clone, programs = folder / "origin", folder / "clone", folder / "bin"

    def git(*words, at=origin):
        person = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", at, *person, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def commit(files):
        for name, text in files.items():
            (origin / name).write_text(text, encoding="utf-8")
        git("add", ".")
        git("commit", "-qm", "files")

    origin.mkdir()
    git("init", "-qb", "main")
    commit({"kernels.py": KERNELS, "model.py": MODEL, "shapes.toml": SHAPES})
    git("switch", "-qc", "change")
    commit(PLANTED)
    git("clone", "-q", origin, clone, at=folder)
    programs.mkdir()
    for name, text in {
        "attnsuite": COMMAND,
        "pip": "#!/bin/sh\n",
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "JAX_PLATFORMS": "cpu",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    known = {"${{ github.base_ref }}": "main", "${{ github.sha }}": git("rev-parse", "change").strip()}

    def run(step, branch=None):
        if branch is not None:
            git("switch", "-q", "--detach", f"origin/{branch}", at=clone)
        text = steps()[step]
        for name, value in known.items():
            text = text.replace(name, value)
        # A planted wrong result needs no narrow interval.
        text = text.replace("--sample-seconds 4", "--sample-seconds 0.01")
        assert "${{" not in text
        return subprocess.run(
            [shutil.which("bash"), "-e", "-c", text],
            cwd=clone,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )

    run.summary = folder / "summary.md"
    return run


def test_fallback_fails_the_step_of_what_really_runs(execute):
    ended = execute("what really runs", "main")
    assert ended.returncode == 0, ended.stderr
    ended = execute("what really runs", "change")
    assert ended.returncode != 0
    assert "is not supported by cudnn" in ended.stderr


def test_wrong_kernel_fails_the_step_that_judges_it_in_its_interpreter(execute):
    ended = execute("numbers of the kernel, in its interpreter", "change")
    assert ended.returncode == 1, ended.stderr
    assert re.search(r"^- heads-equal: wrong: output is off by ", ended.stdout, re.MULTILINE)


def test_wrong_kernel_fails_the_comparison_with_the_main_branch(execute):
    ended = execute("measure both")
    assert ended.returncode == 0, ended.stderr
    ended = execute("compare")
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "wrong: forward-s64-h2k2-d32-full-f32/kernels.py:attend" in ended.stderr
    assert "kernels.py" in execute.summary.read_text(encoding="utf-8")
