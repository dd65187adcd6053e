"""Whether ``attnsuite compare --fail-on slower:10%`` finds a planted slowdown, and leaves an unchanged rerun alone.

Measures: give it an idle machine. A backend ``planted`` computes what another does (``--backend``) and then multiplies
small matrices: none in an unchanged run, and in a slowed run as many as take a share of the median of the run before.
Each try runs the suite twice: slowed, and unchanged, both compared with the unchanged run before.

    python tests/planted_slowdown.py --tries 20 --slowdown 15 --sample-seconds 2 --out /tmp/planted  # 25 minutes

Prints a table in Markdown. The exit code is 0 if ``compare`` ends with 3 for every slowed run and at most one of twenty
unchanged ones. ``compare`` may name the run as a whole; how often it names a planted cell is counted apart.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

from attnsuite import reports
from attnsuite.suite import statistics
from command import installed
from script import python

BACKEND = """
import dataclasses, json, os
import jax, jax.numpy as jnp
from attnsuite import backends

BASE = backends.get(os.environ["PLANTED_BACKEND"])

@dataclasses.dataclass(frozen=True)
class Planted:
    name: str = "planted"
    exact: bool = True

    def takes(self, target, mode):
        return BASE.takes(target, mode)

    def plan(self, spec, layout, *, target, mode="native", options=None):
        made = BASE.plan(spec, layout, target=target, mode=mode, options=options)
        steps = json.loads(os.environ["PLANTED_STEPS"]).get(str(spec.query_length), 0)

        def attend(query, key, value, layer, carry):
            out, carry = made.attend(query, key, value, layer, carry)
            if not steps:
                return out, carry
            fill = jnp.where(jnp.abs(out[0, 0, 0, 0]) > 1e30, 0.0, 1 / 128)  # needs the output, so that it waits
            square = jax.lax.fori_loop(0, steps, lambda _, x: x @ x, jnp.full((128, 128), fill))
            return out + (square[0, 0] - fill), carry

        return dataclasses.replace(made, attend=attend)
"""
CALIBRATION = 400  # steps
SUITE = """
[[case]]
kind = "op_forward"
sequence = 1024

[[case]]
kind = "op_forward"
sequence = 2048
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--backend", default="flash_cpu", help="what the planted backend computes as")
    parser.add_argument("--slowdown", type=float, default=15.0, help="percent")
    parser.add_argument("--sample-seconds", type=float, default=4.0, help="of each cell in each run")
    parser.add_argument("--fail-on", default="slower:10%")
    parser.add_argument("--out", type=Path, required=True, help="a directory that does not exist yet")
    asked = parser.parse_args()
    path = package(asked.out)
    limits = reports.parse_limits(asked.fail_on)
    measured = functools.partial(measure, path=path, backend=asked.backend, seconds=asked.sample_seconds)
    before = measured(asked.out / "unchanged-0", steps={})
    found = in_a_cell = in_each = flagged = 0
    step = step_seconds(before, measured(asked.out / "calibration", steps=dict.fromkeys(medians(before), CALIBRATION)))
    say("| try | slowed: time relative to control | found | unchanged: time relative to control | flagged |")
    say("|---|---|---|---|---|")
    for number in range(1, asked.tries + 1):
        steps = {length: round(seconds * asked.slowdown / 100 / step) for length, seconds in medians(before).items()}
        slowed = measured(asked.out / f"slowed-{number}", steps=steps)
        again = measured(asked.out / f"unchanged-{number}", steps={})
        hits, alarms = (reports.compare(before, run, limits).regressions for run in (slowed, again))
        cells = {each.cell for each in hits if "/planted/" in each.cell}
        found, flagged = found + bool(hits), flagged + bool(alarms)
        in_a_cell, in_each = in_a_cell + bool(cells), in_each + (len(cells) == len(steps))
        named = ["; ".join(each.cell for each in worse) or "no" for worse in (hits, alarms)]
        say(f"| {number} | {ratios(before, slowed)} | {named[0]} | {ratios(before, again)} | {named[1]} |")
        before = again
    say(f"\n{asked.fail_on}: of {asked.tries} slowed runs {found} were found, {in_a_cell} of them in a planted")
    say(f"cell and {in_each} in each planted cell; of {asked.tries} unchanged runs {flagged} were flagged.")
    return 0 if found == asked.tries and flagged * 20 <= asked.tries else 1


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def package(out: Path) -> Path:
    """A directory to import from, with the backend as an installed package; and the suite."""
    (out / "package").mkdir(parents=True)
    (out / "planted.toml").write_text(SUITE)
    return installed(out / "package", "[attnsuite.backends]\nplanted = planted:Planted\n", planted=BACKEND)


def measure(run: Path, path: Path, backend: str, seconds: float, steps: dict[str, int]) -> Path:
    """One run of the suite, each cell sampled for so long, in which ``planted`` makes these further steps."""
    done = python(
        *("-m", "attnsuite", "run", "--suite", path.parent / "planted.toml", "--backends", "standard,planted"),
        *("--out", run, "--sample-seconds", seconds),
        limit=None,
        first=path.resolve(),
        PLANTED_BACKEND=backend,
        PLANTED_STEPS=json.dumps(steps),
    )
    if done.returncode != 0:
        raise SystemExit(f"attnsuite run ended with {done.returncode}: {done.stderr[-2000:]}")
    return run


def medians(run: Path) -> dict[str, float]:
    """The median of ``planted`` at each length, in seconds."""
    records = [record for record in reports.load(run).records if record.requested == "planted"]
    return {str(record.problem["sequence"]): statistics.median(record.samples).value for record in records}


def step_seconds(before: Path, after: Path) -> float:
    """What one further step takes: of what ``CALIBRATION`` of them added at each length, the smallest."""
    without, with_steps = medians(before), medians(after)
    return min((with_steps[length] - seconds) / CALIBRATION for length, seconds in without.items())


def ratios(before: Path, after: Path) -> str:
    """The time of ``planted`` relative to ``standard``, B over A, at each length, as ``compare --fail-on`` takes it."""
    runs = [{record.key: record.samples for record in reports.load(run).records} for run in (after, before)]
    cells = [(key, key.replace("/planted/", "/standard/")) for key in runs[0] if "/planted/" in key]
    found = (statistics.quick_ratio(*(run[cell] for cell in pair for run in runs)) for pair in cells)
    return ", ".join(f"{ratio:.3f}" for ratio in found)


if __name__ == "__main__":
    raise SystemExit(main())
