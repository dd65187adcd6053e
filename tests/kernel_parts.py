"""Which part of a kernel of flash_cpu its time goes into: it is compiled and timed with each part left out.

Measures: give it an idle machine. The numbers of a kernel without a part are wrong, and nobody looks at them. Each
variant is compiled in a process of its own, with a cache of its own, and timed in turns with the others.

    python tests/kernel_parts.py        # five minutes

Prints a table in Markdown for the forward and one for the backward kernel: the milliseconds of the whole kernel, and
the share of them that is saved without each part. Parts overlap in the processor, so the shares need not add up to 1.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
import types
from contextlib import ExitStack
from unittest import mock

import jax
import jax.numpy as jnp

from attnsuite import backends
from attnsuite.backends.flash_cpu import backward, backward_rows, forward, panels, products, rows, slopes, softmax
from attnsuite.backends.flash_cpu.emit import Function, void

PARTS = {
    "forward": ("scores", "softmax", "its exponentials", "weighted sum", "packing"),
    "backward": ("S and dP", "P and dS", "their exponentials", "dQ, dK and dV", "packing"),
}
CASES = tuple(itertools.product(("float32", "bfloat16"), (64, 128), (512, 2048)))  # dtype, head_dim, length
ROUNDS, SECONDS = 5, 0.4


def without(part: str) -> ExitStack:
    """A context in which the generator leaves ``part`` out of what it writes."""
    empty_rows = {name: empty(getattr(rows, name)) for name in ("copy_row", "join", "transpose")}
    no_rows = types.SimpleNamespace(**vars(rows) | empty_rows)
    changes = {
        "": (),
        "scores": ((products.Scores, "emit", lambda *_: None),),
        "weighted sum": ((products.Weighted, "emit", lambda *_: None),),
        "softmax": ((forward, "softmax", empty(softmax.softmax)),),
        "P and dS": ((backward, "slopes", empty(slopes.slopes)),),
        "its exponentials": ((softmax, "exp2", lambda _e, _isa, x, **_: x),),
        "their exponentials": ((slopes, "exp2", lambda _e, _isa, x, **_: x),),
        "packing": ((panels, "rows", no_rows), (backward_rows, "rows", no_rows)),
    }
    changes |= {"S and dP": changes["scores"], "dQ, dK and dV": changes["weighted sum"]}
    context = ExitStack()
    for owner, name, change in changes[part]:
        context.enter_context(mock.patch.object(owner, name, change))
    return context


def empty(make):
    """As ``make``, which writes a function; the function does nothing, and returns zero if it returns anything."""

    def made(module, *arguments, **options):
        whole = make(module, *arguments, **options)
        returns = whole.function_type.return_type
        with Function(module, f"empty_{whole.name}", whole.function_type.args, returns) as (e, _):
            if returns != void:
                e.ret(e.const(returns, 0))
            return e.function

    return made


def serve(part: str) -> None:
    """Answer each line ``direction dtype head_dim length`` with the least seconds of a call."""
    programs = {}
    for line in sys.stdin:
        if line not in programs:
            programs[line] = prepare(part, *line.split())
        program, arguments = programs[line]
        end, best = time.perf_counter() + SECONDS, float("inf")
        while (start := time.perf_counter()) < end:
            jax.block_until_ready(program(*arguments))
            best = min(best, time.perf_counter() - start)
        _say(best)


def prepare(part: str, direction: str, dtype: str, head_dim: str, length: str):
    """A compiled pass and its arguments; what the backward pass starts from comes from the whole forward kernel."""
    x = jnp.ones((1, int(length), 8, int(head_dim)), dtype)
    attend = jax.jit(lambda q, k, v: backends.attention(q, k, v, is_causal=True, backend="flash_cpu"))
    program, arguments = attend, (x, x, x)
    if direction == "backward":
        _, pull_back = jax.vjp(attend, x, x, x)
        program, arguments = jax.jit(lambda pull_back, d_out: pull_back(d_out)), (pull_back, x)
    with without(part):
        jax.block_until_ready(program(*arguments))
    return program, arguments


def _say(*words) -> None:
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


def measure(direction: str, folder: str) -> None:
    """Print the table of one direction."""
    parts = PARTS[direction]
    workers = {
        part: subprocess.Popen(
            [sys.executable, __file__, part],
            env=os.environ | {"XDG_CACHE_HOME": f"{folder}/{direction} {part}", "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in ("", *parts)
    }
    _say(f"| {direction}, causal, 8/8 heads | whole, ms |", *(f"without {part} |" for part in parts))
    _say("| :-- |" + " --: |" * (1 + len(parts)))
    for dtype, head_dim, length in CASES:
        least = dict.fromkeys(workers, float("inf"))
        for _ in range(ROUNDS):
            for part, worker in workers.items():
                worker.stdin.write(f"{direction} {dtype} {head_dim} {length}\n")
                worker.stdin.flush()
                least[part] = min(least[part], float(worker.stdout.readline()))
        saved = " | ".join(f"{round(100 * (1 - least[part] / least['']))}%" for part in parts)
        _say(f"| {dtype}, D {head_dim}, S {length} | {1e3 * least['']:.2f} | {saved} |")
    for worker in workers.values():
        worker.stdin.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for direction in PARTS:
            measure(direction, folder)
            _say()


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 else main()
