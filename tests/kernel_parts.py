"""Which part of the forward kernel of flash_cpu its time goes into: it is compiled and timed with each part left out.

Measures: give it an idle machine. The numbers of a kernel without a part are wrong, and nobody looks at them. Each
variant is compiled in a process of its own, with a cache of its own, and timed in turns with the others.

    python tests/kernel_parts.py        # four minutes

Prints a table in Markdown: the milliseconds of the whole kernel, and the share of them that is saved without each part.
Parts overlap in the processor, so that the shares need not add up to 1.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

from attnsuite import backends
from attnsuite.backends.flash_cpu import forward, packing, products, rows, softmax
from attnsuite.backends.flash_cpu.emit import Function, i1, ptr

PARTS = ("whole", "scores", "softmax", "its exponentials", "weighted sum", "packing")
CASES = tuple(itertools.product(("float32", "bfloat16"), (64, 128), (512, 2048)))  # dtype, head_dim, length
ROUNDS, SECONDS = 5, 0.4


def leave_out(part: str) -> None:
    """Change the generator of this process: what it writes from now on lacks ``part``."""
    if part == "scores":
        products.Scores.emit = lambda *_: None
    elif part == "weighted sum":
        products.Weighted.emit = lambda *_: None
    elif part == "softmax":
        forward.softmax = _no_softmax
    elif part == "its exponentials":
        softmax.exp2 = lambda _e, _isa, x: x
    elif part == "packing":
        packing.rows = type("Rows", (), {**vars(rows), "copy_row": staticmethod(_nothing)})


def _nothing(module, isa, name, *_):
    with Function(module, name, [ptr, ptr]) as (e, _places):
        return e.function


def _no_softmax(module, *arguments, **options):
    whole = softmax.softmax(module, *arguments, **options)
    with Function(module, f"no_{whole.name}", whole.function_type.args, i1) as (e, _places):
        e.ret(e.const(i1, 0))
    return e.function


def serve(part: str) -> None:
    """Answer each line ``dtype head_dim length`` with the least seconds of a call."""
    leave_out(part)
    calls = {}
    for line in sys.stdin:
        dtype, head_dim, length = line.split()
        if line not in calls:
            x = jnp.ones((1, int(length), 8, int(head_dim)), dtype)
            program = jax.jit(lambda q, k, v: backends.attention(q, k, v, is_causal=True, backend="flash_cpu"))
            calls[line] = (program, x)
            program(x, x, x).block_until_ready()
        program, x = calls[line]
        end, best = time.perf_counter() + SECONDS, float("inf")
        while (start := time.perf_counter()) < end:
            program(x, x, x).block_until_ready()
            best = min(best, time.perf_counter() - start)
        _say(best)


def _say(*words) -> None:
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            part: subprocess.Popen(
                [sys.executable, __file__, part],
                env=os.environ | {"XDG_CACHE_HOME": f"{folder}/{part}", "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for part in PARTS
        }
        _say("| forward, causal, 8/8 heads | whole, ms |", *(f"without {part} |" for part in PARTS[1:]))
        _say("| :-- |" + " --: |" * len(PARTS))
        for dtype, head_dim, length in CASES:
            least = dict.fromkeys(PARTS, float("inf"))
            for _ in range(ROUNDS):
                for part, worker in workers.items():
                    worker.stdin.write(f"{dtype} {head_dim} {length}\n")
                    worker.stdin.flush()
                    least[part] = min(least[part], float(worker.stdout.readline()))
            whole = least["whole"]
            saved = " | ".join(f"{round(100 * (1 - least[part] / whole))}%" for part in PARTS[1:])
            _say(f"| {dtype}, D {head_dim}, S {length} | {1e3 * whole:.2f} | {saved} |")
        for worker in workers.values():
            worker.stdin.close()


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 else main()
