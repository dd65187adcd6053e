"""The arrays of a call: what a layout says of them, the spec that they make, and whether they match a spec.

A spec says which arrays will come, so that support can be judged before there are any. :func:`fit` compares it with a
layout, :func:`check_operands` and :func:`check_terms` with the arrays of a layer; a difference is an error and is never
ignored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from .features import KV_DTYPES
from .operands import NO_TERMS, EitherArray, Terms
from .spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The arrays that, with the spec, decide which query attends to which key in a batch.

    All int32. A row with a negative segment id is padding. ``None`` positions mean ``arange`` on both sides.
    ``key_value_seq_lengths`` counts the leading valid slots of each key sequence. ``mask`` (True: may attend)
    broadcasts to ``[batch, heads, query, key]``; most kernels refuse it. Slot ``s`` of sequence ``b`` in a paged cache
    is slot ``s % page_size`` of page ``page_table[b, s // page_size]``. Entries whose slots nobody sees may hold
    anything. ``kv_cache.ragged_layout`` makes the layout of a ragged batch.
    """

    query_segment_ids: Int[EitherArray, "batch q_len"] | None = None
    key_value_segment_ids: Int[EitherArray, "batch kv_len"] | None = None
    query_positions: Int[EitherArray, "batch q_len"] | None = None
    key_value_positions: Int[EitherArray, "batch kv_len"] | None = None
    key_value_seq_lengths: Int[EitherArray, " batch"] | None = None
    mask: Bool[EitherArray, "#batch #heads #q_len #kv_len"] | None = None
    page_table: Int[EitherArray, "batch pages_per_sequence"] | None = None


# Each array of a layout: the field of the spec that announces it, and what its axes count.
ARRAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "query_segment_ids": ("has_segment_ids", ("batch", "query")),
    "key_value_segment_ids": ("has_segment_ids", ("batch", "keys")),
    "query_positions": ("has_positions", ("batch", "query")),
    "key_value_positions": ("has_positions", ("batch", "keys")),
    "key_value_seq_lengths": ("has_seq_lengths", ("batch",)),
    "mask": ("has_mask", ("batch", "heads", "query", "keys")),
    "page_table": ("page_size", ("batch", "pages")),
}


def shape_of(spec: AttentionSpec, axes: Sequence[str]) -> tuple[int, ...]:
    """The shape of an array of a layout, or of a learned operand, by what its axes count."""
    sizes = {"batch": spec.batch, "heads": spec.num_heads, "query": spec.query_length, "keys": spec.key_value_length}
    sizes["pages"] = spec.key_value_length // (spec.page_size or 1)
    return tuple(sizes[axis] for axis in axes)


