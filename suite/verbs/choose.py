"""The verb ``attnsuite choose``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import InputError
from .flags import CHECK_FAILED, flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnsuite.backends.choices import Source

    from ..choosing import Score

ALLOWED = 1.05  # of the best fixed backend's time, over all held-out problems together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choose:
    """Write a policy: the fastest exact backend of each measured problem, for auto to follow."""

    run_dirs: tyro.conf.Positional[Annotated[tuple[Path, ...], flag("RUN ...", "none")]]
    """Directories that run or tune wrote; a later one replaces problems of an earlier one."""
    out: Annotated[Path, flag("FILE")] = Path("policy.json")
    """The policy's file. One that exists is extended: a problem that it has is replaced."""
    check: Annotated[Path | None, flag("DIR", "no check")] = None
    """Directory of a run of other problems: hold auto with the policy against each fixed backend, by its records."""


def run(command: Choose) -> int:
    """Write the policy and print what it says; with ``--check`` also how it does on other problems."""
    from attnsuite.backends.choices import Policy, to_json

    from .. import files
    from ..choosing import extended, score, sources_of

    if not command.run_dirs:
        raise InputError("choose needs the directory of at least one run; attnsuite run writes one.")
    if command.check is not None and command.check.resolve() in {path.resolve() for path in command.run_dirs}:
        raise InputError(f"--check {command.check} is a run that the policy is made of; give a run of other problems.")
    files.check_file(command.out)
    found = sources_of(command.run_dirs)
    together, scored = extended(command.out, found), None
    if command.check is not None:  # before the file is written: the run may be none to hold the policy against
        scored = score(Policy.of(str(command.out), together), command.check)
    files.write_text(command.out, to_json(together))
    total = sum(len(each.choices) for each in together)
    print(_cases(found))
    if more := total - sum(len(each.choices) for each in found):
        print(f"{more} more choices were in the file, and stay")
    print(f"policy:  {command.out}\nuse it:  export ATTNSUITE_POLICY={shlex.quote(str(command.out.resolve()))}")
    if scored is None:
        return 0
    print(_scored(scored))
    return 0 if scored.over_fixed <= ALLOWED else CHECK_FAILED


def _cases(sources: Sequence[Source]) -> str:
    from tabulate import tabulate

    rows = [
        (
            choice.case,
            " ".join((choice.backend, *(f"{name}={value}" for name, value in (choice.options or {}).items()))),
            "-" if choice.ratio is None else f"{choice.ratio:.3g}",
            "-" if choice.interval is None else f"[{choice.interval[0]:.3g}, {choice.interval[1]:.3g}]",
            "-" if choice.memory is None else f"{choice.memory / 2**20:.4g}",
        )
        for source in sources
        for choice in source.choices
    ]
    headers = ["case", "choice", "x standard", "95% interval", "memory (MiB)"]
    return tabulate(rows, headers, tablefmt="plain", disable_numparse=True)


def _scored(found: Score) -> str:
    from tabulate import tabulate

    rows = [
        (row.case, row.chosen, f"{row.seconds[row.chosen] * 1e3:.4g}", min(row.seconds, key=lambda n: row.seconds[n]),
         f"{min(row.seconds.values()) * 1e3:.4g}", row.sentence)
        for row in found.rows
    ]  # fmt: skip
    headers = ["held-out case", "auto takes", "ms", "fastest", "ms", "why"]
    sums = {
        "auto with the policy": found.with_policy,
        "auto without": found.without,
        **{f"{name} every time": seconds for name, seconds in sorted(found.fixed.items(), key=lambda pair: pair[1])},
        "the fastest of each case": found.best_each,
    }
    table = tabulate(rows, headers, tablefmt="plain", disable_numparse=True)
    totals = "\n".join(f"{name:<26}{seconds * 1e3:>12.4g} ms" for name, seconds in sums.items())
    verdict = "within" if found.over_fixed <= ALLOWED else "NOT within"
    message = (
        f"auto with the policy takes {found.over_fixed:.3f} times as long as {found.best_fixed}, the best fixed backend"
    )
    return f"\n{table}\n\n{totals}\n{message}: {verdict} {ALLOWED:g}."
