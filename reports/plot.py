"""Pictures as SVG (extra ``plot``): speed over sequence length against the roofline, and Kascade's quality.

A picture of speed is for one head layout. It has a panel per kind of pass and dtype: FLOP/s of every backend over S,
and as the roof the matmul rate that this machine reached in that dtype. The same records give the same bytes.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from importlib import util
from typing import Any

from attnsuite.suite.shown import matmul_peak

from .cells import Cell, Group

_KINDS = {"op_forward": "forward", "op_forward_backward": "forward and backward"}
_FEWEST = 3  # lengths that make a line
_GIGA = 1e9


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
class Picture:
    """The panels of one picture, and the name of its file."""

    file: str
    title: str
    panels: tuple[Panel, ...]


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return util.find_spec("matplotlib") is not None


def pictures(groups: Sequence[Group]) -> tuple[Picture, ...]:
    """The pictures of speed: one per head layout that was timed at three lengths or more."""
    plain = [group for group in groups if group.kind in _KINDS and _is_plain(group)]
    layouts = sorted({_layout(group) for group in plain})
    made = []
    for heads, kv_heads, dim in layouts:
        members = [group for group in plain if _layout(group) == (heads, kv_heads, dim)]
        panels = [
            panel
            for kind in _KINDS
            for dtype in ("float32", "bfloat16", "float16")
            if (panel := _panel(kind, dtype, [g for g in members if (g.kind, _dtype(g)) == (kind, dtype)]))
        ]
        if panels:
            title = f"heads {heads}/{kv_heads}, D {dim}, causal"
            made.append(Picture(f"speed-h{heads}k{kv_heads}-d{dim}.svg", title, tuple(panels)))
    return tuple(made)


def draw(picture: Picture) -> str:
    """The picture as SVG text; needs matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 (an optional package)  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    columns = min(2, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    with mpl.rc_context({"svg.hashsalt": picture.file, "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
        names = list(dict.fromkeys(name for panel in picture.panels for name, _ in panel.lines))
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, panel in zip(axes, picture.panels, strict=False):
            _draw_panel(axis, panel, names)
        for axis in axes[len(picture.panels) :]:
            axis.set_visible(False)
        handles = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(picture.title)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


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
    places = sorted({x for _, points in panel.lines for x, _ in points})
    if not all(float(x).is_integer() for x in places):  # measured shares differ a little from line to line
        places = [2.0**n for n in range(math.floor(math.log2(places[0])), math.ceil(math.log2(places[-1])) + 1)]
    axis.set_xticks(places, [f"{x:g}" for x in places])
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(visible=True, which="both", linewidth=0.3)


def _panel(kind: str, dtype: str, groups: Sequence[Group]) -> Panel | None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for group in groups:
        for cell in group.cells:
            if (rate := _flops(cell)) is not None:
                lines.setdefault(cell.label, []).append((int(_problem(group)["sequence"]), rate / _GIGA))
    kept = tuple((name, tuple(sorted(points))) for name, points in lines.items() if len(points) >= _FEWEST)
    if not kept:
        return None
    roof = matmul_peak(groups[0].cells[0].record)
    return Panel(f"{_KINDS[kind]}, {dtype}", kept, None if roof is None else roof / _GIGA)


def _flops(cell: Cell) -> float | None:
    return cell.speed.flops_rate if cell.speed and cell.record.mode == "native" else None


def _problem(group: Group) -> dict[str, Any]:
    return group.cells[0].record.problem


def _dtype(group: Group) -> object:
    return _problem(group).get("dtype")


def _layout(group: Group) -> tuple[int, int, int]:
    problem = _problem(group)
    return problem["heads"], problem["kv_heads"], problem["head_dim"]


def _is_plain(group: Group) -> bool:
    problem = _problem(group)
    ours = all(type(problem.get(name)) is int for name in ("heads", "kv_heads", "head_dim", "sequence"))
    other = any(problem.get(name) for name in ("window", "window_size", "chunk_size", "soft_cap", "value_head_dim"))
    return ours and not other and problem.get("causal") is True and problem.get("documents", 1) == 1