def make_spec(
    query: Any,
    key: Any,
    value: Any,
    layout: Layout = Layout(),
    terms: Terms = NO_TERMS,
    *,
    needs_grad: bool = True,
    value_head_dim: int | None = None,
    kv_layout: str = "NHD",
    **options: Any,
) -> AttentionSpec:
    """The spec of a call, from its arrays (or ``jax.ShapeDtypeStruct``) and options; checks shapes and dtypes.

    Positions that are ``arange`` in a NumPy array are the default and leave ``has_positions`` False. Raises ValueError
    with the shape or dtype given and the one expected. With a page table, key and value are pages. If
    ``value`` is None, the values are the first ``value_head_dim`` numbers of the keys.
    """
    check_kinds(layout, terms)
    in_keys = value is None
    if in_keys and value_head_dim is None:
        raise ValueError(
            "value is None; give an array, or give backends.attention value_head_dim=r, and the first r numbers of "
            "each key are its value."
        )
    if in_keys != (value_head_dim is not None):
        raise ValueError(
            f"value_head_dim={value_head_dim!r} is given with an array of values; give one of the two: value=None with "
            "value_head_dim=r takes the first r numbers of each key as its value."
        )
    value = key if in_keys else value
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(known_shape(name, x)) != 4:
            raise ValueError(
                f"{name} has shape {known_shape(name, x)}; expected 4 dimensions [batch, length, heads, head_dim]."
            )
    batch, q_len, heads, head_dim = query.shape
    rows, kv_len, kv_heads, v_dim = value.shape
    axes = "S, K"
    if kv_layout == "HND":
        kv_len, kv_heads, axes = kv_heads, kv_len, "K, S"
    paged = layout.page_table is not None
    if key.shape[:3] != value.shape[:3] or (rows != batch and not paged) or key.shape[3] != head_dim:
        first = "P" if paged else batch
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit together; "
            f"expected key [{first}, {axes}, {head_dim}] and value [{first}, {axes}, Hv] with the same S and K."
        )
    if layout.page_table is not None:
        options |= {"num_pages": rows, "page_size": kv_len}
        table = known_shape("page_table", layout.page_table)
        if len(table) != 2 or table[0] != batch or not table[1]:
            raise ValueError(
                f"page_table has shape {table}; expected ({batch}, pages_per_sequence), a row per sequence."
            )
        kv_len *= table[1]
    dtypes = {str(x.dtype) for x in (query, key, value)}
    if str(key.dtype) == str(value.dtype) in KV_DTYPES:
        options["kv_dtype"] = str(key.dtype)
        dtypes = {str(query.dtype)}
    if len(dtypes) != 1:
        raise ValueError(
            f"query is {query.dtype}, key is {key.dtype} and value is {value.dtype}; cast all three to one dtype."
        )
    layout = _without_plain_positions(layout, (batch, q_len), (batch, kv_len))
    brought = {field for name, (field, _) in ARRAYS.items() if getattr(layout, name) is not None} - {"page_size"}
    spec = AttentionSpec(
        batch=batch,
        query_length=q_len,
        key_value_length=kv_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim if in_keys else v_dim,
        values_in_keys=in_keys,
        kv_layout=kv_layout,
        dtype=dtypes.pop(),
        **dict.fromkeys(brought, True),
        **{f"has_{name}": True for name in terms.given() if not name.endswith("_scales")},
        needs_grad=needs_grad,
        **options,
    )
    check_layout(spec, layout)
    check_terms(spec, terms)
    return spec


def check_kinds(layout: Any, terms: Any) -> None:
    """Raise TypeError for what is no :class:`Layout` and what are no :class:`Terms`."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout={layout!r} is no Layout; give Layout(mask=...), with the name of each array.")
    if not isinstance(terms, Terms):
        raise TypeError(f"terms={terms!r} is no Terms; give Terms(bias=...), with the name of each operand.")


def fit(spec: AttentionSpec, layout: Layout) -> Layout:
    """The layout as backends take it: :func:`check_layout`'s, with lengths between 0 and all slots."""
    check_kinds(layout, NO_TERMS)
    layout = check_layout(spec, layout)
    lengths = layout.key_value_seq_lengths
    if isinstance(lengths, np.ndarray | jax.Array):  # a number above the keys means all of them, one below 0 none
        xp = np if isinstance(lengths, np.ndarray) else jnp
        layout = dataclasses.replace(layout, key_value_seq_lengths=xp.clip(lengths, 0, spec.key_value_length))
    return layout


