"""``attnsuite doctor``: the devices, the versions, and every backend with every reason against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .errors import CellFailure, jax_does_not_start
from .grid.process import Worker

_SECONDS = 300.0


def examine_here() -> dict[str, Any]:
    """Examine in a process of its own, so that a backend may crash or hang there. Raises InputError."""
    with Worker(psutil.virtual_memory().total) as worker:
        try:
            return worker.ask({"do": "doctor"}, _SECONDS)
        except CellFailure as failure:
            raise jax_does_not_start(failure) from failure


def describe(found: dict[str, Any]) -> RenderableType:
    """The examination for a terminal."""
    environment = found["environment"]
    problems = list(found["backends"][0]["problems"]) if found["backends"] else []
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(environment):
        facts.add_row(Text(name, style="dim"), Text(value))
    table = Table(title="what each backend would run as here", title_justify="left")
    table.add_column("backend")
    for problem in problems:
        table.add_column(problem)
    for devices, backends in _by_devices(found["backends"]).items():
        table.add_section()
        table.add_row(Text(devices, style="dim"))
        for backend in backends:
            name = backend["name"] if backend["exact"] else f"{backend['name']} (approximate)"
            table.add_row(f"  {name}", *(_mode(backend["problems"][problem]) for problem in problems))
    return Group(facts, "", table, *_reasons(found["backends"]), *map(Text, found["kinds"]))


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


def _by_devices(backends: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The backends under the devices that they are for, in the order of the registry."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for backend in backends:
        devices = f"for {', '.join(backend['devices'])}" if backend["devices"] else "for no device, as installed here"
        groups.setdefault(devices, []).append(backend)
    return groups


def _mode(problem: dict[str, Any]) -> Text:
    if problem["mode"] == "native":
        return Text("native", style="green")
    if problem["mode"] is None:
        return Text("refused", style="red")
    return Text(f"{problem['mode']} only", style="yellow")


def _reasons(backends: list[dict[str, Any]]) -> Iterator[Text]:
    """Every reason once per backend, with the problems that it applies to."""
    for backend in backends:
        against: dict[str, list[str]] = {}
        for problem, support in backend["problems"].items():
            for reason in support["reasons"]:
                against.setdefault(reason, []).append(problem)
        for reason, problems in against.items():
            scope = "" if len(problems) == len(backend["problems"]) else f" ({', '.join(problems)})"
            yield Text.assemble((backend["name"], "bold"), f"{scope}: {reason}")
