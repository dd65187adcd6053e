"""Verdict ``symmetric``: relations that attention keeps, and that need no reference.

Permuted heads, sequences and keys permute the result or leave it as it is. Logits that are all shifted by the same
number give the same weights. A token that stands twice weighs as much as one with log 2 added to its logits. The
weights of a row add up to 1, so that the values' gradients of all keys add up to the cotangents of all rows, and those
of the keys to zero. So a kernel can be held to them at lengths where no float64 reference is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from attnsuite.backends import AttentionSpec, Layout, Terms
from attnsuite.backends.oracle import EPSILON

from .finding import Finding, Trial, concluded
from .subject import Arrays, Subject

LONG = 131_072  # keys of the long problem; fewer in an interpreter, where such a call takes minutes
_ALLOWED = {"float32": 64.0, "bfloat16": 4.0, "float16": 4.0}  # epsilons of the dtype, of the largest number


def symmetric(subject: Subject) -> Finding:
    """Hold the backend to every relation that its problems allow."""
    if not subject.backend.exact:
        return Finding("not applicable", f"{subject.backend.name} is approximate by design.")
    return concluded(_trials(subject), f"{subject.backend.name} takes no problem of this verdict.")


def _trials(subject: Subject) -> Iterator[Trial]:
    for _, spec in subject.dtypes(batch=2):
        yield from _relations(subject, spec)
    for _, spec in subject.dtypes(batch=1, has_bias=True):
        yield from _doubled_by_bias(subject, spec)
    keys = 4096 if subject.mode == "interpret" else LONG
    long = {"query_length": 16, "key_value_length": keys, "needs_grad": False, "num_kv_heads": 2, "num_heads": 4}
    for _, spec in subject.dtypes(is_causal=False, **long):
        yield from _shuffled_keys(subject, spec, f"shuffled keys, {keys} of them")


def _relations(subject: Subject, spec: AttentionSpec) -> Iterator[Trial]:
    inputs = _on_a_grid(subject, spec)
    plain = subject.run(spec, inputs)
    kv_heads = np.arange(spec.num_kv_heads)[::-1]
    heads = (kv_heads[:, None] * spec.group_size + np.arange(spec.group_size)).ravel()
    query, key, value, cotangent = inputs
    found = subject.run(spec, (query[:, :, heads], key[:, :, kv_heads], value[:, :, kv_heads], cotangent[:, :, heads]))
    permuted = {name: x[:, :, heads if name in ("output", "dq") else kv_heads] for name, x in plain.items()}
    yield _same("permuted heads", spec, permuted, found)
    found = subject.run(spec, tuple(x[::-1] for x in inputs))
    yield _same("permuted sequences", spec, {name: x[::-1] for name, x in plain.items()}, found)
    found = subject.run(spec, (query * 2, key / 2, value, cotangent))
    scaled = {name: x * {"dq": 0.5, "dk": 2}.get(name, 1) for name, x in plain.items()}
    yield _same("queries doubled and keys halved", spec, scaled, found)
    shift = np.random.default_rng(3).integers(-1, 2, key.shape[-1]).astype(key.dtype)
    found = subject.run(spec, (query, key + shift, value, cotangent))
    yield _same("shifted logits", spec, {"output": plain["output"]}, found, room=4.0)
    doubled = dataclasses.replace(
        spec, query_length=2 * spec.query_length, key_value_length=2 * spec.key_value_length, needs_grad=False
    )
    if subject.takes(doubled):
        found = subject.run(doubled, tuple(np.repeat(x, 2, axis=1) for x in inputs))
        yield _same("every token twice", spec, {"output": plain["output"]}, {"output": found["output"][:, 1::2]})
    yield from _shuffled_keys(subject, spec, "shuffled keys")
    if spec.needs_grad:
        yield from _sums(spec, plain, cotangent)


def _shuffled_keys(subject: Subject, spec: AttentionSpec, change: str) -> Iterator[Trial]:
    """All rows see all keys; of a causal mask the last row alone does."""
    if spec.is_causal and spec.query_length != spec.key_value_length:
        return
    query, key, value, cotangent = _on_a_grid(subject, spec)
    order = np.random.default_rng(4).permutation(spec.key_value_length)
    spec = dataclasses.replace(spec, needs_grad=False)
    if not subject.takes(spec):
        return
    rows = slice(-1, None) if spec.is_causal else slice(None)
    one, other = (
        subject.run(spec, (query, k, v, cotangent)) for k, v in ((key, value), (key[:, order], value[:, order]))
    )
    yield _same(change, spec, {"output": one["output"][:, rows]}, {"output": other["output"][:, rows]})


def _doubled_by_bias(subject: Subject, spec: AttentionSpec) -> Iterator[Trial]:
    """Two equal keys, of which one is closed, and the other has log 2 more."""
    query, key, value, cotangent = _on_a_grid(subject, spec)
    key[:, 1], value[:, 1] = key[:, 0], value[:, 0]
    biases = np.zeros((2, 1, 1, 1, spec.key_value_length), np.float32)
    biases[1, ..., 0], biases[1, ..., 1] = np.log(2.0), -1e9
    spec = dataclasses.replace(spec, needs_grad=False)
    if not subject.takes(spec):
        return
    inputs = (query, key, value, cotangent)
    both, one = (subject.run(spec, inputs, Layout(), Terms(bias=jnp.asarray(bias)))["output"] for bias in biases)
    rows = slice(1 if spec.is_causal else 0, None)  # the first row of a causal mask sees one of the two
    yield _same("a key twice, or log 2 in its bias", spec, {"output": both[:, rows]}, {"output": one[:, rows]})


def _sums(spec: AttentionSpec, plain: Arrays, cotangent: np.ndarray) -> Iterator[Trial]:
    """The sums over all keys of dv and dk; rounding grows with what is summed."""
    dk, dv = (plain[name].astype(np.float64) for name in ("dk", "dv"))
    rows = cotangent.astype(np.float64).sum(axis=1)
    rows = rows.reshape(spec.batch, spec.num_kv_heads, spec.group_size, -1).sum(axis=2)
    for change, total, wanted, parts in (("dv sums to the cotangents", dv, rows, dv), ("dk sums to zero", dk, 0.0, dk)):
        off, allowed = np.abs(total.sum(axis=1) - wanted).max(), _room(spec) * np.abs(parts).sum(axis=1).max()
        broken = "" if off <= allowed else f"off by {off:.2g} (allowed {allowed:.2g})"
        yield Trial(change, "", spec.dtype, broken)


def _on_a_grid(subject: Subject, spec: AttentionSpec) -> tuple[np.ndarray, ...]:
    """Inputs of few bits: halves, doubles and small shifts of them are exact in every dtype."""
    query, key, value, cotangent = subject.drawn(spec)
    query, key = (np.clip(np.round(x.astype(np.float32) * 16) / 16, -4, 4).astype(x.dtype) for x in (query, key))
    return query, key, value, cotangent


def _same(
    change: str,
    spec: AttentionSpec,
    wanted: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    room: float = 1.0,
) -> Trial:
    for name, x in wanted.items():
        off = np.abs(found[name].astype(np.float64) - x.astype(np.float64)).max() / np.abs(x.astype(np.float64)).max()
        allowed = room * _room(spec)
        if not off <= allowed:
            return Trial(
                change, "", spec.dtype, f"{name} is off by {off:.2g} of its largest value (allowed {allowed:.2g})"
            )
    return Trial(change, "", spec.dtype, "")


def _room(spec: AttentionSpec) -> float:
    return _ALLOWED[spec.dtype] * EPSILON[spec.dtype]
