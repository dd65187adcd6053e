"""One attention over many devices: its sequences, its heads and its length, each divided along an axis of a mesh.

:class:`Sharded` takes a backend and a ``jax.sharding.Mesh``, and is a backend itself: it runs the backend's plan on
each device's share inside ``shard_map``. Sequences and heads are independent, so data and tensor parallelism
communicate nothing. Context parallelism divides the tokens. Each device keeps its queries and either gathers all keys
(``exchange="gather"``: any exact backend that takes positions) or lets them pass by in a ring (``exchange="ring"``:
backends with ``part``, see ``ring.py``). A backend with its own way to divide an axis brings it
(:class:`ShardingBackend`); users ask for it with the same arguments.

On a CPU, dividing the heads uses all cores: XLA runs the steps of a loop one after the other on one device. A process
with one JAX device per core (``jax.config.update("jax_num_cpu_devices", n)`` before JAX starts) works on n heads at
once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from . import ring
from .contract import Backend, Carry, PartBackend, Plan
from .devices import Target
from .features import BASIC_FEATURES, INSTEAD, KV_LAYOUTS, Feature, Mode, Options, Takes
from .layout import ARRAYS, Layout
from .operands import NO_TERMS, OPERANDS, EitherArray, Terms
from .resolve import Resolution
from .spec import AttentionSpec
from .support import plan, support, takes_of

Divided = Literal["heads", "batch"]
Exchange = Literal["gather", "ring"]
MeshAxis = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MeshAxes:
    """The mesh axis that divides each dimension (None: the dimension is whole on every device).

    ``data``: the batch. ``heads``: KV heads with their queries. ``context``: the tokens of queries and of keys. The
    first two may be several axes, as a tuple.
    ``exchange`` is how keys reach the queries of other devices.
    """

    data: MeshAxis | None = None
    heads: MeshAxis | None = None
    context: str | None = None
    exchange: Exchange = "gather"

    def __post_init__(self) -> None:
        named = self.named()
        if not named:
            raise ValueError("MeshAxes names no axis; give at least one of data, heads and context.")
        every = [name for axes in named.values() for name in _names(axes)]
        if not all(isinstance(name, str) for name in every):
            raise ValueError(f"{named} does not name axes; give each dimension a name, or a tuple of names.")
        if len(set(every)) < len(every):
            raise ValueError(f"{named} shards two dimensions over one axis; give each an axis of its own.")
        if self.exchange not in get_args(Exchange):
            raise ValueError(f"exchange={self.exchange!r} must be 'gather' or 'ring'.")

    def named(self) -> dict[str, MeshAxis]:
        """The dimensions that are divided, with their axes."""
        every = {"data": self.data, "heads": self.heads, "context": self.context}
        return {name: axis for name, axis in every.items() if axis is not None}


@runtime_checkable
class ShardingBackend(Backend, Protocol):
    """A backend that divides a dimension itself, because dividing it from outside would be wrong or slower."""

    def sharded(self, mesh: Mesh | AbstractMesh, axes: MeshAxes) -> Backend | None:
        """The backend for the whole problem on all devices of ``mesh``; None if the shares are independent problems.

        Batch and heads are known to divide. The backend refuses other sizes that ``mesh`` does not divide.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Sharded:
    """``backend`` on every device of ``mesh``, each with its share. A backend itself, hashable, registrable.

    Arrays with the :meth:`sharding` of this backend stay where they are; others are moved. Support is that of one
    device's share, or of the backend's own way to divide. Raises ValueError for an axis that the mesh lacks.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from attnsuite.backends import plan, registry
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    >>> backend = Sharded(registry.get("chunked"), mesh, MeshAxes(heads="model"))
    >>> spec = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=2, num_kv_heads=2, head_dim=16)
    >>> x = jnp.ones((1, 8, 2, 16))
    >>> backend.name, plan(backend, spec, target=Target.here()).run(x, x, x)[0].shape
    ('chunked@heads=1', (1, 8, 2, 16))
    """

    backend: Backend
    mesh: Mesh | AbstractMesh
    axes: MeshAxes

    def __post_init__(self) -> None:
        is_backend = isinstance(self.backend, Backend) and not isinstance(self.backend, type)
        if not is_backend or not isinstance(self.axes, MeshAxes):
            raise ValueError(
                f"Sharded({self.backend!r}, mesh, {self.axes!r}) is not accepted; give a backend, a mesh and MeshAxes, "
                "such as Sharded(backends.get('chunked'), mesh, MeshAxes(heads='model'))."
            )
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise ValueError(f"mesh={self.mesh!r} is not accepted; give a jax.sharding.Mesh.")  # noqa: TRY004 (a value)
        for name, axis in self.axes.named().items():
            if not set(_names(axis)) <= set(self.mesh.axis_names):
                raise ValueError(
                    f"{name}={axis!r} is not an axis of the mesh; it has {', '.join(self.mesh.axis_names)}."
                )

    @staticmethod
    def among(backend: Backend, spec: AttentionSpec, mesh: Mesh) -> Sharded:
        """Over the one axis of ``mesh``: divide the heads of ``spec`` if they can be divided, else its sequences.

        Raises ValueError for a mesh of several axes, and if neither can be divided.

        >>> from attnsuite.backends import registry
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("cores",))
        >>> spec = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=2, num_kv_heads=2, head_dim=16)
        >>> Sharded.among(registry.get("standard"), spec, mesh).name
        'standard@heads=1'
        """
        if len(mesh.axis_names) != 1:
            raise ValueError(f"the mesh has the axes {mesh.axis_names}; Sharded.among takes a mesh of one axis.")
        axis = mesh.axis_names[0]
        match divided(spec, mesh.size):
            case "heads":
                return Sharded(backend, mesh, MeshAxes(heads=axis))
            case "batch":
                return Sharded(backend, mesh, MeshAxes(data=axis))
        raise ValueError(
            f"num_kv_heads={spec.num_kv_heads} and batch={spec.batch} cannot be divided among {mesh.size} devices; "
            "use a number of devices that divides one of them."
        )

    @property
    def name(self) -> str:
        """The backend's name, and the number of devices that share each dimension."""
        parts = [f"{name}={self._size(name)}" for name in self.axes.named()]
        return f"{self.backend.name}@{','.join(parts)}{',ring' if self._in_ring else ''}"

    @property
    def exact(self) -> bool:
        """As the backend."""
        return self.backend.exact

    def takes(self, target: Target, mode: Mode) -> Takes:
        """The features that can be divided. The backend judges the share itself.

        Not masks and biases in a ring, and score functions only where the length alone is divided.
        """
        learned: frozenset[Feature] = frozenset(operand.name for operand in OPERANDS)
        features: frozenset[Feature] = frozenset({*BASIC_FEATURES, *learned, "log_sum_exp", "mask_function"})
        if self._in_ring:  # which adds the sinks itself
            features = features - (learned - {"sinks"}) - {"mask", "log_sum_exp"}
        if set(self.axes.named()) == {"context"}:  # a share counts its sequences and heads from zero
            features |= frozenset[Feature]({"score_function"})
        why = "which passes keys between devices, but not the columns of such an array"
        because = dict.fromkeys(("mask", "bias"), why) | {"log_sum_exp": "which uses it to merge the parts"}
        because |= {"alibi": "whose parts have no slopes"}
        because = {name: f"{each}; exchange='gather' takes it" for name, each in because.items()}
        because |= {"score_function": "whose shares count sequences and heads from zero"}
        whole = self.axes.context is None and self._self_sharded() is None
        layouts = KV_LAYOUTS if whole else ("NHD",)
        carries = takes_of(self.backend, target, mode).carries
        return Takes(features=features, carries=carries, kv_layouts=layouts, because=because)

    def refuses(self, spec: AttentionSpec, target: Target, mode: Mode, options: Options) -> tuple[str, ...]:
        """Every reason: dimensions that cannot be divided, and the backend's refusals of one device's share."""
        native = self._self_sharded()
        if native is not None:
            reasons = tuple(self._indivisible(spec, "data", "heads"))
            return reasons or support(native, spec, target, mode, options).reasons
        reasons = (*self._indivisible(spec), *self._unshardable(takes_of(self.backend, target, mode)))
        if reasons:
            return reasons
        share = self._share(spec)
        added = " with positions of its own" if share.has_positions and not spec.has_positions else ""
        parts = ring.specs_of_parts(share) if self._in_ring else (share,)
        found = (reason for part in parts for reason in support(self.backend, part, target, mode, options).reasons)
        return tuple(dict.fromkeys(f"the share of one device{added}: {reason}" for reason in found))

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """Each device plans its share with the backend. A backend's carry is divided with the batch."""
        planned: dict[str, Any] = {"target": target, "mode": mode, "options": options}
        native = self._self_sharded()
        if native is not None:
            return native.plan(spec, layout, **planned)
        share, arrays = self._share(spec), self._arrays()
        rows = Layout(**{name: self._partition_spec(getattr(layout, name), axes) for name, (_, axes) in ARRAYS.items()})
        carries = PartitionSpec(self.axes.data)
        keys = self._arrays(spec.kv_layout)

        def attend(
            query: Array, key: Array, value: Array, layer: int | None, carry: Carry, terms: Terms = NO_TERMS
        ) -> tuple[Any, Carry]:
            def local(
                layout: Layout, query: Array, key: Array, value: Array, carry: Carry, terms: Terms
            ) -> tuple[Any, Carry]:
                if self.axes.context is not None and self._in_ring:
                    axis = ring.Axis(self.axes.context, self._size("context"))
                    part_of = functools.partial(cast("PartBackend", self.backend).part, **planned)
                    return ring.attend(part_of, share, axis, layout, (query, key, value), terms), carry
                if self.axes.context is not None:
                    if share.has_positions:
                        of_query = {"query_positions": share.query_length}
                        layout = ring.with_positions(layout, self.axes.context, share.batch, of_query)
                    key, value = _gather(self.axes.context, key), _gather(self.axes.context, value)
                planned_here = plan(self.backend, share, layout, **planned)
                return planned_here.run(query, key, value, terms=terms, layer=layer, carry=carry)

            operands: Any = (layout, query, key, value, carry, terms)
            of_terms = Terms(**{x.name: self._partition_spec(getattr(terms, x.name), x.axes) for x in OPERANDS})
            in_specs = (rows, arrays, keys, keys, carries, of_terms)
            if AxisType.Explicit in self.mesh.axis_types:  # on which shard_map takes no array that is sharded otherwise
                operands = self._resharded(operands, in_specs)
            run = jax.shard_map(  # jax.jit: JAX runs no gradient of ours in a shard_map operation by operation
                local,
                mesh=self.mesh,
                in_specs=in_specs,
                # Of the log-sum-exp [batch, length, heads] too: a spec may be shorter than the output's.
                out_specs=((arrays, arrays) if spec.return_log_sum_exp else arrays, carries),
                check_vma=False,
            )
            return jax.jit(run)(*operands)

        return Plan(attend)

    def sharding(self, kv_layout: str = "NHD") -> NamedSharding:
        """The sharding of query, key, value and output ``[batch, length, heads, dim]``.

        With ``"HND"`` that of keys and values ``[batch, heads, length, dim]``. Raises ValueError for another layout.
        """
        if kv_layout not in KV_LAYOUTS:
            raise ValueError(f"kv_layout={kv_layout!r} is not accepted; use one of {', '.join(KV_LAYOUTS)}.")
        return NamedSharding(self.mesh, self._arrays(kv_layout))

    def _self_sharded(self) -> Backend | None:
        """The backend with its own way to divide these axes, if it has one."""
        return self.backend.sharded(self.mesh, self.axes) if isinstance(self.backend, ShardingBackend) else None

    @property
    def _in_ring(self) -> bool:
        return self.axes.context is not None and self.axes.exchange == "ring"

    def _size(self, name: str) -> int:
        """Devices that share a dimension."""
        axis = self.axes.named().get(name)
        return 1 if axis is None else math.prod(self.mesh.shape[name] for name in _names(axis))

    def _arrays(self, kv_layout: str = "NHD") -> PartitionSpec:
        if kv_layout == "HND":
            return PartitionSpec(self.axes.data, self.axes.heads, self.axes.context)
        return PartitionSpec(self.axes.data, self.axes.context, self.axes.heads)

    def _indivisible(self, spec: AttentionSpec, *names: str) -> Iterator[str]:
        """Sentences for dimensions that do not divide evenly: of ``names``, or of all that are divided."""
        lengths = ("query_length", "key_value_length")
        fields = {"data": ("batch",), "heads": ("num_kv_heads",), "context": lengths}
        for name, axis in self.axes.named().items():
            for field in fields[name] if name in (names or fields) else ():
                if getattr(spec, field) % self._size(name):
                    yield (
                        f"{field}={getattr(spec, field)} cannot be sharded over the {self._size(name)} devices of "
                        f"{name}={axis!r}; give a multiple of {self._size(name)}, or a mesh whose axis divides it."
                    )

    def _unshardable(self, takes: Takes) -> Iterator[str]:
        named = [name for name in ("heads", "context") if name in self.axes.named()]
        if takes.carries and named:
            yield (
                f"{self.backend.name} selects in one layer what the next ones attend to, across heads and over all "
                f"keys, so its {' and '.join(named)} cannot be sharded from outside; shard data only, or heads "
                f"only where {self.backend.name} shards them itself."
            )
        elif self._in_ring and not takes.parts:
            yield (
                f"{self.backend.name} cannot attend to a part of the keys, as a ring asks of it; use "
                "exchange='gather', or backend='chunked'."
            )

    def _share(self, spec: AttentionSpec) -> AttentionSpec:
        """One device's share. In a ring its keys are those of one device, else all keys."""
        heads, context = self._size("heads"), self._size("context")
        return dataclasses.replace(
            spec,
            batch=spec.batch // self._size("data"),
            num_heads=spec.num_heads // heads,
            num_kv_heads=spec.num_kv_heads // heads,
            query_length=spec.query_length // context,
            key_value_length=spec.key_value_length // (context if self._in_ring else 1),
            has_positions=spec.has_positions or (context > 1 and not self._in_ring and ring.by_position(spec)),
        )

    def _resharded(self, operands: Any, specs: Any) -> Any:
        """The arrays, sharded by their specs, of which one may stand for a whole tree."""

        def reshard(spec: PartitionSpec | None, arrays: Any) -> Any:
            if spec is None:
                return arrays
            place = NamedSharding(self.mesh, spec)
            return jax.tree.map(lambda x: jax.sharding.reshard(jnp.asarray(x), place), arrays)

        return jax.tree.map(reshard, specs, operands, is_leaf=lambda x: x is None)

    def _partition_spec(self, x: EitherArray | None, axes: Sequence[str]) -> Any:
        """Of an array, by what its axes count. Whole are keys, unless in a ring, and a dimension of one."""
        if x is None:
            return None
        at = {"batch": self.axes.data, "heads": self.axes.heads, "query": self.axes.context}
        at |= {"keys": self.axes.context if self._in_ring else None}
        return PartitionSpec(*(None if size == 1 else at[axis] for size, axis in zip(x.shape, axes, strict=True)))


