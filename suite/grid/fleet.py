"""Runs a grid on the nodes of a Ray cluster: a case, with all of its cells, is computed on one node.

The driver (this process) asks every node what it is, assigns cases to the nodes that fit, and stores the records of a
case when all of them are there. Nodes may come late and may die: a case whose node died runs on another, and nothing
of the first attempt is stored. A case that was lost on three nodes becomes records of a crash. All nodes of a run have
the same versions and are the same machines, as ``--resume`` and ``attnsuite report --out`` demand of a run too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import signal
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from ..cell import Cell, Outcome
from ..errors import InputError
from ..flag_values import names_of
from ..measure import environment as here
from ..record import MACHINE_KIND, Environment, Record
from .executors import refused
from .grid import Grid, GridWatcher
from .node import Doing, Node, Warned
from .running import now, record_of

_LOSSES = 3  # nodes on which a case is lost before it becomes a record; cases that a node loses before it gets no more
_LOOK_SECONDS = 1.0  # between two looks at the list of nodes
_CLOSE_SECONDS = 5.0
_GATHER_SECONDS = 60.0  # for nodes that do not answer at the start, since others of Ray's users have them
_WHOLE = ("CPU", "GPU", "TPU")  # a node is taken with all of these, so that nothing else of Ray runs beside a case


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetRequest:
    """Which nodes to use. ``needed`` are resources that a node announces. ``patience`` is in seconds.

    With ``any_versions`` the nodes need not have the driver's versions, but all must have the same. ``packages`` maps
    packages to the versions that Ray installs for this run on each node, beside what the node has. ``work`` is the
    class that computes on a node.
    """

    address: str = "auto"
    needed: tuple[str, ...] = ()
    any_versions: bool = False
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    patience: float = 300.0  # without a node that could compute
    work: type[Any] = Node


@dataclasses.dataclass(slots=True)
class Job:
    """The cells of a case that have no record, and the names of the nodes on which they were lost."""

    cells: list[Cell]
    lost_on: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Member:
    """A node of the cluster as the driver knows it."""

    name: str
    state: Literal["contacted", "idle", "busy", "refused"]
    actor: Any = None
    answer: Any = None  # a Ray reference to its description, or the stream of messages of its case
    environment: Environment = dataclasses.field(default_factory=Environment)
    cells: list[Cell] = dataclasses.field(default_factory=list)
    job: Job | None = None


class Fleet:
    """The nodes of a cluster that compute one run. A context manager; connects when it is entered."""

    def __init__(self, grid: Grid, request: FleetRequest, watcher: GridWatcher) -> None:
        self._grid, self._request, self._watcher = grid, request, watcher
        self._members: dict[str, Member] = {}
        self._first: tuple[Environment, list[Cell]] | None = None
        self._losses: dict[str, list[str]] = {}  # of a node: cases, since the last that it finished
        self._refusals: list[str] = []
        self._looked = float("-inf")
        self._ray = _imported()
        self._remote: Any = None

    def __enter__(self) -> Self:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.getsignal(number) for number in signals}
        try:
            self._ray.init(self._request.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"no Ray cluster answers at {self._request.address!r} ({reason}); "
                "start one with ray start --head, or give its --address."
            ) from error
        finally:
            for number, handler in handlers.items():  # Ray's would end this process without its own ending
                signal.signal(number, handler)
        self._remote = self._ray.remote(self._request.work)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            closing = [member.actor.close.remote() for member in self._members.values() if member.actor is not None]
            if closing:
                self._ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        self._ray.shutdown()

    def gather(self) -> tuple[Environment, list[Cell]]:
        """What the nodes are, and the cells of the run. Waits for the nodes that are there now.

        Raises InputError if no node can compute the run, or if the nodes are of several kinds.
        """
        begin = time.monotonic()
        self._meet()
        while True:
            waiting = [member for member in self._members.values() if member.state == "contacted"]
            found = [member for member in self._members.values() if member.state == "idle"]
            if found and (not waiting or time.monotonic() - begin > _GATHER_SECONDS):
                break
            self._check_patience(begin if not waiting else time.monotonic())
            for _ in self._hear(_LOOK_SECONDS):  # no node has a case yet
                pass
            self._meet()
        targets = sorted({member.environment.get("target", "") for member in found})
        if len(targets) > 1:
            raise InputError(
                f"the nodes are of several kinds ({', '.join(targets)}); choose with --nodes-with, "
                "and run each kind into an --out of its own."
            )
        self._first = found[0].environment, found[0].cells
        for member in found[1:]:
            self._admit(member)
        return self._first

    def records(self, missing: Sequence[Cell]) -> Iterator[tuple[Record, ...]]:
        """The records of these cells, those of a case together."""
        grouped = itertools.groupby(missing, key=lambda cell: cell.case)
        waiting = deque(Job(list(cells)) for _, cells in grouped)
        since = time.monotonic()
        while waiting or any(member.state == "busy" for member in self._members.values()):
            self._meet()
            self._assign(waiting)
            if any(member.state in {"busy", "contacted"} for member in self._members.values()):
                since = time.monotonic()
            self._check_patience(since)
            for job, records in self._hear(_LOOK_SECONDS):
                if records is not None:
                    yield records
                elif len(job.lost_on) < _LOSSES:
                    waiting.appendleft(job)
                else:
                    yield tuple(self._lost_record(cell, job.lost_on) for cell in job.cells)

    def _meet(self) -> None:
        """Ask new nodes what they are; forget those that are gone and had nothing to do."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for key in [
            key for key in self._members if key not in alive and self._members[key].state in {"idle", "refused"}
        ]:
            del self._members[key]
        for key, node in alive.items():
            if key not in self._members and self._is_wanted(node["Resources"]):
                self._members[key] = self._ask(key, node)

    def _is_wanted(self, announced: dict[str, float]) -> bool:
        """Whether a node computes at all (a head that only schedules announces no CPU), and has what is needed."""
        return announced.get("CPU", 0) > 0 and all(announced.get(name, 0) > 0 for name in self._request.needed)

    def _ask(self, key: str, node: dict[str, Any]) -> Member:
        from ray.util import scheduling_strategies  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        name = f"{node['NodeManagerHostname']}-{key[:8]}"
        whole = {kind: node["Resources"].get(kind, 0) for kind in _WHOLE}
        actor = self._remote.options(
            num_cpus=whole["CPU"],
            num_gpus=whole["GPU"],
            resources={"TPU": whole["TPU"]} if whole["TPU"] else None,
            runtime_env=_runtime_env(self._request.packages),
            max_concurrency=2,  # it is closed while it computes
            scheduling_strategy=scheduling_strategies.NodeAffinitySchedulingStrategy(key, soft=False),
        ).remote(name)
        return Member(name, "contacted", actor, actor.look.remote(self._grid))

    def _assign(self, waiting: deque[Job]) -> None:
        """Give every idle node a case; a case that was lost goes to another node where there is one."""
        for member in [member for member in self._members.values() if member.state == "idle"]:
            others = [other for other in self._members.values() if other.state in {"idle", "busy"}]
            for job in waiting:
                elsewhere = any(other.name not in job.lost_on for other in others)
                if member.name not in job.lost_on or not elsewhere:
                    waiting.remove(job)
                    member.job, member.state = job, "busy"
                    member.answer = member.actor.compute.options(num_returns="streaming").remote(job.cells)
                    break

    def _hear(self, seconds: float) -> Iterator[tuple[Job, tuple[Record, ...] | None]]:
        """Wait for messages of nodes. Yields each case that ended with its records, or with None if it was lost."""
        busy = {
            id(member.answer): key for key, member in self._members.items() if member.state in {"contacted", "busy"}
        }
        answers = [self._members[key].answer for key in busy.values()]
        if not answers:
            time.sleep(min(seconds, 0.1))
            return
        ready, _ = self._ray.wait(answers, num_returns=1, timeout=seconds, fetch_local=False)
        for answer in ready:
            key = busy[id(answer)]
            member = self._members[key]
            try:
                if member.state == "contacted":
                    member.environment, member.cells = self._ray.get(answer)
                    member.state = "idle"
                    self._admit(member)
                    continue
                message = self._ray.get(next(answer))
            except (self._ray.exceptions.RayError, InputError, StopIteration) as error:
                job = self._lost(key, member, error)
                if job is not None:
                    yield job, None
                continue
            if isinstance(message, Doing):
                self._watcher.doing(message.case, message.backend, f"{message.what} on {member.name}")
            elif isinstance(message, Warned):
                self._watcher.warn(f"{member.name}: {message.sentence}")
            else:
                job, member.job, member.answer = member.job, None, None
                member.state = "idle"
                self._losses.pop(key, None)
                if job is not None:
                    yield job, message

    def _admit(self, member: Member) -> None:
        """Refuse a node that does not belong to this run."""
        environment = member.environment
        packages = self._request.packages
        if lacking := _unlike(environment.get("versions", {}), packages, "asked for"):
            self._refuse(member, "; ".join(lacking))
        elif not self._request.any_versions and (reason := _other_versions(environment, packages)):
            self._refuse(member, f"{reason}; --any-versions takes the nodes' own")
        elif self._first is not None and (reason := _differences(self._first, (environment, member.cells))):
            self._refuse(member, reason)

    def _refuse(self, member: Member, why: str) -> None:
        member.state, member.answer = "refused", None
        self._refusals.append(f"{member.name}: {why}")
        self._watcher.warn(f"node {member.name} is not used: {why}.")
        self._release(member)

    def _release(self, member: Member) -> None:
        """End what computes on a node."""
        if member.actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(member.actor)
        member.actor = None

    def _lost(self, key: str, member: Member, error: BaseException) -> Job | None:
        """A node raised, or died with what it computed. Returns the case that it had."""
        reason = self._reason(error)
        job, member.job = member.job, None
        if job is None and isinstance(
            error, InputError | self._ray.exceptions.RuntimeEnvSetupError
        ):  # the error says why
            self._refuse(member, reason)
            return None
        self._release(member)
        losses = self._losses.setdefault(key, [])
        losses.append(job.cells[0].case.name if job else "its start")
        if job is not None:
            job.lost_on.append(member.name)
            self._watcher.warn(f"case {job.cells[0].case.name} was lost on node {member.name} ({reason}).")
        if len(losses) >= _LOSSES:
            self._refuse(member, f"it lost {', '.join(losses)} one after the other ({reason})")
        else:
            del self._members[key]  # asked again, if the cluster still has the node
        return job

    def _reason(self, error: BaseException) -> str:
        """Why a node was lost, without a full stop: what was raised there, or which process died."""
        errors = self._ray.exceptions
        if isinstance(error, errors.RayTaskError):
            raised = error.cause if error.cause is not None else error  # pyright: ignore[reportAttributeAccessIssue]
            text = " ".join(str(raised).split())[:300].rstrip(".")
            return text if isinstance(raised, InputError) else f"{type(raised).__name__}: {text}"
        if isinstance(error, errors.RuntimeEnvSetupError):
            packages = ",".join(_requirements(self._request.packages))
            return f"--packages {packages} cannot be installed there: " + " ".join(str(error).split())[-300:].rstrip(
                "."
            )
        if "node has died" in str(error):
            return "the node died"
        if isinstance(error, errors.ActorDiedError) and "__init__" in str(error):
            return "attnsuite does not start there: " + " ".join(str(error).split())[-200:].rstrip(".")
        return "its process died"

    def _lost_record(self, cell: Cell, nodes: Sequence[str]) -> Record:
        """The record of a cell whose case no node survived."""
        suite, environment = self._grid.suite, self._first[0] if self._first else Environment()
        if not cell.is_measured:
            return refused(cell, suite, environment)
        error = f"the node that computed its case was lost {len(nodes)} times: {', '.join(nodes)}."
        outcome = Outcome(status="crashed", error=error)
        return record_of(cell, outcome, suite=suite, environment=environment, started=now())

    def _check_patience(self, since: float) -> None:
        """Raises InputError if no node was there to compute for too long."""
        if time.monotonic() - since > self._request.patience:
            reason = "; ".join(dict.fromkeys(self._refusals)) or "none has a CPU and what --nodes-with asks for"
            raise InputError(
                f"for {self._request.patience:g} s no node of the cluster could compute ({reason}). What is done "
                "is kept."
            )


