"""Records the first half hour of three people: `python docs/half_hours.py docs/half-hours.md`, on an idle machine.

Each session has a folder and a virtual environment of its own, into which this checkout is installed. The page shows
each command, its seconds, its exit code and what it printed. Nothing in it is written by hand.
"""

import dataclasses
import datetime as dt
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN = (14, 26)  # lines from the beginning and from the end of a long output

TRAIN = """
import jax, jax.numpy as jnp, optax
from flax import nnx

class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(512, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=8, in_features=512, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x), is_causal=True)

def training_step():
    model = nnx.List([Block(nnx.Rngs(i)) for i in range(4)])

    def step(model, x):
        def loss(model):
            y = x
            for block in model:
                y = block(y)
            return (y ** 2).mean()
        return nnx.grad(loss)(model)

    return step, (model, jnp.ones((1, 1024, 512)))
"""
USE = """
from attnsuite import backends

spec = backends.AttentionSpec(batch=1, query_length=1024, key_value_length=1024, num_heads=8, num_kv_heads=8,
                              head_dim=64, is_causal=True)
found = backends.resolve("auto", spec, backends.Target.here())
print(found.backend.name, *found.reasons, sep="\\n")
"""
KERNEL = """
import jax, jax.numpy as jnp
from attnsuite import backends

def masked(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(v.dtype), v)

attend = backends.from_function(masked, takes={"causal", "gradient"})
"""
HALF = KERNEL.replace(", preferred_element_type=jnp.float32", "")  # scores in the dtype of the inputs
SHAPES = """
[[case]]
kind = "op_forward_backward"
sequence = 512
heads = 4
kv_heads = 4
"""


@dataclasses.dataclass(frozen=True)
class Session:
    """Somebody's half hour: who, the files that lie in their folder, and what they type."""

    who: str
    files: dict[str, str]
    commands: tuple[str, ...]


SESSIONS = (
    Session(
        "You train a model, and want the best attention for it",
        {"train.py": TRAIN, "use.py": USE},
        (
            "attnsuite doctor",
            "attnsuite harvest train.py:training_step --out mine.toml",
            "cat mine.toml",
            "attnsuite run --suite mine.toml --out mine",
            "attnsuite choose mine --out policy.json",
            "ATTNSUITE_POLICY=policy.json python use.py",
        ),
    ),
    Session(
        "You wrote a kernel",
        {"kernel.py": HALF, "corrected.py": KERNEL, "shapes.toml": SHAPES},
        (
            "cat kernel.py",
            "attnsuite judge kernel.py:attend --random 4 --out judged",
            "diff kernel.py corrected.py; cp corrected.py kernel.py",
            "attnsuite judge kernel.py:attend --random 4 --out judged-again",
            "attnsuite run --suite shapes.toml --backends standard,chunked,kernel.py:attend --out run",
        ),
    ),
    Session(
        "You guard a repository",
        {"kernel.py": KERNEL, "shapes.toml": SHAPES},
        (
            "git init --quiet && git add *.py *.toml && git commit --quiet -m 'as it is'",
            "attnsuite run --suite shapes.toml --backends standard,kernel.py:attend --sample-seconds 2 --out before",
            "sed -i 's/-1e9/-10/' kernel.py && git commit --quiet -am 'a shortcut'",
            "attnsuite run --suite shapes.toml --backends standard,kernel.py:attend --sample-seconds 2 --out after",
            "attnsuite compare before after --fail-on wrong,failed,slower:15%,memory:10%",
        ),
    ),
)


def shown(text: str) -> str:
    """What a command printed; of many lines the first and the last."""
    lines = text.rstrip().splitlines()
    first, last = SHOWN
    if len(lines) > first + last + 1:
        lines = [*lines[:first], f"[{len(lines) - first - last} lines]", *lines[-last:]]
    return "\n".join(line.rstrip() for line in lines)


def record(session: Session, folder: Path) -> list[str]:
    """The section of a session, as lines of Markdown."""
    for name, text in session.files.items():
        (folder / name).write_text(text.lstrip(), encoding="utf-8")
    identity = {"GIT_AUTHOR_NAME": "you", "GIT_AUTHOR_EMAIL": "you@example.org"}
    environment = os.environ | identity | {
        "GIT_COMMITTER_NAME": "you",
        "GIT_COMMITTER_EMAIL": "you@example.org",
        "PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        environment.pop(name, None)
    install = f"python -m venv .venv && . .venv/bin/activate && pip install -qq {ROOT}"
    lines, whole = [f"## {session.who}", ""], 0.0
    for command in (install, *session.commands):
        begin = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - begin
        whole += seconds
        typed = command.replace(str(ROOT), "~/attention-suite")
        told = shown(done.stdout).replace(str(ROOT), "attention-suite").replace(str(folder), "~/half-hour")
        lines += ["```text", f"$ {typed}", *([told] if told else []), f"[{seconds:.0f} s, exit code {done.returncode}]"]
        lines += ["```", ""]
    return [*lines, f"{whole / 60:.1f} minutes in all.", ""]


def main(page: Path) -> None:
    """Run the sessions, and write ``page``."""
    here = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    today = dt.datetime.now(dt.UTC).date()
    about = (
        f"Recorded by `python docs/half_hours.py docs/half-hours.md` on {today}: {here}, revision {revision}. "
        "Each session begins in an empty folder with a new virtual environment. The seconds of the first command are "
        "those of the installation."
    )
    lines = ["# Three first half hours", "", about, ""]
    for session in SESSIONS:
        folder = Path(tempfile.mkdtemp())
        try:
            lines += record(session, folder)
        finally:
            shutil.rmtree(folder)
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
