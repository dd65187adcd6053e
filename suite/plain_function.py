"""What a plain function ``f(query, key, value)`` takes: its signature is read, and it is called with small arrays.

Whether a result is right is decided later, by the judge. A keyword of the contract that can be given is judged: one
that is ignored would else be a feature that the function lacks. Whether a function without ``is_causal`` is causal is
told by the nearer of the two meanings, by the float64 oracle, so that a causal kernel with a fault is judged as a
causal kernel. Calls are compiled, as all later ones are; where the shape of the output tells enough, they are traced
alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnsuite.backends import AttentionSpec, Layout, Terms, oracle
from attnsuite.backends.features import DTYPES, Feature
from attnsuite.backends.operands import OPERANDS

LENGTH, HEADS, HEAD_DIM = 128, 4, 64  # small, and of a size that kernels with fixed blocks take
_CONFINED = (
    "a function of yours runs confined: it can write into its TMPDIR alone, read no other temporary file and open no "
    "port; docs/explanation/judge.md"
)


_SHAPES: Mapping[Feature, str] = {
    "grouped_queries": "grouped heads",
    "cross_length": "keys of another length",
    "value_head_dim": "values of another size",
}
_KEYWORDS: Mapping[Feature, tuple[str, ...]] = {
    "mask": ("mask",),
    **{operand.name: (operand.name,) for operand in OPERANDS},
    "scale": ("scale",),
    "window": ("local_window_size",),
    "chunk": ("chunk_size",),
    "soft_cap": ("logits_soft_cap",),
    "lengths": ("key_value_seq_lengths",),
    "segments": ("query_segment_ids", "key_value_segment_ids"),
    "log_sum_exp": ("return_log_sum_exp",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The features and dtypes of a function.

    ``error`` is what it raised where it could not be called at all. ``misshapen`` says what is wrong with the shape or
    dtype of its output, or that it is not finite.
    """

    features: frozenset[Feature]
    dtypes: tuple[str, ...] = DTYPES[:3]
    error: str = ""
    misshapen: str = ""

    def __str__(self) -> str:
        arrays = f"3 float32 arrays [1, {LENGTH}, {HEADS}, {HEAD_DIM}]"
        if self.error:
            return f"It raised {self.error} when called with {arrays}."
        if self.misshapen:
            return f"Called with {arrays}: {self.misshapen}"
        causal, both = "causal" in self.features, "bidirectional" in self.features
        kinds = "causal or not (is_causal=)" if causal and both else "causal" if causal else "not causal"
        lacking = [dtype for dtype in DTYPES[:3] if dtype not in self.dtypes]
        phrases = {**_SHAPES, **{feature: f"{', '.join(names)}=" for feature, names in _KEYWORDS.items()}}
        taken = ", ".join(phrase for feature, phrase in phrases.items() if feature in self.features) or "nothing more"
        without = f"; not {', '.join(lacking)}" if lacking else ""
        return f"Called with small arrays, it was found to be {kinds}, and to take {taken}{without}."


def explained(error: str) -> str:
    """What a function raised in its process; of a PermissionError also that the process is confined."""
    return error if "PermissionError" not in error or _CONFINED in error else f"{error} ({_CONFINED})"


