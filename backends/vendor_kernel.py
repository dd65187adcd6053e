"""The shell around one kernel of JAX, tokamax or NVIDIA: its device, its package, its options, and the plan of a call.

A kernel's own file has what differs: the allow-list, the reasons that an allow-list cannot express, and the function
that makes a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from importlib import util
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from .contract import Plan, check_options
from .devices import Target
from .features import Mode, Options, Takes
from .layout import Layout
from .spec import AttentionSpec

Platform = Literal["tpu", "cuda"]
_DEVICES: dict[Platform, str] = {"tpu": "TPUs", "cuda": "NVIDIA GPUs"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VendorKernel:
    """A backend that is one kernel of somebody else.

    ``make(spec, layout, target, mode, options)`` makes the plan. ``reasons(spec, target, mode, options)`` gives what
    ``allowed`` cannot express. ``platform`` is the only one that the kernel runs on natively; None where ``reasons``
    judge the device. ``module`` is that of JAX which has the kernel. ``missing(mode)`` says why an optional package
    cannot be used; it is asked on the present device, and in modes that run on the host. ``options`` are those of a
    plan, with their meanings; ``check(spec, target, options)`` raises ValueError for values that do not fit.
    """

    name: str
    allowed: Takes
    make: Callable[[AttentionSpec, Layout, Target, Mode, dict[str, Any]], Plan]
    reasons: Callable[[AttentionSpec, Target, Mode, Mapping[str, Any]], Iterable[str]] = lambda *_: ()
    platform: Platform | None = None
    module: str | None = None
    missing: Callable[[Mode], tuple[str, ...]] = lambda _: ()
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    check: Callable[[AttentionSpec, Target, Mapping[str, Any]], Any] = lambda *_: None
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """The allow-list, the same on every device."""
        return self.allowed

    def refuses(self, spec: AttentionSpec, target: Target, mode: Mode, options: Options) -> tuple[str, ...]:
        """A JAX without the kernel, another platform, what the kernel cannot do, and a missing package."""
        found = list[str]()
        if self.module is not None and not _is_there(self.module):
            found += [f"this version of jax no longer has {self.module}, which {self.name} is; use backend='chunked'."]
        if self.platform not in (None, target.platform) and mode != "interpret":
            found.append(
                f"{self.name} is a kernel for {_DEVICES[self.platform]}, not for {target}; use backend='chunked', "
                "which runs on every platform, or mode='interpret' to check its numbers."
            )
        found += self.reasons(spec, target, mode, options or {})
        return tuple(found) if found or not (target.present or mode != "native") else self.missing(mode)

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """Prepare one forward pass.

        Raises ValueError for an option that the kernel does not have, and ImportError, with the reason, where its
        package cannot be used here.
        """
        checked = check_options(self.name, options, self.options)
        self.check(spec, target, checked)
        if why_not := self.missing(mode):
            raise ImportError(" ".join(why_not))
        return self.make(spec, layout, target, mode, checked)


def round_up(length: int, step: int) -> int:
    """``length`` or the next multiple of ``step``."""
    return -(-length // step) * step


def padded(x: Array, length: int, axis: int = 1, fill: float = 0) -> Array:
    """``x`` with ``fill`` behind its end, up to ``length`` along ``axis``."""
    behind = [(0, length - size if each == axis else 0) for each, size in enumerate(x.shape)]
    return jnp.pad(x, behind, constant_values=fill)


def _is_there(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package that it was in
        return False
