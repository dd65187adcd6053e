"""Pictures as SVG: speed over sequence length against the roofline, maps of winners, and panels of lines.

A picture of speed is for one head layout. It has a panel per kind of pass and dtype: FLOP/s of every backend over S,
and as the roof the matmul rate that this machine reached in that dtype. The same records give the same bytes.

A map of winners has the fastest exact backend of each case, where the cases of a kind vary in two dimensions or more.
Its columns are the sequence lengths, or the values of the field that varies most where the length does not vary. Its
rows are the combinations of all other fields.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from attnsuite.suite.kinds import phase_of
from attnsuite.suite.kinds.op_case import is_plain
from attnsuite.suite.reportable import baseline_of, matmul_peak
from attnsuite.suite.statistics import Interval

from . import cases
from .answer import distinguishable, exact_speeds
from .cells import Group

PASSES = ("forward", "forward and backward")  # of attention calls, that have a panel each
_FEWEST = 3  # lengths that make a line
_MOST_CASES = 30  # that one picture holds legibly
_GIGA = 1e9
_LEAST = 2  # columns, and rows, that make a map
_LAYOUT = ("heads", "kv_heads")  # described together
_NAMES = frozenset({"kind", "name"})


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """Lines by name, each of points (x, y). For speed: GFLOP/s over S per backend, under a roof in GFLOP/s."""

    title: str
    lines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    roof: float | None
    x_label: str = "S (tokens)"
    y_label: str = "GFLOP/s of visible pairs"
    log_y: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Whiskers:
    """A line of its own for each case: by backend, the time relative to the baseline's with its interval."""

    baseline: str
    cases: tuple[str, ...]
    points: tuple[tuple[str, tuple[tuple[int, Interval], ...]], ...]  # backend, (number of the case, ratio)


