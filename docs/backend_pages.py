"""``python docs/backend_pages.py`` writes what the pages of docs/reference/backends/ say of each backend.

What a backend takes is asked of the backend, and its options are those that it checks. A page has a section for each
backend: what stands before "- Install" is written by hand. A test holds the pages current.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from attnsuite.backends import registry, support
from attnsuite.backends.kascade import settings
from support_matrix import BASE, PROBLEMS, TARGETS  # beside this file

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference" / "backends"
INSTALL = {
    "cudnn": "pip install '.[cuda12]'",
    "pallas_flash": "pip install '.[cuda12]'",
    "kvax": "pip install '.[kvax]'",
    "tokamax_splash": "pip install '.[tokamax]'",
    "tokamax_triton": "pip install '.[tokamax]'",
}


def generated(name: str, before: Mapping[str, Mapping[str, str]]) -> str:
    """What a section says behind its half by hand; ``before`` has the options of the sections above it."""
    return "\n".join([*_install(name), *_takes(name), *_listed(options_of(name), before)]) + "\n"


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
    yield from (f"- Takes, natively on {', '.join(labels)}: {line}." for line, labels in lines.items())


def _numbers(sizes: tuple[int, ...] | range) -> str:
    if isinstance(sizes, range):
        return f"{sizes[0]} to {sizes[-1]}" + (f" in steps of {sizes.step}" if sizes.step > 1 else "")
    return ", ".join(map(str, sizes))


def options_of(name: str) -> Mapping[str, str]:
    """The options of a backend, each with what it means."""
    backend = registry.get(name)
    module = settings if name == "kascade" else sys.modules[type(backend).__module__]
    return getattr(backend, "options", None) or getattr(module, "OPTIONS", {})


def _listed(options: Mapping[str, str], before: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for other, theirs in before.items():
        if len(options) > 1 and options.items() <= theirs.items():
            left = ", ".join(f"`{option}`" for option in theirs if option not in options)
            yield f"- Options: those of `{other}`{' without ' if left else ''}{left}."
            return
    if options:
        yield from ("", "| option | meaning |", "|---|---|")
        yield from (f"| `{option}` | {meaning} |" for option, meaning in options.items())


def page(path: Path) -> str:
    """A whole page of docs/reference/backends/: of each section its half by hand, and the generated one."""
    top, *sections = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text, before = top, {}
    for section in sections:
        name = section.partition("\n")[0]
        by_hand, _, _ = section.partition("- Install")
        text += f"## {by_hand}{generated(name, before)}\n"
        before[name] = options_of(name)
    return text.rstrip("\n") + "\n"


def main() -> None:
    """Write every page again."""
    for path in PAGES.glob("*.md"):
        path.write_text(page(path), encoding="utf-8")


if __name__ == "__main__":
    main()
