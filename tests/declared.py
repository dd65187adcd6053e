"""Specs by their sizes, the plainest one, where each backend is at home, and a backend with an allow-list."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

from attnsuite.backends import AttentionSpec, Plan, Takes, Target
from attnsuite.backends.features import FEATURES, Mode
from attnsuite.backends.registry import BUILT_IN


def sized(
    T: int, S: int | None = None, *, B: int = 1, N: int = 2, K: int | None = None, H: int = 64, **options: Any
) -> AttentionSpec:
    """The spec of these sizes, called as in ``attnsuite.testing.cases``."""
    sizes = {"batch": B, "query_length": T, "key_value_length": S or T, "head_dim": H}
    return AttentionSpec(**sizes, num_heads=N, num_kv_heads=K or N, **options)


# Asks for nothing that a backend may lack but for one of two: is_causal is True or False.
PLAIN = sized(64, B=2, dtype="bfloat16", is_causal=True, needs_grad=False)
# The built-in backends that have to load and take the plain spec; a decoding backend takes one query token.
# flash_cpu needs llvmlite, which has no wheels for some machines.
DECODING = ("paged_attention", "ragged_paged_attention")
LOADING = tuple(
    name for name in BUILT_IN if name not in DECODING and (name != "flash_cpu" or importlib.util.find_spec("llvmlite"))
)
# Where each backend is at home.
HOME: dict[str, tuple[Target, Mode]] = {
    "cudnn": (Target("cuda", "h100"), "native"),
    "kvax": (Target("cuda", "h100"), "native"),
    "pallas_flash": (Target("cuda", "h100"), "native"),
    "splash": (Target("tpu", "v5e"), "native"),
    "tokamax_splash": (Target("tpu", "v5e"), "native"),
    "tokamax_triton": (Target("cuda", "h100"), "native"),
    "tpu_flash_attention": (Target("tpu", "v5e"), "native"),
}


def home(name: str) -> tuple[Target, Mode]:
    return HOME.get(name, (Target("cpu"), "native"))


@dataclasses.dataclass(frozen=True)
class Declared:
    """A backend whose allow-list is the test's own."""

    allowed: Takes
    name: str = "declared"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        return self.allowed

    def plan(self, *_: Any, **__: Any) -> Plan:
        raise NotImplementedError

    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True, eq=False)
class Asked(Declared):
    """A backend that declares everything, and answers with what the test gives it."""

    allowed: Takes = Takes(features=frozenset(FEATURES))  # noqa: RUF009 (a frozen value)
    answer: Callable[..., Any] = lambda *_: ()

    def refuses(self, spec: AttentionSpec, target: Target, mode: Mode, options: Any) -> Any:
        return self.answer(spec, target, mode, options)
