"""The attention of a whole model as one program: all layers in turn, the anchors' selection included.

A layer's queries are the first layer's plus the output of the layer before, so that no layer can run ahead. Keys and
values differ between layers: four pairs of arrays take turns. Arrays for every layer would not fit in memory beside the
other rows. Each of the four is far larger than any CPU cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnsuite.backends import Layout, MeshAxes, Plan, Sharded, Target, plan, registry, resolve, support
from attnsuite.backends.features import Mode
from attnsuite.backends.kascade import Selection, Settings, Tiling, default_kernel, kept_fraction
from attnsuite.backends.kascade.block_sizes import gpu_blocks, tpu_blocks

from ...measure.program import Program
from ...measure.tensor_errors import as_model_error
from ...record import TensorError
from .methods import KERNELS, settings_of
from .stack_case import PARTS, StackCase, schedule_of, stack_spec

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
