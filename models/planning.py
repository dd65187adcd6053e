"""The attention of a forward pass and the backends that compute it, decided before anything is traced.

Each distinct attention type of a model has one :class:`~attnsuite.backends.AttentionSpec` and one
:class:`~attnsuite.backends.Resolution`. Both are hashable and are static arguments of the jitted functions. So a
refusal is reported on every call, not only on the one that traces, and the same request never traces twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict

from attnsuite.backends import AttentionSpec, Resolution, Target, masks, resolve, support
from attnsuite.backends.choices import AnyPolicy
from attnsuite.backends.contract import Mode, as_options
from attnsuite.backends.features import Options
from attnsuite.backends.resolve import OnUnavailable

from .config import AttentionType, ModelConfig

Resolutions = tuple[tuple[AttentionType, Resolution], ...]  # a mapping, hashable


class Call(TypedDict, total=False):
    """What computes the attention of a call of a model; see :func:`attnsuite.backends.resolve`."""

    backend: str
    mode: Mode
    backend_options: Mapping[str, Any] | None
    on_unavailable: OnUnavailable
    policy: AnyPolicy | None  # what backend="auto" follows


def attention_spec(
    config: ModelConfig,
    kind: AttentionType,
    *,
    batch: int,
    query_length: int,
    key_value_length: int | None = None,
    packed: bool = False,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    pages: tuple[int, int] | None = None,
    needs_grad: bool = True,
    tree: masks.Tree | None = None,
) -> AttentionSpec:
    """The attention problem of the layers of one type; that of ``latent`` layers see ``models/latent.py``.

    ``key_value_length`` is the capacity of a cache that is attended to, or None for attention over the queries' own
    tokens; ``kv_dtype`` is that of a quantised cache, ``pages`` the number and the size of the pages of a paged one.
    ``packed`` says that segment ids come with the tokens. ``tree`` says that the queries are a draft behind the cache;
    its distances are not those of slots, so that windows and chunks raise ValueError.
    """
    if tree is not None and kind not in ("global", "latent", "nope"):
        raise ValueError(
            f"parents is given for a model with {kind!r} attention, where slots of a tree are no distances; verify "
            "each path of the tree as a draft of its own."
        )
    cached = key_value_length is not None
    kv_heads, dim, value_dim, scale = config.kv_heads, config.dim, config.dim, config.attention_scale
    if kind == "latent":
        rank, nope, rope, value_dim = config.latent
        kv_heads, dim = config.num_heads, nope + rope
        if cached:
            kv_heads, dim, value_dim, scale = 1, rank + rope, rank, dim**-0.5
    return AttentionSpec(
        batch=batch,
        query_length=query_length,
        key_value_length=key_value_length if cached else query_length,
        num_heads=config.num_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        value_head_dim=value_dim,
        kv_layout="HND" if cached else "NHD",
        dtype=dtype or config.dtype,
        scale=scale,
        is_causal=kind != "full",
        logits_soft_cap=config.logits_soft_cap,
        has_sinks=config.attention_sinks,
        local_window_size=(config.window_size - 1, 0) if kind == "sliding" and config.window_size else None,
        chunk_size=config.chunk_size if kind == "chunked" else None,
        mask_function=tree,
        has_segment_ids=packed,
        # Distances inside a document do not depend on where it starts, but chunk borders do.
        has_positions=cached or (packed and kind == "chunked"),
        has_seq_lengths=cached and not packed,
        needs_grad=needs_grad,
        kv_dtype=kv_dtype,
        num_pages=None if pages is None else pages[0],
        page_size=None if pages is None else pages[1],
    )


def resolve_attention(
    config: ModelConfig,
    *,
    backend: str = "auto",
    mode: Mode = "native",
    on_unavailable: OnUnavailable = "fallback",
    target: Target | None = None,
    options: Options = None,
    policy: AnyPolicy | None = None,
    **problem: Any,
) -> Resolutions:
    """The resolution of each distinct attention type of ``config``; ``problem`` as for :func:`attention_spec`.

    ``options`` are those for ``backend``, which may refuse some together with the problem; each resolution plans with
    them. ``policy`` is what ``backend="auto"`` follows, as :func:`attnsuite.backends.resolve` says.

    Raises the errors of :func:`attnsuite.backends.resolve`, and ValueError for an option that cannot be hashed.
    """
    target, given = Target.here() if target is None else target, _hashable(options)

    def resolved(kind: AttentionType) -> Resolution:
        spec = attention_spec(config, kind, **problem)
        found = resolve(backend, spec, target, mode=mode, on_unavailable=on_unavailable, options=given, policy=policy)
        is_cached_latent = kind == "latent" and problem.get("key_value_length") is not None
        return _hinted(found) if is_cached_latent else found

    return tuple((kind, resolved(kind)) for kind in config.attention_types)


def _check_schedule(config: ModelConfig, schedule: Any) -> None:
    """Raise ValueError for another number of layers, and where a selection would cross attention types."""
    from attnsuite.backends.kascade import Schedule  # noqa: PLC0415 (the other backends do without it)

    if not isinstance(schedule, Schedule):
        return  # the backend says what it takes
    if len(schedule.layers) != config.num_layers:
        raise ValueError(f"the schedule is for {len(schedule.layers)} layers, and the model has {config.num_layers}.")
    for layer, role in enumerate(schedule.layers):
        kind, of_anchor = config.layer_types[layer], config.layer_types[role.anchor]
        if kind != of_anchor:
            raise ValueError(
                f"layer {layer} ({kind} attention) of the schedule reuses the selection of layer {role.anchor} "
                f"({of_anchor}); give it an anchor of its own type."
            )


def check_call(call: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword that :class:`Call` does not have."""
    accepted = Call.__annotations__
    if unknown := sorted(call.keys() - accepted):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; a call of a model takes {', '.join(accepted)}.")


def planned(config: ModelConfig, call: Call, **problem: Any) -> Resolutions:
    """The resolutions of a call. Raises what :func:`resolve_attention` raises, and for a schedule of another model."""
    check_call(call)
    options = call.get("backend_options")
    if options and "schedule" in options:
        _check_schedule(config, options["schedule"])
    how: dict[str, Any] = {name: value for name, value in call.items() if name != "backend_options"}
    return resolve_attention(config, options=options, **how, **problem)


def _hinted(found: Resolution) -> Resolution:
    """Enables ``values_in_keys`` where the resolved backend supports it; the backend stays the same."""
    hinted = dataclasses.replace(found, spec=dataclasses.replace(found.spec, values_in_keys=True))
    return hinted if support(found.backend, hinted.spec, found.target, *found.mode_and()) else found


def _hashable(options: Options) -> dict[str, Any]:
    """Backend options in the order of their names. Raises ValueError for a value that cannot be hashed."""
    given = as_options(options)
    for name, value in given.items():
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"backend_options[{name!r}] is a {type(value).__name__}, which cannot be a static argument of a "
                "compiled model; give a number, a string, a tuple or a frozen dataclass."
            ) from None
    return dict(sorted(given.items()))
