"""A profile of one sample of a cell: what ran, when and for how long, as XProf and Perfetto read it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

LARGEST = 64 * 2**20  # bytes of one file


def profile(take_sample: Callable[[], float], folder: Path, name: str) -> tuple[str, ...]:
    """Take one sample under JAX's profiler. Returns what was not kept, as sentences. Raises OSError.

    Writes ``NAME.trace.json.gz`` for Perfetto into ``folder``, and ``plugins/profile/NAME/NAME.xplane.pb``, where XProf
    looks for a run of that name. Earlier files of these names are replaced; a file above :data:`LARGEST` is not kept.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the calls of this package are not what is asked about, and fill the file
    with tempfile.TemporaryDirectory() as raw:
        jax.profiler.start_trace(raw, profiler_options=options)
        try:
            take_sample()
        finally:
            jax.profiler.stop_trace()
        refused: list[str] = []
        for pattern, target in (
            ("*.trace.json.gz", folder / f"{name}.trace.json.gz"),
            ("*.xplane.pb", folder / "plugins" / "profile" / name / f"{name}.xplane.pb"),
        ):
            for found in Path(raw).rglob(pattern):
                if (size := found.stat().st_size) > LARGEST:
                    refused.append(f"{target.name} is {size / 2**20:.0f} MiB, above {LARGEST // 2**20}: not kept.")
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(found, target)
        return tuple(refused)
