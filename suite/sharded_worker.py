"""The process that divides attention among its devices: ``python -m attnsuite.suite.sharded_worker``.

Its devices are CPU devices of the host; JAX makes as many as are asked for. ``jax.distributed`` may join several such
processes over loopback; the mesh then spans all of them. Each row is one backend on one mesh. Output and gradients are
judged against the float64 oracle, with the noise floor of the standard backend on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnsuite.backends import AttentionSpec, Backend, Layout, Target, oracle, plan, registry, support
from attnsuite.backends.dealing import MeshAxes, Sharded, balanced_order
from attnsuite.backends.standard import STANDARD

from .absent.compilation import one_line
from .grid.answering import answer_requests
from .measure.judge import as_error
from .sharded import PROBLEMS, Row, ShardedProblem

QUANTITIES = ("out", "dq", "dk", "dv")


def main() -> None:
    """Answer requests until stdin ends: first to join other processes, then one row per request."""
    answer_requests(_do)


def _do(request: dict[str, Any]) -> Any:
    if request["do"] == "row":
        return answer(Row(**request["row"]), alone=request["alone"])
    return jax.distributed.initialize(
        request["coordinator"], num_processes=request["processes"], process_id=request["process"]
    )


def answer(row: Row, *, alone: bool) -> dict[str, Any]:
    """``status`` (ok, wrong, unsupported, crashed), and the fields of this status."""
    spec = _spec(row.problem, registry.get(row.backend))
    mesh = Mesh(np.array(jax.devices()).reshape(*row.shape.values()), tuple(row.shape))
    axes = MeshAxes(**{name: name for name in row.shape}, exchange=row.exchange)
    backend = Sharded(registry.get(row.backend), mesh, axes)
    if reasons := support(backend, spec, Target.here(), row.mode).reasons:
        return {"status": "unsupported", "reasons": list(reasons), "error": "refused before anything was traced."}
    try:
        return _judged(backend, spec, row, alone=alone)
    except Exception as error:  # noqa: BLE001 (a row that fails is a result, and the process goes on)
        return {"status": "crashed", "error": one_line(error)}


def _judged(backend: Sharded, spec: AttentionSpec, row: Row, *, alone: bool) -> dict[str, Any]:
    solved = _solved(row.problem, spec)
    everywhere = NamedSharding(backend.mesh, PartitionSpec())
    inputs = [_dealt(x, backend.sharding()) for x in solved.inputs]
    run = _forward_and_backward(backend, spec, solved.layout, row)
    results = jax.jit(run)(*inputs)
    out = results["out"]
    whole = jax.jit(lambda x: x, out_shardings=everywhere)(results)
    found = {name: np.asarray(x.addressable_data(0)) for name, x in whole.items()}
    by_itself = _alone(row.backend, row.mode, row.problem, spec) if alone else {}
    verdicts = {name: _verdict(name, x, solved, spec) for name, x in found.items()}
    wrong = [name for name, verdict in verdicts.items() if not verdict.passed]
    return {
        "status": "wrong" if wrong else "ok",
        "error": f"{', '.join(wrong)} beyond what is allowed." if wrong else None,
        "accuracy": {name: dataclasses.asdict(as_error(verdict)) for name, verdict in verdicts.items()},
        "facts": {
            "shape": list(out.sharding.shard_shape(out.shape)),
            "one_device": {name: _finite(verdict.max_error) for name, verdict in by_itself.items()},
        },
    }


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Solved:
    layout: Layout
    inputs: tuple[np.ndarray, ...]  # query, key, value, cotangent of the output
    expected: Mapping[str, np.ndarray]
    standard: Mapping[str, oracle.Verdict]
    unseen: Mapping[str, np.ndarray]


@functools.cache
def _solved(name: str, spec: AttentionSpec) -> _Solved:
    """The arrays of a problem, the oracle's results for them, and the standard backend's errors."""
    layout, rng = _layout(PROBLEMS[name], spec), np.random.default_rng(0)
    query = (spec.batch, spec.query_length, spec.num_heads, spec.head_dim)
    key = (spec.batch, spec.key_value_length, spec.num_kv_heads, spec.head_dim)
    inputs = tuple(
        rng.standard_normal(shape).astype(np.float32).astype(jnp.dtype(spec.dtype))
        for shape in (query, key, key, query)
    )
    expected: dict[str, np.ndarray] = {"out": oracle.forward(spec, layout, inputs[0], inputs[1], inputs[2])}
    if spec.needs_grad:
        expected |= oracle.gradients(spec, layout, *inputs)
    run = jax.jit(_forward_and_backward(STANDARD, spec, layout, None))
    results = {name: np.asarray(x) for name, x in run(*inputs).items()}
    standard = {name: oracle.judge(x, expected[name], None, spec.dtype, _kind(name)) for name, x in results.items()}
    rows, keys = oracle.unseen_rows(spec, layout), oracle.unseen_keys(spec, layout)
    return _Solved(layout, inputs, expected, standard, {"out": rows, "dq": rows, "dk": keys, "dv": keys})


@functools.cache
def _alone(backend: str, mode: Any, problem: str, spec: AttentionSpec) -> dict[str, oracle.Verdict]:
    """The same backend on one device."""
    solved = _solved(problem, spec)
    run = jax.jit(
        _forward_and_backward(registry.get(backend), spec, solved.layout, Row(backend, {}, problem, mode=mode))
    )
    return {name: _verdict(name, np.asarray(x), solved, spec) for name, x in run(*solved.inputs).items()}


def _forward_and_backward(
    backend: Backend, spec: AttentionSpec, layout: Layout, row: Row | None
) -> Callable[..., dict[str, Any]]:
    mode = "native" if row is None else row.mode

    def run(query: Any, key: Any, value: Any, d_out: Any) -> dict[str, Any]:
        planned = plan(backend, spec, layout, target=Target.here(), mode=mode)
        if not spec.needs_grad:
            return {"out": planned.run(query, key, value)[0]}
        out, pullback = jax.vjp(lambda q, k, v: planned.run(q, k, v)[0], query, key, value)
        return dict(zip(QUANTITIES, (out, *pullback(d_out)), strict=True))

    return run


def _verdict(name: str, x: np.ndarray, solved: _Solved, spec: AttentionSpec) -> oracle.Verdict:
    return oracle.judge(
        x, solved.expected[name], solved.standard[name], spec.dtype, _kind(name), zero=solved.unseen[name]
    )


def _kind(quantity: str) -> oracle.Kind:
    return "forward" if quantity == "out" else "gradient"


def _spec(problem: str, backend: Backend) -> AttentionSpec:
    """The problem's spec, without gradients for a backend that has none."""
    spec = PROBLEMS[problem].spec()
    return spec if backend.exact else dataclasses.replace(spec, needs_grad=False)


def _layout(problem: ShardedProblem, spec: AttentionSpec) -> Layout:
    arrays: dict[str, np.ndarray] = {}
    if problem.segments is not None:
        ids = np.repeat(problem.segments[::2], problem.segments[1::2]).astype(np.int32)
        rows = np.stack([ids] * (spec.batch - 1) + [np.zeros_like(ids)])
        arrays |= {"query_segment_ids": rows, "key_value_segment_ids": rows}
    if problem.key_lengths is not None:
        arrays["key_value_seq_lengths"] = np.array(problem.key_lengths, np.int32)
    if problem.balanced_for is not None:
        order = balanced_order(spec.query_length, problem.balanced_for)
        arrays |= dict.fromkeys(("query_positions", "key_value_positions"), np.stack([order] * spec.batch))
    return Layout(**arrays)  # pyright: ignore[reportArgumentType]  (NumPy arrays are arrays)


def _dealt(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The array over all processes; each process has the whole of it in memory."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


if __name__ == "__main__":
    main()
