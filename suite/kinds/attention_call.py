"""One attention call: the case, its program, and how its cells are judged.

A case that is too large for the oracle, or for an interpreter, is judged at a shorter length, and its record says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnsuite.backends import AttentionSpec, Backend, Layout, Plan, Sharded, Target, oracle, registry, resolve, support
from attnsuite.backends import plan as plan_whole
from attnsuite.backends.devices import usable_cores
from attnsuite.backends.features import Mode, Options
from attnsuite.backends.sharding import divided
from attnsuite.models import TextFile

from .. import peers, typed
from ..cell import Cell, Means, Outcome, Prepared, Request
from ..errors import CellFailure
from ..measure import execution
from ..measure.program import Draw, Program, named_outputs, with_gradients
from ..measure.tensor_errors import judge_outputs, judge_tensors, save_reference
from ..record import TensorError
from . import parts
from .formulas import op_bytes, op_flops, op_tokens
from .inputs import layout_of, make_inputs
from .kind import Kind, of_backends, of_peers
from .op_case import Call, OpCase, spec_of

# Score entries (batch x heads x query x key) that the oracle takes at most: 8 heads at 4096 tokens. It needs
# about 2 s forward and 8 s with gradients for that on 2 cores of a 2026 server.
ORACLE_ENTRIES = 8 * 4096 * 4096
# The same for an interpreter: Kvax's kernels, forward and backward, need about 4 s for that, 16 s at 1024.
INTERPRETED_ENTRIES = 8 * 512 * 512
C = TypeVar("C", bound=Call)
_BASELINE = "standard"
INTERPRETED_LENGTH = 1024  # tokens: a longer case would be judged again at the length to which this one is cut


def op_function(case: OpCase | AttentionSpec, plan: Callable[[Layout], Plan]) -> Callable[..., Any]:
    """The function of an attention call: ``(layout, query, key, value) -> output``.

    With gradients it also takes ``d_out`` and returns ``(out, dq, dk, dv)``. The function includes planning, as a
    model's forward pass does. The layout is an argument, so that no backend can make the mask of one case a constant of
    its code.
    """

    def forward(layout: Layout, query: Any, key: Any, value: Any) -> Any:
        return plan(layout).run(query, key, value)[0]

    def forward_backward(layout: Layout, query: Any, key: Any, value: Any, d_out: Any) -> Any:
        return with_gradients(lambda q, k, v: forward(layout, q, k, v))(query, key, value, d_out)

    return forward_backward if case.needs_grad else forward


def op_program(
    case: OpCase, backend: Backend, mode: Mode, target: Target, devices: int = 1, options: Options = None
) -> Program:
    """The program of an op case, see :func:`op_function`.

    On several devices the arrays are divided among them, as in a model that divides its heads.
    """
    spec, inputs = spec_of(case), make_inputs(case)
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), ("devices",))
    sharded = None if mesh is None else Sharded.among(backend, spec, mesh)

    def plan(layout: Layout) -> Plan:
        return plan_whole(sharded or backend, spec, layout, target=target, mode=mode, options=options)

    layout, arrays = inputs.layout, [inputs.query, inputs.key, inputs.value, inputs.d_out]
    if sharded is not None:
        layout = jax.device_put(layout, NamedSharding(sharded.mesh, PartitionSpec()))
        lie = ("NHD", case.kv_layout, case.kv_layout, "NHD")
        arrays = [jax.device_put(x, sharded.sharding(layout_)) for x, layout_ in zip(arrays, lie, strict=True)]
    query, key, value, d_out = arrays
    arrays = (query, key, value, d_out) if case.needs_grad else (query, key, value)
    return Program(op_function(case, plan), (layout, *arrays), renewed=tuple(range(1, 1 + len(arrays))))


def plan_notes(case: OpCase, row: str) -> tuple[str, ...]:
    """What the plan of a native cell says of itself: that it takes another formula, for instance."""
    notes: list[str] = []

    def plan(layout: Layout) -> None:
        notes.extend(plan_whole(registry.get(row), spec_of(case), layout, target=Target.here()).notes)

    jax.eval_shape(plan, layout_of(case))
    return tuple(notes)


def judged_case(case: C, mode: str | None = "native") -> tuple[C, tuple[str, ...]]:
    """The case on which accuracy is judged: ``case`` itself, or a shorter one with a note that says so."""
    slow, entries = "the float64 oracle", ORACLE_ENTRIES
    if mode == "interpret":
        slow, entries = "an interpreter", INTERPRETED_ENTRIES
    length = case.sequence
    while length > 1 and case.batch * case.heads * min(case.query_length, length) * length > entries:
        length //= 2
    if length == case.sequence:
        return case, ()
    documents = min(case.documents, length)
    fewer = "" if documents == case.documents else f" with documents={documents}"
    note = f"accuracy was judged at sequence={length}{fewer}: {slow} is too slow at sequence={case.sequence}."
    name = f"{case.name[:190]}-judged"
    return dataclasses.replace(case, sequence=length, documents=documents, name=name), (note,)


def _beside_controls(
    case: OpCase, errors: Mapping[str, TensorError], reference: Path, draw: Draw | None
) -> dict[str, TensorError]:
    """The errors of an approximation: that of ``out`` has to be less than half of what knows nothing is off by.

    What knows nothing are zeros, and the mean of the visible values. The other tensors have to be finite.
    """
    inputs = make_inputs(case, draw)
    mean = oracle.forward(spec_of(case), inputs.layout, np.zeros(inputs.query.shape), inputs.key, inputs.value)
    with np.load(reference, allow_pickle=False) as arrays:
        expected = arrays["out"]
    most = float(np.abs(expected).max()) or 1.0  # errors are relative to it
    controls = (float(np.sqrt(np.mean(np.square(x)))) / most for x in (expected, expected - mean))
    least, error = min(controls), errors["out"].rms_error
    if error is None or error >= least / 2:
        off = "NaN or infinity" if error is None else f"off by {error:.2g}"
        raise CellFailure(
            "wrong",
            f"it is declared approximate, and its out is {off} (root mean square); zeros, or the mean of the visible "
            f"values, are off by {least:.2g}, and it has to be better than half of that.",
        )
    return {name: dataclasses.replace(error, passed=error.max_error is not None) for name, error in errors.items()}


class Attention(Kind):
    """The kind of :class:`OpCase`."""

    titles: ClassVar = {
        "op_forward": "forward",
        "op_forward_backward": "forward and backward",
        "op_decode": "decode step",
    }
    phases: ClassVar = {"op_forward": "forward", "op_forward_backward": "forward and backward", "op_decode": "token"}
    case: ClassVar = OpCase
    is_call: ClassVar = True
    peers: ClassVar = ("jax_nn", "tokamax", "torch", "torch_unthrottled")
    judges_in_subprocess: ClassVar = True
    rechecks_all: ClassVar = True

    def read(self, fields: Mapping[str, Any]) -> OpCase:
        """The case; some published records have a ``window`` that is null."""
        return typed.convert({name: x for name, x in fields.items() if (name, x) != ("window", None)}, OpCase)

    def as_now(self, problem: dict[str, Any]) -> dict[str, Any]:
        """The problem, also of before ``kv_layout``, when decode steps read keys and values with the heads first."""
        if "kind" not in problem or "kv_layout" in problem:
            return problem
        return {**problem, "kv_layout": "HND" if problem["kind"] == "op_decode" else "NHD"}

    def cells(self, case: OpCase, request: Request) -> Iterable[Cell]:
        """A cell per backend and peer; with all cores another for each exact backend but the baseline."""
        spec, target = spec_of(case), Target.here()
        found = of_backends(case, request, lambda row: [("attention", resolve(row, spec, target))])
        found = [_or_interpreted(each, case, target) for each in found]
        cores = usable_cores()
        if request.all_cores and target.platform == "cpu" and cores > 1 and divided(spec, cores) is not None:
            shared = [each for each in found if each.mode == "native" and each.exact and each.row != _BASELINE]
            found += [dataclasses.replace(each, devices=cores) for each in shared]
        return [*found, *of_peers(case, request, self.peers)]

    def spec(self, case: OpCase) -> AttentionSpec:
        """The problem of the call."""
        return spec_of(case)

    def judged_by(self, case: OpCase, mode: str | None) -> tuple[OpCase, ...]:
        """The case at a length that the oracle takes. A forward pass may share the reference of the backward pass."""
        short = judged_case(case, mode)[0]
        if short.kind != "op_forward":
            return (short,)
        return short, dataclasses.replace(short, kind="op_forward_backward")

    def write_reference(self, case: OpCase, path: Path, text: TextFile | None, draw: Draw | None) -> None:
        """The oracle's tensors, and the standard backend's errors."""
        spec, inputs = spec_of(case), make_inputs(case, draw)
        arrays = (inputs.query, inputs.key, inputs.value)
        expected = {"out": oracle.forward(spec, inputs.layout, *arrays)}
        if case.needs_grad:
            expected |= oracle.gradients(spec, inputs.layout, *arrays, inputs.d_out)
        program = op_program(case, registry.get(_BASELINE), "native", Target.here())
        save_reference(path, expected, named_outputs(execution.outputs_of(program, draw)), case.dtype)

    def judge(
        self, case: OpCase, outputs: Mapping[str, Any], reference: Path, draw: Draw | None, *, exact: bool
    ) -> dict[str, TensorError]:
        """By the oracle; an approximation beside zeros and the mean of the visible values."""
        errors = judge_outputs(outputs, reference, case.dtype)
        return errors if exact else _beside_controls(case, errors, reference, draw)

    def recheck(self, case: OpCase, outputs: Mapping[str, Any], draw: Draw, choice: int) -> dict[str, TensorError]:
        """A part of the call, by the oracle."""
        part = parts.choose(case, np.random.default_rng(choice))
        expected, standard = parts.expected(case, part, draw)
        return judge_tensors(parts.outputs_in(case, part, outputs), expected, standard, case.dtype)

    def prepare(self, cell: Cell, case: OpCase, means: Means) -> Prepared:
        """Compile the cell. An interpreted cell is never timed."""
        judged, notes = judged_case(case, cell.mode)
        interpreted = cell.mode == "interpret"

        def program(case: OpCase) -> Program:
            backend, target = registry.get(str(cell.resolved)), Target.here()
            return op_program(case, backend, "interpret" if interpreted else "native", target, cell.devices)

        def answers(seed: int) -> Mapping[str, Any]:
            if cell.row in peers.PEERS:
                return named_outputs(execution.outputs_of(peers.program(cell.row, judged, Draw(seed))))
            if judged == case and not interpreted:
                return named_outputs(timed.outputs(Draw(seed)))
            return named_outputs(execution.outputs_of(program(judged), Draw(seed)))

        if interpreted:
            return Prepared(Outcome(notes=notes), answers=answers)
        whole = peers.program(cell.row, case) if cell.row in peers.PEERS else program(case)
        _, timed, outcome = execution.execute(whole, means, cell.devices, spec_of(case) if cell.devices == 1 else None)
        notes = (*notes, *([] if cell.row in peers.PEERS else plan_notes(case, str(cell.resolved))))
        outcome = dataclasses.replace(
            outcome,
            flops=op_flops(case),
            bytes_moved=op_bytes(case),
            tokens=op_tokens(case),
            notes=(*outcome.notes, *notes),
        )
        return Prepared(outcome, timed, answers, named_outputs)


def _or_interpreted(found: Cell, case: OpCase, target: Target) -> Cell:
    """The cell; the interpreted cell, for accuracy, if only an interpreter can run the backend's kernel here."""
    if found.mode == "native" or case.sequence > INTERPRETED_LENGTH:
        return found
    backend = registry.get(found.row)
    if not support(backend, spec_of(case), target, "interpret"):
        return found
    return dataclasses.replace(found, resolved=found.row, mode="interpret", exact=backend.exact)


ATTENTION = Attention()