def _names(axis: MeshAxis) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def balanced_order(length: int, devices: int) -> Int[np.ndarray, " length"]:
    """An order of tokens in which a causal mask costs every device of the context axis the same.

    The sequence is cut into twice as many pieces as there are devices. The first device gets the first and the last
    piece, the second device the second and the last but one, and so on (as in Kvax and in ring attention's "zigzag").
    Put tokens, segment ids and positions into this order once, before the model, and give the positions:
    ``tokens[:, order]``, and as ``query_positions`` and ``key_value_positions`` ``order`` for each sequence
    ``[batch, length]``. ``jnp.argsort(order)`` puts the result back. Raises ValueError for a length that is no multiple
    of ``2 * devices``.

    >>> balanced_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if min(length, devices) < 1 or length % (2 * devices):
        raise ValueError(
            f"length={length} cannot be cut into {2 * devices} equal pieces; pad it to a multiple of that."
        )
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.concatenate([pieces[[i, 2 * devices - 1 - i]].ravel() for i in range(devices)])


def divided(spec: AttentionSpec, devices: int) -> Divided | None:
    """What divides evenly among ``devices``: the KV heads with their queries, else the sequences, else None.

    >>> divided(AttentionSpec(batch=4, query_length=8, key_value_length=8, num_heads=8, num_kv_heads=2,
    ...                       head_dim=64), 4)
    'batch'
    """
    if spec.num_kv_heads % devices == 0:
        return "heads"
    return "batch" if spec.batch % devices == 0 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(axis: str, x: Array) -> Array:
    """The keys or values of all devices. Its gradient is summed in float32, whatever the dtype."""
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def _gather_backward(axis: str, _: None, d_x: Array) -> tuple[Array]:
    total = jax.lax.psum_scatter(d_x.astype(jnp.float32), axis, scatter_dimension=1, tiled=True)
    return (total.astype(d_x.dtype),)


_gather.defvjp(lambda axis, x: (_gather(axis, x), None), _gather_backward)


_DIMENSIONS = ("batch", "length", "heads", "head_dim")


def shares(resolution: Resolution, query: Array, key: Array, value: Array | None) -> Backend:
    """The resolved backend, on each device's share where an explicit mesh shards batch or heads.

    On such a mesh (``jax.make_mesh``'s default since JAX 0.9) the type of an array says how it is sharded, and JAX asks
    each operation what becomes of it. Blocked and native kernels cannot say it of their parts. Their shares are
    independent, so they run inside ``jax.shard_map``, without moving keys or values.

    ``standard`` is left to JAX, which follows each of its operations, and a :class:`Sharded` says itself what each
    device computes. Raises ValueError, with what to do, where query, key and value are sharded otherwise than along
    batch and heads, each alike, and where the share is not supported.
    """
    backend, spec = resolution.backend, resolution.spec
    found = [_sharding(x) for x in (query, key, value) if x is not None]
    if spec.kv_layout == "HND":
        found[1:] = [(batch, length, heads, dim) for batch, heads, length, dim in found[1:]]
    mesh = jax.typeof(query).sharding.mesh
    if backend.name == "standard" or isinstance(backend, Sharded) or not any(any(each) for each in found):
        return backend
    batch, length, heads, head_dim = found[0]
    if length or head_dim or any(each != found[0] for each in found):
        descriptions = [
            f"{name} {dict(zip(_DIMENSIONS, each, strict=True))}"
            for name, each in zip(("query", "key", "value"), found, strict=False)
        ]
        raise ValueError(
            f"{backend.name} runs on each device's share where batch or heads of query, key and value are sharded over "
            f"the same axes of an explicit mesh; given are {'; '.join(descriptions)}. Use jax.sharding.reshard, "
            "or Sharded(backend, mesh, MeshAxes(context=...)) for a sharded length."
        )
    sharded = Sharded(backend, mesh, MeshAxes(data=batch, heads=heads))
    if reasons := support(sharded, spec, resolution.target, *resolution.mode_and()).reasons:
        sentences = " ".join(reasons).replace(INSTEAD, "use backend='standard', which JAX divides itself")
        raise ValueError(f"{sharded.name} cannot run this on {resolution.target}: {sentences}")
    return sharded


def _sharding(x: Array) -> tuple[Any, ...]:
    """The explicit axes of each dimension, None where it is whole."""
    sharding = jax.typeof(x).sharding
    explicit = {
        name
        for name, kind in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    names = [each if isinstance(each, tuple) else (each,) for each in (*sharding.spec, *(None,) * x.ndim)][: x.ndim]
    of_each = [tuple(name for name in each if name in explicit) for each in names]
    return tuple(each[0] if len(each) == 1 else each or None for each in of_each)