def parse_packages(text: str) -> dict[str, str]:
    """Packages and their versions from ``jax==0.10.1,jaxlib==0.10.1``: those whose versions records hold.

    Raises InputError.

    >>> parse_packages("jax==0.10.1, jaxlib==0.10.1")
    {'jax': '0.10.1', 'jaxlib': '0.10.1'}
    """
    found: dict[str, str] = {}
    for word in names_of(text, "--packages"):
        name, _, version = word.partition("==")
        if name not in here.PACKAGES or name in found or not re.fullmatch(r"[0-9][0-9A-Za-z.+!]*", version):
            raise InputError(
                f"--packages {word!r} must be NAME==VERSION, and each name once; "
                f"records hold the versions of {', '.join(here.PACKAGES)}."
            )
        found[name] = version
    return found


def _requirements(packages: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in packages.items()]


def _runtime_env(packages: Mapping[str, str]) -> dict[str, Any] | None:
    """What Ray makes on a node for this run: a copy of the node's environment, with these packages by uv."""
    if not packages:
        return None
    return {"uv": {"packages": _requirements(packages), "uv_pip_install_options": []}}  # with uv's cache


def _unlike(its: Mapping[str, Any], wanted: Mapping[str, Any], word: str) -> list[str]:
    """What is not as wanted, each with what it is; ``word`` says why it is wanted."""
    return [
        f"{name} is {its.get(name, 'missing')}, {word} {value}"
        for name, value in wanted.items()
        if its.get(name) != value
    ]


