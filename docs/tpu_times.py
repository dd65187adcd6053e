# ruff: noqa: E501 (the head of a table is one line)
"""Fits and judges the expected times of `attnsuite tune`: `python docs/tpu_times.py TIMES.csv` prints their page.

The page is reports/published/expected-tpu-times/times.md. TIMES.csv has the times of tokamax's wheel (0.0.17) and of
its repository, a row per measurement. It is not part of this repository. The page has the weights that
`suite/compile/expected.py` holds.
"""

import csv
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import nnls
from scipy.stats import spearmanr

from attnsuite.backends import AttentionSpec, Target
from attnsuite.backends.splash import SPLASH
from attnsuite.suite.compile.expected import CHIPS, TERMS

KERNEL, DEVICES = "pallas_mosaic_tpu_flash_attention", {"tpu_v5": "v5p", "tpu_v6_lite": "v6e", "tpu7x": "tpu7x"}
SIZES = (256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement of the kernel: the problem, the options, the median seconds."""

    source: str
    chip: str
    spec: AttentionSpec
    keeps_rows: bool
    config: tuple[tuple[str, int], ...]
    seconds: float

    @property
    def shape(self) -> tuple[object, ...]:
        """What is held out together: the arrays, whatever the mask."""
        return self.spec.batch, self.spec.query_length, self.spec.num_heads, self.spec.head_dim

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and keys per block."""
        config = dict(self.config)
        return min(config["block_q"], self.spec.query_length), min(config["block_kv"], self.spec.key_value_length)

    def terms(self, blocks: tuple[int, int] | None = None) -> tuple[float, ...]:
        """The terms of the sum, with these blocks instead of its own."""
        q, kv = blocks or self.blocks
        options = {"block_q": q, "block_kv": kv, "block_kv_compute": kv}
        work = SPLASH.work(self.spec, Target("tpu", self.chip), options)
        return CHIPS[self.chip].terms(self.spec, work, q, kv, keeps_rows=self.keeps_rows)

    def area(self, blocks: tuple[int, int] | None = None) -> float:
        """The baseline: pairs in visited blocks."""
        q, kv = blocks or self.blocks
        return self.terms((q, kv))[1] * q * kv


def rows_of(path: Path) -> list[Row]:
    """The rows of the kernel on TPUs."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row_of(line) for line in csv.DictReader(file) if line["kernel"] == KERNEL and line["device"] in DEVICES]


def row_of(line: dict[str, str]) -> Row:
    """One line. Raises ValueError for a problem that the sum does not describe."""
    if any(line[name] for name in ("bool_mask", "bias", "segment_ids")) or float(line["dropout"]):
        raise ValueError(f"{line} has operands that the sum does not count.")
    (batch, rows, heads, dim), (_, keys, kv_heads, _), (*_, value) = (
        [int(size) for size in re.findall(r"\d+", line[name].removeprefix("bf16"))] for name in "qkv"
    )
    spec = AttentionSpec(
        batch=batch, query_length=rows, key_value_length=keys, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        value_head_dim=value, dtype="bfloat16", is_causal=line["causal"] == "1", needs_grad=False,
    )  # fmt: skip
    return Row(
        source=line["source"],
        chip=DEVICES[line["device"]],
        spec=spec,
        keeps_rows=line["residuals"] == "1",
        config=tuple(json.loads(line["config"]).items()),
        seconds=float(line["median_ms"]) / 1e3,
    )


def fitted(rows: Sequence[Row]) -> np.ndarray:
    """Weights, none negative, of the least sum of squared relative errors."""
    terms = np.array([row.terms() for row in rows])
    scale = terms.max(0) + (terms.max(0) == 0)
    return nnls(terms / np.array([[row.seconds] for row in rows]) / scale, np.ones(len(rows)))[0] / scale


def scaled(rows: Sequence[Row]) -> np.ndarray:
    """The baseline's only weight: seconds per pair."""
    return np.array([statistics.median(row.seconds / row.area() for row in rows)])


def held_out(rows: Sequence[Row], fit: Callable, group: Callable[[Row], object]) -> dict[Row, np.ndarray]:
    """The weights for each row, fitted to the rows of the other groups."""
    weights = {key: fit([row for row in rows if group(row) != key]) for key in {group(row) for row in rows}}
    return {row: weights[group(row)] for row in rows}


def accuracy(rows: Sequence[Row], guesses: Sequence[float]) -> str:
    """Rank correlation, median and 90th percentile of the relative error, as cells of a table."""
    errors = [abs(guess / row.seconds - 1) for row, guess in zip(rows, guesses, strict=True)]
    rank = spearmanr(guesses, [row.seconds for row in rows]).statistic
    return f"{rank:.4f} | {100 * statistics.median(errors):.1f} | {100 * np.percentile(errors, 90):.1f}"


def choice(row: Row, weights: np.ndarray) -> tuple[list[float], bool] | None:
    """Where the measured best blocks are among all candidates; None with fewer than six candidates.

    The share of the others before it (equals count half) by the sum, the visited area, and fewest steps then fewest
    bytes; whether the sum has none before it.
    """
    every = [(q, kv) for q in SIZES for kv in SIZES if q <= row.spec.query_length and kv <= row.spec.key_value_length]
    if len(every) < 6 or row.blocks not in every:
        return None
    terms = {each: row.terms(each) for each in every}
    times = {each: round(float(np.dot(terms[each], weights)), 12) for each in every}
    best, orders = row.blocks, (times, {each: row.area(each) for each in every}, {e: terms[e][1:3] for e in every})
    shares = []
    for order in orders:
        before, equal = (sum(test(order[each]) for each in every) for test in (order[best].__gt__, order[best].__eq__))
        shares.append((before + (equal - 1) / 2) / (len(every) - 1))
    return shares, min(times.values()) == times[best]


def page(rows: list[Row]) -> str:
    """The page."""
    wheel = {chip: [row for row in rows if row.chip == chip and "wheel" in row.source] for chip in CHIPS}
    weights = {chip: held_out(own, fitted, lambda row: row.shape) for chip, own in wheel.items()}
    by_dim = {chip: held_out(own, fitted, lambda row: row.spec.head_dim) for chip, own in wheel.items()}
    scales = {chip: held_out(own, scaled, lambda row: row.shape) for chip, own in wheel.items()}
    text = [HEAD.format(measured=sum(map(len, wheel.values())), chips=" | ".join(wheel))]
    for term, counts, *found in zip(TERMS, COUNTS, *map(fitted, wheel.values()), strict=True):
        seconds = term in ("steps", "rows")  # of each; the others are relative to a published rate
        shown = [f"{1e9 * weight:.3g} ns" if seconds else f"{weight:.3g}" for weight in found]
        text.append(f"| {term} | {counts} | {' | '.join(shown)} |")
    text.append(ACCURACY)
    for chip, own in wheel.items():
        guesses = (
            ("the sum", [float(np.dot(row.terms(), weights[chip][row])) for row in own]),
            (
                "the sum, a whole head dimension held out",
                [float(np.dot(row.terms(), by_dim[chip][row])) for row in own],
            ),
            ("visited area", [row.area() * float(scales[chip][row][0]) for row in own]),
        )
        text += [f"| {chip} | {len(own)} | {name} | {accuracy(own, guess)} |" for name, guess in guesses]
    text.append(CHOICE)
    for chip, own in wheel.items():
        found = [each for row in own if (each := choice(row, weights[chip][row]))]
        shares, first = zip(*found, strict=True)
        text.append(
            f"| {chip} | {len(found)} | {100 * sum(first) / len(first):.0f} | "
            + " | ".join(f"{100 * share:.0f}" for share in np.mean(shares, axis=0))
            + " |"
        )
    return "\n".join((*text, FOOT))


COUNTS = (
    "two matrix products over every visited block at the chip's peak, head dimensions rounded up to the width of its matrix unit (128 on a v5p, 256 on a v6e and a tpu7x)",
    "steps of the kernel's grid: at each of them the pipeline is filled anew",
    "bytes of keys and values that the steps load, at the bandwidth of the memory",
    "bytes of queries, keys, values and output, which XLA transposes around the kernel",
    "rows whose log-sum-exp is kept",
)
HEAD = """# Expected times on absent TPUs

`attnsuite tune --target v6e` orders block sizes of splash by an expected time. `python docs/tpu_times.py TIMES.csv`
writes this page from times that tokamax's authors measured, and ship in the wheel of tokamax 0.0.17 ({measured} times of
the forward pass of its splash kernel in bfloat16; 20 shapes, causal and full, with and without the log-sum-exp; the
block sizes are those that tokamax's search found fastest). Nothing of this project has run on a TPU.

The expected time is a sum of five terms. Each is counted from the shapes and the block sizes, divided by a published
rate of the chip, and weighted. The weights are fitted per chip: none is negative, and 1 means the published rate.

| term | counts | {chips} |
|---|---|---|---|---|"""
ACCURACY = """
## How near it is

Every time is compared with a fit that has not seen its shape. The baseline is the number of pairs in visited blocks,
times one constant, which is held out in the same way.

| chip | times | by | rank correlation | median error (%) | 90th percentile (%) |
|---|---|---|---|---|---|"""
CHOICE = """
## Which blocks it would choose

For each problem tokamax's search found the fastest blocks. Here the candidates are all pairs of 256, 512, 1024, 2048 and
4096 that fit the lengths, six at least. A predictor that knows nothing has half of the candidates before the measured
best. "Steps, then bytes" is how `tune` orders where no time is expected.

| chip | problems | measured best is first by the sum (%) | candidates before it, by the sum (%) | by the visited area (%) | by steps, then bytes (%) |
|---|---|---|---|---|---|"""
FOOT = """
Only the best blocks of a problem were published, so the loss of a wrong choice on the chip is not known. JAX's `splash`
has the same blocks and grid and is ordered by the same sum; its times were not measured. No time is expected of the
backward pass, of float32, of head dimensions below 64 or above 256, of a v4 or v5e.
"""

if __name__ == "__main__":
    sys.stdout.write(page(rows_of(Path(sys.argv[1]))))
