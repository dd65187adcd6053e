"""Choose the backend that runs a request, and record every rejection with its reason.

``auto`` takes the first backend of the target's list that supports the spec. If a named backend refuses, the caller
decides what happens: an error, or a fallback to the first backend of that list that supports the spec. A fallback runs
under ``mode="fallback"`` with one warning that gives the reasons. No backend is ever replaced silently.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal, get_args

from . import registry
from .contract import AttentionSpec, Backend, Layout, Plan
from .devices import Target
from .features import Mode
from .support import plan, support

OnUnavailable = Literal["fallback", "raise"]

# Most specialised first; chunked and standard run everywhere. Names that are not registered are skipped.
PRIORITY: dict[str, tuple[str, ...]] = {
    "cuda": ("cudnn", "kvax", "chunked", "standard"),
    "tpu": ("splash", "chunked", "standard"),
    "rocm": ("chunked", "standard"),
    "cpu": ("flash_cpu", "chunked", "standard"),
}


class BackendFallbackWarning(UserWarning):
    """The requested backend was refused and another one runs in its place."""


class BackendUnavailableError(RuntimeError):
    """The requested backend was refused, and the caller asked for an error instead of a fallback."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rejection:
    """A backend that was asked and refused."""

    backend: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.backend}: {' '.join(self.reasons)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Resolution:
    """The backend that runs for a request. ``mode`` is ``fallback`` if it is not the one that was asked for."""

    requested: str
    backend: Backend
    mode: Literal["native", "interpret", "compile", "fallback"]
    spec: AttentionSpec
    target: Target
    rejections: tuple[Rejection, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason why another backend was not taken, one sentence each, led by the backend's name."""
        return tuple(f"{rejection.backend}: {reason}" for rejection in self.rejections for reason in rejection.reasons)

    def plan(self, layout: Layout = Layout(), options: Mapping[str, Any] | None = None) -> Plan:  # noqa: B008
        """Plan one forward pass with the resolved backend. Options are the requested backend's; a fallback takes none.

        Raises the errors of :func:`attnsuite.backends.plan`: ValueError where ``layout`` and the spec disagree, or for
        options.
        """
        if self.mode == "fallback":
            return plan(self.backend, self.spec, layout, target=self.target)
        return plan(self.backend, self.spec, layout, target=self.target, mode=self.mode, options=options)


def resolve(
    request: str,
    spec: AttentionSpec,
    target: Target | None = None,
    *,
    mode: Mode = "native",
    on_unavailable: OnUnavailable = "fallback",
    options: Mapping[str, Any] | None = None,
) -> Resolution:
    """Decide which backend computes ``spec`` on ``target`` (default: this machine) for ``request``.

    ``request`` is a registered name or ``"auto"``. ``options`` are those for the requested backend, which may refuse
    some together with the spec. Raises UnknownBackendError for an unregistered name, and ValueError for an unknown
    mode. Raises BackendUnavailableError if the named backend refuses and ``on_unavailable="raise"``, or if no backend
    supports the spec.
    """
    target = Target.here() if target is None else target
    if on_unavailable not in get_args(OnUnavailable):
        raise ValueError(f"on_unavailable={on_unavailable!r} must be 'fallback' or 'raise'.")
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} must be one of {', '.join(map(repr, get_args(Mode)))}.")
    if request == "auto" and mode != "native":
        raise ValueError(f"mode={mode!r} is for a backend by name; give backend=..., or leave mode at 'native'.")
    rejections: list[Rejection] = []
    if request != "auto":
        backend = registry.get(request)
        found = support(backend, spec, target, mode, options)
        if found:
            return Resolution(request, backend, mode, spec, target)
        rejections.append(Rejection(request, found.reasons))
        if on_unavailable == "raise":
            raise BackendUnavailableError(f"{request} cannot run this on {target}: {' '.join(found.reasons)}")
    known = registry.names()
    for name in PRIORITY[target.platform]:
        if (name == request and mode == "native") or name not in known:
            continue
        backend = registry.get(name)
        found = support(backend, spec, target)
        if not found:
            rejections.append(Rejection(name, found.reasons))
            continue
        if request == "auto":
            return Resolution(request, backend, "native", spec, target, tuple(rejections))
        resolution = Resolution(request, backend, "fallback", spec, target, tuple(rejections))
        asked, instead = ("", "") if mode == "native" else (f" in mode {mode!r}", " natively")
        warnings.warn(
            f"{request} cannot run this{asked} on {target}; {name} runs{instead} instead. "
            + " ".join(resolution.reasons),
            BackendFallbackWarning,
            stacklevel=2,
        )
        return resolution
    raise BackendUnavailableError(
        f"no backend can run this on {target}: {' '.join(map(str, rejections))} Registered: {', '.join(known)}."
    )