def found_out(function: Callable[..., Any]) -> Found:
    """The features of ``function``, by its keywords and a few small calls. Whatever it raises is no error here."""
    spec = AttentionSpec(
        batch=1, query_length=LENGTH, key_value_length=LENGTH, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM
    )
    keywords = _keywords(function)
    causal = dataclasses.replace(spec, is_causal=True)
    probe = _Probe(function, spec)
    both = "is_causal" in keywords and all(probe.has_shape(spec, is_causal=value) for value in (True, False))
    if both:
        probe = dataclasses.replace(probe, always={"is_causal": False})
    try:
        if misshapen := probe.fault():
            return Found(frozenset({"bidirectional", "gradient"}), misshapen=misshapen)
        is_causal = probe.nearer(causal, spec, {})
        misshapen = "" if both or is_causal or probe.is_finite() else "its output is not finite."
    except (Exception, SystemExit) as error:  # noqa: BLE001 (anything that a function raises)
        error_text = explained(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return Found(frozenset({"bidirectional", "gradient"}), error=error_text)
    plain = causal if is_causal else spec
    features: set[Feature] = {"gradient", "causal" if is_causal else "bidirectional"}
    features |= {"causal"} if both else set()
    for feature, (announced, arrays) in _feature_problems(plain).items():
        names = _KEYWORDS[feature]
        values = {name: getattr(arrays, name) if arrays else announced[name] for name in names}
        requested = dataclasses.replace(plain, **announced)
        # What is computed with a keyword is left to the judge; but chunk_size may be a kernel's block of keys.
        if keywords.issuperset(names) and (
            probe.can(requested, plain, values) if feature == "chunk" else probe.has_shape(requested, **values)
        ):
            features.add(feature)
    shapes: dict[Feature, Mapping[str, int]] = {
        "grouped_queries": {"num_kv_heads": HEADS // 2},
        "cross_length": {"query_length": LENGTH // 2},
        "value_head_dim": {"value_head_dim": HEAD_DIM // 2},
    }
    features |= {name for name, sizes in shapes.items() if probe.has_shape(dataclasses.replace(plain, **sizes))}
    dtypes = tuple(dtype for dtype in DTYPES[:3] if probe.has_shape(dataclasses.replace(plain, dtype=dtype)))
    return Found(frozenset(features), dtypes, misshapen=misshapen)


def _feature_problems(plain: AttentionSpec) -> dict[Feature, tuple[dict[str, Any], Layout | Terms | None]]:
    """By feature: the fields of a spec that asks for it, and its arrays."""
    rng = np.random.default_rng(1)
    shape = 1, 1, LENGTH, LENGTH
    ids = np.repeat(np.arange(4, dtype=np.int32), LENGTH // 4)[None]
    mask = rng.random(shape) < 0.5
    learned: dict[Feature, np.ndarray] = {x.name: x.example((1, LENGTH, LENGTH, HEADS), rng) for x in OPERANDS}
    return {
        "mask": ({"has_mask": True}, Layout(mask=mask | np.eye(LENGTH, dtype=bool))),
        "scale": ({"scale": 0.7}, None),
        "window": ({"local_window_size": (15, 0 if plain.is_causal else 7)}, None),
        "chunk": ({"chunk_size": 48}, None),
        "soft_cap": ({"logits_soft_cap": 0.5}, None),
        "log_sum_exp": ({"return_log_sum_exp": True}, None),
        "lengths": ({"has_seq_lengths": True}, Layout(key_value_seq_lengths=np.array([LENGTH // 3], np.int32))),
        "segments": ({"has_segment_ids": True}, Layout(query_segment_ids=ids, key_value_segment_ids=ids)),
        **{name: ({f"has_{name}": True}, Terms(**{name: x})) for name, x in learned.items()},
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Probe:
    function: Callable[..., Any]
    spec: AttentionSpec
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def fault(self) -> str:
        """What is wrong with the shape or dtype of an output; empty where nothing is."""
        from attnsuite.testing import shapes  # noqa: PLC0415 (only a function of a user's needs it)

        return shapes.fault_of(self._outline(self.spec), self.spec)

    def is_finite(self) -> bool:
        """Whether all numbers of an output are finite: NaN is near no meaning."""
        return bool(np.isfinite(np.asarray(self._program({})(*_inputs(self.spec)), np.float64)).all())

    def nearer(
        self,
        one: AttentionSpec,
        other: AttentionSpec,
        keywords: Mapping[str, Any],
    ) -> bool:
        """Whether the result of a call is nearer to the meaning of ``one`` than to that of ``other``."""
        inputs = _inputs(one)
        out = np.asarray(self._program(keywords)(*inputs), np.float64)
        first, second = oracle.forward(one, Layout(), *inputs), oracle.forward(other, Layout(), *inputs)
        return bool(out.shape == first.shape and np.abs(out - first).sum() < np.abs(out - second).sum())

    def _outline(self, spec: AttentionSpec, **keywords: Any) -> Any:
        """Shape and dtype of what a call with arrays of these sizes returns; it is lowered, and not compiled."""
        arrays = {name: x for name, x in keywords.items() if isinstance(x, np.ndarray)}
        return self._program(keywords).lower(*_inputs(spec), **arrays).out_info

    def _program(self, keywords: Mapping[str, Any]) -> Any:
        """The function under ``jax.jit``, with those keywords that are no arrays as constants."""
        import jax  # noqa: PLC0415 (the command line starts without it)

        settings = {name: x for name, x in {**self.always, **keywords}.items() if not isinstance(x, np.ndarray)}
        return jax.jit(functools.partial(self.function, **settings))

    def can(self, *question: Any) -> bool:
        """As :meth:`nearer`; False where the function raises."""
        try:
            return self.nearer(*question)
        except (Exception, SystemExit):  # noqa: BLE001 (as above)
            return False

    def has_shape(self, spec: AttentionSpec, **keywords: Any) -> bool:
        """Whether a call with arrays of these sizes gives an output (and a log-sum-exp) of the right shape."""
        rows = 1, spec.query_length, spec.num_heads
        expected = [(*rows, spec.value_head_dim), rows][: 1 + spec.return_log_sum_exp]
        try:
            found = self._outline(spec, **keywords)
            return [x.shape for x in (found if spec.return_log_sum_exp else (found,))] == expected
        except (Exception, SystemExit):  # noqa: BLE001 (as above)
            return False


def _inputs(spec: AttentionSpec) -> tuple[Any, ...]:
    import jax  # noqa: PLC0415 (the command line starts without it)

    from attnsuite.testing import problems  # noqa: PLC0415 (only a function of a user's needs it)

    return jax.device_put(problems.drawn(spec)[:3])


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters beyond the three arrays; none where the signature cannot be read."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return frozenset()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(each.name for each in parameters[3:] if each.kind in named)
