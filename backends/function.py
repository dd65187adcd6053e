"""A plain function of arrays as a backend, so that somebody's own kernel is judged and timed as any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from .contract import Plan, check_options, positions
from .devices import Target
from .features import Feature, Mode, Options, Takes
from .layout import Layout
from .operands import Terms
from .spec import AttentionSpec

PLAIN: frozenset[Feature] = frozenset({"bidirectional", "gradient"})


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionBackend:
    """A function behind the contract; :func:`from_function` makes one."""

    name: str
    function: Callable[..., Any]
    declared: Takes = dataclasses.field(hash=False)
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """What was declared, on every device."""
        return self.declared

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """Call the function with the keywords of what the spec asks for."""
        check_options(self.name, options, {})
        keywords = _keywords(spec, layout, self.declared)

        def attend(query: Any, key: Any, value: Any, terms: Terms) -> Any:
            learned = {name: getattr(terms, name) for name in terms.given()}
            return self.function(query, key, value, **keywords, **learned)

        return Plan.stateless(attend)


def from_function(
    function: Callable[..., Any],
    *,
    takes: Takes | Iterable[Feature] = PLAIN,
    name: str | None = None,
    exact: bool = True,
) -> FunctionBackend:
    """The backend of a function ``f(query, key, value)`` of arrays ``[batch, length, heads, head_dim]``.

    ``takes`` declares what the function handles, as feature names or as :class:`Takes`; everything else is refused
    before the function is called. By default the function handles attention of all tokens to all, with gradients, and
    nothing more. It is called with a keyword for each feature that a problem asks for:

    - ``causal`` beside ``bidirectional``: ``is_causal``, True or False. A function that takes one of the two gets none.
    - ``window``: ``local_window_size=(left, right)``; ``chunk``: ``chunk_size``; ``soft_cap``: ``logits_soft_cap``;
      ``scale``: ``scale``, a float; ``mask_function`` and ``score_function``: by these names.
    - ``segments``: ``query_segment_ids`` and ``key_value_segment_ids``; ``positions``: ``query_positions`` and
      ``key_value_positions``; ``lengths``: ``key_value_seq_lengths``; ``mask``, ``bias``, ``sinks``, ``alibi``: by
      these names. Shapes and dtypes are those of :class:`Layout` and :class:`Terms`.
    - ``pages``: ``page_table``; ``kv_dtype``: ``key_scales`` and ``value_scales``.
    - ``values_in_keys``: ``value_head_dim``; the value is then None.
    - ``log_sum_exp``: ``return_log_sum_exp=True``; it then returns the pair ``(output, log_sum_exp)``.
    - ``gradient``, ``grouped_queries``, ``cross_length`` and ``value_head_dim`` show in the arrays and bring none.

    The name is the function's own unless ``name`` says another. Raises TypeError for something that cannot be called
    or has no name, ValueError for a feature that is not known.

    >>> import jax
    >>> mine = from_function(lambda q, k, v: jax.nn.dot_product_attention(q, k, v), name="mine")
    >>> sorted(mine.declared.features)
    ['bidirectional', 'gradient']
    """
    if not callable(function):
        raise TypeError(f"{function!r} is not a function; give one of (query, key, value).")
    name = getattr(function, "__name__", None) if name is None else name
    if not name:
        raise TypeError(f"{function!r} has no name; give name='...'.")
    declared = takes if isinstance(takes, Takes) else Takes(features=frozenset(takes), modes=("native", "compile"))
    return FunctionBackend(name, function, declared, exact)


def _keywords(spec: AttentionSpec, layout: Layout, declared: Takes) -> dict[str, Any]:
    requested = spec.features()
    keywords: dict[str, Any] = {}
    if {"causal", "bidirectional"} <= declared.features:
        keywords["is_causal"] = spec.is_causal
    settings = {
        "window": ("local_window_size", spec.window),
        "chunk": ("chunk_size", spec.chunk_size),
        "soft_cap": ("logits_soft_cap", spec.logits_soft_cap),
        "scale": ("scale", spec.softmax_scale),
        "mask_function": ("mask_function", spec.mask_function),
        "score_function": ("score_function", spec.score_function),
        "log_sum_exp": ("return_log_sum_exp", True),
        "values_in_keys": ("value_head_dim", spec.value_head_dim),
    }
    keywords |= {keyword: value for feature, (keyword, value) in settings.items() if feature in requested}
    if "positions" in requested:
        rows = (jnp.broadcast_to(x, (spec.batch, x.shape[1])) for x in positions(spec, layout))
        keywords |= dict(zip(("query_positions", "key_value_positions"), rows, strict=True))
    arrays = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    return keywords | {name: x for name, x in arrays.items() if x is not None and name not in keywords}
