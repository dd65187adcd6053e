"""What a plain function ``f(query, key, value)`` takes: its signature is read, and it is called with small arrays.

Each call is held to the float64 oracle. Whether a result is right is decided later, by the judge; here the nearer of
two meanings counts, so that a causal kernel with a fault is judged as a causal kernel.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnsuite.backends import AttentionSpec, Layout, Terms, oracle
from attnsuite.backends.features import DTYPES, Feature

LENGTH, HEADS, HEAD_DIM = 128, 4, 64  # small, and of a size that kernels with fixed blocks take


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The features and dtypes of a function; ``error`` is what it raised where it could not be called at all."""

    features: frozenset[Feature]
    dtypes: tuple[str, ...] = DTYPES[:3]
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"It raised {self.error} when called with 3 float32 arrays [1, {LENGTH}, {HEADS}, {HEAD_DIM}]."
        causal, both = "causal" in self.features, "bidirectional" in self.features
        kinds = "causal or not" if causal and both else "causal" if causal else "not causal"
        words = {"grouped_queries": "grouped heads", "cross_length": "keys of another length", "mask": "mask arrays"}
        lacking = [dtype for dtype in DTYPES[:3] if dtype not in self.dtypes]
        more = [word for feature, word in {**words, "bias": "bias arrays"}.items() if feature in self.features]
        taken = ", ".join(more) or "nothing more"
        without = f"; not {', '.join(lacking)}" if lacking else ""
        return f"Called with small arrays, it was found to be {kinds}, and to take {taken}{without}."


def found_out(function: Callable[..., Any]) -> Found:
    """The features of ``function``, by its keywords and a few small calls. Whatever it raises is no error here."""
    spec = AttentionSpec(
        batch=1, query_length=LENGTH, key_value_length=LENGTH, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM
    )
    keywords = _keywords(function)
    probe = _Probe(function, spec)
    features: set[Feature] = {"gradient"}
    causal = dataclasses.replace(spec, is_causal=True)
    try:
        is_causal = probe.nearer(causal, spec, {})
    except Exception as error:  # noqa: BLE001 (anything that a function raises)
        error_text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Found(frozenset({"bidirectional", "gradient"}), error=error_text)
    features.add("causal" if is_causal else "bidirectional")
    if not is_causal and "is_causal" in keywords and probe.can(causal, spec, {"is_causal": True}):
        features.add("causal")
    rng = np.random.default_rng(1)
    shape = 1, 1, LENGTH, LENGTH
    arrays: dict[Feature, tuple[np.ndarray, Any]] = {
        "mask": ((mask := (rng.random(shape) < 0.5) | np.eye(LENGTH, dtype=bool)), Layout(mask=mask)),
        "bias": ((bias := 4 * rng.standard_normal(shape).astype(np.float32)), Terms(bias=bias)),
    }
    plain = causal if is_causal else spec
    for feature, (array, given) in arrays.items():
        announced: Any = {f"has_{feature}": True}
        if feature in keywords and probe.can(dataclasses.replace(plain, **announced), plain, {feature: array}, given):
            features.add(feature)
    shapes: dict[Feature, Mapping[str, int]] = {
        "grouped_queries": {"num_kv_heads": HEADS // 2},
        "cross_length": {"query_length": LENGTH // 2},
        "value_head_dim": {"value_head_dim": HEAD_DIM // 2},
    }
    features |= {name for name, sizes in shapes.items() if probe.has_shape(dataclasses.replace(plain, **sizes))}
    dtypes = tuple(dtype for dtype in DTYPES[:3] if probe.has_shape(dataclasses.replace(plain, dtype=dtype)))
    return Found(frozenset(features), dtypes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Probe:
    function: Callable[..., Any]
    spec: AttentionSpec

    def nearer(
        self, one: AttentionSpec, other: AttentionSpec, keywords: Mapping[str, Any], given: Layout | Terms | None = None
    ) -> bool:
        """Whether the result of a call is nearer to the meaning of ``one``, with what is given, than of ``other``."""
        inputs = _inputs(one)
        out = np.asarray(self.function(*inputs, **keywords), np.float64)
        layout = given if isinstance(given, Layout) else Layout()
        terms = given if isinstance(given, Terms) else Terms()
        first, second = oracle.forward(one, layout, *inputs, terms), oracle.forward(other, Layout(), *inputs)
        return bool(out.shape == first.shape and np.abs(out - first).sum() < np.abs(out - second).sum())

    def can(self, *question: Any) -> bool:
        """As :meth:`nearer`; False where the function raises."""
        try:
            return self.nearer(*question)
        except Exception:  # noqa: BLE001 (as above)
            return False

    def has_shape(self, spec: AttentionSpec) -> bool:
        """Whether a call with arrays of these sizes gives an output of the right shape."""
        try:
            out = self.function(*_inputs(spec))
            return tuple(out.shape) == (1, spec.query_length, spec.num_heads, spec.value_head_dim)
        except Exception:  # noqa: BLE001 (as above)
            return False


def _inputs(spec: AttentionSpec) -> tuple[Any, Any, Any]:
    import jax  # noqa: PLC0415 (the command line starts without it)
    import jax.numpy as jnp  # noqa: PLC0415 (as above)

    rng = np.random.default_rng(0)
    q, k, s = spec.query_length, spec.num_kv_heads, spec.key_value_length
    shapes = (
        (1, q, spec.num_heads, spec.head_dim),
        (1, s, k, spec.head_dim),
        (1, s, k, spec.value_head_dim or spec.head_dim),
    )
    query, key, value = (jax.device_put(rng.standard_normal(shape).astype(jnp.dtype(spec.dtype))) for shape in shapes)
    return query, key, value


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters beyond the three arrays; none where the signature cannot be read."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return frozenset()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(each.name for each in parameters[3:] if each.kind in named)
