"""Prints how fast one core multiplies the shapes of the model ``small`` at 1024 tokens, in XLA or in PyTorch.

python tests/product_rates.py xla|torch    # GFLOP/s by CPU time, best of 25, float32; start it with taskset -c 0
"""

import importlib
import sys
import time

SHAPES = {
    "q, o": (1024, 512, 512),
    "k, v": (1024, 512, 256),
    "gate, up": (1024, 512, 1408),
    "down": (1024, 1408, 512),
    "slope of gate, up": (1408, 1024, 512),
    "slope of down": (512, 1024, 1408),
}


def product(library, rows, summed, columns):
    if library == "torch":
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        left, right = torch.ones(rows, summed), torch.ones(columns, summed)
        return lambda: torch.nn.functional.linear(left, right)
    jax = importlib.import_module("jax")
    left, right = jax.numpy.ones((rows, summed)), jax.numpy.ones((columns, summed))
    run = jax.jit(lambda left, right: jax.numpy.einsum("ti,oi->to", left, right))
    return lambda: run(left, right).block_until_ready()


def seconds(run):
    start = time.process_time()
    run()
    return time.process_time() - start


for name, shape in SHAPES.items():
    run = product(sys.argv[1], *shape)
    run()
    rate = 2e-9 * shape[0] * shape[1] * shape[2] / min(seconds(run) for _ in range(25))
    sys.stdout.write(f"{name}: {rate:.0f}\n")
