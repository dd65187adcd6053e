"""Attention divided among many devices: the case, and how one backend on one mesh is judged.

The devices are CPU devices of the host; JAX makes as many as are asked for. ``jax.distributed`` may join several
processes over loopback; the mesh then spans all of them. Output and gradients are judged against the float64 oracle,
with the noise floor of the standard backend on one device. Only correctness is measured: devices that share a CPU say
nothing about speed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnsuite.backends import AttentionSpec, Backend, Layout, Target, oracle, plan, registry, support
from attnsuite.backends.sharding import MeshAxes, Sharded, balanced_order
from attnsuite.testing import cases, layouts

from .. import typed
from ..cell import Cell, Means, Outcome, Prepared, Request
from ..errors import InputError
from ..flag_values import known_backend, parts_of
from ..measure.program import named_outputs
from ..measure.tensor_errors import as_error
from ..typed import Count, Real, Size
from .attention_call import op_function
from .kind import Kind, backends_of, check_fields
from .kind import cell as cell_of

if TYPE_CHECKING:
    from attnsuite.testing.problems import Problem

_AXIS = "(data|heads|context) ([1-9][0-9]{0,3})"
_MESH = re.compile(f"{_AXIS}( x {_AXIS}){{0,2}}")


def _packed(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Documents and padding in every sequence but the last, which is one document."""
    ids = np.repeat([-1, 0, 1, -1], [20, 110, 150, 40]).astype(np.int32)
    rows = np.stack([ids] * (sizes[0] - 1) + [np.zeros_like(ids)])
    return dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), rows)


