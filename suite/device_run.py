"""``attnsuite run --suite device``: a run on somebody's device, the most useful cells first.

First some problems of the contract on every backend that runs natively here, then the attention calls of ``quick``,
decode steps and a long context, then whole models. A run that is cut keeps what is finished. On an accelerator only the
backends that run natively there are taken, Kvax first on an NVIDIA GPU; on a CPU, where this is a rehearsal, all are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .diagnosis import examine_here
from .errors import InputError
from .grid.run_grid import RunGrid, check_idle, new_request, resumed_request
from .grid.running import Limits
from .judgement import new_judgement, resumed_judgement
from .kinds import kind_of
from .kinds.kind import Dtype
from .measure.accelerator import used_by_others
from .store import CONFORMANCE, MANIFEST
from .suites import DEVICE

# The named problems that tell most: dtypes, grouped heads, masks, lengths, decoding, what nobody sees, large logits.
PROBLEMS = (
    "causal-bfloat16", "causal", "gqa-4", "length-129", "head-dim-128", "window-causal", "segments-causal",
    "padding-right", "ragged-causal", "decode-bfloat16", "decode-4", "soft-cap", "rows-before-every-key",
    "cross-bfloat16", "pages-decode", "big-logits-bfloat16",
)  # fmt: skip
_FIRST = {"cuda": "kvax", "tpu": "splash"}
# The dtype of all problems, where the kernels of a platform take no float32.
_DTYPES: Mapping[str, Dtype] = {"cuda": "bfloat16"}


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRun:
    """The two grids of a run on a device, in order, and what the device is."""

    target: str
    judgement: RunGrid
    suite: RunGrid

    def plan(self) -> Iterator[str]:
        """What is run, in order."""
        cases = self.suite.cases
        yield f"device:  {self.target}; backends: {', '.join(self.suite.backends)}"
        yield f"1. the contract: {len(self.judgement.cases)} problems on each backend"
        for number, title in enumerate(("attention calls and decode steps", "models, text"), start=2):
            selected = [case for case in cases if kind_of(case.kind).is_call == (number == 2)]
            yield f"{number}. {title}: {len(selected)} cases: {', '.join(case.name for case in selected)}"
        yield "It can be stopped at any moment: what is finished is kept, and --resume goes on."


def device_run(
    backends: Sequence[str] | None,
    out: Path,
    limits: Limits,
    *,
    resume: bool,
    busy: bool = False,
    cases: str | None = None,
) -> DeviceRun:
    """The grids of these flags. Raises InputError where JAX does not start, or nothing runs natively here.

    ``cases`` chooses among what is timed; the contract stays whole. A GPU that others use is refused unless ``busy``.
    """
    if resume:
        return _resumed(backends, cases, out, limits)
    others = None if busy else used_by_others()
    found = examine_here()
    target = str(found["environment"]["target"])
    check_idle(target, others)
    platform = target.partition(":")[0]
    taken = tuple(backends or _taken(found, platform))
    problems = ",".join(PROBLEMS)
    judgement = new_judgement(taken, problems, range(0), 0, out / CONFORMANCE, limits, dtype=_DTYPES.get(platform))
    return DeviceRun(target, judgement, _suite(taken, out, limits, cases))


def _suite(backends: Sequence[str], out: Path, limits: Limits, cases: str | None = None) -> RunGrid:
    made = new_request(DEVICE.name, ",".join(backends), cases, None, out, limits)
    return dataclasses.replace(made, busy=True)  # was looked at before the contract


def _resumed(backends: Sequence[str] | None, cases: str | None, out: Path, limits: Limits) -> DeviceRun:
    """The run in ``out``, whichever of its grids it was cut in."""
    folder = out / CONFORMANCE
    if backends is not None:
        raise InputError("--backends cannot change a run that was begun; leave it out, or start a new run.")
    if not (folder / MANIFEST).is_file():
        raise InputError(f"{out} holds no run of --suite device to resume; leave out --resume to start one.")
    judgement = resumed_judgement(folder, limits)
    if not (out / MANIFEST).is_file():
        return DeviceRun("as before", judgement, _suite(judgement.backends, out, limits, cases))
    if cases is not None:
        raise InputError("--cases cannot change a run that was begun; leave it out, or start a new run.")
    suite = resumed_request(None, None, None, None, out, limits)
    if suite.suite != DEVICE.name:
        raise InputError(f"{out} holds a run of the suite {suite.suite}; resume it without --suite device.")
    return DeviceRun("as before", judgement, suite)


def _taken(found: dict, platform: str) -> list[str]:
    """The backends to run, the one that matters most here first. Raises InputError."""
    if platform == "cpu":
        return [*DEVICE.default_backends()]
    native = [
        backend["name"]
        for backend in found["backends"]
        if backend["name"] in DEVICE.default_backends()
        and any(problem["mode"] == "native" for problem in backend["problems"].values())
    ]
    if not native:
        raise InputError("no backend runs natively on this device; attnsuite doctor says what each one needs.")
    return sorted(native, key=lambda name: name != _FIRST.get(platform))
