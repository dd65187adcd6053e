"""The request of ``attnsuite compile``, checked: its cases, models, backends and devices exist."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnsuite.backends import Target, names
from attnsuite.models import PRESETS

from .absent import topologies
from .absent.programs import model_config
from .compile_run import CompileGrid
from .errors import InputError
from .grid.running import Limits
from .kinds.attention import OpCase
from .kinds.model import ModelCase
from .named_model import absolute
from .names import is_whole, names_of
from .store import RECORDS
from .suites import Suite, find_suite, select
from .user_function import known_row

# Problems of a present transformer: grouped queries, head dim 128, bfloat16, from short to very long.
COMPILE = Suite(
    "compile",
    (
        OpCase(kind="op_forward_backward", sequence=4096, heads=32, head_dim=128, dtype="bfloat16"),
        OpCase(kind="op_forward_backward", sequence=4096, heads=32, head_dim=128, dtype="float32"),
        OpCase(kind="op_forward_backward", sequence=8192, heads=32, head_dim=128, dtype="bfloat16", documents=8),
        OpCase(kind="op_forward", sequence=16384, heads=32, head_dim=128, dtype="bfloat16", window_size=1024),
        *(
            OpCase(kind="op_forward", sequence=sequence, heads=32, head_dim=128, dtype="bfloat16")
            for sequence in (8192, 32768, 131072)
        ),
        OpCase(kind="op_forward", sequence=1000, heads=32, head_dim=256, dtype="bfloat16", causal=False),
        OpCase(  # the cache of models.KVCache, under the name that its pages have
            kind="op_decode",
            name="decode-s32768-h32k8-d128-b8-bf16",
            sequence=32768,
            heads=32,
            head_dim=128,
            dtype="bfloat16",
            batch=8,
            kv_layout="HND",
        ),
    ),
)

COMPILED_KERNELS = ("xla", "pallas")  # of Kascade; its native kernels are for the processor at hand
_PHASES = {"prefill": "model_prefill", "train": "model_train", "decode": "model_decode"}
_DEFAULT_LENGTH = "2048"
_BATCH = "batch"  # the word of --longest that asks for the largest batch


@dataclasses.dataclass(frozen=True, slots=True)
class ModelWords:
    """The flags about models, as they were given."""

    models: str | None
    lengths: str | None
    phases: str | None
    batch: int
    dtype: str
    longest: str | None


def compile_request(
    *,
    suite: str | None,
    cases: str | None,
    backends: str | None,
    targets: str | None,
    models: ModelWords,
    out: Path,
    limits: Limits,
    cache: Path | None,
    command: Sequence[str],
    kernels: str | None = None,
    schedule: bool = False,
) -> CompileGrid:
    """The request of these flags. Raises InputError with one sentence for a name that does not exist."""
    if (out / RECORDS).exists():
        raise InputError(
            f"{out} already has records; choose another --out (what was compiled before is not compiled again)."
        )
    if schedule and models.models is not None:
        raise InputError("--schedule is about attention calls; leave out --model.")
    cells = _cells(models)
    searches, batch_searches = _searches(models, cells)
    chosen = names() if backends is None else names_of(backends, "--backends")
    devices = tuple(map(_known_target, names_of(targets or ",".join(topologies.KINDS), "--targets")))
    return CompileGrid(
        cases=(*_ops(suite, cases, wanted=models.models is None), *cells),
        searches=searches,
        batch_searches=batch_searches,
        backends=tuple(known_row(name) for name in chosen),
        targets=devices,
        out=out,
        limits=limits,
        cache=cache or default_cache(),
        command=tuple(command),
        kernels=() if kernels is None else tuple(_known_kernel(name) for name in names_of(kernels, "--kernel")),
        schedule=schedule,
    )


def default_cache() -> Path:
    """Where the answers of the compilers are kept if ``--cache`` says nothing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnsuite" / "compile"


def _ops(suite: str | None, patterns: str | None, *, wanted: bool) -> tuple[OpCase | ModelCase, ...]:
    if patterns is None and suite is None and not wanted:
        return ()
    found = COMPILE if suite in (None, COMPILE.name) else find_suite(suite)
    chosen = found.cases if patterns is None else select(found.cases, names_of(patterns, "--cases"))
    kept = tuple(_one_step(case) for case in chosen if isinstance(case, OpCase | ModelCase))
    if not kept:
        raise InputError(f"suite {found.name} has no case that can be compiled without data; use op and model cases.")
    return kept


def _one_step(case: OpCase | ModelCase) -> OpCase | ModelCase:
    """A decode case with one token, as it is compiled. Raises InputError for an unknown model."""
    if isinstance(case, OpCase):
        return case
    model_config(case)
    return dataclasses.replace(case, new_tokens=1)


def _cells(words: ModelWords) -> tuple[ModelCase, ...]:
    """Cases of the models at the given lengths."""
    if words.models is None:
        for flag, given in (("--seq-lens", words.lengths), ("--phases", words.phases), ("--longest", words.longest)):
            if given is not None:
                raise InputError(f"{flag} is about models; add --model, such as --model llama-3.2-1b.")
        return ()
    phases = names_of(words.phases or ",".join(_PHASES), "--phases")
    lengths = [_length(text) for text in names_of(words.lengths or _DEFAULT_LENGTH, "--seq-lens")]
    return tuple(
        dataclasses.replace(base, sequence=length, name="") for base in _bases(phases, words) for length in lengths
    )


def _searches(words: ModelWords, cells: tuple[ModelCase, ...]) -> tuple[tuple[ModelCase, ...], tuple[ModelCase, ...]]:
    """Cases whose longest length is to be searched, and those of ``cells`` whose largest batch is."""
    asked = names_of(words.longest, "--longest") if words.longest is not None else ()
    phases = [name for name in asked if name != _BATCH]
    return _bases(phases, words) if phases else (), cells if _BATCH in asked else ()


def _bases(phases: Sequence[str], words: ModelWords) -> tuple[ModelCase, ...]:
    dtype: Any = words.dtype  # the case checks it
    kinds: list[Any] = [_known(_PHASES, name, "phase") for name in phases]
    bases = [
        ModelCase(kind=kind, model=model, batch=words.batch, dtype=dtype, new_tokens=1)
        for model in (name if name in PRESETS else absolute(name) for name in names_of(words.models or "", "--model"))
        for kind in kinds
    ]
    for base in bases:
        model_config(base)
    return tuple(bases)


def _known_target(name: str) -> Target:
    if name.partition(":")[0] not in topologies.KINDS:
        raise InputError(
            f"target {name!r} cannot be compiled for; use {', '.join(topologies.KINDS)}, or a slice such as v5e:4x4."
        )
    try:
        return Target.named(name)
    except ValueError as error:
        raise InputError(str(error)) from error


def _known_kernel(name: str) -> str:
    if name not in COMPILED_KERNELS:
        raise InputError(f"--kernel {name!r} is not compiled for other devices; use {', '.join(COMPILED_KERNELS)}.")
    return name


def _known(table: dict[str, str], name: str, what: str) -> str:
    if name not in table:
        raise InputError(f"{what} {name!r} is not known; use {', '.join(table)}.")
    return table[name]


def _length(text: str) -> int:
    if not is_whole(text) or int(text) < 1:
        raise InputError(f"--seq-lens {text!r} is not a length; give integers of at least 1, separated by commas.")
    return int(text)
