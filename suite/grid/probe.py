"""Ask, in a process of its own, what is here and which backend each cell of a run would get."""

from __future__ import annotations

import dataclasses
from typing import Any

from attnsuite.backends import BackendUnavailableError, Resolution, Target, registry, resolve, support
from attnsuite.backends.devices import usable_cores
from attnsuite.backends.sharding import divided

from .. import peers
from ..cases import Case, ModelCase, OpCase, RetrievalCase, SelectionCase, StackCase, TextCase, spec_of, stack_spec
from ..kascade.methods import METHODS, methods_of, refusals
from ..measure import environment
from ..record import Mode

_BASELINE = "standard"
INTERPRETED_LENGTH = 1024  # tokens: a longer case would be judged again at the length to which this one is cut


@dataclasses.dataclass(frozen=True, slots=True)
class CellPlan:
    """What would run for one backend or peer in one case. ``mode`` is None where nothing can."""

    case: str
    requested: str
    resolved: str | None
    mode: Mode | None
    exact: bool | None
    reasons: tuple[str, ...]
    devices: int = 1


def probe(cases: list[Case], backends: list[str], text: str | None, *, all_cores: bool = False) -> dict[str, Any]:
    """The environment, and a :class:`CellPlan` for every case and every backend or peer of ``backends``.

    With ``all_cores`` a CPU gets a second cell, on one device per core, for each exact backend but the baseline
    in each op case that can be divided. Raises InputError for a model that is not known and for a ``text``
    file that is too short for a case.
    """
    plans = []
    for case in cases:
        if isinstance(case, SelectionCase | StackCase):
            plans += _method_plans(case, backends, text, all_cores=all_cores)
            continue
        found = _plans(case, [name for name in backends if name not in peers.PEERS], text)
        if isinstance(case, TextCase) and any(_controls(other, case) for other in cases):
            found = [_left_to_controls(plan) if plan.requested == "kascade" else plan for plan in found]
        plans += [*found, *(_on_all_cores(case, found) if all_cores else ())]
        plans += [_peer_plan(case, name) for name in backends if name in peers.PEERS if _concerns(name, case)]
    return {"environment": environment.describe(), "plans": [dataclasses.asdict(plan) for plan in plans]}


def _controls(other: Case, case: TextCase) -> bool:
    return isinstance(other, SelectionCase) and other.kind == "kascade_text" and other.model == case.model


def _left_to_controls(plan: CellPlan) -> CellPlan:
    reason = "kascade: measured on this model's text beside its controls, in the kascade-text cases of this run."
    return dataclasses.replace(plan, resolved=None, mode=None, exact=None, reasons=(reason,))


def _plans(
    case: OpCase | ModelCase | TextCase | RetrievalCase, backends: list[str], text: str | None
) -> list[CellPlan]:
    backends = [name for name in backends if name not in METHODS or name in registry.names()]
    if isinstance(case, OpCase):
        spec, target = spec_of(case), Target.here()
        plans = [_plan(case.name, name, lambda name=name: [resolve(name, spec, target)]) for name in backends]
        return [_interpreted(plan, case, target) for plan in plans]
    # A run of op cases alone does not import flax.
    from .. import model_cell, quality  # noqa: PLC0415

    if isinstance(case, RetrievalCase):
        config = model_cell.retrieval_model(case).config
    else:
        config = model_cell.model_config(case)
    if isinstance(case, TextCase):
        quality.read_text(case, config, text)

    def ask(backend: str) -> list[Resolution]:
        return [resolution for _, resolution in model_cell.resolutions_of(case, config, backend)]

    return [_plan(case.name, name, lambda name=name: ask(name)) for name in backends]


