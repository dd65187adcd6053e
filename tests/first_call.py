"""How long the first call of a native kernel takes: compiled, and read from the cache on disk.

Measures: give it an idle machine. Every kernel is made in processes of its own, twice with an empty cache directory and
twice more with what the first ones left there. Importing JAX is not counted.

    python tests/first_call.py        # a minute

Prints a table in Markdown, in milliseconds: the slower of two.
"""

from __future__ import annotations

import itertools
import sys
import tempfile

from script import printed

KERNELS = ("forward", "backward", "decode")
ONE = """
import sys, time
import jax
from attnsuite.backends import AttentionSpec, Target
from attnsuite.backends.flash_cpu import targets
from attnsuite.backends.flash_cpu.calls import Calls
from attnsuite.backends.flash_cpu.compiler import Processor

kind, dtype, head_dim = sys.argv[1], sys.argv[2], int(sys.argv[3])
spec = AttentionSpec(batch=1, query_length=1 if kind == "decode" else 64, key_value_length=64, num_heads=2,
                     num_kv_heads=2, head_dim=head_dim, dtype=dtype, is_causal=True, needs_grad=kind == "backward")
isa = Processor.here().isa().of(dtype)
calls = Calls(spec, isa)
kernel = calls._decode_kernel(head_dim) if kind == "decode" else calls.kernel
begin = time.perf_counter()
targets.target(kind, kernel, isa)
print(1e3 * (time.perf_counter() - begin), isa.name)
"""


def milliseconds(words: tuple[str, ...], cache: str) -> tuple[float, str]:
    """Of one process: how long it took to have the kernel, and the instruction set."""
    time, isa = printed(ONE, *words, XDG_CACHE_HOME=cache).split()
    return float(time), isa


def main() -> None:
    lines = []
    for words in itertools.product(KERNELS, ("float32", "bfloat16"), ("64", "128")):
        isa, pairs = "", []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as cache:
                (compiled, isa), (read, _) = (milliseconds(words, cache) for _ in range(2))
            pairs.append((compiled, read))
        cells = " | ".join(f"{max(times):.0f}" for times in zip(*pairs, strict=True))
        lines.append(f"| {', '.join(words)}, {isa} | {cells} |")
    sys.stdout.write("\n".join(["| kernel | compiled | from the cache |", "|---|---|---|", *lines, ""]))


if __name__ == "__main__":
    main()
