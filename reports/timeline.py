"""A profile as a picture: a row per thread or stream, a bar per operation, for a first look without a trace viewer."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SUFFIX = ".trace.json.gz"
LARGEST = 256 * 2**20  # bytes of an unpacked trace, of which Python makes several times as many
_COLOURED = 8  # operations with a colour of their own
_WAITING = "wait for completion"
_MARKS = ("end: ", "ThreadpoolListener")  # of XLA for CPUs: the end of an operation, a region of its threads
_FRAME = "ThunkExecutor::Execute"  # encloses a program's operations; what is left of it is a gap between them
_HOST = "python"  # calls of the interpreter's thread enclose what they wait for


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One operation that ran: in its row from ``start`` for ``length``, both in milliseconds."""

    row: str
    operation: str
    start: float
    length: float


def bars(trace: bytes) -> tuple[Bar, ...]:
    """The operations of a trace in Chrome's format (gzip), as JAX's profiler writes it, each while it is the innermost.

    An operation that encloses others of its row is cut where they run, so bars of one row do not overlap. Numbers at
    the end of a name (``fusion.3``) are dropped. Raises ValueError for more than :data:`LARGEST` bytes.
    """
    with gzip.open(io.BytesIO(trace)) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"unpacked it is larger than {LARGEST >> 20} MiB; open it in Perfetto, or profile less.")
    events = json.loads(text)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    rows: dict[str, list[tuple[float, float, str]]] = {}
    for event in events:
        row = names.get((event.get("pid"), event.get("tid")), "")
        ran = event.get("ph") == "X" and not event["name"].startswith(_MARKS)
        if ran and row and not row.startswith(_HOST):
            start, length = event["ts"] / 1000, event.get("dur", 0) / 1000
            rows.setdefault(row, []).append((start, -length, _operation(event["name"])))
    return tuple(
        Bar(row, operation, start, end - start)
        for row, spans in rows.items()
        for operation, start, end in _innermost(sorted(spans))
        if operation != _FRAME
    )


def _innermost(spans: Sequence[tuple[float, float, str]]) -> Iterator[tuple[str, float, float]]:
    """Disjoint pieces (operation, start, end) of nested spans (start, -length, operation) in order."""
    open_spans: list[tuple[float, str]] = []
    at = -math.inf
    for start, negative_length, operation in (*spans, (math.inf, 0.0, "")):
        while open_spans and open_spans[-1][0] <= start:
            end, ending = open_spans.pop()
            if end > at:
                yield ending, at, end
                at = end
        if open_spans and start > at:
            yield open_spans[-1][1], at, start
        at = start
        open_spans.append((start - negative_length, operation))


def draw_profiles(folder: Path) -> tuple[str, ...]:
    """Draw every trace of a directory that is newer than its picture. Returns what was not drawn, as sentences."""
    sentence = []
    for trace in sorted(folder.glob(f"*{SUFFIX}")):
        picture = picture_of(trace)
        try:
            if not picture.exists() or picture.stat().st_mtime < trace.stat().st_mtime:
                draw(trace)
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
            sentence.append(f"{trace} was not drawn: {type(error).__name__}: {error}")
    return tuple(sentence)


def picture_of(trace: Path) -> Path:
    """The path of a trace's picture."""
    return trace.with_name(trace.name.removesuffix(SUFFIX) + ".png")


def draw(trace: Path) -> None:
    """Draw the trace beside its file, as ``NAME.png``, unless nothing ran outside Python. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (half a second that only pictures need)
    from matplotlib.figure import Figure  # noqa: PLC0415

    found = bars(trace.read_bytes())
    if not found:
        return
    begin = min(bar.start for bar in found)
    busy: dict[str, float] = collections.defaultdict(float)
    for bar in found:
        busy[bar.operation] += bar.length
    named = sorted(busy.keys() - {_WAITING}, key=lambda name: (-busy[name], name))[:_COLOURED]
    colours = {name: f"C{number}" for number, name in enumerate(named)} | {_WAITING: "0.92"}
    rows = list(dict.fromkeys(bar.row for bar in sorted(found, key=lambda bar: bar.start)))
    figure = Figure(figsize=(11, 1.6 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in (*named, _WAITING, None):
        of_name = [bar for bar in found if bar.operation == name or (name is None and bar.operation not in colours)]
        label = f"{name or 'other'}: {sum(bar.length for bar in of_name):.2f} ms"
        _bars(axes, of_name, rows, begin, colours.get(name or "", "0.6"), label)
    axes.set_yticks(range(len(rows)), [f"{row.split('/')[0]} {number}" for number, row in enumerate(rows)])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the first operation")
    axes.set_title(trace.name.removesuffix(SUFFIX), loc="left")
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(picture_of(trace), dpi=110)


def _bars(axes: Any, of_name: Sequence[Bar], rows: Sequence[str], begin: float, colour: str, label: str) -> None:
    for number, row in enumerate(rows):
        spans = [(bar.start - begin, bar.length) for bar in of_name if bar.row == row]
        if spans:
            axes.broken_barh(spans, (number - 0.4, 0.8), facecolors=colour, label=label)
            label = ""


def _operation(name: str) -> str:
    if _WAITING in name:
        return _WAITING
    base, _, number = name.rpartition(".")
    return base if base and number.isdigit() else name
