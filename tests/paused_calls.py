"""What a pause between two calls costs where XLA's threads may run anywhere, and where each has a processor of its own.

Measures: give it an idle machine. Every row is a process of its own: one call of attention (8/8 heads, D 64; forward:
2048 tokens, float32; decode: a token behind 32768, bfloat16) forty times, without a pause and with one of 0.15 s before
each call.

    python tests/paused_calls.py        # two minutes

Prints a table in Markdown, in milliseconds.
"""

from __future__ import annotations

import json
import sys

from attnsuite.suite import statistics
from script import printed

ONE = """
import json, sys, time
import jax
from attnsuite import backends
from attnsuite.suite.measure import placement

(name, kind), pinned, pause = sys.argv[1].split(), sys.argv[2] == "pinned", float(sys.argv[3])
queries, length, dtype = (1, 32768, "bfloat16") if kind == "decode" else (2048, 2048, "float32")
keys = jax.random.split(jax.random.key(0), 3)
shapes = [(1, queries, 8, 64)] + [(1, length, 8, 64)] * 2
arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]
call = jax.jit(lambda q, k, v: backends.attention(q, k, v, is_causal=kind == "forward", backend=name))
jax.block_until_ready(call(*arrays))
assert not pinned or placement.pin_pool()
times = []
for _ in range(40):
    time.sleep(pause)
    begin = time.perf_counter()
    jax.block_until_ready(call(*arrays))
    times.append(1e3 * (time.perf_counter() - begin))
print(json.dumps(sorted(times)))
"""


def main() -> None:
    lines = []
    for call in ("chunked forward", "flash_cpu forward", "flash_cpu decode"):
        for threads in ("free", "pinned"):
            for pause in ("0", "0.15"):
                times = json.loads(printed(ONE, call, threads, pause))
                cells = (statistics.median(times).value, times[len(times) // 10], times[-len(times) // 10])
                lines.append(f"| {call} | {threads} | {pause} | {' | '.join(f'{cell:.1f}' for cell in cells)} |\n")
    head = "| call | threads | pause, s | median | 10% | 90% |\n|---|---|---|---|---|---|\n"
    sys.stdout.write(head + "".join(lines))


if __name__ == "__main__":
    main()
