"""``python docs/backend_pages.py`` writes the generated half of each page in docs/reference/backends/.

What a backend takes is asked of the backend, its options are those that it checks, and where it ran is read from the
records in reports/published/. What stands above the mark of a page is written by hand. A test holds the pages current.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from attnsuite.backends import registry, support
from attnsuite.backends.kascade import settings
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import speed_of, standard_of
from attnsuite.suite.statistics import median
from attnsuite.suite.store import parse_records
from attnsuite.suite.support_matrix import BASE, PROBLEMS, TARGETS

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "reports" / "published"
PAGES = ROOT / "docs" / "reference" / "backends"
MARK = "<!-- Below: written by `python docs/backend_pages.py`. -->\n"
INSTALL = {
    "cudnn": "pip install '.[cuda12]'",
    "pallas_flash": "pip install '.[cuda12]'",
    "kvax": "pip install '.[kvax]'",
    "tokamax_splash": "pip install '.[tokamax]'",
    "tokamax_triton": "pip install '.[tokamax]'",
}

_MODES = {"native": "Natively", "interpret": "In an interpreter", "compile": "Compiled only"}


def generated(name: str, published: Mapping[str, tuple[Record, ...]]) -> str:
    """What follows the mark on the page of a backend."""
    return "\n".join([*_install(name), *_takes(name), *_options(name), *_ran(name, published)]) + "\n"


def _install(name: str) -> Iterator[str]:
    line = INSTALL.get(name)
    yield f"- Install: {f'`{line}`' if line else 'comes with the package'}."


def _takes(name: str) -> Iterator[str]:
    backend = registry.get(name)
    lines: dict[str, list[str]] = {}
    for label, target in TARGETS.items():
        if any(support(backend, dataclasses.replace(BASE, **change), target) for change in PROBLEMS.values()):
            takes = backend.takes(target, "native")
            sizes = "any" if takes.head_dims is None else _numbers(takes.head_dims)
            lines.setdefault(f"{', '.join(takes.dtypes)}; head dimension {sizes}", []).append(f"`{label}`")
    where = "[which problems](../backends.md#what-runs-where)"
    yield from (f"- Takes, natively on {', '.join(labels)}: {line}; {where}." for line, labels in lines.items())


def _numbers(sizes: tuple[int, ...] | range) -> str:
    if isinstance(sizes, range):
        return f"{sizes[0]} to {sizes[-1]}" + (f" in steps of {sizes.step}" if sizes.step > 1 else "")
    return ", ".join(map(str, sizes))


def _options(name: str) -> Iterator[str]:
    backend = registry.get(name)
    module = settings if name == "kascade" else sys.modules[type(backend).__module__]
    options = getattr(backend, "options", None) or getattr(module, "OPTIONS", {})
    if options:
        yield from ("", "## Options", "", "| option | meaning |", "|---|---|")
        yield from (f"| `{option}` | {meaning} |" for option, meaning in options.items())


def _ran(name: str, published: Mapping[str, tuple[Record, ...]]) -> Iterator[str]:
    yield from ("", "## Where it ran", "")
    where: dict[str, list[tuple[str, str]]] = {"native": [], "interpret": [], "compile": []}
    targets: dict[str, set[str]] = defaultdict(set)
    for folder, records in published.items():
        by_mode: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record.resolved == record.requested == name and record.status == "ok" and record.mode in where:
                by_mode[record.mode].append(record)
                targets[record.mode].add(record.target.partition(":")[2])
        for mode, ran in by_mode.items():
            link = f"[{folder}](../../../reports/published/{folder}/report.md)"
            ratios = _ratios(ran, records) if mode == "native" else ""
            where[mode].append((link, f"{ran[0].started[:10]}, cells: {len(ran)}{ratios}" if ratios else ""))
    for mode, pages in where.items():
        if pages:
            others = ", ".join(link for link, timed in pages if not timed)
            yield f"- {_MODES[mode]} ({', '.join(sorted(targets[mode]))}): {others}".rstrip()
            yield from (f"  - {link}, {timed}" for link, timed in pages if timed)
    if not targets:
        yield "Nowhere yet: no published run has it."


def _ratios(ran: list[Record], records: tuple[Record, ...]) -> str:
    """Times of one run relative to its reference in the same rounds; nothing where none was measured."""
    cases: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        cases[record.case].append(record)
    pairs = [(record, standard_of(cases[record.case])) for record in ran if record.devices == 1]
    speeds = [(speed_of(record, reference), reference) for record, reference in pairs]
    ratios = [speed.ratio.value for speed, _ in speeds if speed and speed.ratio]
    if not ratios:
        return ""
    (name,) = {reference.requested for speed, reference in speeds if speed and speed.ratio and reference}
    span = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f", {median(ratios).value:.2f}{span} of the time of `{name}`"


def published_records() -> dict[str, tuple[Record, ...]]:
    """The records of every published run, by its folder."""
    return {path.parent.name: parse_records(path)[0] for path in sorted(PUBLISHED.glob("*/records.jsonl"))}


def page(name: str, published: Mapping[str, tuple[Record, ...]]) -> str:
    """The whole page: its half by hand, and the generated one."""
    by_hand, _, _ = (PAGES / f"{name}.md").read_text(encoding="utf-8").partition(MARK)
    return by_hand + MARK + generated(name, published)


def main() -> None:
    """Write every page again."""
    published = published_records()
    for name in registry.BUILT_IN:
        (PAGES / f"{name}.md").write_text(page(name, published), encoding="utf-8")


if __name__ == "__main__":
    main()
