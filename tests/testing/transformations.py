"""What JAX can do with a call: each of its transformations, and meshes, held to ``jax.nn`` in float64.

``python -m attnsuite.testing.transformations standard chunked flash_cpu`` writes its table.
A cell says ``yes``, or the sentence with which the call was refused; anything else is a fault, and the exit code is 1.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"  # before JAX is imported: meshes have two devices

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnsuite import backends

Attend = Callable[..., Any]

_TOLERANCE = 1e-4  # of the largest number of a result; float32 against float64
_BATCH, _HEADS = PartitionSpec("x"), PartitionSpec(None, None, "x")
# Beyond JAX's own reach: a program with a custom call of this package cannot leave the process that registered it.
_NOT_EXPORTED = "Cannot serialize code with custom calls"


def operands(dtype: Any) -> tuple[jax.Array, ...]:
    """Query, key and value: two sequences of 160 tokens, four heads over two KV heads."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((2, 160, heads, 16)), dtype) for heads in (4, 2, 2))


def _loss(attend: Attend, *arrays: jax.Array) -> jax.Array:
    return (attend(*arrays) ** 2).sum()


def _gradients(attend: Attend, *arrays: jax.Array) -> Any:
    return jax.grad(functools.partial(_loss, attend), argnums=(0, 1, 2))(*arrays)


def _both(attend: Attend, *arrays: jax.Array) -> Any:
    """The output and the gradients, of one program."""
    return jax.jit(lambda *x: (attend(*x), _gradients(attend, *x)))(*arrays)


def _directional(attend: Attend, *arrays: jax.Array) -> Any:
    """A Hessian-vector product, forward over reverse."""
    return jax.jvp(functools.partial(_gradients, attend), arrays, arrays)


def _vmapped(axes: tuple[int | None, ...], attend: Attend, *arrays: jax.Array) -> Any:
    stacked = (x if axis is None else jnp.stack([x, 2 * x]) for x, axis in zip(arrays, axes, strict=True))
    return jax.vmap(attend, in_axes=axes)(*stacked)


def _scanned(attend: Attend, query: jax.Array, *cache: jax.Array) -> Any:
    def both(query: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (attend(x, *cache), None), query, None, length=2)[0].sum()

    return jax.grad(both)(query)


def _shard_mapped(spec: PartitionSpec, attend: Attend, *arrays: jax.Array) -> Any:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    return _both(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec), *arrays)