def check_layout(spec: AttentionSpec, layout: Layout) -> Layout:
    """The layout that belongs to ``spec``. Raises ValueError where the two disagree, with expected and given.

    Every array that the spec announces must be there, and no other; values may be abstract. Integers of other dtypes
    become int32. Positions that are ``arange`` (a NumPy array) are left out if the spec announces none.
    """
    if not spec.has_positions:
        sides = ((spec.batch, spec.query_length), (spec.batch, spec.key_value_length))
        layout = _without_plain_positions(layout, *sides)
    for field in dict.fromkeys(field for field, _ in ARRAYS.values()):
        names = [name for name, (announced, _) in ARRAYS.items() if announced == field]
        present = [name for name in names if getattr(layout, name) is not None]
        says, yes, no = getattr(spec, field), *((16, None) if field == "page_size" else (True, False))
        if present and not says:
            raise ValueError(
                f"the layout brings {' and '.join(present)}, but the spec says {field}={says}; "
                f"make the spec with {field}={yes}, or leave the array out."
            )
        if says and not present:
            raise ValueError(
                f"the spec says {field}={says}, but the layout brings no {' or '.join(names)}; "
                f"give the array, or make the spec with {field}={no}."
            )
    if (layout.query_segment_ids is None) != (layout.key_value_segment_ids is None):
        raise ValueError("query_segment_ids and key_value_segment_ids go together; give both or neither.")
    for name, (announced, axes) in ARRAYS.items():
        x, shape = getattr(layout, name), shape_of(spec, axes)
        if x is None:
            continue
        if name == "mask":
            check_array(name, x, shape, "bool", broadcasts=True)
            continue
        if known_shape(name, x) != shape:
            raise ValueError(f"{name} has shape {known_shape(name, x)}; expected {shape}.")
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}; expected an integer dtype.")
        if x.dtype != jnp.int32 and isinstance(x, np.ndarray | jax.Array):  # in a narrow or unsigned one sums wrap
            layout = dataclasses.replace(layout, **{name: as_int32(name, x, are_ids=announced == "has_segment_ids")})
    return layout


def known(name: str, x: Any) -> Any:
    """A NumPy array as it is: its numbers can be read without waiting for a device, and JAX would make them int32."""
    return x if isinstance(x, np.ndarray) else as_array(name, x)


def as_array(name: str, x: Any) -> Any:
    """``x`` as JAX's array, None as None. Raises ValueError for what JAX makes no array of."""
    try:
        return None if x is None else jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        given = f"{type(x).__name__} of dtype {x.dtype.str}" if isinstance(x, np.ndarray) else type(x).__name__
        why = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{name} is a {given}, of which JAX makes no array ({why}); give one of numbers.") from error


def as_int32(name: str, x: EitherArray, *, are_ids: bool) -> EitherArray:
    """``x`` in int32, whose ends stand for what is beyond them.

    A NumPy array with such numbers raises ValueError. So do ids, which would become one document; traced ids in a dtype
    that may hold such numbers do, too.
    """
    limits = jnp.iinfo(jnp.int32)
    if jnp.iinfo(x.dtype).max <= limits.max:
        return x.astype(np.int32)
    if are_ids and isinstance(x, Tracer):
        raise ValueError(
            f"{name} is {x.dtype} and traced, so that its numbers are not known; expected int32: "
            f"give {name}.astype(jnp.int32), with ids that int32 holds."
        )
    if not (are_ids or isinstance(x, np.ndarray)):
        x = jnp.clip(x, max(limits.min, jnp.iinfo(x.dtype).min), limits.max)
    elif x.size and not limits.min <= int(x.min()) <= int(x.max()) <= limits.max:
        raise ValueError(f"{name} has numbers from {x.min()} to {x.max()}; expected numbers that int32 holds.")
    return x.astype(np.int32)


def check_operands(spec: AttentionSpec, query: Any, key: Any, value: Any) -> None:
    """Raise ValueError if the shape or dtype of an array is not that of ``spec``."""
    keys, of_keys = key_rows(spec), spec.kv_dtype or spec.dtype
    expected = {
        "query": (query, (spec.batch, spec.query_length, spec.num_heads, spec.head_dim), spec.dtype),
        "key": (key, (*keys, spec.head_dim), of_keys),
        "value": (value, (*keys, spec.value_head_dim), of_keys),
    }
    if spec.values_in_keys != (value is None):
        found, remedy = ("no value is", "give one") if value is None else ("a value is", "give None")
        raise ValueError(
            f"{found} given, but the spec of this plan says values_in_keys={spec.values_in_keys}; {remedy}."
        )
    if value is None:
        del expected["value"]
    for name, (x, shape, dtype) in expected.items():
        if known_shape(name, x) != shape:
            raise ValueError(f"{name} has shape {known_shape(name, x)}; the spec of this plan says {shape}.")
        if str(x.dtype) != dtype:
            raise ValueError(f"{name} is {x.dtype}; the spec of this plan says {dtype}; cast one, or plan anew.")


