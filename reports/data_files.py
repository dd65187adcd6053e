"""The machine-readable files of a report: one CSV row per record, and the computed tables as JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence

from attnsuite.suite.record import TensorError
from attnsuite.suite.reportable import shows_memory
from attnsuite.suite.statistics import Interval

from . import cases
from .cells import Cell, cells_of
from .columns import FIGURES, further
from .formatting import Value
from .page import Page, Section
from .quality import shows_quality
from .table import Table

JSON_SCHEMA = 1


def to_json(pages: Sequence[Page]) -> str:
    """Every table and sentence of the pages as JSON; intervals are objects with value, low, high and count."""
    data = {"schema": JSON_SCHEMA, "pages": [_page(page) for page in pages]}
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def to_csv(pages: Sequence[Page]) -> str:
    """One row per record in the order of the pages. Seconds and bytes; a missing value is an empty cell."""
    cells = [(page, cell) for page in pages for cell in cells_of(page.groups)]
    leading = [_leading(*place) for place in cells]
    further = [_further(cell) for _, cell in cells]
    names = dict.fromkeys(name for row in leading for name in row) | dict.fromkeys(sorted(set().union(*further)))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    for first, second in zip(leading, further, strict=True):
        writer.writerow({name: _no_formula(value) for name, value in (first | second).items()})
    return text.getvalue()


def _no_formula(value: object) -> object:
    """A text that a spreadsheet would take for a formula gets an apostrophe in front, which makes it text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _page(page: Page) -> dict[str, object]:
    return {
        "device": page.device,
        "title": page.title,
        "versions": page.subtitle,
        "sections": [_section(section) for section in page.sections],
    }


def _section(section: Section) -> dict[str, object]:
    return {
        "key": section.key,
        "title": section.title,
        "text": [*section.paragraphs, *section.items, *section.commands],
        "tables": [_table(table) for table in section.tables],
    }


def _table(table: Table) -> dict[str, object]:
    return {
        "key": table.key,
        "title": table.title,
        "columns": {column.key: column.header for column in table.columns},
        "rows": [{column.key: _plain(row.get(column.key)) for column in table.columns} for row in table.rows],
    }


def _plain(value: Value) -> object:
    if isinstance(value, Interval):
        return {"value": value.value, "low": value.low, "high": value.high, "count": value.count}
    if isinstance(value, TensorError):
        return {name: _plain(number) for name, number in dataclasses.asdict(value).items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _leading(page: Page, cell: Cell) -> dict[str, object]:
    """The columns that every record has."""
    record = cell.record
    return {
        "device": page.device,
        "suite": record.suite,
        "key": record.key,
        "kind": record.kind,
        "case": record.case,
        "problem": cases.describe(record.kind, record.problem),
        "requested": record.requested,
        "resolved": record.resolved,
        "mode": record.mode,
        "target": record.target,
        "exact": record.exact,
        "status": record.status,
        "error": record.error,
        "reasons": " ".join(record.reasons),
        **dict(pair for figure in FIGURES.values() for pair in figure.in_file(cell)),
        "temp_over_standard": cell.temp_ratio,
    }


def _further(cell: Cell) -> dict[str, object]:
    """The columns that some records have: sizes, errors of each tensor, figures of the kind and of the model."""
    record = cell.record
    row: dict[str, object] = {}
    if shows_memory(record):
        row |= {f"{name}_bytes": size for name, size in record.memory.items()}
    for tensor, error in record.accuracy.items():
        row |= {f"{tensor}_{name}": value for name, value in dataclasses.asdict(error).items()}
    row |= {f"figure_{name}": value for name, value in further(cell).items()}
    if shows_quality(cell):
        row |= {f"quality_{name}": value for name, value in record.quality.items()}
    return row
