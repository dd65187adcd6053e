"""What flash_cpu loses where other threads share its cores: two JAX devices, and PyTorch's threads, which spin.

Measures: give it an idle machine of two cores or more. Medians of calls in turns. ``shards`` is a call whose heads are
divided between two devices by ``jax.shard_map``, with its inputs there already; ``pmap`` one whose sequences are;
``dispatch`` is what JAX takes to start an addition on two devices. ``after torch`` is a call on one device right after
a product of PyTorch's, whose threads wait for more.

    python tests/thread_neighbours.py        # a minute; needs PyTorch

Prints a table in Markdown: milliseconds on one device, the others relative to it, and the dispatch in milliseconds.
"""

import importlib
import os
import sys
import time

os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite import backends

CASES = (  # length, queries, KV heads of 8 heads, head dimension, dtype, gradient
    (8192, 1, 2, 64, "float32", False),
    (32768, 1, 8, 64, "float32", False),
    (512, 512, 8, 64, "bfloat16", False),
    (2048, 2048, 8, 64, "float32", False),
    (1024, 1024, 2, 64, "bfloat16", True),
    (512, 512, 2, 128, "float32", True),
    (2048, 2048, 8, 64, "float32", True),
)
SECONDS = 6


def attend(q, k, v):
    return backends.attention(q, k, v, is_causal=q.shape[1] == k.shape[1], backend="flash_cpu", on_unavailable="raise")


def with_gradients(q, k, v):
    return jax.vjp(attend, q, k, v)[1](q)


def calls(length, queries, kv_heads, head_dim, dtype, gradient):
    """Functions without arguments that wait for their result."""
    shapes = [(2, queries, 8, head_dim)] + [(2, length, kv_heads, head_dim)] * 2
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    function = with_gradients if gradient else attend
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("cores",))

    def ready(program, *arguments):
        return lambda: jax.block_until_ready(program(*arguments))

    def sharded(body):
        heads = jax.sharding.PartitionSpec(None, None, "cores", None)
        shards = [jax.device_put(x, jax.sharding.NamedSharding(mesh, heads)) for x in arrays]
        return ready(jax.jit(jax.shard_map(body, mesh=mesh, in_specs=heads, out_specs=heads, check_vma=False)), *shards)

    on_each = [jax.pmap(lambda x: x)(x.reshape(2, 1, *x.shape[1:])) for x in arrays]
    one = ready(jax.jit(function), *arrays)
    dispatch = sharded(lambda q, _k, _v: q + 1)
    return {"one device": one, "shards": sharded(function), "pmap": ready(jax.pmap(function), *on_each),
            "after torch": one, "dispatch": dispatch}  # fmt: skip


def medians(found):
    """Seconds of each."""
    torch = importlib.import_module("torch")
    square = torch.ones(512, 512)
    times = {name: [] for name in found}
    for call in found.values():
        call()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for name, call in found.items():
            if name == "after torch":
                torch.mm(square, square)
            else:
                time.sleep(0.01)  # PyTorch's threads have given up
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(of_one)) for name, of_one in times.items()}


def main():
    columns = ("shards", "pmap", "after torch")
    sys.stdout.write("| 2 sequences, 8 heads | one device, ms | " + " | ".join(columns) + " | dispatch, ms |\n")
    sys.stdout.write("| :-- | --: | --: | --: | --: | --: |\n")
    for case in CASES:
        length, queries, kv_heads, head_dim, dtype, gradient = case
        found = medians(calls(*case))
        one = found["one device"]
        name = f"T {queries}, S {length}, 8/{kv_heads}, D {head_dim}, {dtype}{', gradient' * gradient}"
        relative = " | ".join(f"{found[column] / one:.2f}" for column in columns)
        sys.stdout.write(f"| {name} | {1e3 * one:.2f} | {relative} | {1e3 * found['dispatch']:.2f} |\n")


if __name__ == "__main__":
    main()
