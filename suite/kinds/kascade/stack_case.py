"""The attention of all layers of a model in turn, as one program, which shows what Kascade costs.

A layer's queries are the first layer's plus the output of the layer before, so that no layer can run ahead. Keys and
values differ between layers: four pairs of arrays take turns. Arrays for every layer would not fit in memory beside the
other rows. Each of the four is far larger than any CPU cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnsuite.backends import AttentionSpec, Layout, MeshAxes, Plan, Sharded, Target, plan, registry, resolve, support
from attnsuite.backends.devices import usable_cores
from attnsuite.backends.features import Mode
from attnsuite.backends.kascade import Schedule, Selection, Settings, Tiling, default_kernel, kept_fraction, manual
from attnsuite.backends.kascade.block_sizes import gpu_blocks, tpu_blocks
from attnsuite.backends.kascade.cost import not_profitable

from ...cell import Cell, Means, Outcome, Prepared, Request
from ...errors import InputError, as_input
from ...measure import execution
from ...measure.program import Program
from ...measure.tensor_errors import as_model_error, judged
from ...record import TensorError
from ...typed import Count, Seed
from ..kind import SHORT_DTYPE, Dtype, Kernel, Keys, Kind, Layers, Share, cell, check_fields, name_case, refused
from .methods import KERNELS, METHODS, rows_of, settings_of

StackKind = Literal["kascade_prefill", "kascade_decode"]
PARTS = ("anchor_layer", "reuse_layer")
DISTINCT = 4  # pairs of keys and values
JUDGED_LENGTH = 512
JUDGED = (
    f"attention of a whole stack was judged at sequence={JUDGED_LENGTH} with everything selected, "
    "where each row has to be exact."
)
INTERPRETED_LENGTH, INTERPRETED_LAYERS = 256, 3
INTERPRETED = (
    f"the kernel was executed by an interpreter, for its numbers alone: {INTERPRETED_LAYERS} layers at "
    f"sequence={INTERPRETED_LENGTH} with everything selected."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackCase:
    """The attention of all layers of a Llama-shaped model, one after the other: what Kascade costs as a whole.

    There are ``layers`` layers, each with keys and values of its own. Layer 0 is dense; ``anchors`` layers, layer 0
    among them, select, evenly spread; the others reuse. With one layer its parts are timed: an anchor, a reuse layer.
    ``kascade_decode`` is one query token behind ``sequence`` cached keys. With ``by_token`` selecting single keys is
    timed too. ``kernel`` computes Kascade's rows; empty: the device's default. Raises InputError for a field that does
    not fit.
    """

    kind: StackKind
    sequence: Count
    name: str = ""
    layers: Layers = 16
    anchors: Layers = 5
    heads: Count = 32
    kv_heads: Count = 8
    head_dim: Count = 64
    dtype: Dtype = "float32"
    top_k: Share = 0.125
    min_keys: Keys = 0
    tile_size: Count = 128
    by_token: bool = True
    kernel: Kernel = ""
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        parts = [self.kind.replace("_", "-"), f"s{self.sequence}", f"l{self.layers}a{self.anchors}"]
        parts += [f"h{self.heads}k{self.kv_heads}", f"d{self.head_dim}", f"k{self.top_k:g}", f"t{self.tile_size}"]
        name_case(self, "-".join([*parts, SHORT_DTYPE[self.dtype]]))
        if self.anchors > self.layers:
            raise InputError(
                f"case {self.name}: anchors = {self.anchors} must be at most {self.layers}, the number of layers."
            )
        settings_of(self)
        with as_input(f"case {self.name}: "):
            stack_spec(self)


def stack_spec(case: StackCase) -> AttentionSpec:
    """The attention problem of each layer of a stack. Raises ValueError for shapes that do not fit."""
    decode = case.kind == "kascade_decode"
    return AttentionSpec(
        batch=1,
        query_length=1 if decode else case.sequence,
        key_value_length=case.sequence,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        is_causal=True,
        has_positions=decode,
        has_seq_lengths=decode,
        needs_grad=False,
    )


def schedule_of(case: StackCase) -> Schedule:
    """Layer 0 dense, anchors evenly spread, the others reuse. For the parts of a single layer: dense, anchor, reuse."""
    if case.layers == 1:
        return manual((0, 1), num_layers=3, kv_heads=case.kv_heads)
    anchors = tuple(i * case.layers // case.anchors for i in range(case.anchors))
    return manual(anchors, num_layers=case.layers, kv_heads=case.kv_heads)


def settings(case: StackCase, method: str) -> Settings:
    """Kascade's settings in a row. Single keys are selected for tiles of 32 queries, as in the paper."""
    others: dict[str, Any] = {"schedule": schedule_of(case)}
    if method == "kascade_token":
        others |= {"granularity": "token", "query_tile": 32}
    if method == "kascade_profitable":
        others["when"] = "profitable"
    if method in KERNELS:
        others["kernel"] = KERNELS[method]
    return settings_of(case, **others)