def check_result(name: str, spec: AttentionSpec, found: Any) -> None:
    """Raise ValueError unless the backend ``name`` returned an output, and a log-sum-exp if asked for, of ``spec``."""
    shape = [spec.batch, spec.query_length, spec.num_heads, spec.value_head_dim]
    arrays = list(found) if isinstance(found, tuple | list) else [found]
    given = [(str(getattr(x, "dtype", type(x).__name__)), list(getattr(x, "shape", ()))) for x in arrays]
    expected = [(spec.dtype, shape), ("float32", shape[:3])][: 1 + spec.return_log_sum_exp]
    if given[0] != expected[0] or [size for _, size in given] != [size for _, size in expected]:
        returned, wanted = (" and ".join(f"{dtype}{size}" for dtype, size in each) for each in (given, expected))
        raise ValueError(f"the backend {name!r} returned {returned}; expected {wanted}.")


def key_rows(spec: AttentionSpec) -> tuple[int, int, int]:
    """The shape of keys and values without their last axis: of pages, or of the slots of each sequence."""
    rows, slots = spec.batch, spec.key_value_length
    if spec.num_pages is not None and spec.page_size is not None:
        rows, slots = spec.num_pages, spec.page_size
    return (rows, spec.num_kv_heads, slots) if spec.kv_layout == "HND" else (rows, slots, spec.num_kv_heads)


def check_terms(spec: AttentionSpec | None, terms: Terms) -> None:
    """Raise ValueError unless the given terms are those that ``spec`` announces (None: none)."""
    check_kinds(Layout(), terms)
    announced = frozenset() if spec is None else spec.announced_terms
    for field in dataclasses.fields(terms):
        name, present = field.name, getattr(terms, field.name) is not None
        scale = name.endswith("_scales")
        if name in announced and not present:
            asks = f"kv_dtype={spec.kv_dtype!r}" if scale and spec is not None else f"has_{name}=True"
            raise ValueError(
                f"{asks} asks for {name}, but it is None; give {name}=... (to a plan in terms=Terms(...))."
            )
        if present and scale and name not in announced:
            quantised = spec is not None and spec.kv_dtype is not None
            why = "the keys are the values, with key_scales" if quantised else "keys and values are not quantised"
            raise ValueError(f"{name} is given, but {why}; leave it out, or give keys and values of {_QUANTISED}.")
        if present and name not in announced:
            raise ValueError(
                f"terms.{name} is given, but the spec of this plan says has_{name}=False; "
                f"plan a spec with has_{name}=True through backends.plan."
            )
        if spec is not None and present and scale:
            check_array(name, getattr(terms, name), key_rows(spec), "float32", broadcasts=True)
    if spec is None:
        return
    for operand in spec.learned:
        x, shape = getattr(terms, operand.name), shape_of(spec, operand.axes)
        check_array(operand.name, x, shape, "a floating dtype", broadcasts=operand.broadcasts)


def known_shape(name: str, x: Any) -> tuple[int, ...]:
    """The shape of an array. Raises ValueError for something else, and for sizes that are no numbers."""
    if not hasattr(x, "shape"):
        raise ValueError(f"{name} is a {type(x).__name__}; give an array, such as jnp.asarray({name}).")
    if not all(isinstance(size, int | np.integer) for size in x.shape):
        raise ValueError(
            f"{name} has the symbolic shape {x.shape}; a backend is chosen and planned for sizes that are numbers, so "
            "call jax.export with a shape of numbers, once for each."
        )
    return tuple(x.shape)