def _balanced(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The tokens in the order that balances four devices."""
    order = np.stack([balanced_order(sizes[1], 4)] * sizes[0])
    return dict.fromkeys(("query_positions", "key_value_positions"), order)


_causal = functools.partial(cases.case, T=320, is_causal=True)  # 2 sequences, 4 heads and 2 KV heads of dim 32
PROBLEMS = {
    "causal": _causal(),
    "causal bfloat16": _causal(dtype="bfloat16"),
    "ragged": cases.case(T=320, layout=layouts.lengths(320, 150)),
    "packed": _causal(layout=_packed),
    "packed, window, soft cap": _causal(layout=_packed, local_window_size=(90, 0), logits_soft_cap=5.0),
    "balanced": _causal(layout=_balanced),
    "one KV head": _causal(K=1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCase:
    """A problem of :data:`PROBLEMS` on a mesh of devices, which ``processes`` share equally.

    ``mesh`` names the axes and their sizes in the mesh's order, such as ``data 2 x context 4``. ``exchange`` says how
    the devices of the axis ``context`` see all keys; None without this axis. ``backends`` are those that compute the
    case, separated by commas; without it all do. Raises InputError for fields that do not fit.
    """

    kind: Literal["sharded"] = "sharded"
    name: str = ""
    problem: str
    mesh: str
    exchange: Literal["gather", "ring"] | None = None
    processes: Count = 1
    backends: str = ""

    def __post_init__(self) -> None:
        exchange = "" if self.exchange is None else f", {self.exchange}"
        object.__setattr__(self, "name", self.name or f"{self.problem}, {self.mesh}{exchange}")
        check_fields(self)
        if self.problem not in PROBLEMS:
            raise InputError(f"problem = {typed.quoted(self.problem)} is not known; use one of {', '.join(PROBLEMS)}.")
        if not _MESH.fullmatch(self.mesh) or len(self.shape) != self.mesh.count(" x ") + 1:
            wanted = "axes among data, heads and context with their sizes, such as data 2 x context 4"
            raise InputError(f"mesh = {typed.quoted(self.mesh)} is not a mesh; give {wanted}.")
        if ("context" in self.shape) != (self.exchange is not None):
            wanted = "gather or ring" if "context" in self.shape else "none"
            raise InputError(f"exchange = {typed.quoted(self.exchange)} does not fit mesh {self.mesh}; use {wanted}.")
        if self.devices % self.processes:
            raise InputError(f"processes = {self.processes} do not share the {self.devices} devices equally.")
        for name in parts_of(self.backends):
            known_backend(name)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis, in the mesh's order."""
        return {name: int(size) for name, size in re.findall(_AXIS, self.mesh)}

    @property
    def devices(self) -> int:
        """The devices of all processes."""
        return math.prod(self.shape.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The shape of the output that one device holds.

    ``one_device`` is the ``max_error`` of each tensor when the same backend computes it on one device.
    """

    shape: tuple[Size, ...]
    one_device: dict[str, Real | None]


class ShardedKind(Kind):
    """The kind of :class:`ShardedCase`."""

    titles: ClassVar = {"sharded": "sharded attention"}
    page: ClassVar = "sharded"
    case: ClassVar = ShardedCase
    facts: ClassVar = Share
    shares_process: ClassVar = True
    cases_share_process: ClassVar = True
    needs_ceilings: ClassVar = False

    def rows(self, case: ShardedCase) -> tuple[str, ...]:
        """The backends that the case names."""
        return tuple(parts_of(case.backends))

    def cells(self, case: ShardedCase, request: Request) -> Iterable[Cell]:
        """A cell per backend, on CPU devices: native, or interpreted for a backend that takes a CPU no other way."""
        target = Target.named("cpu")
        for row in (row for row in backends_of(request) if row in (self.rows(case) or request.rows)):
            backend = registry.get(row)
            mode = "native" if support(backend, _spec(case.problem, backend), target, "native") else "interpret"
            yield cell_of(case, row, target, resolved=row, mode=mode, exact=backend.exact, devices=case.devices)

    def processes(self, case: ShardedCase) -> tuple[int, int]:
        """The processes, and the devices of each."""
        return case.processes, case.devices // case.processes

    def prepare(self, cell: Cell, case: ShardedCase, means: Means) -> Prepared:
        """Compute and judge at once, in each of the joined processes; nothing is timed."""
        mode: Any = cell.mode
        whole = registry.get(cell.row)
        spec = _spec(case.problem, whole)
        mesh = Mesh(np.array(jax.devices()).reshape(*case.shape.values()), tuple(case.shape))
        axes: dict[str, Any] = {name: name for name in case.shape} | {"exchange": case.exchange or "gather"}
        backend = Sharded(whole, mesh, MeshAxes(**axes))
        if reasons := support(backend, spec, Target.here(), mode).reasons:
            return Prepared(Outcome(status="unsupported", reasons=reasons, error="refused before anything was traced."))
        return Prepared(_judged(backend, spec, case.problem, mode))


def _judged(backend: Sharded, spec: AttentionSpec, problem: str, mode: Any) -> Outcome:
    solved = _solved(problem, spec)
    everywhere = NamedSharding(backend.mesh, PartitionSpec())
    inputs = [jax.make_array_from_callback(x.shape, backend.sharding(), x.__getitem__) for x in solved.inputs]
    results = _program(backend, spec, solved.layout, mode)(*inputs)
    out = results["out"]
    whole = jax.jit(lambda x: x, out_shardings=everywhere)(results)
    found = {name: np.asarray(x.addressable_data(0)) for name, x in whole.items()}
    alone = _alone(backend.backend.name, mode, problem, spec)
    verdicts = {name: _verdict(name, x, solved) for name, x in found.items()}
    wrong = [name for name, verdict in verdicts.items() if not verdict.passed]
    return Outcome(
        status="wrong" if wrong else "ok",
        error=f"{', '.join(wrong)} beyond what is allowed." if wrong else None,
        accuracy={name: as_error(verdict) for name, verdict in verdicts.items()},
        facts=Share(
            shape=out.sharding.shard_shape(out.shape),
            one_device={name: as_error(verdict).max_error for name, verdict in alone.items()},
        ),
    )


@functools.cache
def _arrays(name: str) -> tuple[AttentionSpec, Layout, tuple[np.ndarray, ...]]:
    """The spec of a problem, its layout, and query, key, value and cotangent."""
    from attnsuite.testing import problems  # noqa: PLC0415 (as in conformance_case.py)

    layout, terms, inputs = jax.device_get(problems.arrays(PROBLEMS[name], name))
    return problems.spec_of(PROBLEMS[name], layout, terms, inputs), layout, inputs


@functools.cache
def _solved(name: str, spec: AttentionSpec) -> Problem:
    """A problem with the oracle's results, and the standard backend's errors."""
    from attnsuite.testing import problems  # noqa: PLC0415 (as in conformance_case.py)

    return problems.solve(spec, *_arrays(name)[1:])


@functools.cache
def _alone(name: str, mode: Any, problem: str, spec: AttentionSpec) -> dict[str, oracle.Verdict]:
    """The same backend on one device."""
    solved = _solved(problem, spec)
    run = _program(registry.get(name), spec, solved.layout, mode)
    return {name: _verdict(name, np.asarray(x), solved) for name, x in run(*solved.inputs).items()}


def _program(backend: Backend, spec: AttentionSpec, layout: Layout, mode: Any) -> Callable[..., dict[str, Any]]:
    """The compiled function of the four arrays of a problem."""
    run = op_function(spec, lambda layout: plan(backend, spec, layout, target=Target.here(), mode=mode))
    taken = 4 if spec.needs_grad else 3
    return jax.jit(lambda *inputs: named_outputs(run(layout, *inputs[:taken])))


def _verdict(name: str, x: np.ndarray, solved: Problem) -> oracle.Verdict:
    return solved.verdict("output" if name == "out" else name, x)  # pyright: ignore[reportArgumentType]  (an array)


def _spec(problem: str, backend: Backend) -> AttentionSpec:
    """The problem's spec, without gradients for a backend that has none."""
    spec = _arrays(problem)[0]
    return spec if backend.exact else dataclasses.replace(spec, needs_grad=False)


SHARDED = ShardedKind()