def refusals(case: StackCase, method: str, target: Target, mode: Mode = "native") -> tuple[str, ...]:
    """Why Kascade does not run the row with its kernel on ``target``; no other kernel is timed in its place."""
    if method == "dense":
        return ()
    options = settings(case, method).as_options()
    return support(registry.get("kascade"), stack_spec(case), target, mode, options).reasons


def stack_program(
    case: StackCase, method: str, devices: int = 1, dense: str | None = None, mode: Mode = "native"
) -> Program:
    """The program of a row, which returns the last layer's output. ``dense`` is the backend of a dense row.

    On several devices the heads are divided among them, as users of these backends divide them.
    """
    arrays = _arrays(case)
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), ("devices",))
    if mesh is not None:
        by_query = PartitionSpec(None, None, "devices")
        by_key = PartitionSpec(None, "devices") if case.kind == "kascade_decode" else by_query
        arrays = (
            jax.device_put(arrays[0], NamedSharding(mesh, by_query)),
            *(jax.device_put(x, NamedSharding(mesh, by_key)) for x in arrays[1:]),
        )
    dense = dense or resolve("auto", stack_spec(case), Target.here()).backend.name
    # Not part of the timed program.
    handed = (jax.jit(_select(case, mesh))(*arrays),) if method == "reuse_layer" else ()
    return Program(_stack(case, method, mesh, dense, mode), (*arrays, *handed))


def plan_notes(case: StackCase, method: str) -> tuple[str, ...]:
    """The notes of a Kascade row's plan: with ``when="profitable"``, that it ran dense."""
    if method != "kascade_profitable":
        return ()
    return _kascade(case, method).notes


def block_notes(case: StackCase, method: str, target: Target) -> tuple[str, ...]:
    """The blocks in which a Pallas kernel takes the case's tiles."""
    chosen, spec = settings(case, method), stack_spec(case)
    if method == "dense" or (chosen.kernel or default_kernel(target)) != "pallas":
        return ()
    blocks = (gpu_blocks if target.platform == "cuda" else tpu_blocks)(spec, Tiling.of(spec, chosen), chosen)
    sizes = f"block_q={blocks.block_q}, block_kv_sparse={blocks.block_kv}, block_kv_compute={blocks.step_kv}"
    return (f"{sizes}, in tiles of {blocks.tile_q} queries and {blocks.tile_kv} keys.",)


def figures(case: StackCase, method: str) -> dict[str, float]:
    """Kept fractions by formula: of causal pairs, and of causal FLOPs with the anchors' selection."""
    spec, chosen = stack_spec(case), settings(case, method)
    if method == "dense" or plan_notes(case, method):
        return {"kept_pairs": 1.0, "flops": 1.0}
    fractions = kept_fraction(spec, chosen, len(chosen.schedule.layers) if chosen.schedule else 1)
    if method in PARTS:
        return {
            "kept_pairs": fractions.reuse,
            "flops": fractions.reuse if method == "reuse_layer" else fractions.anchor,
        }
    return {"kept_pairs": fractions.pairs, "flops": fractions.flops}


