"""The contract of every attention backend: what it computes, and its interface.

The semantics are those of ``jax.nn.dot_product_attention`` with the gaps closed:

- A query row that may attend to nothing gives exactly zero, and zero gradients.
- A negative segment id is padding: it matches nothing, not even other padding.
- Softmax and accumulation are float32 whatever the input dtype.
- ``local_window_size=(left, right)`` counts the keys beside the query's own: a row sees at most
  ``left + 1 + right`` keys. A model whose ``sliding_window`` counts the token itself gives ``(sliding_window - 1, 0)``.
- Keys and values that a query may not see change nothing, as long as they are finite. NaN and infinity in slots behind
  the length, in padding and in other documents are kept out by ``standard``, ``chunked``, ``flash_cpu`` and ``kascade``
  on a CPU, forward and backward. In later keys of a causal mask, a window or a mask array ``standard`` and decode steps
  of ``chunked`` do not keep them out: that would take one more pass over the values. Of other kernels it is measured
  (``attnsuite judge``); ``isolate=True`` zeroes what lengths and padding hide before any backend runs.
- A length above the number of slots means all of them.
- A mask function decides by the positions of a query and a key, beside all other masks (``masks.py``).
- A score function changes each scaled and capped score by its head and positions (``scores.py``).
- ALiBi subtracts a head's slope times the distance of the two positions, ``|query - key|``, after the score function.
- A sink is one more logit of every row of its head, without a value: it takes weight from the keys.
- The log-sum-exp of a row is that of its visible logits (scaled, capped, with the bias) and of its sink, float32.
  Without a sink it is ``-inf`` where the row sees nothing. It has a gradient.
- Keys and values of a paged cache are pages, which a page table deals to the sequences. A slot is read only if a query
  sees it; a visible slot whose page is not in the pool gives NaN.
- Quantised keys and values (``kv_dtype``) stand for ``number * scale``. A cache, paged or quantised, has no gradient.
- With ``values_in_keys`` there is no array of values: a key's value is its first ``value_head_dim`` numbers, and the
  gradient of the keys is that of both.
- A backend refuses a problem that it cannot compute before anything is traced (``features.py``, ``support.py``).

``oracle.py`` computes these semantics in float64; ``attnsuite.testing`` tests every backend against them.

An :class:`AttentionSpec` holds everything static, a :class:`Layout` the arrays that follow from the tokens (once per
forward pass), and :class:`Terms` the learned operands (per layer). A caller plans once per forward pass and runs the
plan in each layer; the words ``plan`` and ``run`` are FlashInfer's (arXiv 2501.01005).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from . import sinks
from .derivatives import forward_mode_explained, forward_only
from .devices import Target
from .features import Mode, Options
from .layout import Layout, check_operands, check_terms
from .manual_axes import varying
from .operands import NO_TERMS, EitherArray, Terms
from .spec import AttentionSpec

Carry = Any  # a pytree threaded from layer to layer: () for every backend that keeps nothing between layers


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """Whether a backend takes a spec: true, or false with one sentence for every reason."""

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A backend's preparation of one forward pass: made once, run by every layer.

    ``attend(query, key, value, layer, carry)`` returns the output and the carry for the next layer; ``layer`` is None
    where a run names none, and traced in a scan over layers. If the spec asks for terms, ``attend`` takes
    :class:`Terms` as a sixth argument. If it asks for the log-sum-exp, the output is the pair ``(output,
    log_sum_exp)``. ``notes`` are sentences that a reader of the result must know (an approximate backend that decided
    to run dense says so here). ``spec`` is the planned problem; :func:`attnsuite.backends.plan` adds it.
    ``num_layers``: how many layers have a role of their own, so that a run which names no layer is an error; None where
    all are alike. ``key_blocks``: how many keys the kernels take at a time, a number for each of their blocks, tiles
    and pages; empty where that is not known. Faults lie where such a block ends (verdict ``isolates``).
    """

    attend: Callable[..., tuple[Any, Carry]]
    notes: tuple[str, ...] = ()
    spec: AttentionSpec | None = None
    num_layers: int | None = None
    key_blocks: tuple[int, ...] = ()

    @staticmethod
    def stateless(
        run: Callable[..., Any],
        notes: tuple[str, ...] = (),
        *,
        gradient: bool = True,
        key_blocks: tuple[int, ...] = (),
    ) -> Plan:
        """The plan of layers that are all alike: ``run(query, key, value, terms)`` gives the output of each.

        ``gradient=False``: it raises ValueError where it is differentiated.
        """

        def attend(
            query: Any, key: Any, value: Any, layer: Any, carry: Carry, terms: Terms = NO_TERMS
        ) -> tuple[Any, Carry]:
            return run(query, key, value, terms), carry

        return Plan(attend if gradient else forward_only(attend), notes, key_blocks=key_blocks)

    def run(
        self,
        query: Float[Array, "batch q_len heads head_dim"],
        key: Num[Array, "rows slots kv_heads head_dim"],
        value: Num[Array, "rows slots kv_heads v_dim"] | None,
        *,
        terms: Terms = NO_TERMS,
        layer: int | Array | None = None,
        carry: Carry = (),
    ) -> tuple[Any, Carry]:
        """Attend in one layer; returns the output and the carry for the next layer.

        ``value`` is None where the spec has ``values_in_keys``. The output is ``[batch, q_len, heads, v_dim]`` in the
        query's dtype. If the spec asks for the log-sum-exp, the result is the pair of the output and a float32 array
        ``[batch, q_len, heads]``. Raises ValueError for terms that the spec does not announce, for announced terms that
        are missing, for arrays that do not match the spec, and without ``layer`` where the plan needs it.
        """
        if layer is None and self.num_layers is not None:
            raise ValueError(_NO_LAYER)
        if self.spec is not None:
            check_operands(self.spec, query, key, value)
        query, key, value, terms = varying((query, key, value, terms), (query, key, value, terms))
        check_terms(self.spec, terms)
        present = (sinks.finite(terms),) if terms.given() else ()
        with forward_mode_explained():
            found, carry = self.attend(query, key, value, layer, carry, *present)
        if terms.sinks is not None and self.spec is not None and self.spec.return_log_sum_exp:
            found = found[0], sinks.minus_infinity(terms.sinks, found[1])
        return found, carry