@dataclasses.dataclass(frozen=True, slots=True)
class Square:
    """A case in a map: its column and row, the fastest backend, and the next one where the two are not told apart."""

    column: int
    row: int
    winner: str
    rival: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Winners:
    """A map: a square for each case that was timed, under the names of its columns and rows."""

    title: str
    x_label: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    squares: tuple[Square, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """The panels of one picture, and the name of its file."""

    file: str
    title: str
    panels: tuple[Panel, ...] | tuple[Whiskers] | tuple[Winners, ...]


def against_standard(groups: Sequence[Group]) -> tuple[Picture, ...]:
    """Times relative to standard in every case, in one picture; none where no case has a ratio or they are too many."""
    timed = [group for group in groups if any(cell.speed and cell.speed.ratio for cell in group.cells)]
    if not timed or len(timed) > _MOST_CASES:
        return ()
    points: dict[str, list[tuple[int, Interval]]] = {}
    for number, group in enumerate(timed):
        for cell in group.cells:
            if cell.speed and cell.speed.ratio and cell.record.mode == "native":
                name = cell.label if cell.record.exact else f"{cell.label} (approximate)"
                points.setdefault(name, []).append((number, cell.speed.ratio))
    baseline = baseline_of(group.kind for group in timed)
    lines = tuple((name, tuple(at)) for name, at in points.items())
    whiskers = Whiskers(baseline, tuple(group.case for group in timed), lines)
    title = f"Time relative to {baseline}, 95% intervals: further left is faster"
    return (Picture("against-standard.svg", title, (whiskers,)),) if points else ()


def pictures(groups: Sequence[Group]) -> tuple[Picture, ...]:
    """The pictures of speed: one per head layout that was timed at three lengths or more."""
    plain = [group for group in groups if phase_of(group.kind) in PASSES and _is_plain(group)]
    made = []
    for layout in sorted({_layout(group) for group in plain}):
        panels = []
        for phase, dtype in itertools.product(PASSES, ("float32", "bfloat16", "float16")):
            alike = [
                g for g in plain if (_layout(g), phase_of(g.kind), g.problem.get("dtype")) == (layout, phase, dtype)
            ]
            if panel := _panel(f"{phase}, {dtype}", alike):
                panels.append(panel)
        if panels:
            heads, kv_heads, dim = layout
            title = f"heads {heads}/{kv_heads}, D {dim}, causal"
            made.append(Picture(f"speed-h{heads}k{kv_heads}-d{dim}.svg", title, tuple(panels)))
    return tuple(made)


def draw(picture: Picture) -> str:
    """The picture as SVG text."""
    import matplotlib as mpl  # noqa: PLC0415 (half a second that only pictures need)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": picture.file, "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(layout="constrained")
        axes = _draw_panels(figure, picture.panels)
        handles = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(picture.title)
        return as_svg(figure)


def as_svg(figure: Any) -> str:
    """The figure as SVG text. A character that Matplotlib's font lacks is left to the fonts of whoever looks at it."""
    text = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _draw_panels(figure: Any, panels: Sequence[Panel | Whiskers | Winners]) -> Sequence[Any]:
    if isinstance(panels[0], Whiskers):
        figure.set_size_inches(10.4, 1.3 + 0.3 * len(panels[0].cases))
        axis = figure.subplots()
        _draw_whiskers(axis, panels[0])
        return [axis]
    if maps := [panel for panel in panels if isinstance(panel, Winners)]:
        return _draw_maps(figure, maps)
    lines = [panel for panel in panels if isinstance(panel, Panel)]
    columns = min(2, len(lines))
    rows = -(-len(lines) // columns)
    figure.set_size_inches(5.2 * columns, 3.6 * rows)
    names = list(dict.fromkeys(name for panel in lines for name, _ in panel.lines))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, lines, strict=False):
        _draw_panel(axis, panel, names)
    for axis in axes[len(lines) :]:
        axis.set_visible(False)
    return axes


def _draw_whiskers(axis: Any, panel: Whiskers) -> None:
    for place, (name, points) in enumerate(panel.points):
        shift = 0.5 * ((place + 0.5) / len(panel.points) - 0.5)  # backends of a case lie beside each other
        values = [ratio.value for _, ratio in points]
        below = [ratio.value - (ratio.value if ratio.low is None else ratio.low) for _, ratio in points]
        above = [(ratio.value if ratio.high is None else ratio.high) - ratio.value for _, ratio in points]
        rows = [number + shift for number, _ in points]
        axis.errorbar(
            values, rows, xerr=(below, above), fmt="o", markersize=4, linewidth=1.2, color=f"C{place % 10}", label=name
        )
    axis.axvline(1.0, color="black", linestyle="--", linewidth=1, label=panel.baseline)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_yticks(range(len(panel.cases)), panel.cases)
    axis.invert_yaxis()
    axis.set_xlabel(f"time relative to {panel.baseline}")
    axis.grid(visible=True, axis="x", which="both", linewidth=0.3)


def _draw_maps(figure: Any, maps: Sequence[Winners]) -> Sequence[Any]:
    """One map below the other, each as high as its rows need."""
    heights = [0.8 + 0.36 * len(found.rows) for found in maps]
    figure.set_size_inches(10.4, 0.9 + sum(heights))
    names = list(dict.fromkeys(square.winner for found in maps for square in found.squares))
    axes = figure.subplots(len(maps), 1, squeeze=False, height_ratios=heights).ravel()
    for axis, found in zip(axes, maps, strict=True):
        _draw_map(axis, found, names)
    return axes


def _draw_map(axis: Any, found: Winners, names: Sequence[str]) -> None:
    from matplotlib.colors import to_rgba  # noqa: PLC0415 (as in draw)
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    for square in found.squares:
        corner = (square.column - 0.5, square.row - 0.5)
        color = to_rgba(f"C{names.index(square.winner) % 10}", 0.45)
        axis.add_patch(Rectangle(corner, 1, 1, facecolor=color, edgecolor="white", linewidth=2, label=square.winner))
        text = square.winner
        if square.rival is not None:
            label = "hatched: the rounds do not tell the first from the second"
            axis.add_patch(Rectangle(corner, 1, 1, fill=False, hatch="///", edgecolor="0.5", linewidth=0, label=label))
            text = f"{square.winner} or {square.rival}"
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
        axis.text(square.column, square.row, text, ha="center", va="center", fontsize=7, bbox=behind)
    axis.set_xlim(-0.5, len(found.columns) - 0.5)
    axis.set_ylim(len(found.rows) - 0.5, -0.5)
    axis.set_xticks(range(len(found.columns)), found.columns)
    axis.set_yticks(range(len(found.rows)), found.rows)
    axis.tick_params(length=0)
    axis.set_title(found.title)
    axis.set_xlabel(found.x_label)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _draw_panel(axis: Any, panel: Panel, names: Sequence[str]) -> None:
    for name, points in panel.lines:
        place = names.index(name)
        color, style = f"C{place % 10}", "-" if place < 10 else "--"
        axis.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=3.5,
            linewidth=1.3,
            label=name,
            color=color,
            linestyle=style,
        )
    if panel.roof is not None:
        axis.axhline(panel.roof, color="black", linestyle="--", linewidth=1, label="measured matmul rate")
    axis.set_xscale("log", base=2)
    if panel.log_y:
        axis.set_yscale("log")
    ticks = sorted({x for _, points in panel.lines for x, _ in points})
    if not all(float(x).is_integer() for x in ticks):  # measured shares differ a little from line to line
        ticks = [2.0**n for n in range(math.floor(math.log2(ticks[0])), math.ceil(math.log2(ticks[-1])) + 1)]
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(visible=True, which="both", linewidth=0.3)