def judge(case: StackCase, method: str, devices: int, mode: Mode = "native") -> dict[str, TensorError]:
    """Judge the row against the standard backend, with everything selected, on a short sequence.

    An interpreted kernel is judged on fewer layers and a shorter sequence.
    """
    length = INTERPRETED_LENGTH if mode == "interpret" else JUDGED_LENGTH
    layers = min(case.layers, INTERPRETED_LAYERS) if mode == "interpret" else case.layers
    short = dataclasses.replace(
        case,
        name="judged",
        sequence=min(case.sequence, length),
        layers=layers,
        anchors=min(case.anchors, layers),
        top_k=1.0,
    )
    ours, theirs = (
        stack_program(short, method, devices, mode=mode),
        stack_program(short, "dense", dense="standard"),
    )
    actual = jax.jit(ours.function)(*ours.arguments)
    expected = jax.jit(theirs.function)(*theirs.arguments)
    return {"out": as_model_error(actual, expected, expected, case.dtype)}


def _stack(case: StackCase, method: str, mesh: Mesh | None, dense: str, mode: Mode) -> Callable[..., Any]:
    def run(query: Any, keys: Any, values: Any, *handed: Any) -> Any:
        planned = _dense(case, mesh, dense) if method == "dense" else _kascade(case, method, mesh, mode)
        keys, values = _as_in_the_contract(case, keys, values)
        if method == "anchor_layer":
            return query + planned.run(query, keys[0], values[0], layer=1)[0]
        if method == "reuse_layer":
            return query + planned.run(query, keys[0], values[0], layer=2, carry=handed[0])[0]
        x, carry = query, ()
        for layer in range(case.layers):
            at = layer % len(keys)
            out, carry = planned.run(x, keys[at], values[at], layer=layer, carry=carry)
            x = query + out
        return x

    return run


def _dense(case: StackCase, mesh: Mesh | None, dense: str) -> Plan:
    backend, spec, layout, target = registry.get(dense), stack_spec(case), _layout(case), Target.here()
    return plan(backend if mesh is None else Sharded.among(backend, spec, mesh), spec, layout, target=target)


def _kascade(case: StackCase, method: str, mesh: Mesh | None = None, mode: Mode = "native") -> Plan:
    backend, options = registry.get("kascade"), settings(case, method).as_options()
    if mesh is not None:
        backend = Sharded(backend, mesh, MeshAxes(heads=mesh.axis_names[0]))
    return plan(backend, stack_spec(case), _layout(case), target=Target.here(), mode=mode, options=options)


def _select(case: StackCase, mesh: Mesh | None) -> Callable[..., Selection]:
    """A function of the stack's arrays that returns an anchor's selection, the carry of a reuse layer."""

    def select(query: Any, keys: Any, values: Any) -> Any:
        keys, values = _as_in_the_contract(case, keys, values)
        return _kascade(case, "anchor_layer", mesh).run(query, keys[0], values[0], layer=1)[1]

    return select


def _as_in_the_contract(case: StackCase, *caches: tuple[jax.Array, ...]) -> list[tuple[jax.Array, ...]]:
    """Keys and values in the layout of a plan; those of a cache are transposed."""
    if case.kind != "kascade_decode":
        return list(caches)
    return [tuple(x.swapaxes(1, 2) for x in cache) for cache in caches]


def _layout(case: StackCase) -> Layout:
    if case.kind != "kascade_decode":
        return Layout()
    at = jnp.full((1, 1), case.sequence - 1, jnp.int32)
    return Layout(query_positions=at, key_value_seq_lengths=at[0] + 1)