_NO_LAYER = (
    "this plan gives each layer its role by a schedule, and the call names no layer; a layer 0 that is dense would run "
    "in every place. In a model of your own plan once and run each layer, out, carry = plan.run(query, key, value, "
    "layer=i, carry=carry). In another library's, stack = backends.LayerStack(num_layers), give layer=stack[i] (or "
    "layer=stack) to backends.attention, attention_fn or the adapter, and call the model by stack.run(model, x). "
    "Without the schedule every layer selects for itself."
)


@runtime_checkable
class Backend(Protocol):
    """One implementation of the contract, hashable.

    Two more methods say what the backend takes. ``takes(target, mode) -> Takes`` is its allow-list.
    ``refuses(spec, target, mode, options)`` is optional: it returns the reasons that an allow-list cannot express, one
    sentence each. Callers use :func:`attnsuite.backends.support`, which judges by both, and
    :func:`attnsuite.backends.plan`.
    """

    @property
    def name(self) -> str:
        """The name by which users ask for it."""
        ...

    @property
    def exact(self) -> bool:
        """Whether every visible pair is computed; False for approximations (sparse attention)."""
        ...

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """Prepare one forward pass for ``target``. Raises ValueError for an option that the backend does not have."""
        ...


@runtime_checkable
class BackendWithRoles(Backend, Protocol):
    """A backend whose layers have different roles, so that a single call shows only one of them."""

    def roles(self, spec: AttentionSpec) -> Mapping[str, tuple[Mapping[str, Any], int]]:
        """Maps a role to the options to plan with and to the index of a layer that has this role.

        A layer after another one takes the carry that the layer before it returned.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class SelectedShare:
    """What an approximate backend attends to in some layers of a model, as shares of the causal pairs.

    ``pairs`` is the mean over the layers. ``figures`` are figures of a record, ``kept_pairs`` among them. ``lines`` say
    the same as sentences.
    """

    pairs: float
    figures: Mapping[str, float]
    lines: tuple[str, ...]


@runtime_checkable
class SelectsKeys(Backend, Protocol):
    """An approximate backend that says which part of a model's attention it computes."""

    def selected_share(
        self, spec: AttentionSpec, options: Mapping[str, Any], layers: tuple[int, ...], num_layers: int
    ) -> SelectedShare:
        """What ``layers`` of a model of ``num_layers`` attend to under ``options``. Raises ValueError."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Attention to a part of the keys, in a form that can be merged with other parts: used by a ring of devices.

    ``forward(query, key, value)`` returns ``(out, top, rest)``: the output over this part, and the log-sum-exp of its
    scores as ``top + rest``, each ``[batch, q_len, heads]``, all float32. If ``top`` is the largest score, ``rest``
    keeps its low bits when logits are large. A kernel that has only the sum returns it as ``top``, with a ``rest`` of
    zero. A row that sees nothing here has an output of zero and a ``top`` of :data:`NOTHING_SEEN`.
    ``backward(query, key, value, out, top, rest, d_out)`` takes output and log-sum-exp over *all* keys. It returns this
    part's contribution to dq, and its dk and dv, float32.
    """

    forward: Callable[..., tuple[Array, Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


NOTHING_SEEN = -1e30  # finite, so that merging parts gives no NaN


@runtime_checkable
class PartBackend(Backend, Protocol):
    """A backend with ``parts`` in its ``takes``: it can attend to some of the keys and return their log-sum-exp."""

    def part(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Part:
        """As :meth:`Backend.plan`, for a spec whose keys are one part of all."""
        ...


def positions(spec: AttentionSpec, layout: Layout) -> tuple[EitherArray, EitherArray]:
    """Query and key positions ``[batch or 1, length]``, with the default ``arange`` filled in."""
    q, k = layout.query_positions, layout.key_value_positions
    return (
        np.arange(spec.query_length, dtype=np.int32)[None] if q is None else q,
        np.arange(spec.key_value_length, dtype=np.int32)[None] if k is None else k,
    )


def may_attend(spec: AttentionSpec, layout: Layout) -> Bool[Array, "#batch #heads q_len kv_len"] | None:
    """The whole mask of a call, or None where every pair may attend. Quadratic: for references and short input."""
    if not spec.masks_anything:
        return None
    q_pos, k_pos = (jnp.asarray(x) for x in positions(spec, layout))  # traced, not a quadratic constant of the program
    q_pos, k_pos = q_pos[:, None, :, None], k_pos[:, None, None, :]
    terms: list[Any] = [jnp.ones((1, 1, spec.query_length, spec.key_value_length), bool)]
    if spec.positional_mask is not None:
        terms.append(spec.positional_mask(q_pos, k_pos))
    if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
        q_seg, k_seg = layout.query_segment_ids[:, None, :, None], layout.key_value_segment_ids[:, None, None, :]
        terms.append((q_seg == k_seg) & (q_seg >= 0))
    if layout.key_value_seq_lengths is not None:
        slots = jnp.arange(spec.key_value_length)[None, None, None]
        terms.append(slots < layout.key_value_seq_lengths[:, None, None, None])
    if layout.mask is not None:
        terms.append(layout.mask)
    mask = terms[0]
    for term in terms[1:]:
        mask = mask & term
    return mask


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether ``value`` is an integer of at least ``least``, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def as_options(options: Options) -> dict[str, Any]:
    """The options as a dict. Raises ValueError for something else than a mapping."""
    if not isinstance(options, Mapping | None):
        raise ValueError(  # noqa: TRY004 (one kind of error for every option)
            f"the options {options!r} are no mapping; give backend_options (of resolve and plan: options) as a dict, "
            "such as {'block_q': 64}."
        )
    return dict(options or {})


def check_options(
    backend: str,
    options: Options,
    accepted: Mapping[str, str],
) -> dict[str, Any]:
    """The options as a dict. Raises ValueError for a name that the backend does not have, listing those that it has."""
    given = as_options(options)
    unknown = sorted(set(given) - set(accepted))
    if unknown:
        have = "; ".join(f"{name}: {meaning}" for name, meaning in accepted.items()) or "none"
        raise ValueError(f"{backend} has no option {', '.join(map(repr, unknown))}; its options are: {have}.")
    return given
