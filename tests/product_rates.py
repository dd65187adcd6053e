"""Prints how fast one core multiplies the shapes of the model ``small`` at 1024 tokens, in XLA or in PyTorch.

python tests/product_rates.py xla|torch    # GFLOP/s by CPU time, best of 25, float32; start it with taskset -c 0

Of each projection ``out = x @ w.T``: itself, the slope of ``x``, and that of ``w``, each as automatic differentiation
writes it. The last sums over the first axis of both operands.
"""

import importlib
import sys
import time

TOKENS = 1024
PROJECTIONS = {"q, o": (512, 512), "k, v": (512, 256), "gate, up": (512, 1408), "down": (1408, 512)}  # in, out
FORMS = {"forward": "ti,oi->to", "slope of x": "to,oi->ti", "slope of w": "to,ti->oi"}


def product(library, form, width, columns):
    sizes = {"t": TOKENS, "i": width, "o": columns}
    shapes = [[sizes[axis] for axis in operand] for operand in form.split("->")[0].split(",")]
    if library == "torch":
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        left, right = (torch.ones(shape) for shape in shapes)
        match form:  # as in the gradient of torch.nn.functional.linear
            case "ti,oi->to":
                return lambda: torch.nn.functional.linear(left, right)
            case "to,oi->ti":
                return lambda: left.mm(right)
            case "to,ti->oi":
                return lambda: left.t().mm(right)
    jax = importlib.import_module("jax")
    left, right = (jax.numpy.ones(shape) for shape in shapes)
    run = jax.jit(lambda left, right: jax.numpy.einsum(form, left, right))
    return lambda: run(left, right).block_until_ready()


def seconds(run):
    start = time.process_time()
    run()
    return time.process_time() - start


for name, (width, columns) in PROJECTIONS.items():
    rates = []
    for kind, form in FORMS.items():
        run = product(sys.argv[1], form, width, columns)
        run()
        rate = 2e-9 * TOKENS * width * columns / min(seconds(run) for _ in range(25))
        rates.append(f"{kind} {rate:.0f}")
    sys.stdout.write(f"{name}: {', '.join(rates)}\n")