def _other_versions(found: Environment, but: Collection[str]) -> str:
    """In what a node differs from the driver, but for some packages.

    A package that only one of them has makes no difference here.
    """
    mine = here.versions() | {"source": here.source_digest()}
    its = {**found.get("versions", {}), "source": found.get("source", "")}
    both = {name: value for name, value in mine.items() if name in its and name not in but}
    return "; ".join(_unlike(its, both, "here"))


def _differences(first: tuple[Environment, list[Cell]], other: tuple[Environment, list[Cell]]) -> str:
    """In what a node differs from the nodes that the run began with; empty where their figures belong together."""
    names = ("target", "versions", "source", "git_revision", "flags", *MACHINE_KIND)
    mine, its = ({name.replace("_", " "): node[0].get(name) for name in names} for node in (first, other))
    reasons = _unlike(its, mine, "was")
    if not reasons and _rows(first[1]) != _rows(other[1]):
        changed = {key for key, *_ in _rows(first[1]) ^ _rows(other[1])}
        reasons = [f"other backends would run in {', '.join(sorted(changed)[:3])}"]
    return "; ".join(reasons)


def _rows(cells: Iterable[Cell]) -> set[tuple[Any, ...]]:
    return {(cell.key, cell.resolved, cell.mode, cell.exact) for cell in cells}


def _imported() -> Any:
    """The package ray. Raises InputError where it is not installed."""
    try:
        import ray  # noqa: PLC0415  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise InputError("--executor ray needs the package ray: pip install '.[ray]'.") from error
    return ray