def _arrays(case: StackCase) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Query ``[1, T, N, H]``; keys and values ``[1, S, K, H]`` each, in decoding ``[1, K, S, H]``."""
    rng = np.random.default_rng([case.seed, 0])
    spec, pairs = stack_spec(case), min(case.layers, DISTINCT)
    lengths = (case.kv_heads, case.sequence) if case.kind == "kascade_decode" else (case.sequence, case.kv_heads)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)

    query = draw(1, spec.query_length, case.heads, case.head_dim)
    keys, values = (tuple(draw(1, *lengths, case.head_dim) for _ in range(pairs)) for _ in range(2))
    return query, keys, values


class Stacks(Kind):
    """The kind of :class:`StackCase`."""

    titles: ClassVar = {
        "kascade_prefill": "kascade, prefill of a stack",
        "kascade_decode": "kascade, decode step of a stack",
    }
    case: ClassVar = StackCase

    def rows(self, case: StackCase) -> tuple[str, ...]:
        """Dense and Kascade's rows; for a single layer its parts."""
        names = rows_of(case.kind)
        whole = ("dense", *PARTS) if case.layers == 1 else tuple(name for name in names if name not in PARTS)
        return tuple(name for name in names if name in whole and (case.by_token or name != "kascade_token"))

    def cells(self, case: StackCase, request: Request) -> Iterable[Cell]:
        """A cell per row. On a CPU all rows share all cores, and dense attention is also timed on one device.

        Kernels other than XLA's code have their own ways to use all cores of one device.
        """
        target = Target.here()
        dense = resolve("auto", stack_spec(case), target).backend.name
        found = [_cell(case, row, dense, target) for row in self.rows(case) if row in request.rows]
        cores = usable_cores()
        if not request.all_cores or target.platform != "cpu" or cores == 1 or case.kv_heads % cores:
            return found
        # So the fastest dense attention is measured, not assumed.
        shared = [
            dataclasses.replace(each, devices=cores)
            if each.mode and (each.row == "dense" or kernel_of(case, each.row, target) == "xla")
            else each
            for each in found
        ]
        return [each for each in found if each.row == "dense"] + shared

    def prepare(self, cell: Cell, case: StackCase, means: Means) -> Prepared:
        """Judge the row against dense attention with everything selected, then make it ready to be timed."""
        mode: Mode = "interpret" if cell.mode == "interpret" else "native"
        outcome = Outcome(
            quality=figures(case, cell.row),
            tokens=stack_spec(case).query_length,
            accuracy=judge(case, cell.row, cell.devices, mode),
            notes=(
                *plan_notes(case, cell.row),
                *block_notes(case, cell.row, Target.here()),
                JUDGED if mode == "native" else INTERPRETED,
            ),
        )
        # With everything selected an approximate row must be exact: its numbers are judged by the same rule.
        if (found := judged(outcome, exact=True)).error is not None or mode == "interpret":
            return Prepared(found)
        _, timed, measured = execution.execute(stack_program(case, cell.row, cell.devices), means, cell.devices)
        same = {name: getattr(found, name) for name in ("quality", "tokens", "accuracy", "notes")}
        return Prepared(dataclasses.replace(measured, **same), timed)


def _cell(case: StackCase, row: str, dense: str, target: Target) -> Cell:
    if row == "kascade_profitable":
        settings = settings_of(case, schedule=schedule_of(case))
        if not_profitable(stack_spec(case), settings) is None:
            reason = "kascade_profitable: it runs sparse here, so this row would repeat kascade."
            return refused(case, row, (reason,))
    if row in KERNELS and kernel_of(case, "kascade", target) == KERNELS[row]:
        return refused(case, row, (f"{row}: that kernel computes kascade here, so this row would repeat it.",))
    mode, reasons = "native", refusals(case, row, target)
    if reasons and row in KERNELS and not refusals(case, row, target, "interpret"):
        mode, reasons = "interpret", ()  # for its numbers alone
    if reasons:
        return refused(case, row, reasons)
    return cell(case, row, resolved=dense if row == "dense" else row, mode=mode, exact=METHODS[row].exact)


def kernel_of(case: StackCase, row: str, target: Target) -> str:
    """The kernel that computes a row of Kascade."""
    return KERNELS.get(row) or case.kernel or default_kernel(target)


STACK = Stacks()
