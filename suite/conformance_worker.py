"""What the worker process answers for ``judge``: it holds a backend to one problem."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from attnsuite.backends import Target, registry
from attnsuite.testing import judging, problems, random_specs

from .measure import environment
from .measure.judge import as_error
from .own import register_own

_LONGEST = 300  # characters of what a backend raised


def look(backends: Sequence[str]) -> dict[str, Any]:
    """The environment, and whether each backend is exact."""
    register_own(backends)
    exact = {name: bool(getattr(registry.get(name), "exact", True)) for name in backends}
    return {"environment": environment.describe(), "exact": exact}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer the request ``judge``: a ``status`` and the fields of this status."""
    register_own([request["backend"]])
    problem = request["problem"]
    try:
        found = _judged(request["backend"], problem["name"], problem["number"], problem["seed"])
    except Exception as error:  # noqa: BLE001 (whatever a backend raises is a result, and the process goes on)
        return {"status": "crashed", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST]}
    finally:
        if problem["number"] is not None:  # no two random problems share a program
            problems.traced.cache_clear()
            jax.clear_caches()
    if found.status == "unsupported":
        return {"status": "unsupported", "reasons": list(found.said), "error": "refused before anything was traced."}
    return {
        "status": found.status,
        "error": " ".join(found.said) or None,
        "drawn": found.problem,
        "accuracy": {name: dataclasses.asdict(as_error(verdict)) for name, verdict in found.verdicts.items()},
        "facts": {
            "gradients": "dq" in found.verdicts,
            "isolates": found.isolates,
            "share": _finite(max(random_specs.share(verdict) for verdict in found.verdicts.values())),
        },
    }


def _judged(name: str, case: str, number: int | None, seed: int | None) -> judging.Judgement:
    backend, target = registry.get(name), Target.here()
    if not backend.exact:
        reason = f"{name} is approximate by design, and the contract's judge is for exact backends."
        return judging.Judgement("unsupported", said=(reason,))
    if number is None or seed is None:
        return judging.judge_case(backend, case, target)
    return judging.judge_random(backend, number, seed, target)


def _finite(share: float) -> float | None:
    return share if math.isfinite(share) else None
