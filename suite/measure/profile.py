"""Profiles: files of one sample for XProf and Perfetto, and the seconds that the device computed in each of some calls.

``jax.profiler.ProfileData`` reads the files of JAX's profiler. A TPU writes an event per call of a program, into the
line "XLA Modules". A GPU writes an event per kernel or copy, into a line per stream; XLA on a CPU one per operation,
into a line per thread. There a call's time is the union of its events, as tokamax takes it, so gaps between kernels are
in no time of a GPU.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from jax.profiler import ProfileData

from ..errors import CellFailure

LARGEST = 64 * 2**20  # bytes of one file
_MODULES = "XLA Modules"
# Planes, and the lines with operations. Other lines of a device hold the same work again, or none.
_LINES = (("/device:TPU:0", _MODULES), ("/device:GPU:0", "Stream #"), ("/host:CPU", "tf_XLA"))
_NO_WORK = ("ThreadpoolListener", "ThunkExecutor", "SlinkyThreadPool", "end: ")  # marks and waits of XLA on a CPU


def trace(run: Callable[[], object], raw: Path) -> None:
    """Run under JAX's profiler, which writes into ``raw``."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the calls of this package are not what is asked about, and fill the file
    jax.profiler.start_trace(str(raw), profiler_options=options)
    try:
        run()
    finally:
        jax.profiler.stop_trace()


def keep(raw: Path, folder: Path, name: str) -> tuple[str, ...]:
    """Move what :func:`trace` wrote into ``folder``. Returns what was not kept, as sentences. Raises OSError.

    ``NAME.trace.json.gz`` is for Perfetto, and ``plugins/profile/NAME/NAME.xplane.pb`` lies where XProf looks for a run
    of that name. Earlier files of these names are replaced; a file above :data:`LARGEST` is not kept.
    """
    refused: list[str] = []
    for pattern, target in (
        ("*.trace.json.gz", folder / f"{name}.trace.json.gz"),
        ("*.xplane.pb", folder / "plugins" / "profile" / name / f"{name}.xplane.pb"),
    ):
        for found in (path for path in raw.rglob(pattern) if path.is_file() and not path.is_symlink()):
            if (size := found.stat().st_size) > LARGEST:
                refused.append(f"{target.name} is {size / 2**20:.0f} MiB, above {LARGEST // 2**20}: not kept.")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(found, target)
    return tuple(refused)


def call_times(run: Callable[[], None], calls: int) -> tuple[float, ...]:
    """Seconds that the first device computed in each of the ``calls`` calls of one program that ``run`` waits for.

    Nothing else may run. Raises CellFailure where the profile cannot be divided into so many equal calls.
    """
    with tempfile.TemporaryDirectory() as raw:
        trace(run, Path(raw))
        files = list(Path(raw).rglob("*.xplane.pb"))
        if len(files) != 1:
            raise CellFailure("crashed", f"JAX's profiler wrote {len(files)} profiles instead of one.")
        return read_call_times(files[0].read_bytes(), calls)


def read_call_times(xplane: bytes, calls: int) -> tuple[float, ...]:
    """As :func:`call_times`, of the content of an ``.xplane.pb``."""
    planes = {plane.name: plane for plane in ProfileData.from_serialized_xspace(xplane).planes}
    name, beginning = next(((name, line) for name, line in _LINES if name in planes), ("", ""))
    events = sorted(
        (event.start_ns, event.start_ns + event.duration_ns, event.name)
        for line in (planes[name].lines if name else ())
        if line.name.startswith(beginning)
        for event in line.events
        if not event.name.startswith(_NO_WORK)
    )
    size, rest = divmod(len(events), calls)
    parts = [events[i : i + size] for i in range(0, size * calls, size or 1)]
    if not size or rest or len({tuple(sorted(name for _, _, name in part)) for part in parts}) > 1:
        raise CellFailure("crashed", f"a profile has {len(events)} operations, which are not {calls} equal calls.")
    return tuple(_union([(start, end) for start, end, _ in part]) / 1e9 for part in parts)


def _union(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans that are in the order of their starts."""
    length, reached = 0.0, spans[0][0]
    for start, end in spans:
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
