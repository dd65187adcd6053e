"""Implementations outside this project, measured on the same problems beside the backends.

A peer is a comparator, not a backend: no backend falls back to it, and no model can use it. It runs in a cell of its
own, on the same arrays, in the same rounds, and is judged by the same oracle. A peer is imported only in its cell's
process. A peer whose package is missing, or that does not take the problem, is refused with the reason.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from importlib import util
from pathlib import Path

from attnsuite.backends.devices import cpu_name

from ..cell import Case
from ..measure.program import Draw, Program
from . import mkl

_MASKS = frozenset({"window_size", "documents"})
# Fields by which a case asks for more than causal attention; their defaults ask for nothing.
_OPTIONS = ("window_size", "chunk_size", "mask", "soft_cap", "documents", "value_head_dim", "ragged")


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """An implementation to compare with: in ``module`` (of this package) a ``function(case) -> Program``.

    ``masks`` are the options of an op case that it takes besides causal. ``unthrottled`` lifts the vendor
    check of the math library that it computes with (``mkl.py``).
    """

    name: str
    module: str
    packages: tuple[str, ...]
    masks: frozenset[str] = frozenset()
    unthrottled: bool = False
    function: str = "program"


_LLAMA = ("torch", "transformers")
_ALL = (
    Peer("jax_nn", "jax_attention", (), _MASKS, function="jax_nn"),
    Peer("tokamax", "jax_attention", ("tokamax",), function="chunked_tokamax"),
    Peer("torch", "torch_sdpa", ("torch",), _MASKS),
    Peer("torch_unthrottled", "torch_sdpa", ("torch",), _MASKS, unthrottled=True),
    Peer("transformers", "torch_llama", _LLAMA),
    Peer("transformers_unthrottled", "torch_llama", _LLAMA, unthrottled=True),
)
PEERS = {peer.name: peer for peer in _ALL}


def refusals(name: str, case: Case) -> tuple[str, ...]:
    """Every reason why the peer cannot be measured on this machine in this case; nothing is imported."""
    peer, reasons = PEERS[name], []
    missing = [package for package in peer.packages if util.find_spec(package) is None]
    if missing:
        reasons.append(f"{name}: {' and '.join(missing)} not installed; pip install '.[peers]'.")
    if peer.unthrottled:
        reasons += [f"{name}: {reason}" for reason in mkl.refusals(cpu_name())]
    fields = dataclasses.asdict(case)  # pyright: ignore[reportArgumentType]  (every case is a dataclass)
    takes = "prompts of one length" if "ragged" in fields else "causal and full attention"
    takes += f" and {', '.join(sorted(peer.masks))}" if peer.masks else ""
    for field in dataclasses.fields(case):  # pyright: ignore[reportArgumentType]
        value = fields[field.name]
        same = field.name == "value_head_dim" and value == fields.get("head_dim")
        if field.name in _OPTIONS and value != field.default and not same and field.name not in peer.masks:
            reasons.append(f"{name}: {field.name}={value} is outside of what is compared with it; it takes {takes}.")
    # The peers count the positions of queries from 0: a decode step's window would lie at the first key.
    if "window_size" in peer.masks and fields["window_size"] is not None and case.is_decode:  # pyright: ignore[reportAttributeAccessIssue]
        reasons.append(f"{name}: window_size={fields['window_size']} is compared in forward and backward passes alone.")
    return tuple(reasons)


def worker_environment(name: str, folder: Path) -> Mapping[str, str]:
    """Environment variables of the peer's process. Files that they name are in ``folder``."""
    return mkl.environment(folder) if PEERS[name].unthrottled else {}


def program(name: str, case: Case, draw: Draw | None = None) -> Program:
    """The peer's program of ``case``; of an attention call also with the inputs of ``draw``."""
    peer = PEERS[name]
    make = getattr(importlib.import_module(f"attnsuite.suite.peers.{peer.module}"), peer.function)
    return make(case) if draw is None else make(case, draw)
