"""The time that a splash kernel's forward pass is expected to take on a TPU that is not here, from its block sizes.

A sum of five terms, each a count of work divided by a published rate of the chip:

- products: two matrix products over every visited block, the head dimensions rounded up to the matrix unit's width;
- steps: the start of each step of the kernel's grid, when its pipeline is empty;
- keys: the keys and values that the steps load;
- arrays: queries, keys, values and output, which XLA reads and writes around the kernel;
- rows: the log-sum-exp, where it is kept for a gradient.

The weights were fitted to times that tokamax's authors measured and ship in their wheel. ``docs/tpu_times.py`` makes
the fit and its page, ``reports/published/expected-tpu-times/times.md``, with the errors on shapes that were held out.
No time of another kernel, dtype, head dimension or chip is expected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attnsuite.backends import AttentionSpec
from attnsuite.backends.tunable import KernelWork
from attnsuite.backends.vendor_kernel import round_up

TERMS = ("products", "steps", "keys", "arrays", "rows")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Published rates of a device as JAX counts devices, and the fit.

    ``peak`` is in bfloat16 operations per second, ``bandwidth`` in bytes per second, ``width`` in numbers along a side
    of the matrix unit. ``weights`` are those of :data:`TERMS`: times the ideal for products, keys and arrays; seconds
    for a step and a row. ``error`` is the median relative error on shapes that were held out.
    """

    peak: float
    bandwidth: float
    width: int
    weights: tuple[float, ...]
    error: float

    def terms(
        self, spec: AttentionSpec, work: KernelWork, block_q: int, block_kv: int, *, keeps_rows: bool = False
    ) -> tuple[float, ...]:
        """The counts of :data:`TERMS`; those that a rate divides are in seconds. ``spec`` is in bfloat16."""
        widths = (spec.head_dim, spec.value_head_dim or spec.head_dim)
        rows = spec.batch * spec.query_length * spec.num_heads
        elements = (rows + spec.batch * spec.key_value_length * spec.num_kv_heads) * sum(widths)
        return (
            2 * work.steps * block_q * block_kv * sum(round_up(x, self.width) for x in widths) / self.peak,
            work.steps,
            work.loaded_bytes / self.bandwidth,
            2 * elements / self.bandwidth,
            rows * keeps_rows,
        )


# Peaks and bandwidths: cloud.google.com/tpu/docs, pages v5p, v6e and tpu7x (whose chip is two of JAX's devices).
# Weights and errors: reports/published/expected-tpu-times/times.md.
CHIPS: Mapping[str, Chip] = {
    "v5p": Chip(
        peak=459e12, bandwidth=2765e9, width=128, weights=(1.06, 1.82e-07, 0.00867, 2.45, 5.84e-10), error=0.046
    ),
    "v6e": Chip(peak=918e12, bandwidth=1640e9, width=256, weights=(1.15, 2.49e-07, 1.07, 2.17, 1.02e-09), error=0.029),
    "tpu7x": Chip(
        peak=1153.5e12, bandwidth=3690e9, width=256, weights=(1.35, 4.26e-07, 1.41, 2.86, 5.07e-10), error=0.046
    ),
}


def expected_seconds(
    kind: str, spec: AttentionSpec, options: Mapping[str, object], work: KernelWork | None
) -> float | None:
    """The expected seconds of the forward pass on a chip of this ``kind``; None for what the fit does not cover."""
    chip, sizes = CHIPS.get(kind), (options.get("block_q"), options.get("block_kv"))
    covered = spec.dtype == "bfloat16" and not spec.needs_grad and 64 <= spec.head_dim <= 256 and spec.query_length > 1
    if chip is None or work is None or not covered or not all(isinstance(size, int) for size in sizes):
        return None
    block_q, block_kv = (int(str(size)) for size in sizes)
    return sum(map(float.__mul__, chip.weights, map(float, chip.terms(spec, work, block_q, block_kv))))
