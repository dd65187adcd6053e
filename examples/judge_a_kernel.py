"""Judge a kernel of one's own: registered as a backend, and held to the float64 oracle.

Run: python examples/judge_a_kernel.py
The judge allows twice the error of the baseline in the same dtype. A kernel that forgets something fails, however small
the mistake looks. `attnsuite judge my.py:fn` tries every rule of the contract; docs/how-to/my-kernel.md shows how.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from attnsuite import backends
from attnsuite.backends import oracle


def kernel(scale, query, key, value):
    """Causal attention, one query head per KV head; `scale` is what a careless port gets wrong."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), value)


@dataclasses.dataclass(frozen=True)
class Mine:
    """A backend takes what it names, and the core refuses the rest with a sentence."""

    name: str
    error: float = 0.0
    exact: bool = True

    def takes(self, target, mode):
        return backends.Takes(features=frozenset({"causal", "gradient"}), modes=("native",))

    def plan(self, spec, layout, *, target, mode="native", options=None):
        attend = functools.partial(kernel, spec.softmax_scale * (1 + self.error))
        return backends.Plan(lambda query, key, value, layer, carry: (attend(query, key, value), carry))


def verdict(backend, spec, arrays):
    """The oracle's verdict on one forward pass of a backend."""
    expected = oracle.forward(spec, backends.Layout(), *arrays)
    target = backends.Target.here()
    outputs = [
        backends.plan(one, spec, backends.Layout(), target=target).run(*arrays)[0]
        for one in (backend, backends.get("standard"))
    ]
    return oracle.judge(outputs[0], expected, outputs[1], spec.dtype)


def main():
    """Return the verdicts on a right kernel and on one whose scale is off by one part in ten thousand."""
    spec = backends.AttentionSpec(
        batch=2, query_length=96, key_value_length=96, num_heads=4, num_kv_heads=4, head_dim=32, is_causal=True
    )
    arrays = [jax.random.normal(key, (2, 96, 4, 32)) for key in jax.random.split(jax.random.key(0), 3)]
    right, wrong = (verdict(Mine("mine", error), spec, arrays) for error in (0.0, 1e-4))
    for name, found in (("right", right), ("wrong", wrong)):
        print(f"{name}: error {found.max_error:.1e}, allowed {found.allowed:.1e}, passed: {found.passed}")
    refused = backends.support(Mine("mine"), dataclasses.replace(spec, local_window_size=8), backends.Target.here())
    print(*refused.reasons, sep="\n")
    return right, wrong, refused


if __name__ == "__main__":
    main()