def _method_plans(
    case: SelectionCase | StackCase, wanted: list[str], text: str | None, *, all_cores: bool
) -> list[CellPlan]:
    """The rows of a case that are asked for, those that would repeat another refused."""
    # A run of op cases alone does not import flax.
    from ..kascade import dense as problems  # noqa: PLC0415
    from ..kascade import quality, stack  # noqa: PLC0415

    rows, target = [name for name in methods_of(case) if name in wanted], Target.here()
    if isinstance(case, SelectionCase):
        dense, config = "standard", problems.checked_config(case, text)
        refused = {name: quality.refusals(case, name, config, target) for name in rows}
    else:
        dense = resolve("auto", stack_spec(case), target).backend.name
        refused = {name: stack.refusals(case, name, target) for name in rows}
    plans = []
    for name in rows:
        reasons = refusals(name, case) or refused[name]
        resolved = None if reasons else dense if name == "dense" else name
        exact = None if reasons else METHODS[name].exact
        plans.append(CellPlan(case.name, name, resolved, None if reasons else "native", exact, reasons))
    cores = usable_cores()
    if not all_cores or not isinstance(case, StackCase) or Target.here().platform != "cpu":
        return plans
    if cores == 1 or case.kv_heads % cores:
        return plans
    # Rows run on all cores; dense on one device too, so that which dense is the fastest is known, not assumed.
    divided_rows = [dataclasses.replace(plan, devices=cores) if plan.mode else plan for plan in plans]
    return [plan for plan in plans if plan.requested == "dense"] + divided_rows


def _on_all_cores(case: Case, plans: list[CellPlan]) -> list[CellPlan]:
    cores = usable_cores()
    if not isinstance(case, OpCase) or Target.here().platform != "cpu" or cores == 1:
        return []
    if divided(spec_of(case), cores) is None:
        return []
    return [
        dataclasses.replace(plan, devices=cores)
        for plan in plans
        if plan.mode == "native" and plan.exact and plan.requested != _BASELINE
    ]


def _concerns(name: str, case: Case) -> bool:
    return case.kind in peers.PEERS[name].kinds


def _peer_plan(case: Case, name: str) -> CellPlan:
    reasons = peers.refusals(name, case)
    if reasons:
        return CellPlan(case.name, name, None, None, None, reasons)
    return CellPlan(case.name, name, name, "native", True, ())  # noqa: FBT003 (a peer is exact)


def _interpreted(plan: CellPlan, case: OpCase, target: Target) -> CellPlan:
    """The plan, or where the backend cannot run here and its kernel can be interpreted, that: for its accuracy."""
    backend = registry.get(plan.requested)
    if plan.mode == "native" or case.sequence > INTERPRETED_LENGTH:
        return plan
    if not support(backend, spec_of(case), target, "interpret"):
        return plan
    return dataclasses.replace(plan, resolved=plan.requested, mode="interpret", exact=backend.exact)


def _plan(case: str, requested: str, ask: Any) -> CellPlan:
    try:
        found: list[Resolution] = ask()
    except BackendUnavailableError as error:
        return CellPlan(case, requested, None, None, None, (str(error),))
    names = tuple(dict.fromkeys(resolution.backend.name for resolution in found))
    fallback = any(resolution.mode == "fallback" for resolution in found)
    reasons = tuple(dict.fromkeys(reason for resolution in found for reason in resolution.reasons))
    exact = all(resolution.backend.exact for resolution in found)
    return CellPlan(case, requested, "+".join(names), "fallback" if fallback else found[0].mode, exact, reasons)


# What doctor asks every backend for: the problems that a transformer poses.
_DOCTOR_CASES = {
    "forward": OpCase(kind="op_forward", sequence=1024, kv_heads=2, dtype="bfloat16"),
    "forward+backward": OpCase(kind="op_forward_backward", sequence=1024, kv_heads=2, dtype="bfloat16"),
    "packed documents": OpCase(kind="op_forward", sequence=1024, kv_heads=2, dtype="bfloat16", documents=4),
    "decode step": OpCase(kind="op_decode", sequence=1024, kv_heads=2, dtype="bfloat16"),
}


def examine() -> dict[str, Any]:
    """What ``doctor`` shows: the environment, and for each backend and problem its mode or every reason against it."""
    target = Target.here()
    found = []
    for name in registry.names():
        backend = registry.get(name)
        problems = {}
        for label, case in _DOCTOR_CASES.items():
            answers = {mode: support(backend, spec_of(case), target, mode) for mode in ("native", "interpret")}
            mode = next((mode for mode, answer in answers.items() if answer), None)
            problems[label] = {"mode": mode, "reasons": list(answers["native"].reasons)}
        found.append({"name": name, "exact": backend.exact, "problems": problems})
    return {"environment": environment.describe(), "backends": found}
