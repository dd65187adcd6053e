"""The workflow file of docs/how-to/guard.md, executed step by step on a small repository that uses this package."""

import contextlib
import dataclasses
import io
import re
import runpy
import shlex
import shutil
import subprocess
import traceback
from importlib import util
from pathlib import Path

import pytest
import yaml

from attnsuite.suite import command_line
from attnsuite.suite.grid import run_grid as grid_run

GUARD = Path(__file__).parents[2] / "docs" / "how-to" / "guard.md"
KERNELS = """
import functools
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from attnsuite.backends import from_function


def kernel(q, k, v, out):
    scores = q[...].astype(jnp.float32) @ k[...].astype(jnp.float32).T / q.shape[-1] ** 0.5
    out[...] = (jax.nn.softmax(scores) @ v[...].astype(jnp.float32)).astype(out.dtype)


def one_head(q, k, v, interpret):
    rows = q.shape[0]
    tile = pl.BlockSpec((rows, q.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec(k.shape, lambda i: (0, 0))
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    call = pl.pallas_call(kernel, shape, grid=q.shape[0] // rows, in_specs=[tile, whole, whole], out_specs=tile,
                          interpret=interpret)
    return call(q, k, v)


def forward(q, k, v):
    heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
    native, interpreted = (jax.vmap(jax.vmap(functools.partial(one_head, interpret=i))) for i in (False, True))
    return jax.lax.platform_dependent(*heads_first, cpu=interpreted, default=native).swapaxes(1, 2)


attend = from_function(forward, takes={"bidirectional"})
"""
MODEL = """
import jax.numpy as jnp
from attnsuite import backends

x = jnp.ones((1, 64, 2, 32))
backends.attention(x, x, x, is_causal=True, backend="chunked", on_unavailable="raise")
"""
SHAPES = '[[case]]\nkind = "op_forward"\nsequence = 64\nheads = 2\nkv_heads = 2\nhead_dim = 32\ncausal = false\n'
# A tile of four rows is right in the interpreter, and no tile of a TPU.
PLANTED = {
    "kernels.py": KERNELS.replace("** 0.5", "** 0.51").replace("rows = q.shape[0]", "rows = 4"),
    "model.py": MODEL.replace("chunked", "cudnn"),
}


def steps():
    """The commands of the published workflow by the names of their steps."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```", GUARD.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return {step["name"]: step["run"] for step in yaml.safe_load(text)["jobs"]["attention"]["steps"] if "run" in step}


@pytest.mark.parametrize(
    "file", [GUARD, *sorted((GUARD.parents[2] / ".github/workflows").iterdir())], ids=lambda f: f.name
)
def test_a_workflow_names_its_actions_by_digest_and_puts_no_expression_into_a_shell_line(file):
    text = file.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert not [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)]
    assert "permissions:" in text
    assert not [line for line in text.splitlines() if "${{" in line and not re.match(r" +[A-Z_]+: ", line)]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A step: the exit code of its last command, and what its commands printed."""

    code: int
    stdout: str
    stderr: str


def attnsuite(*words):
    try:
        command_line.main(words)
    except SystemExit as ended:
        return ended.code or 0
    return 0


def python(path):
    try:
        runpy.run_path(path, run_name="__main__")
    except Exception:  # noqa: BLE001 (as the interpreter does)
        traceback.print_exc()
        return 1
    return 0


def git(*words, at="."):
    person = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run([shutil.which("git"), "-C", at, *person, *words], check=True, capture_output=True)
    return 0


# In this process, because an import of JAX takes longer than the commands. `pip install` has nothing to install here.
COMMANDS = {"attnsuite": attnsuite, "python": python, "git": git, "pip": lambda *_: 0}


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """A function that runs a step in a clone whose branch plants a wrong kernel and asks for a GPU's backend."""
    folder = tmp_path_factory.mktemp("guard")
    origin, clone = folder / "origin", folder / "clone"

    def commit(files):
        for name, text in files.items():
            (origin / name).write_text(text, encoding="utf-8")
        git("add", ".", at=origin)
        git("commit", "-qm", "files", at=origin)

    origin.mkdir()
    git("init", "-qb", "main", at=origin)
    commit({"kernels.py": KERNELS, "model.py": MODEL, "shapes.toml": SHAPES})
    git("switch", "-qc", "change", at=origin)
    commit(PLANTED)
    git("clone", "-q", origin, clone, at=folder)

    def run(step, branch="change"):
        out, err = io.StringIO(), io.StringIO()
        # A planted fault needs no narrow interval, and one absent device shows as much as two.
        text = steps()[step].replace("--sample-seconds 4", "--sample-seconds 0.01").replace("v5e,h100", "v5e")
        text = text.replace("--random 2", "--random 0 --cases heads-equal")  # every problem that it takes is wrong
        text = text.replace("$BEFORE", "origin/main").replace("$AFTER", "origin/change")
        git("switch", "-q", "--detach", f"origin/{branch}", at=clone)
        with contextlib.chdir(clone), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            for command in text.replace(" && ", "\n").strip().split("\n"):
                name, *words = shlex.split(command)
                if code := COMMANDS[name](*words):
                    break
        return Ended(code, out.getvalue(), err.getvalue())

    rates = {"float32": 1e11, "bfloat16": 1e11}
    peaks = {"matmul_flops": rates, "copy_bytes_per_second": 1e10, "read_bytes_per_second": 1e10}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(grid_run, "measured_machine", lambda: peaks)  # ten seconds, and no step compares them
        run.summary = folder / "summary.md"
        yield run


def test_fallback_fails_the_step_of_what_really_runs(execute):
    ended = execute("what really runs", "main")
    assert ended.code == 0, ended.stderr
    ended = execute("what really runs")
    assert ended.code != 0
    assert "is not supported by cudnn" in ended.stderr


def test_wrong_kernel_fails_the_step_that_judges_it_in_its_interpreter(execute):
    ended = execute("numbers of the kernel, in its interpreter")
    assert ended.code == 1, ended.stderr
    assert re.search(r"^- heads-equal: wrong: output is off by ", ended.stdout, re.MULTILINE)


@pytest.mark.thorough
def test_wrong_kernel_fails_the_comparison_with_the_main_branch(execute):
    ended = execute("measure both")
    assert ended.code == 0, ended.stderr
    ended = execute("compare")
    assert ended.code == 3, ended.stdout + ended.stderr
    assert "wrong: forward-s64-h2k2-d32-full-f32/kernels.py:attend" in ended.stderr
    assert "kernels.py" in execute.summary.read_text(encoding="utf-8")


@pytest.mark.compile
@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu is not installed (tox -e compile has it)")
def test_kernel_that_is_illegal_on_a_tpu_fails_the_step_that_compiles_it(execute):
    ended = execute("compile both for devices that are not here")
    assert ended.code == 3, ended.stdout + ended.stderr
    failed = "failed: forward-s64-h2k2-d32-full-f32/kernels.py:attend/tpu:v5e/compile: it ran in A; crashed: "
    assert f"{failed}ValueError: The Pallas TPU lowering" in ended.stderr
