"""``attnsuite doctor``: the device, the versions, and for each backend whether it runs here or what it needs."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import psutil

from attnsuite.backends import AttentionSpec, Target, registry, support

from . import kinds
from .errors import CellFailure, jax_does_not_start
from .grid.process import Worker
from .measure import environment

_SECONDS = 300.0


def examine_here(seconds: float = _SECONDS, memory: int | None = None) -> dict[str, Any]:
    """Examine in a process of its own, so that a backend may crash or hang there. Raises InputError.

    ``memory`` is its limit in bytes; None: the machine's.
    """
    with Worker(memory or psutil.virtual_memory().total) as worker:
        try:
            return worker.ask(seconds, examine)
        except CellFailure as failure:
            raise jax_does_not_start(failure) from failure


# The problems of a transformer, for which doctor asks every backend.
_CALL = AttentionSpec(
    batch=1, query_length=1024, key_value_length=1024, num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16",
    is_causal=True, needs_grad=False,
)  # fmt: skip
_PROBLEMS = {
    "forward": _CALL,
    "forward+backward": dataclasses.replace(_CALL, needs_grad=True),
    "packed documents": dataclasses.replace(_CALL, has_segment_ids=True),
    "decode step": dataclasses.replace(_CALL, query_length=1, head_dim=128, value_head_dim=128, has_positions=True),
}

# A device of each platform: doctor groups the backends by those that they are for.
_DEVICES = {"CPU": Target("cpu"), "NVIDIA GPU": Target("cuda", "h100"), "TPU": Target("tpu", "v5e")}


def examine() -> dict[str, Any]:
    """In that process: the environment, each backend's mode or reasons in each problem, and kinds that are broken.

    A backend's ``devices`` are the platforms where it takes one of the problems natively, as it is installed here.
    """
    target = Target.here()
    found = []
    for name in registry.names():
        backend = registry.get(name)
        problems = {}
        for label, spec in _PROBLEMS.items():
            answers = {mode: support(backend, spec, target, mode) for mode in ("native", "interpret")}
            mode = next((mode for mode, answer in answers.items() if answer), None)
            # What stands against the interpreter beside these: a package that is missing or broken.
            reasons = dict.fromkeys(answers["native"].reasons)
            if mode is None:
                reasons |= dict.fromkeys(x for x in answers["interpret"].reasons if not x.startswith("mode="))
            problems[label] = {"mode": mode, "reasons": list(reasons)}
        specs = _PROBLEMS.values()
        devices = [label for label, device in _DEVICES.items() if any(support(backend, spec, device) for spec in specs)]
        found.append({"name": name, "exact": backend.exact, "devices": devices, "problems": problems})
    return {"environment": environment.describe(), "backends": found, "kinds": list(kinds.faults())}


def describe(found: dict[str, Any], *, every: bool = False, width: int = 79) -> Iterator[str]:
    """The examination in lines of at most ``width``: a line per backend, and with ``every`` each reason."""
    for indent, line in _lines(found, every=every):
        yield from textwrap.wrap(line, width, subsequent_indent=" " * indent, replace_whitespace=False) or [""]


def _lines(found: dict[str, Any], *, every: bool) -> Iterator[tuple[int, str]]:
    """Each line with the columns by which it is indented where it goes on."""
    facts = dict(_facts(found["environment"]))
    for name in facts if every else ("device", "machine", "versions"):
        yield 10, f"{name:<9} {facts.get(name, '-')}"
    groups: dict[str, list[tuple[str, str]]] = {}
    for backend in found["backends"]:
        heading, line = _standing(backend)
        name = backend["name"] if backend["exact"] else f"{backend['name']} (approximate)"
        groups.setdefault(heading, []).append((name, line))
    for heading in (_HERE, _INSTALL, _INTERPRETED, _ELSEWHERE, _NOWHERE):
        if heading in groups:
            yield from ((0, ""), (0, heading))
            yield from ((30, f"  {name:<27} {line}") for name, line in groups[heading])
    yield from ((0, line) for line in (["", *found["kinds"]] if found["kinds"] else []))
    yield 0, ""
    if not every:
        yield 0, "Every reason, all versions and flags: attnsuite doctor --all"
    for backend in found["backends"] if every else ():
        yield from ((2, reason) for reason in _reasons(backend))


_HERE, _INSTALL = "runs here", "needs an install"
_INTERPRETED = "runs here in an interpreter only (mode='interpret' checks it); made for"
_ELSEWHERE = "needs another device"
_NOWHERE = "runs nowhere, as installed here"
_COMMAND = re.compile(r"pip install (?:'[^']*'|\S+)")


def _standing(backend: dict[str, Any]) -> tuple[str, str]:
    """The heading that a backend stands under, and what its line says."""
    problems, devices = backend["problems"], ", ".join(backend["devices"]) or "no device, as installed here"
    native = [name for name, problem in problems.items() if problem["mode"] == "native"]
    if native:
        return _HERE, _part(native, list(problems)).removeprefix("; ")
    commands = {
        command[0]
        for problem in problems.values()
        for reason in problem["reasons"]
        if (command := _COMMAND.search(reason))
    }
    if commands:
        return _INSTALL, f"{' and '.join(sorted(commands))} (for {devices})"
    interpreted = [name for name, problem in problems.items() if problem["mode"] == "interpret"]
    if interpreted:
        return _INTERPRETED, devices + _part(interpreted, list(problems))
    if not backend["devices"]:
        return _NOWHERE, next(reason for problem in problems.values() for reason in problem["reasons"])
    return _ELSEWHERE, devices


def _facts(environment: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory = environment["device_memory"]
    size = "" if memory is None else f", {memory / 2**30:.0f} GiB"
    yield "device", f"{environment['device_count']} x {environment['target']}{size}"
    machine = f"{environment['cpu']}, {environment['cores']} cores, {environment['machine_memory'] / 2**30:.0f} GiB"
    yield "machine", machine
    yield "system", environment["platform"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    if environment["git_revision"]:
        yield "revision", environment["git_revision"]
    if environment["flags"]:
        yield "flags", " ".join(f"{name}={value}" for name, value in environment["flags"].items())


def _part(taken: list[str], problems: list[str]) -> str:
    """Which of the problems are taken: the shorter list of the two; nothing where all are."""
    others = [name for name in problems if name not in taken]
    if not others:
        return ""
    return f"; only {', '.join(taken)}" if len(taken) < len(others) else f"; not {', '.join(others)}"


def _reasons(backend: dict[str, Any]) -> Iterator[str]:
    """Every reason against a backend, once, with the problems that it applies to."""
    against: dict[str, list[str]] = {}
    for problem, answer in backend["problems"].items():
        for reason in answer["reasons"]:
            against.setdefault(reason, []).append(problem)
    for reason, problems in against.items():
        scope = "" if len(problems) == len(backend["problems"]) else f" ({', '.join(problems)})"
        yield f"{backend['name']}{scope}: {reason}"
