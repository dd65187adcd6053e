"""Check the arrays of one call, operands and terms, against the spec that they were planned for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from .contract import AttentionSpec, Terms


def check_operands(spec: AttentionSpec, query: Any, key: Any, value: Any) -> None:
    """Raise ValueError if the shape or dtype of an array is not that of ``spec``."""
    keys, of_keys = key_rows(spec), spec.kv_dtype or spec.dtype
    expected = {
        "query": (query, (spec.batch, spec.query_length, spec.num_heads, spec.head_dim), spec.dtype),
        "key": (key, (*keys, spec.head_dim), of_keys),
        "value": (value, (*keys, spec.value_head_dim), of_keys),
    }
    if spec.values_in_keys != (value is None):
        given, way = ("no value is", "give one") if value is None else ("a value is", "give None")
        raise ValueError(f"{given} given, but the spec of this plan says values_in_keys={spec.values_in_keys}; {way}.")
    if value is None:
        del expected["value"]
    for name, (x, shape, dtype) in expected.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; the spec of this plan says {shape}.")
        if str(x.dtype) != dtype:
            raise ValueError(f"{name} is {x.dtype}; the spec of this plan says {dtype}; cast one, or plan anew.")


def key_rows(spec: AttentionSpec) -> tuple[int, int, int]:
    """The shape of keys and values without their last axis: of pages, or of the slots of each sequence."""
    rows, slots = spec.batch, spec.key_value_length
    if spec.num_pages is not None and spec.page_size is not None:
        rows, slots = spec.num_pages, spec.page_size
    return (rows, spec.num_kv_heads, slots) if spec.kv_layout == "HND" else (rows, slots, spec.num_kv_heads)


def check_terms(spec: AttentionSpec | None, terms: Terms) -> tuple[str, ...]:
    """The names of the given terms. Raises ValueError unless they are those that ``spec`` announces (None: none)."""
    for field in dataclasses.fields(terms):
        name, x = field.name, getattr(terms, field.name)
        announced = spec is not None and name in spec.announced_terms
        scale = name.endswith("_scales")
        if announced and x is None:
            says = f"kv_dtype={spec.kv_dtype!r}" if scale and spec is not None else f"has_{name}=True"
            raise ValueError(
                f"the spec says {says}, but terms.{name} is None; run the plan with terms=Terms({name}=...)."
            )
        if x is not None and not announced:
            says, wanted = ("kv_dtype=None", "kv_dtype") if scale else (f"has_{name}=False", f"has_{name}=True")
            raise ValueError(
                f"terms.{name} is given, but the spec of this plan says {says}; "
                f"plan a spec with {wanted} through backends.plan."
            )
    if spec is not None and terms.bias is not None:
        check_broadcast("bias", terms.bias, spec, "a floating dtype", jnp.floating)
    for name in ("sinks", "alibi"):
        if spec is not None and getattr(terms, name) is not None:
            _check_per_head(name, getattr(terms, name), spec)
    for name in ("key_scales", "value_scales"):
        if spec is not None and getattr(terms, name) is not None:
            _check_scales(name, getattr(terms, name), spec)
    return terms.given()


def check_broadcast(name: str, x: Any, spec: AttentionSpec, wanted: str, kind: Any) -> None:
    """Raise ValueError unless ``x`` is of ``kind`` and broadcasts to [batch, heads, query, key]."""
    full = (spec.batch, spec.num_heads, spec.query_length, spec.key_value_length)
    if len(x.shape) != 4 or any(have not in (1, want) for have, want in zip(x.shape, full, strict=True)):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected 4 dimensions that broadcast to {full}.")
    if not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{name} has dtype {x.dtype}; expected {wanted}.")


def _check_per_head(name: str, x: Any, spec: AttentionSpec) -> None:
    if tuple(x.shape) != (spec.num_heads,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected one number per query head, {(spec.num_heads,)}.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {x.dtype}; expected a floating dtype.")


def _check_scales(name: str, x: Any, spec: AttentionSpec) -> None:
    full = key_rows(spec)
    if len(x.shape) != 3 or any(have not in (1, want) for have, want in zip(x.shape, full, strict=True)):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected 3 dimensions that broadcast to {full}.")
    if str(x.dtype) != "float32":
        raise ValueError(f"{name} has dtype {x.dtype}; expected float32.")
