"""A run that is ended at a random moment and resumed, many times: no cell is lost, none is doubled.

The run writes as every run does (lock, manifest, one record after the other); its cells take a millisecond each, so
that hundreds of trials take seconds. Prints what came of them as JSON:

    PYTHONPATH=tests python tests/random_ends.py --trials 200 --signal SIGKILL
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from attnsuite.suite import entry
from attnsuite.suite.grid import run_grid
from attnsuite.suite.grid.execute import execute
from attnsuite.suite.store import LOCK, MANIFEST, RECORDS, parse_records
from fleet_work import ROWS, Seen, Work, record_of, request

NAMES = [f"case{number}" for number in range(10)]
CELL_SECONDS = 1e-3


def work(out: Path) -> None:
    """The run in ``out``: a new one, or the rest of one that was begun."""
    asked = request(out, NAMES, resume=(out / MANIFEST).is_file())

    def records(cells: Any, *_: Any) -> Iterator[Any]:
        for cell in cells:
            time.sleep(CELL_SECONDS)
            yield record_of(cell, "here")

    with (
        mock.patch.object(run_grid, "probe", Work("here").look),
        mock.patch.object(run_grid, "measured_machine", dict),
        mock.patch.object(run_grid, "group_records", records),
    ):
        execute(asked, Seen())


def ended(out: Path, number: int, after: tuple[int, float] | None = None) -> int:
    """The exit code of a process that works in ``out``; it is sent a signal after so many records and seconds."""
    parent, code = os.getpid(), 0
    try:
        child = os.fork()
        if child == 0:
            work(out)
    except BaseException as error:
        if os.getpid() == parent:
            raise
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 99
    if os.getpid() != parent:
        # The exception and the frames that it held are gone, and with them what a process removes when it ends.
        os._exit(code)
    if after is not None:
        records, seconds = after
        while not (out / LOCK).exists() or whole_lines(out).count(b"\n") < records:
            time.sleep(CELL_SECONDS / 10)
        time.sleep(seconds)
        os.kill(child, number)  # if it has ended it waits for waitpid
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def whole_lines(out: Path) -> bytes:
    """The records that are there, without a last line that was cut off."""
    data = (out / RECORDS).read_bytes() if (out / RECORDS).is_file() else b""
    return data[: data.rfind(b"\n") + 1]


def main() -> None:
    """Try, and print the tally."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--signal", choices=["SIGKILL", "SIGINT"], default="SIGKILL")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    number = signal.Signals[asked.signal]
    signal.signal(signal.SIGINT, entry._interrupt)
    draw = random.Random(asked.seed)  # noqa: S311 (moments, not secrets)
    names = ("with records", "lost", "doubled", "changed", "left behind", "odd ends")
    tally = {"trials": asked.trials} | dict.fromkeys(names, 0)
    there: set[Path] = set()
    with tempfile.TemporaryDirectory() as place:
        tempfile.tempdir = place  # of the runs; a run that is killed leaves its own
        work(Path(place) / "undisturbed")  # and imports what its children then have
        for trial in range(asked.trials):
            out = Path(place) / str(trial)
            moment = draw.randrange(len(NAMES) * len(ROWS)), draw.uniform(0, 3 * CELL_SECONDS)
            code = ended(out, number, moment)
            left = set(Path(place).glob("attnsuite-*")) - there if number == signal.SIGINT else set()
            there |= left
            before = whole_lines(out)
            again = ended(out, number)
            keys = [record.key for record in parse_records(out / RECORDS)[0]] if again == 0 else []
            tally["odd ends"] += code not in {0, -number, 128 + number} or again != 0
            tally["with records"] += 0 < before.count(b"\n") < len(NAMES) * len(ROWS)
            tally["lost"] += len(NAMES) * len(ROWS) - len(set(keys))
            tally["doubled"] += len(keys) - len(set(keys))
            tally["changed"] += not (out / RECORDS).read_bytes().startswith(before)
            tally["left behind"] += len(left)
    print(json.dumps(tally))  # noqa: T201 (this is a command)


if __name__ == "__main__":
    sys.exit(main())
