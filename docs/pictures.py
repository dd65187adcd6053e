"""Draw the pictures of README and of the first page from published runs: ``python docs/pictures.py``.

``answer-light.svg`` and ``answer-dark.svg`` are the answer of a run as the terminal shows it. ``speed.svg``,
``roofline.svg`` and ``winners.svg`` have light and dark colours in one file. None holds a script.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

from attnsuite import reports
from attnsuite.reports import plot
from attnsuite.reports.cells import Group, group
from attnsuite.reports.plot import winners

HERE = Path(__file__).parent
PUBLISHED = HERE.parent / "reports" / "published"
QUICK, SPEED = PUBLISHED / "cpu-amd-epyc", PUBLISHED / "cpu-amd-epyc-speed"
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}
ROWS = ("standard", "chunked", "flash_cpu", "torch_unthrottled")  # the others of the run are variants of these
DARK = """<style>@media (prefers-color-scheme: dark) {
text { fill: #e6e6e6 } [style*="fill: #ffffff"] { fill: #16181d !important }
[style*="stroke: #000000"] { stroke: #e6e6e6 !important } [style*="stroke: #ffffff"] { stroke: #16181d !important }
}</style>"""


def answer(run: Path, theme: TerminalTheme) -> str:
    """The answer of a run, 80 columns wide."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ attnsuite run", style="bold"))
    for line in reports.answer_lines(reports.load(run)):
        console.print(Text(line))
    drawn = console.export_svg(title="attnsuite run", theme=theme, unique_id="answer")
    return re.sub(r"\s*@font-face \{[^}]*\}", "", drawn)  # they would be fetched from elsewhere


def in_both_themes(svg: str) -> str:
    """Matplotlib's SVG with colours for a dark page."""
    return re.sub(r"(<svg [^>]*>)", rf"\1{DARK}", svg, count=1)


def speed(groups: tuple[Group, ...]) -> str:
    """FLOP/s over the length, under the measured rate of products: 8/8 heads, D 64, causal, float32."""
    (drawn,) = (each for each in plot.pictures(groups) if each.file == "speed-h8k8-d64.svg")
    panels = [
        dataclasses.replace(panel, lines=tuple(line for line in panel.lines if line[0] in ROWS))
        for panel in drawn.panels
        if isinstance(panel, plot.Panel) and panel.title.endswith("float32")
    ]
    return plot.draw(dataclasses.replace(drawn, file="speed.svg", panels=tuple(panels)))


def points(groups: tuple[Group, ...]) -> Iterator[tuple[str, float, float]]:
    """Row, FLOP per byte and FLOP/s of each attention call in float32, one device."""
    for cell in (cell for member in groups if member.kind.startswith("op_") for cell in member.cells):
        record, rate = cell.record, cell.speed and cell.speed.flops_rate
        asked = record.requested in ROWS and record.devices == 1 and record.problem["dtype"] == "float32"
        if asked and rate and record.flops and record.bytes_moved:
            yield record.requested, record.flops / record.bytes_moved, rate


def roofline(groups: tuple[Group, ...]) -> str:
    """FLOP/s over FLOP per byte, below what the machine's measured rates of products and of reading allow."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, *at in points(groups):
        found[name].append((at[0], at[1]))
    machine = groups[0].cells[0].record.environment["machine"]
    peak, read = machine["matmul_flops"]["float32"], machine["read_bytes_per_second"]
    with mpl.rc_context({"svg.hashsalt": "roofline", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axis = figure.subplots()
        for name in ROWS:
            axis.plot(*zip(*found[name], strict=True), "o", markersize=3, alpha=0.7, label=name)
        x = np.geomspace(0.1, 4e3, 50)
        axis.plot(x, np.minimum(peak, read * x), color="black", linewidth=1, label="measured rates")
        axis.set(xscale="log", yscale="log", xlabel="FLOP per byte, by formula", ylabel="FLOP/s of visible pairs")
        axis.grid(visible=True, linewidth=0.3)
        axis.set_title("Attention calls in float32, one JAX device: decode steps left, prefill and gradients right")
        axis.legend(frameon=False)
        return plot.as_svg(figure)


def map_of_winners(groups: tuple[Group, ...]) -> str:
    """The fastest exact backend, or peer, of each forward case."""
    (drawn,) = winners(groups)
    maps = [panel for panel in drawn.panels if isinstance(panel, plot.Winners)]
    return plot.draw(dataclasses.replace(drawn, panels=(maps[0],)))


def drawn() -> Iterator[tuple[str, str]]:
    """The name and the text of each picture."""
    for name, theme in THEMES.items():
        yield f"answer-{name}.svg", answer(QUICK, theme)
    groups = group(reports.load(SPEED).records)
    for name, draw in (("speed", speed), ("roofline", roofline), ("winners", map_of_winners)):
        yield f"{name}.svg", in_both_themes(draw(groups))


if __name__ == "__main__":
    for file, text in drawn():
        (HERE / file).write_text(text, encoding="utf-8")
