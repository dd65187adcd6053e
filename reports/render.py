"""One run directory or several -> report.md, report.html, records.csv, report.json and pictures beside the records."""

from __future__ import annotations

from pathlib import Path

from attnsuite.suite.files import check_directory, write_text

from . import compiled, files, html, markdown, plot
from .load import Run, load
from .page import Page, build


def render(run_dir: Path, *others: Path, out: Path | None = None) -> Path:
    """Write the report of a run into ``out`` (default: the run directory) and return the path of ``report.md``.

    Runs in ``others`` follow on the same page. The files are pure functions of the run directories: the same bytes
    each time. Raises ReportError where no report can be made from one of them, InputError where it cannot be written.
    """
    runs = [load(folder) for folder in (run_dir, *others)]
    pages = tuple(page for run in runs for page in _pages(run))
    pictures = {picture.file: plot.draw(picture) for page in pages for section in page.sections
                for picture in section.pictures}  # fmt: skip
    text = markdown.render(pages)
    folder = Path(run_dir) if out is None else Path(out)
    title = "; ".join(page.title for page in pages)
    written = {
        "report.md": text,
        "report.html": html.render(text, title, pictures),
        "records.csv": files.to_csv(pages),
        "report.json": files.to_json(pages),
        **pictures,
    }
    check_directory(folder)
    for name, content in written.items():
        write_text(folder / name, content)
    return folder / "report.md"


def _pages(run: Run) -> tuple[Page, ...]:
    return (compiled.build(run),) if compiled.is_compiled(run) else build(run)
