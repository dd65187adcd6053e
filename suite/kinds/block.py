"""An attention block: input projections, attention and output projection in one compiled program.

A bare attention call gets its arrays in the layout of the contract. In a model, projections make these arrays, so a
kernel that wants another layout pays for the change there. The times of a block include that cost. Rotary embedding,
normalisation and biases are left out, because they are the same program for every backend.

The judge is the float64 oracle between projections in float64.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import Backend, Layout, Plan, Target, oracle, plan, registry, resolve
from attnsuite.models import TextFile

from ..cell import Cell, Means, Prepared, Request
from ..measure import execution
from ..measure.program import Draw, Program, renewed
from ..measure.tensor_errors import save_reference
from ..record import TensorError
from ..typed import Count
from .attention_call import judged_case
from .formulas import ITEM_BYTES, op_flops, op_tokens
from .inputs import layout_of
from .kind import Kind, of_backends
from .op_case import Call, describe_call, spec_of

BlockKind = Literal["block_forward", "block_forward_backward"]
# The outputs of a block; gradients are of the input and of the four projections.
_OUTPUTS = ("out", "d_x", "d_query_projection", "d_key_projection", "d_value_projection", "d_out_projection")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockCase(Call):
    """An attention call between its projections: ``width`` features of each token become queries, keys and values.

    ``width`` is ``heads * head_dim`` if it is not given. The output projection leads back to ``width`` features. With
    ``block_forward_backward``, gradients of the input and of the four projections are computed too. The other fields
    mean the same as in an attention call. Raises InputError for a field that does not fit.
    """

    kind: BlockKind
    width: Count | None = None

    @property
    def description(self) -> str:
        """The fields in short, the width before those of the call."""
        width = [] if self.width is None else [f"w{self.width}"]
        return "-".join(["block", *width, describe_call(self)])

    @property
    def features(self) -> int:
        """Features of a token before and behind the block."""
        return self.width or self.heads * self.head_dim


def block_function(case: BlockCase, planned: Callable[[Layout], Plan]) -> Callable[..., Any]:
    """The function of a block: ``(layout, x, d_out, query, key, value, out) -> outputs``, four of them projections.

    ``x`` and the cotangent ``d_out`` are ``[batch, sequence, width]``, the projections of queries, keys and values
    ``[width, heads, head_dim]``, that of the output ``[heads, head_dim, width]``. The function includes planning, as a
    model's forward pass does. The layout is an argument, as in an attention call.
    """

    def run(layout: Layout, x: Any, d_out: Any, *projections: Any) -> tuple[Any, ...]:
        def forward(x: Any, query: Any, key: Any, value: Any, out: Any) -> Any:
            query, key, value = (jnp.einsum("btw,wnh->btnh", x, weight) for weight in (query, key, value))
            attended, _ = planned(layout).run(query, key, value)
            return jnp.einsum("btnv,nvw->btw", attended, out)

        if not case.needs_grad:
            return (forward(x, *projections),)
        result, pull_back = jax.vjp(forward, x, *projections)
        return result, *pull_back(d_out)

    return run


def block_program(case: BlockCase, backend: Backend, target: Target) -> Program:
    """The program of a block and its arrays, drawn from the case's seed (initialises JAX)."""
    spec = spec_of(case)
    function = block_function(case, lambda layout: plan(backend, spec, layout, target=target))
    arrays = _arrays(case)
    return Program(function, (layout_of(case), *arrays), renewed=tuple(range(1, 1 + len(arrays))))


def _arrays(case: BlockCase, draw: Draw | None = None) -> tuple[jax.Array, ...]:
    """Input, cotangent and projections, renewed by ``draw``.

    Queries, keys and values get a variance of about one, as in a bare call.
    """
    rng = np.random.default_rng([case.seed, 2])
    value_dim = case.value_head_dim or case.head_dim
    tokens = (case.batch, case.sequence, case.features)
    inner = [(case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, value_dim)]
    shapes = [tokens, tokens, *((case.features, *shape) for shape in inner), (case.heads, value_dim, case.features)]
    summed = [1, 1, *[case.features] * 3, case.heads * value_dim]
    arrays = (
        jnp.asarray(rng.standard_normal(shape, np.float32) / np.sqrt(length), case.dtype)
        for shape, length in zip(shapes, summed, strict=True)
    )
    return renewed(tuple(arrays), draw)


