"""Named suites: tuples of cases, and the same from a TOML file (``suite_file.py``).

A suite is data. ``quick`` runs every exact backend in a few minutes on 2 cores; ``full`` is for accelerators and large
machines, and ``device`` for ten minutes on one.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from attnsuite.backends import names, registry
from attnsuite.sentences import nearest

from .cell import Case
from .errors import InputError
from .kinds import extensions
from .kinds.attention import OpCase
from .kinds.cache import CacheCase
from .kinds.caller import CallerCase
from .kinds.model import ModelCase
from .kinds.retrieval import RetrievalCase
from .kinds.serving import ServingCase
from .kinds.text import TextCase
from .suite_file import check_peers, read_suite_file

C = TypeVar("C", bound=Case)


@dataclasses.dataclass(frozen=True, slots=True)
class Suite:
    """A name and the cases under it; the names of the cases are unique.

    ``peers`` are measured beside the backends. With ``exact_only`` approximate backends are measured only where they
    are asked for: without calibration and controls, which their own suites have, their rows show what nobody would use.
    With ``all_cores`` each backend on a CPU is also measured with one device per core.
    """

    name: str
    cases: tuple[Case, ...]
    peers: tuple[str, ...] = ()
    all_cores: bool = False
    exact_only: bool = False

    def __post_init__(self) -> None:
        check_peers(self.peers)
        found = [case.name for case in self.cases]
        twice = sorted({name for name in found if found.count(name) > 1})
        if twice:
            raise InputError(f"suite {self.name} has two cases named {', '.join(twice)}; give each its own name.")
        if not self.cases:
            raise InputError(f"suite {self.name} has no cases; add a [[case]] table.")

    def backends(self) -> tuple[str, ...]:
        """The backends that are measured unless others are asked for."""
        return tuple(name for name in names() if registry.get(name).exact or not self.exact_only)


QUICK = Suite(
    "quick",
    (
        # 2048: standard and the oracle take four times as long at 4096, for the same answer.
        OpCase(kind="op_forward_backward", sequence=2048),
        OpCase(kind="op_forward", sequence=2048),
        OpCase(kind="op_forward_backward", sequence=1024, kv_heads=2, dtype="bfloat16"),
        OpCase(kind="op_forward", sequence=1024, kv_heads=2),
        OpCase(kind="op_forward", sequence=1024, kv_heads=2, dtype="bfloat16"),
        OpCase(kind="op_forward", sequence=2048, documents=8),
        OpCase(kind="op_decode", sequence=8192),
        OpCase(kind="op_decode", sequence=8192, kv_heads=2),
        ModelCase(kind="model_prefill", sequence=1024),
        ModelCase(kind="model_decode", sequence=1024),
        ModelCase(kind="model_train", sequence=512),
        TextCase(sequence=512, sequences=16),
        RetrievalCase(sequence=1024, prompts=4),
    ),
    exact_only=True,
)

_LONG: dict[str, Any] = {"kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}

# Ten minutes on somebody's device (``device_run.py``): whenever it is cut, what is done is of the most use so far. The
# kernels of GPUs, Kvax among them, take no float32.
DEVICE = Suite(
    "device",
    (
        *(case for case in QUICK.cases if isinstance(case, OpCase) and case.dtype == "bfloat16"),
        *(OpCase(kind=kind, sequence=16384, **_LONG) for kind in ("op_forward", "op_forward_backward")),
        *(OpCase(kind="op_decode", sequence=32768, **_LONG, kv_layout=kv_layout) for kv_layout in ("NHD", "HND")),
        *(case for case in QUICK.cases if isinstance(case, OpCase) and case.dtype != "bfloat16"),
        *(
            dataclasses.replace(case, dtype="bfloat16", name="")
            for case in QUICK.cases
            if isinstance(case, ModelCase | TextCase)
        ),
        *(case for case in QUICK.cases if not isinstance(case, OpCase)),
    ),
    exact_only=True,
)

FULL = Suite(
    "full",
    (
        *(
            OpCase(kind=kind, sequence=sequence, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
            for kind in ("op_forward_backward", "op_forward")
            for sequence in (512, 1024, 2048, 4096, 8192, 16384, 32768)
            for head_dim in (64, 128)
            for kv_heads in (8, 2)
            for dtype in ("float32", "bfloat16")
        ),
        *(
            OpCase(kind=kind, sequence=sequence, head_dim=128, kv_heads=2, dtype="bfloat16", documents=documents)
            for kind in ("op_forward_backward", "op_forward")
            for sequence in (4096, 16384)
            for documents in (4, 16)
        ),
        *(
            OpCase(kind="op_forward", sequence=sequence, head_dim=128, kv_heads=2, dtype="bfloat16", window_size=1024)
            for sequence in (4096, 16384)
        ),
        *(
            OpCase(
                kind="op_decode", sequence=sequence, head_dim=128, kv_heads=kv_heads, dtype=dtype, kv_layout=kv_layout
            )
            for sequence in (2048, 8192, 32768)
            for kv_heads in (8, 2)
            for dtype in ("float32", "bfloat16")
            for kv_layout in ("NHD", "HND")
        ),
        *(
            ModelCase(kind=kind, model=model, sequence=sequence, dtype="bfloat16")
            for kind in ("model_prefill", "model_decode", "model_train")
            for model in ("medium", "large")
            for sequence in (1024, 4096)
        ),
        *(
            ModelCase(kind=kind, model="medium", sequence=2048, batch=8, ragged=True, dtype="bfloat16")
            for kind in ("model_prefill", "model_decode")
        ),
        TextCase(sequence=512, sequences=64),
        TextCase(sequence=512, sequences=64, dtype="bfloat16"),
        *(RetrievalCase(sequence=sequence, prompts=64) for sequence in (1024, 4096)),
    ),
)


def _grid(lengths: tuple[int, ...], head_dims: tuple[int, ...]) -> tuple[OpCase, ...]:
    """Causal attention forward, and forward with backward, in every combination."""
    return tuple(
        OpCase(kind=kind, sequence=sequence, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        for sequence in lengths
        for head_dim in head_dims
        for kind in ("op_forward_backward", "op_forward")
        for dtype in ("float32", "bfloat16")
        for kv_heads in (8, 2)
    )


CPU_SPEED = Suite(
    "cpu-speed",
    (
        *_grid((512, 1024, 2048, 4096), (64,)),
        *_grid((512, 2048), (128,)),
        OpCase(kind="op_forward", sequence=4096, window_size=512),
        OpCase(kind="op_forward", sequence=4096, documents=8),
        OpCase(kind="op_forward_backward", sequence=4096, documents=8),
        *(
            OpCase(
                kind="op_decode",
                sequence=sequence,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                kv_layout=kv_layout,
            )
            for kv_layout in ("NHD", "HND")
            for dtype in ("float32", "bfloat16")
            for head_dim in (64, 128)
            for kv_heads in (8, 2)
            for sequence in (8192, 32768)
        ),
        *(
            ModelCase(kind=kind, model=model, sequence=1024 if kind == "model_train" else 2048)
            for model in ("small", "medium")
            for kind in ("model_prefill", "model_train", "model_decode")
        ),
        ModelCase(kind="model_decode", model="small", sequence=2048, dtype="bfloat16"),
        *_grid((8192,), (64,)),
        OpCase(kind="op_forward", sequence=8192, window_size=512),
        OpCase(kind="op_forward", sequence=8192, documents=8),
        *_grid((4096,), (128,)),
        *(OpCase(kind=kind, sequence=16384) for kind in ("op_forward", "op_forward_backward")),
    ),
    peers=("jax_nn", "torch", "torch_unthrottled", "transformers", "transformers_unthrottled", "tokamax"),
    all_cores=True,
)

# What a model loses in a cache of fewer bits, and continuous batching: two minutes on 2 cores.
SERVING = Suite("serving", (CacheCase(), ServingCase()), exact_only=True)

_STEP: dict[str, Any] = {"sequence": 8192, "query_length": 1}
_CACHES: tuple[dict[str, Any], ...] = ({"page_size": 16}, {"kv_dtype": "int8"})

# The programs that people write, against what JAX or flax does for the same call.
CALLER = Suite(
    "caller",
    (
        CallerCase(way="eager", sequence=256, operand="causal"),
        CallerCase(way="eager", sequence=256, query_length=1, operand="lengths"),
        CallerCase(way="jit", sequence=2048, operand="causal"),
        CallerCase(way="jit", sequence=2048, operand="causal", gradient=True),
        *(
            CallerCase(way="jit", sequence=2048, operand=operand, gradient=gradient)
            for operand in ("mask", "key_mask", "bias")
            for gradient in (False, True)
        ),
        CallerCase(way="jit", sequence=2048, operand="learned_bias", gradient=True),
        *(
            CallerCase(way="jit", **_STEP, kv_heads=kv_heads, dtype=dtype, kv_layout=kv_layout)
            for kv_heads in (8, 2)
            for dtype in ("float32", "bfloat16")
            for kv_layout in ("NHD", "HND")
        ),
        *(
            CallerCase(way="jit", **_STEP, kv_heads=2, dtype="bfloat16", kv_layout=kv_layout, **cache)
            for cache in _CACHES
            for kv_layout in ("NHD", "HND")
        ),
        CallerCase(way="vmap", **_STEP, batch=4, operand="lengths"),
        CallerCase(way="nnx", sequence=4096, query_length=1),
        CallerCase(way="linen", sequence=4096, query_length=1),
        CallerCase(way="layers", sequence=512, layers=32, operand="causal", gradient=True),
    ),
)

_ADDED = (Suite(name, **fields) for added in extensions().values() for name, fields in added.suites.items())
SUITES = {suite.name: suite for suite in (QUICK, DEVICE, FULL, CPU_SPEED, CALLER, *_ADDED, SERVING)}


def find_suite(name: str) -> Suite:
    """The named suite, or the one in a TOML file. Raises InputError naming those that exist.

    >>> find_suite("quick").cases[0].name
    'forward-backward-s2048-h8k8-d64-f32'
    """
    if name in SUITES:
        return SUITES[name]
    if name.endswith(".toml"):
        return _load(Path(name))
    known = f"use {', '.join(SUITES)}, or the path of a .toml file."
    raise InputError(f"suite {name!r} is not known; {known}{nearest(name, SUITES)}")


def select(cases: Sequence[C], patterns: Sequence[str]) -> tuple[C, ...]:
    """The cases whose name matches any of the glob patterns. Raises InputError for a pattern that matches none."""
    known = [case.name for case in cases]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise InputError(f"no case matches {pattern!r}; the cases are {', '.join(known)}.{nearest(pattern, known)}")
    return tuple(case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns))


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` (from 1) of ``count`` parts of the cases: every ``count``-th case, whole."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def select(self, cases: Sequence[C]) -> tuple[C, ...]:
        """The cases of this part. Raises InputError if there are more parts than cases."""
        if self.count > len(cases):
            raise InputError(f"--shard {self} is of {len(cases)} cases; use at most {len(cases)} shards.")
        return tuple(cases[self.number - 1 :: self.count])


def parse_shard(text: str) -> Shard:
    """The shard ``i/n``, with i from 1 to n. Raises InputError.

    >>> parse_shard("2/3").select("abcde")
    ('b', 'e')
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    shard = Shard(int(match[1]), int(match[2])) if match else Shard(0, 0)
    if not 1 <= shard.number <= shard.count:
        raise InputError(f"--shard {text!r} must be i/n with i from 1 to n, such as 1/4.")
    return shard


def _load(path: Path) -> Suite:
    read, cases = read_suite_file(path)
    try:
        return Suite(read.name or path.stem, cases, read.peers, read.all_cores)
    except InputError as error:
        raise InputError(f"suite file {path}: {error}") from error
