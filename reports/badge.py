"""Badges of ``attnsuite judge --badge``: the verdicts of one backend or function, as JSON and as a picture.

The JSON says what was judged: the digest of the code, versions, device, date and every answer. The SVG shows name and
verdicts in one line, and all of it as its title.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from attnsuite.suite.files import write_text
from attnsuite.suite.kinds.conformance_case import TAKES, answer_of
from attnsuite.suite.record import Record
from attnsuite.testing.verdicts import VERDICTS

from .environment import date_of, device_of, versions_of

_GREEN, _RED, _GREY = "#2e7d32", "#b3261e", "#6b7280"
_GLYPH, _HEIGHT = 6.6, 20  # pixels of a letter of 11 pixels, and of a line


def write_badges(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write ``badge-<name>.json`` and ``.svg`` of each backend into ``folder``."""
    written = []
    for name in dict.fromkeys(record.requested for record in records):
        backend_records = [record for record in records if record.requested == name]
        facts = badge(backend_records)
        stem = folder / f"badge-{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}"
        for suffix, text in ((".json", json.dumps(facts, indent=1) + "\n"), (".svg", picture(facts, backend_records))):
            write_text(path := stem.with_suffix(suffix), text)
            written.append(path)
    return written


def badge(records: Sequence[Record]) -> dict[str, object]:
    """The facts of one backend's badge."""
    first = records[0]
    problems = [
        record for record in records if record.case not in (TAKES, *VERDICTS) and record.status != "unsupported"
    ]
    right = sum(record.status == "ok" for record in problems)
    versions = versions_of(records)
    return {
        "name": first.requested,
        "code": first.environment.get("source_files", {}).get(first.requested) or first.environment.get("source", ""),
        "versions": {name: versions[name] for name in ("attnsuite", "jax", "python") if name in versions},
        "device": device_of(first),
        "mode": next((record.mode for record in records if record.mode), None),
        "date": date_of(records),
        "right": right,
        "judged": len(problems),
        "verdicts": {record.case: answer_of(record) for record in records if record.case in VERDICTS},
    }


def picture(facts: Mapping[str, object], records: Sequence[Record]) -> str:
    """One line of SVG: the name, right or wrong, and the verdicts that are yes."""
    answers = [(record.case, answer_of(record)) for record in records]
    right = "not judged" if not facts["judged"] else "right" if facts["right"] == facts["judged"] else "wrong"
    count = f" {facts['right']}/{facts['judged']}" if facts["judged"] else ""
    parts = [(str(facts["name"]), "#374151"), (right + count, {"right": _GREEN, "wrong": _RED}.get(right, _GREY))]
    parts += [(name.replace("_", " "), _GREEN) for name in VERDICTS if (name, "yes") in answers]
    x, drawn = 0.0, []
    for text, colour in parts:
        width = _GLYPH * len(text) + 12
        drawn.append(f'<rect x="{x:.0f}" width="{width + 1:.0f}" height="{_HEIGHT}" fill="{colour}"/>')
        drawn.append(f'<text x="{x + width / 2:.0f}" y="14" text-anchor="middle">{escape(text)}</text>')
        x += width
    title = "; ".join(f"{key}: {facts[key]}" for key in ("name", "code", "device", "date", "versions", "verdicts"))
    style = 'font-family="monospace" font-size="11" fill="#fff"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x:.0f}" height="{_HEIGHT}" role="img">'
    return f"{opening}<title>{escape(title)}</title><g {style}>{''.join(drawn)}</g></svg>\n"