def _expected(case: BlockCase, draw: Draw | None) -> dict[str, np.ndarray]:
    """The outputs in float64: the oracle between NumPy's products."""
    spec, layout = spec_of(case), layout_of(case)
    x, d_out, *projections = (np.asarray(array).astype(np.float64) for array in _arrays(case, draw))
    inner, outer = projections[:3], projections[3]
    query, key, value = (np.einsum("btw,wnh->btnh", x, weight, optimize=True) for weight in inner)
    attended = oracle.forward(spec, layout, query, key, value)
    found = [np.einsum("btnv,nvw->btw", attended, outer, optimize=True)]
    if case.needs_grad:
        d_attended = np.einsum("btw,nvw->btnv", d_out, outer, optimize=True)
        slopes = oracle.gradients(spec, layout, query, key, value, d_attended)
        d_inner = [slopes[name] for name in ("dq", "dk", "dv")]
        d_x = [np.einsum("btnh,wnh->btw", d, weight, optimize=True) for d, weight in zip(d_inner, inner, strict=True)]
        d_weights = [np.einsum("btw,btnh->wnh", x, d, optimize=True) for d in d_inner]
        found += [sum(d_x[1:], d_x[0]), *d_weights, np.einsum("btnv,btw->nvw", attended, d_out, optimize=True)]
    return dict(zip(_OUTPUTS, found, strict=False))


def block_flops(case: BlockCase) -> float:
    """FLOPs of a block: of the attention call, and of the projections, whose backward pass is two products each."""
    value_dim = case.value_head_dim or case.head_dim
    columns = (case.heads + case.kv_heads) * (case.head_dim + value_dim)
    products = 2.0 * case.batch * case.sequence * case.features * columns
    return op_flops(case) + products * (3 if case.needs_grad else 1)


def block_bytes(case: BlockCase) -> float:
    """Bytes that any implementation must move: input and projections read once, outputs written once."""
    value_dim = case.value_head_dim or case.head_dim
    tokens = case.batch * case.sequence * case.features
    weights = case.features * (case.heads + case.kv_heads) * (case.head_dim + value_dim)
    moved = 2 * tokens + weights
    return float((2 * moved if case.needs_grad else moved) * ITEM_BYTES[case.dtype])


class Block(Kind):
    """The kind of :class:`BlockCase`."""

    titles: ClassVar = {"block_forward": "block, forward", "block_forward_backward": "block, forward and backward"}
    case: ClassVar = BlockCase
    judges_in_subprocess: ClassVar = True

    def cells(self, case: BlockCase, request: Request) -> Iterable[Cell]:
        """A cell per backend."""
        spec, target = spec_of(case), Target.here()
        return of_backends(case, request, lambda row: [("attention", resolve(row, spec, target))])

    def judged_by(self, case: BlockCase, mode: str | None) -> tuple[BlockCase, ...]:
        """The case at a length that the oracle takes."""
        return (judged_case(case)[0],)

    def write_reference(self, case: BlockCase, path: Path, text: TextFile | None, draw: Draw | None) -> None:
        """The outputs in float64, and the errors of the standard backend's block."""
        program = block_program(case, registry.get("standard"), Target.here())
        save_reference(path, _expected(case, draw), _named(execution.outputs_of(program, draw)), case.dtype)

    def recheck(
        self, case: BlockCase, outputs: Mapping[str, Any], draw: Draw, choice: int
    ) -> dict[str, TensorError] | None:
        """The whole block, where the oracle takes it."""
        if judged_case(case)[0] != case:
            return None
        with tempfile.TemporaryDirectory() as folder:
            self.write_reference(case, path := Path(folder) / "block.npz", None, draw)
            return self.judge(case, outputs, path, draw, exact=True)

    def prepare(self, cell: Cell, case: BlockCase, means: Means) -> Prepared:
        """Compile the cell."""
        backend, target = registry.get(str(cell.resolved)), Target.here()
        judged, notes = judged_case(case)
        _, timed, outcome = execution.execute(block_program(case, backend, target), means)

        def answers(seed: int) -> Mapping[str, Any]:
            if judged == case:
                return _named(timed.outputs(Draw(seed)))
            return _named(execution.outputs_of(block_program(judged, backend, target), Draw(seed)))

        outcome = dataclasses.replace(
            outcome,
            flops=block_flops(case),
            bytes_moved=block_bytes(case),
            tokens=op_tokens(case),
            notes=(*outcome.notes, *notes),
        )
        return Prepared(outcome, timed, answers, _named)


def _named(outputs: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(_OUTPUTS, outputs, strict=False))


BLOCK = Block()
