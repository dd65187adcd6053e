"""A program on a mesh with automatic axes: each device computes its share of the batch and of the heads.

XLA knows nothing of what a native kernel computes, and does not divide a loop over tiles of heads: it would gather
whole arrays for both. ``custom_partitioning`` says by a rule which dimensions are independent, and hands over each
device's share of the operands. A share is a problem of the same kind with fewer sequences and heads, so no key or value
moves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .contract import AttentionSpec

Compute = Callable[..., tuple[Any, ...]]  # (spec, *operands) -> results
# The dimensions of each operand and result, one letter each; "." for one that no other has.
Dims = Sequence[str]


def by_shares(compute: Compute, spec: AttentionSpec, operands: Sequence[Any], dims: Dims, results: Dims) -> Any:
    """``compute(spec, *operands)``; where XLA divides batch or heads among devices, each with the spec of its share.

    ``b`` is the batch, ``n`` the query heads, ``k`` the KV heads, ``t`` and ``s`` the lengths, ``h`` and ``v`` the head
    dimensions. Programs of one device, and those inside of ``jax.shard_map``, are as without it. Forward derivatives
    are those of ``compute``, on whole arrays.
    """
    whole = functools.partial(compute, spec)
    if jax.device_count() == 1 or jax.sharding.get_abstract_mesh().manual_axes:
        return whole(*operands)
    shapes = [operand.shape for operand in operands], [x.shape for x in jax.eval_shape(whole, *operands)]
    dims, results = (
        [_without_ones(*one) for one in zip(many, of_each, strict=True)]
        for many, of_each in zip((dims, results), shapes, strict=True)
    )
    one_kv_head, alone = spec.num_kv_heads == 1, spec.group_size == 1
    factors = {"n": "g" if one_kv_head else "k" if alone else "(k g)"} | {letter: letter for letter in "bktshv"}
    used = {letter for letters in (*dims, *results) for letter in letters}
    rule = _rule(factors, dims, results)
    undivided = [letter for letter in "tshv" if letter in used] + (["g"] if "n" in used and not alone else [])
    sizes: dict[str, Any] = {"g": spec.group_size} if "(k g)" in factors.values() else {}
    program = custom_partitioning(whole)
    program.def_partition(
        partition=functools.partial(_partition, compute, spec, dims, results),
        sharding_rule=rule,
        need_replication_factors=tuple(sorted(undivided, key=rule.index)),
        **sizes,
    )
    batched = custom_vmap(program)

    @batched.def_vmap
    def _(size: int, mapped: Any, *operands: Any) -> Any:
        """A batch of problems is left to the kernels' own rule."""
        axes = jax.tree.map(lambda one: 0 if one else None, list(mapped))
        found = jax.vmap(whole, in_axes=axes)(*operands)
        return found, jax.tree.map(lambda _: True, found)

    run = jax.custom_jvp(batched)
    run.defjvp(lambda primals, tangents: jax.jvp(whole, primals, tangents))
    return run(*operands)


def _without_ones(letters: str, shape: Sequence[int]) -> str:
    """A dimension of one is broadcast: it has no share."""
    return "".join("." if size == 1 else letter for letter, size in zip(letters, shape, strict=True))


def _rule(factors: Mapping[str, str], dims: Dims, results: Dims) -> str:
    def side(many: Dims, first: str) -> str:
        return ", ".join(
            " ".join(factors.get(letter, f"{first}{i}x{j}") for j, letter in enumerate(letters))
            for i, letters in enumerate(many)
        )

    return f"{side(dims, 'o')} -> {side(results, 'r')}"


def _partition(
    compute: Compute,
    spec: AttentionSpec,
    dims: Dims,
    results: Dims,
    mesh: Mesh,
    arguments: Any,
    _shapes: Any,
) -> tuple[Mesh, Callable[..., Any], Any, Any]:
    """What ``custom_partitioning`` asks for: the share's function, and the shardings of results and operands."""
    query = getattr(arguments[0].sharding, "spec", ())  # of arrays from outside the mesh there is none
    batch, _, heads, *_ = *query, None, None, None
    # Axes that do not divide a dimension leave it whole: each device computes all of it.
    axes = {"b": batch if spec.batch % _size(mesh, batch) == 0 else None}
    axes["k"] = heads if spec.num_kv_heads % _size(mesh, heads) == 0 else None
    axes["n"] = axes["k"]
    parts = {name: _size(mesh, found) for name, found in axes.items()}
    share = dataclasses.replace(
        spec,
        batch=spec.batch // parts["b"],
        num_heads=spec.num_heads // parts["k"],
        num_kv_heads=spec.num_kv_heads // parts["k"],
    )

    def shardings(many: Dims) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec(*(axes.get(letter) for letter in letters))) for letters in many)

    def compute_share(*operands: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # a share is divided no further
            return compute(share, *operands)

    return mesh, compute_share, shardings(results), shardings(dims)


def _size(mesh: Mesh, axes: Any) -> int:
    names: Sequence[str] = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    sizes: Mapping[str, int] = mesh.shape
    return math.prod(sizes[name] for name in names)