_QUANTISED = " or ".join(KV_DTYPES)
_KINDS = {"bool": jnp.bool_, "a floating dtype": jnp.floating, "float32": jnp.float32}


def check_array(name: str, x: Any, shape: tuple[int, ...], dtype: str, *, broadcasts: bool) -> None:
    """Raise ValueError unless ``x`` has ``shape``, or broadcasts to it, and is of ``dtype`` (a key of ``_KINDS``)."""
    given = known_shape(name, x)
    fits = len(given) == len(shape) and all(
        have == want or (broadcasts and have == 1) for have, want in zip(given, shape, strict=True)
    )
    if not fits:
        expected = f"{len(shape)} dimensions that broadcast to" if broadcasts else "one number per query head,"
        raise ValueError(f"{name} has shape {given}; expected {expected} {shape}.")
    if not jnp.issubdtype(x.dtype, _KINDS[dtype]):
        raise ValueError(f"{name} has dtype {x.dtype}; expected {dtype}.")


def unread_slots(spec: AttentionSpec, layout: Layout) -> Bool[Array, "batch kv_len"] | None:
    """Slots that no query sees, as far as lengths and padding tell; None where there are neither."""
    found = []
    if layout.key_value_seq_lengths is not None:
        slots = jnp.arange(spec.key_value_length, dtype=jnp.int32)[None]
        found.append(slots >= jnp.asarray(layout.key_value_seq_lengths)[:, None])
    if layout.key_value_segment_ids is not None:
        found.append(jnp.asarray(layout.key_value_segment_ids) < 0)
    return functools.reduce(jnp.logical_or, found) if found else None


def unseeing_rows(layout: Layout) -> Bool[Array, "#batch #q_len"] | None:
    """Query rows that see nothing, as far as lengths and padding tell; None where there are neither."""
    found = []
    if layout.key_value_seq_lengths is not None:
        found.append(jnp.asarray(layout.key_value_seq_lengths)[:, None] <= 0)
    if layout.query_segment_ids is not None:
        found.append(jnp.asarray(layout.query_segment_ids) < 0)
    return functools.reduce(jnp.logical_or, found) if found else None


def first_slots(
    ids: Int[EitherArray, "batch length"], wanted: Int[EitherArray, "batch wanted"]
) -> tuple[Int[Array, "batch wanted"], Bool[Array, "batch wanted"]]:
    """For each id in ``wanted``, the first slot of ``ids`` that holds it, and whether there is one.

    The slot is a new name of the segment: it is small, counts upwards along the sequence, and is equal on both sides.
    It is found by sorting: no array is quadratic in the length.
    """

    def one(ids: Array, wanted: Array) -> tuple[Array, Array]:
        order = jnp.argsort(ids, stable=True)
        sorted_ids = ids[order]
        where = jnp.minimum(jnp.searchsorted(sorted_ids, wanted), ids.shape[0] - 1)
        return order[where].astype(jnp.int32), sorted_ids[where] == wanted

    return jax.vmap(one)(jnp.asarray(ids), jnp.asarray(wanted))


def _without_plain_positions(layout: Layout, query: tuple[int, int], key: tuple[int, int]) -> Layout:
    """The layout without positions that are ``arange`` in every row, which is the default.

    ``query`` and ``key`` are the shapes ``(batch, length)`` of the two sides.
    """
    sides = (("query_positions", query), ("key_value_positions", key))
    plain = [name for name, shape in sides if _is_arange(getattr(layout, name), shape)]
    return dataclasses.replace(layout, **dict.fromkeys(plain)) if plain else layout


def _is_arange(x: Any, shape: tuple[int, int]) -> bool:
    """Whether this is a NumPy array of ``arange``. To read a JAX array would make the host wait for its device."""
    if not isinstance(x, np.ndarray) or x.shape != shape or not np.issubdtype(x.dtype, np.integer):
        return False
    return bool((x == np.arange(shape[1])).all())
