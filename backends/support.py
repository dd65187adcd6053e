"""The two calls to any backend: whether it takes a problem, and a plan of it.

:func:`support` judges by the backend's allow-list and by its own further conditions. Every plan is made by
:func:`plan`, which refuses a spec that the backend does not take, and arrays that the spec does not announce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from . import features
from .contract import Backend, Plan, Support
from .devices import Target
from .features import INSTEAD, Mode, Options, Sizes, Takes, refusal
from .kv_layout import as_read, swapped
from .layout import Layout, fit, unread_slots
from .spec import AttentionSpec


def support(
    backend: Backend, spec: AttentionSpec, target: Target, mode: Mode = "native", options: Options = None
) -> Support:
    """Whether ``backend`` runs ``spec`` on ``target`` in ``mode`` with ``options``, or every reason why not.

    An error of the backend becomes the reason. Unknown options are not a reason, since :func:`plan` raises ValueError
    for them. Raises TypeError for a name in the place of a backend or a target, and for what is no spec.
    """
    check_kinds(spec, target, backend)
    try:
        takes = takes_of(backend, target, mode)
        spec = as_read(spec, takes)
        # The device first: on a wrong device the other reasons do not matter.
        refuses: Any = getattr(backend, "refuses", lambda *_: ())
        own = refuses(spec, target, mode, options)
        reasons = (*((own,) if isinstance(own, str) else tuple(own)), *_refusals(backend.name, takes, spec, mode))
        if not all(isinstance(reason, str) for reason in reasons):
            raise TypeError(f"its reasons are not all sentences: {reasons!r}")  # noqa: TRY301 (as its other faults)
    except Exception as error:  # noqa: BLE001 (whatever a foreign backend raises is why it cannot be used)
        message = f"{type(error).__name__}: {error}"
        given = getattr(backend, "name", None)
        name = given if isinstance(given, str) else type(backend).__name__
        reasons = (f"{name} failed when asked what it takes ({message}), a fault of its own; {INSTEAD}.",)
    return Support(reasons)


def check_kinds(spec: Any, target: Any, backend: Any = None) -> None:
    """Raise TypeError for a name in the place of what it names, and for what is no spec."""
    if isinstance(backend, str):
        raise TypeError(f"backend={backend!r} is a name; give the backend, backends.get({backend!r}).")
    if not isinstance(target, Target):
        raise TypeError(f"target={target!r} is no Target; give Target.here(), or such as Target('cuda', 'h100').")
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec={spec!r} is no AttentionSpec; give AttentionSpec(batch=..., query_length=..., ...).")


def takes_of(backend: Backend, target: Target, mode: Mode = "native") -> Takes:
    """The allow-list of a backend; one that declares none takes no feature."""
    takes = getattr(backend, "takes", None)
    return Takes() if takes is None else takes(target, mode)


def plan(
    backend: Backend,
    spec: AttentionSpec,
    layout: Layout = Layout(),  # noqa: B008 (a frozen value)
    *,
    target: Target,
    mode: Mode = "native",
    options: Options = None,
    isolate: bool = False,
) -> Plan:
    """Plan one forward pass of ``spec`` on ``backend``.

    ``isolate`` sets the keys and values to zero that the layout alone says nobody sees (slots behind the lengths,
    padding): NaN there then changes nothing in any kernel, at the price of a pass over them. Raises ValueError where
    ``layout`` and ``spec`` disagree, where the backend refuses (with its reasons), for options that the backend does
    not have, and for ``isolate`` with pages.

    >>> from attnsuite.backends import AttentionSpec, Layout, Target, registry
    >>> import jax.numpy as jnp
    >>> spec = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=2, num_kv_heads=2, head_dim=16)
    >>> x = jnp.ones((1, 8, 2, 16))
    >>> plan(registry.get("standard"), spec, target=Target.here()).run(x, x, x)[0].shape
    (1, 8, 2, 16)
    """
    if reasons := support(backend, spec, target, mode, options).reasons:
        raise ValueError(f"{backend.name} cannot run this on {target}: {' '.join(reasons)}")
    return plan_accepted(backend, spec, layout, target=target, mode=mode, options=options, isolate=isolate)


def plan_accepted(
    backend: Backend,
    spec: AttentionSpec,
    layout: Layout,
    *,
    target: Target,
    mode: Mode = "native",
    options: Options = None,
    isolate: bool = False,
) -> Plan:
    """As :func:`plan`, of a problem that :func:`support` has accepted: the backend is not asked again."""
    if not isinstance(isolate, bool):
        raise ValueError(  # noqa: TRY004 (one kind of error for every option)
            f"isolate={isolate!r} is not accepted; isolate is True or False."
        )
    layout = fit(spec, layout)
    read = as_read(spec, takes_of(backend, target, mode))
    made = backend.plan(read, layout, target=target, mode=mode, options=options)
    if not isinstance(made, Plan):
        raise TypeError(f"{backend.name}.plan(...) returned a {type(made).__name__}; a backend returns a Plan.")
    attend = made.attend if read == spec else swapped(made.attend)
    return dataclasses.replace(made, spec=spec, attend=_on_zeros(spec, layout, attend) if isolate else attend)


def _on_zeros(spec: AttentionSpec, layout: Layout, attend: Callable[..., Any]) -> Callable[..., Any]:
    """``attend`` with zeros in the keys and values that :func:`unread_slots` names."""
    if spec.page_size is not None:
        raise ValueError(
            f"isolate=True with page_size={spec.page_size} is not supported, since it would copy the pool of pages "
            "(accepted: contiguous keys and values); leave it out, or use backend='chunked', which reads no such slot."
        )
    unread = unread_slots(spec, layout)
    if unread is None:
        return attend

    slots = unread[:, None, :, None] if spec.kv_layout == "HND" else unread[..., None, None]

    def on_zeros(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        key, value = jax.tree.map(lambda x: jnp.where(slots, jnp.zeros((), x.dtype), x), (key, value))
        return attend(query, key, value, *rest)

    return on_zeros


def _refusals(name: str, takes: Takes, spec: AttentionSpec, mode: Mode) -> Iterator[str]:
    """One sentence for each thing that ``spec`` asks for and the backend ``name`` does not take."""

    def sentence(about: str, requested: str, accepted: str, instead: str = INSTEAD) -> str:
        return refusal(name, requested, takes.because.get(about, ""), accepted, instead)

    if mode not in takes.modes:
        yield sentence("mode", f"mode={mode!r}", _listed(takes.modes), "use mode='native'")
    if spec.dtype not in takes.dtypes:
        another = "use backend='standard'" if spec.dtype == "float64" else INSTEAD
        yield sentence("dtype", f"dtype={spec.dtype}", _listed(takes.dtypes), f"cast the inputs, or {another}")
    wide = takes.head_dims is not None and spec.head_dim not in takes.head_dims
    pad = f"pad the head dimension and give scale, or {INSTEAD}"
    if takes.head_dims is not None and wide:
        yield sentence("head_dims", f"head_dim={spec.head_dim}", _listed(takes.head_dims), pad)
    value_dim, taken = spec.value_head_dim, takes.value_head_dims
    reported = wide and value_dim == spec.head_dim
    if taken is not None and value_dim not in taken and not reported:
        yield sentence("value_head_dims", f"value_head_dim={value_dim}", _listed(taken), pad)
    for field in ("query_length", "key_value_length"):
        length = getattr(spec, field)
        if length < takes.least_length:
            accepted = f"{takes.least_length} or more"
            yield sentence("least_length", f"{field}={length}", accepted)
    for feature, request in features.REQUESTS.items():
        if request.of(spec) and feature not in takes.features:
            instead = f"give needs_grad=False, or {INSTEAD}" if feature == "gradient" else INSTEAD
            yield sentence(feature, request.describe(spec), request.accepted, instead)


def _listed(sizes: Sizes | tuple[str, ...]) -> str:
    """``sizes`` for a reader; a range is given by its ends and its step."""
    if not isinstance(sizes, range):
        return ", ".join(map(str, sizes))
    least, most = sizes[0], sizes[-1]
    multiple = f"multiples of {sizes.step} " if sizes.step > 1 else ""
    return f"{multiple}from {least} to {most}"
