"""Choose the backend that runs a request, and record every rejection with its reason.

``auto`` takes the backend that a policy names for such a problem (``choices.py``), else the first backend of the
target's list that supports the spec. If a named backend refuses, the caller decides what happens: an error, or a
fallback to the first backend of that list that supports the spec. A fallback runs under ``mode="fallback"`` with one
warning that gives the reasons. No backend is ever replaced silently.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Literal, get_args

from attnsuite.sentences import quoted

from . import registry
from .choices import AnyPolicy, Decision, Policy, PolicyNotUsedWarning, decide, policy_of, tuned, usable
from .contract import Backend, Plan, as_options
from .devices import Target
from .features import Mode, Options
from .layout import Layout
from .spec import AttentionSpec
from .support import check_kinds, plan_accepted, support

OnUnavailable = Literal["fallback", "raise"]

# What auto takes where no policy says what was measured. chunked and standard run everywhere. Names that are not
# registered are skipped. On a CPU: in reports/published/cpu-amd-epyc-speed flash_cpu takes at most 0.79 of the time of
# chunked in each of 69 cases (2026-11-23). On a GPU and a TPU nothing was measured here: the first is the library or
# kernel that the vendor or JAX ships for the device. Kvax has run in an interpreter and a compiler only, so it is asked
# for by name.
PRIORITY: dict[str, tuple[str, ...]] = {
    "cuda": ("cudnn", "chunked", "standard"),
    "tpu": ("splash", "chunked", "standard"),
    "rocm": ("chunked", "standard"),
    "cpu": ("flash_cpu", "chunked", "standard"),
}


_NOT_MEASURED = (
    "nothing was measured on this device: auto takes the first of a fixed list that supports the problem "
    "(attnsuite run, then attnsuite choose, make a policy of measurements)."
)


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
    """The backend that runs for a request. ``mode`` is ``fallback`` if it is not the one that was asked for.

    ``policy`` is a sentence about what ``auto`` took: the measurement of a policy that it follows and how near that is,
    or why the policy was not followed, or that nothing was measured on this device. ``tuned`` is the policy that has
    options for the backend that ``auto`` took. ``options`` are those to plan with where no others are given: what
    :func:`resolve` was given. A resolution is hashable where they are.
    """

    requested: str
    backend: Backend
    mode: Literal["native", "interpret", "compile", "fallback"]
    spec: AttentionSpec
    target: Target
    rejections: tuple[Rejection, ...] = ()
    policy: str = ""
    tuned: Policy | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason why another backend was not taken, one sentence each, led by the backend's name."""
        return tuple(f"{rejection.backend}: {reason}" for rejection in self.rejections for reason in rejection.reasons)

    def mode_and(self, options: Options = None) -> tuple[Mode, Options]:
        """The mode to plan in, and the options, which are the requested backend's; a fallback takes none."""
        if self.mode == "fallback":
            return "native", None
        options = dict(self.options) if options is None else options
        return self.mode, options if self.tuned is None else {"tuned": self.tuned} | dict(options or {})

    def plan(
        self,
        layout: Layout = Layout(),  # noqa: B008 (a frozen value)
        options: Options = None,
        *,
        isolate: bool = False,
    ) -> Plan:
        """Plan one forward pass with the resolved backend.

        ``isolate`` and the errors are those of :func:`attnsuite.backends.plan`: ValueError where ``layout`` and the
        spec disagree, or for options.
        """
        mode, options = self.mode_and(options)
        how: dict[str, Any] = {"target": self.target, "mode": mode, "options": options}
        return plan_accepted(self.backend, self.spec, layout, **how, isolate=isolate)


