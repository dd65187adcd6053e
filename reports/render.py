"""Write report.md, details.md, report.html, records.csv, report.json and pictures for one run directory or several."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from attnsuite.suite.files import check_directory, write_text
from attnsuite.suite.kinds import kind_of, title_of

from . import data_files, html, markdown, plot
from .page import Page
from .pages import compiled, measurements
from .read import ReportError, Run, load

REPORT = "report.md"
DETAILS = "details.md"
HTML = "report.html"


def render(run_dir: Path, *others: Path, out: Path | None = None) -> Path:
    """Write the report of a run into ``out`` (default: the run directory) and return the path of ``report.md``.

    Runs in ``others`` follow on the same page. The files are pure functions of the run directories: the same bytes
    each time. Raises ReportError where no report can be made from one of them, InputError where it cannot be written.
    """
    runs = {folder: load(folder) for folder in (run_dir, *others)}
    folder = Path(run_dir) if out is None else Path(out)
    for directory, found in runs.items():
        if stands_alone(found) and (others or len({record.kind for record in found.records}) > 1):
            title = next(title_of(record.kind) for record in found.records if kind_of(record.kind).page)
            raise ReportError(
                f"{directory} holds records of kind {title!r}, whose page stands alone; give it by itself."
            )
    first = runs[run_dir]
    written = _alone(first, folder) if stands_alone(first) else _files(runs.values())
    check_directory(folder)
    for name, content in written.items():
        write_text(folder / name, content)
    return folder / REPORT


def stands_alone(found: Run) -> bool:
    """Whether the page of a run is Markdown alone, without other runs on it."""
    return any(kind_of(record.kind).page for record in found.records)


def _alone(found: Run, folder: Path) -> dict[str, str]:
    """Name -> content, of a run whose page stands alone."""
    kind = found.records[0].kind
    made = importlib.import_module(f".pages.{kind_of(kind).page}", __package__).files(found.records, folder)
    return {**made, HTML: html.render(made[REPORT], title_of(kind).capitalize(), made)}


def _files(runs: Iterable[Run]) -> dict[str, str]:
    """Name -> content."""
    pages = tuple(page for found in runs for page in _pages(found))
    pictures = {
        picture.file: plot.draw(picture) for page in pages for section in page.sections for picture in section.pictures
    }
    written = {REPORT: markdown.render(tuple(map(markdown.short, pages)))}
    if any(page.has_short for page in pages):
        written[DETAILS] = markdown.render(pages)
    text = markdown.render(tuple(map(markdown.folded, pages)))
    return {
        **written,
        HTML: html.render(text, "; ".join(page.title for page in pages), pictures),
        "records.csv": data_files.to_csv(pages),
        "report.json": data_files.to_json(pages),
        **pictures,
    }


def _pages(found: Run) -> tuple[Page, ...]:
    return (compiled.build(found),) if compiled.is_compiled(found) else measurements.build(found)