def _panel(title: str, groups: Sequence[Group]) -> Panel | None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for group in groups:
        for cell in group.cells:
            rate = cell.speed.flops_rate if cell.speed and cell.record.mode == "native" else None
            if rate is not None:
                lines.setdefault(cell.label, []).append((int(group.problem["sequence"]), rate / _GIGA))
    curves = tuple((name, tuple(sorted(points))) for name, points in lines.items() if len(points) >= _FEWEST)
    if not curves:
        return None
    roof = matmul_peak(groups[0].cells[0].record)
    return Panel(title, curves, None if roof is None else roof / _GIGA)


def _layout(group: Group) -> tuple[int, int, int]:
    problem = group.problem
    return problem["heads"], problem["kv_heads"], problem["head_dim"]


def _is_plain(group: Group) -> bool:
    problem = group.problem
    ours = all(type(problem.get(name)) is int for name in ("heads", "kv_heads", "head_dim", "sequence"))
    return ours and is_plain(problem)


def winners(groups: Sequence[Group]) -> tuple[Picture, ...]:
    """The maps of all kinds as one picture; none where no kind varies in two dimensions."""
    timed = [member for member in groups if exact_speeds(member)]
    maps = [
        found
        for kind, title in cases.titles(member.kind for member in timed)
        if (found := _map(title, [member for member in timed if member.kind == kind]))
    ]
    return (Picture("winners.svg", "Fastest exact backend of each case", tuple(maps)),) if maps else ()


def _map(title: str, members: Sequence[Group]) -> Winners | None:
    """The map of one kind; None where fewer than two rows have cases in two columns or more."""
    across = _across(members)
    if across is None:
        return None
    varying = [name for name in _fields(members) if name != across and len(_values(members, name)) > 1]
    grid: dict[str, dict[str, Group]] = {}  # row -> column -> the first case there
    for member in members:
        grid.setdefault(_row(member, across, varying), {}).setdefault(str(member.problem.get(across)), member)
    rows = _distinct(row for row, found in grid.items() if len(found) >= _LEAST)
    columns = _distinct(column for row in rows for column in grid[row])
    if len(rows) < _LEAST:
        return None
    squares = tuple(
        _square(x, y, grid[row][column])
        for x, column in enumerate(columns)
        for y, row in enumerate(rows)
        if column in grid[row]
    )
    return Winners(title, across.replace("_", " "), tuple(columns), tuple(rows), squares)


def _across(members: Sequence[Group]) -> str | None:
    """The field of the columns; None where nothing varies."""
    counts = {name: len(_values(members, name)) for name in _fields(members)}
    if counts.get("sequence", 0) >= _LEAST:
        return "sequence"
    most = max(counts.values(), default=0)
    return next(name for name, count in counts.items() if count == most) if most >= _LEAST else None


def _row(member: Group, across: str, varying: Sequence[str]) -> str:
    problem = member.problem
    described = {name: problem.get(name) for name in varying}
    if described.keys() & set(_LAYOUT) and across not in _LAYOUT:
        described |= {name: problem.get(name) for name in _LAYOUT}
    return cases.describe(member.kind, described) or "otherwise plain"


def _square(column: int, row: int, member: Group) -> Square:
    ranked = exact_speeds(member)
    unclear = len(ranked) > 1 and not distinguishable(ranked)
    return Square(column, row, ranked[0].label, ranked[1].label if unclear else None)


def _fields(members: Sequence[Group]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for member in members for name in member.problem if name not in _NAMES))


def _values(members: Sequence[Group], name: str) -> set[str]:
    return {str(member.problem.get(name)) for member in members}


def _distinct(texts: Iterator[str]) -> list[str]:
    return sorted(set(texts), key=cases.natural)