def _shard_mapped_decode(attend: Attend, query: jax.Array, *cache: jax.Array) -> Any:
    """A step with lengths over a cache of several blocks, which a loop reads."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    long = (jnp.tile(x, (1, 7, 1, 1))[:, :1024] for x in cache)
    step = functools.partial(_with_lengths, attend)
    shares = jax.shard_map(step, mesh=mesh, in_specs=_BATCH, out_specs=_BATCH)
    return jax.jit(shares)(query[:, :1], *long, jnp.asarray([1000, 10], jnp.int32))


def _with_lengths(attend: Attend, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> Any:
    options = {"needs_grad": False} if isinstance(attend, functools.partial) and "backend" in attend.keywords else {}
    return attend(query, key, value, is_causal=False, key_value_seq_lengths=lengths, **options)


def _on_mesh(kind: AxisType, spec: PartitionSpec, attend: Attend, *arrays: jax.Array) -> Any:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    arrays = tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays)
    with jax.set_mesh(mesh):
        return _both(attend, *arrays)


def _in_float64(attend: Attend, *arrays: jax.Array) -> Any:
    with jax.enable_x64(True):  # noqa: FBT003 (JAX's own form)
        wide = tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in arrays)
        return _both(attend, *wide)


TRANSFORMATIONS: dict[str, Callable[..., Any]] = {
    "no jit": lambda attend, *x: attend(*x),
    "jit": lambda attend, *x: jax.jit(attend)(*x),
    "grad": _gradients,
    "vjp": lambda attend, *x: jax.vjp(attend, *x)[1](x[0]),
    "jacrev": lambda attend, q, *x: jax.jacrev(lambda s: attend(q * s, *x)[:, :3, 0, :2])(1.5),
    "jvp": lambda attend, *x: jax.jvp(attend, x, x),
    "jacfwd": lambda attend, q, *x: jax.jacfwd(lambda s: attend(q * s, *x))(1.5),
    "Hessian-vector product": _directional,
    "vmap, all": functools.partial(_vmapped, (0, 0, 0)),
    "vmap, query": functools.partial(_vmapped, (0, None, None)),
    "vmap, key and value": functools.partial(_vmapped, (None, 0, 0)),
    "vmap, grad": lambda attend, *x: _vmapped((0, 0, 0), functools.partial(_gradients, attend), *x),
    "remat": lambda attend, *x: _gradients(jax.checkpoint(attend), *x),
    "scan, grad": _scanned,
    "donate": lambda attend, q, *x: jax.jit(attend, donate_argnums=0)(q + 0, *x),
    "eval_shape": lambda attend, *x: jnp.zeros(jax.eval_shape(attend, *x).shape),
    "export": lambda attend, *x: jax.export.export(jax.jit(attend))(*x).call(*x),
    "shard_map, batch": functools.partial(_shard_mapped, _BATCH),
    "shard_map, heads": functools.partial(_shard_mapped, _HEADS),
    "shard_map, decode step": _shard_mapped_decode,
    "auto mesh, batch": functools.partial(_on_mesh, AxisType.Auto, _BATCH),
    "auto mesh, heads": functools.partial(_on_mesh, AxisType.Auto, _HEADS),
    "explicit mesh, batch": functools.partial(_on_mesh, AxisType.Explicit, _BATCH),
    "explicit mesh, heads": functools.partial(_on_mesh, AxisType.Explicit, _HEADS),
    "float64": _in_float64,
}


def reference(name: str) -> Any:
    """The transformation ``name`` of ``jax.nn.dot_product_attention``, computed in float64."""
    with jax.enable_x64(True):  # noqa: FBT003 (JAX's own form)
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
        plain = jax.jit(attend, static_argnames="is_causal")
        return jax.tree.map(np.asarray, TRANSFORMATIONS[name](plain, *operands(jnp.float64)))


def tried(attend: Attend, name: str, expected: Any) -> str:
    """``yes``, or the sentence of a refusal. Raises AssertionError for another result, and whatever JAX raises."""
    try:
        found = TRANSFORMATIONS[name](attend, *operands(jnp.float32))
    except (TypeError, ValueError, backends.BackendUnavailableError) as error:
        text = " ".join(str(error).split())
        if "use backend=" in text:
            return text
        if _NOT_EXPORTED in text:
            return "JAX exports no native code of this process; use backend='chunked'."
        raise
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        assert np.abs(np.asarray(one) - other).max() <= _TOLERANCE * max(np.abs(other).max(), 1e-9), name
    return "yes"


def table(names: Sequence[str]) -> tuple[str, int]:
    """A Markdown table of backends, with a row for all that has the same answers, and the number of faults."""
    rows, notes, faults = dict[str, list[str]](), list[str](), 0
    for name in TRANSFORMATIONS:
        expected, cells = reference(name), []
        for backend in names:
            attend = functools.partial(backends.attention, is_causal=True, backend=backend, on_unavailable="raise")
            try:
                answer = tried(attend, name, expected)
            except Exception as error:  # noqa: BLE001 (a fault of whatever kind is what the table is to show)
                answer, faults = f"FAULT: {type(error).__name__}: {' '.join(str(error).split())[:200]}", faults + 1
            if answer != "yes":
                notes += [] if answer in notes else [answer]
                answer = f"no [{notes.index(answer) + 1}]"
            cells.append(answer)
        rows.setdefault(" | ".join(cells), []).append(name)
    head = [f"| | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    lines = [f"| {'; '.join(row)} | {cells} |" for cells, row in rows.items()]
    return "\n".join([*head, *lines, "", *(f"{n}. {note}" for n, note in enumerate(notes, 1))]), faults


if __name__ == "__main__":
    text, number = table(sys.argv[1:] or ["standard", "chunked", "flash_cpu"])
    sys.stdout.write(f"{text}\n")
    sys.exit(1 if number else 0)
