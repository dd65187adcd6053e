"""The plainest spec, where each backend is at home, and a backend whose allow-list is the test's own."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from attnsuite.backends import AttentionSpec, Plan, Takes, Target
from attnsuite.backends.features import Mode
from attnsuite.backends.registry import BUILT_IN

# Asks for nothing that a backend may lack but for one of two: is_causal is True or False.
PLAIN = AttentionSpec(
    batch=2,
    query_length=64,
    key_value_length=64,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    is_causal=True,
    needs_grad=False,
)
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