def resolve(
    request: str,
    spec: AttentionSpec,
    target: Target | None = None,
    *,
    mode: Mode = "native",
    on_unavailable: OnUnavailable = "fallback",
    options: Options = None,
    policy: AnyPolicy | None = None,
) -> Resolution:
    """Decide which backend computes ``spec`` on ``target`` (default: this machine) for ``request``.

    ``request`` is a registered name or ``"auto"``. ``options`` are those for the requested backend, which may refuse
    some together with the spec. ``policy`` is for ``"auto"``, which takes its backends and their options: a file that
    ``attnsuite choose`` or ``attnsuite tune`` wrote, or what :func:`attnsuite.backends.load_policy` read (default: the
    file that ``$ATTNSUITE_POLICY`` names, if it is set). A policy of another device or of other versions is not used,
    with one PolicyNotUsedWarning.

    Raises UnknownBackendError for an unregistered name, and ValueError for an unknown mode, for a policy beside a
    backend by name, and for a file that is no policy. Raises BackendUnavailableError if the named backend refuses and
    ``on_unavailable="raise"``, or if no backend supports the spec.
    """
    target = Target.here() if target is None else target
    check_kinds(spec, target)
    options = as_options(options)
    _check(request, mode, on_unavailable, policy)
    rejections: list[Rejection] = []
    valid, followed, given = None, Decision(None, ""), tuple(options.items())
    if request == "auto":
        valid, followed = _decision(policy, spec, target)
        if followed.backend is not None:
            backend = registry.get(followed.backend)
            found = Resolution("auto", backend, "native", spec, target, (), followed.sentence, options=given)
            return _with_tuned(found, valid)
    else:
        backend = registry.get(request)
        found = support(backend, spec, target, mode, options)
        if found:
            return Resolution(request, backend, mode, spec, target, options=given)
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
            sentence = followed.sentence or ("" if target.platform == "cpu" else _NOT_MEASURED)
            taken = Resolution("auto", backend, "native", spec, target, tuple(rejections), sentence, options=given)
            return _with_tuned(taken, valid)
        resolution = Resolution(request, backend, "fallback", spec, target, tuple(rejections))
        in_mode, instead = ("", "") if mode == "native" else (f" in mode {mode!r}", " natively")
        warnings.warn(
            f"{request} cannot run this{in_mode} on {target}; {name} runs{instead} instead. "
            + " ".join(resolution.reasons),
            BackendFallbackWarning,
            stacklevel=2,
        )
        return resolution
    raise BackendUnavailableError(
        f"no backend can run this on {target}: {' '.join(map(str, rejections))} Registered: {', '.join(known)}."
    )


def _check(request: str, mode: str, on_unavailable: str, policy: AnyPolicy | None) -> None:
    """Raise ValueError for words that are not known, or that do not go together."""
    if on_unavailable not in get_args(OnUnavailable):
        raise ValueError(f"on_unavailable={on_unavailable!r} must be 'fallback' or 'raise'.")
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} must be one of {', '.join(map(repr, get_args(Mode)))}.")
    if request == "auto" and mode != "native":
        raise ValueError(f"mode={mode!r} is for a backend by name; give backend=..., or leave mode at 'native'.")
    if request != "auto" and policy is not None:
        raise ValueError(
            f"policy={quoted(policy)} is for backend='auto'; leave it out where backend={request!r} is named."
        )


def _decision(policy: AnyPolicy | None, spec: AttentionSpec, target: Target) -> tuple[Policy | None, Decision]:
    """What of a policy holds for ``target``, and what it says of ``spec``: no backend where ``auto`` takes none."""
    read = policy_of(policy)
    if read is None:
        return None, Decision(None, "")
    valid, reason = usable(read, target)
    if reason:
        if target.present:
            warnings.warn(reason, PolicyNotUsedWarning, stacklevel=3)
        return valid, Decision(None, reason)
    found = decide(valid, spec)
    if found.backend is not None and (reason := _against(found.backend, spec, target)):
        return valid, Decision(None, f"policy {read.name} is not followed: {reason}")
    return valid, found


def _with_tuned(taken: Resolution, policy: Policy | None) -> Resolution:
    """What ``auto`` takes, with the policy's options if they were measured with arrays of the same kinds."""
    name, spec = taken.backend.name, taken.spec
    found = () if policy is None else tuned(policy, name, taken.target, spec)
    if not found or any((e.spec.has_mask, e.spec.has_bias) != (spec.has_mask, spec.has_bias) for e in found):
        return taken
    cases = " and ".join(f"{each.choice.case} of {each.source.name}" for each in found)
    sentence = f"{taken.policy} The options of {name} are those of case {cases}.".lstrip()
    return dataclasses.replace(taken, policy=sentence, tuned=policy)


def _against(name: str, spec: AttentionSpec, target: Target) -> str:
    """Why ``auto`` does not take a policy's backend; empty if it does."""
    if name not in registry.names():
        return f"its backend {name} is not registered here."
    if not registry.get(name).exact:
        return f"its backend {name} is approximate, and auto takes exact ones only."
    return " ".join(support(registry.get(name), spec, target).reasons)
