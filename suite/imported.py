"""``attnsuite tune --import``: tables of block sizes that others measured, as choices of a policy.

Formats: the JSON of tokamax's wheel (``data/autotuning/DEVICE/KERNEL.json``), and the Python tables of ragged paged
attention in JAX and tpu-inference (``TUNED_BLOCK_SIZES``). The latter are read as literals; nothing of a file is
executed. An entry is taken where this project calls the kernel that was measured; every other one is refused, with the
reason. :func:`as_tokamax` writes what ``tune`` measured in tokamax's format.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnsuite.backends import AttentionSpec
from attnsuite.backends.choices import Choice, Source, lookup_key, problem_of

from .errors import InputError, as_input
from .kinds.attention_call import OpCase
from .kinds.tuning_case import TUNING
from .record import Record
from .typed import parse_json

FORMATS = "tokamax's data/autotuning/DEVICE/KERNEL.json, or a Python file with a literal TUNED_BLOCK_SIZES"
_LARGEST = 2**26  # bytes of a file
_DEVICES = {"tpu7x": "tpu7x", "tpu_v5": "v5p", "tpu_v5_lite": "v5e", "tpu_v6_lite": "v6e"}
_FORWARD, _BACKWARD = "pallas_mosaic_tpu_flash_attention", "pallas_mosaic_tpu_flash_attention_vjp"
TOKAMAX = f"{_FORWARD}.json"
_SPLASH = "pallas_mosaic_tpu_splash_attention"
_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
# Of a configuration: the fields that become options, and those that this project's call has no option for.
_OPTIONS = {"block_q": "block_q", "block_kv": "block_kv", "block_kv_compute": "block_kv_compute"}
_BACKWARD_OPTIONS = {
    "block_q_dkv": "block_q_backward",
    "block_kv_dkv": "block_kv_backward",
    "block_kv_dkv_compute": "block_kv_compute_backward",
}
_LEFT_OUT = frozenset({
    "q_layout", "k_layout", "v_layout", "use_experimental_scheduler", "use_base2_exp", "dropout_block_q",
    "dropout_block_kv", "qk_diag_skip", "qk_diag_grid", "sv_diag_skip", "dq_reduction_steps",
})  # fmt: skip
# Of a problem: the values that this project's entries describe. A field with another value is refused.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "precision": ([["DEFAULT", "DEFAULT"], ["DEFAULT", "DEFAULT"]],), "logits_dtype": ("float32",), "bias": (None,),
    "dropout_mask": (None,), "dropout_rate": (0.0,), "paging_info": (None,), "q_indices": (None,),
    "k_indices": (None,), "normalize_output": (True,), "return_residuals": (False,), "segment_ids": (None,),
    "sinks": (None,), "is_mqa": (False,), "prng_key": (None,),
}  # fmt: skip
_READ = frozenset({
    "q", "k", "v", "mask", "logits_soft_cap", "attn_logits_soft_cap", "logits_scale", "mask_value", "residuals", "out",
    "dout",
})  # fmt: skip
_PLAIN_MASK = ("bool_mask", "q_start", "q_end", "k_start", "k_end")
_SAME = ("is_causal", "local_window_size", "chunk_size", "mask_function", "logits_soft_cap")  # of a spec
_Found = tuple[AttentionSpec, Choice]


class _RefusedError(Exception):
    """An entry that cannot be taken, with the reason."""


@dataclasses.dataclass(slots=True)
class Imported:
    """The entries of one file: what is taken, how often each reason refused one, and what another entry says too."""

    path: Path
    source: str = ""
    device: str = ""
    entries: list[Choice] = dataclasses.field(default_factory=list)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    contradict: list[str] = dataclasses.field(default_factory=list)
    repeated: int = 0

    @property
    def total(self) -> int:
        """How many entries the file has."""
        return len(self.entries) + self.repeated + self.refused.total() + len(self.contradict)


def import_tables(paths: Sequence[Path]) -> list[Imported]:
    """The tables in these files. Of two entries for one problem with different options, the first one holds.

    Raises InputError for a file that cannot be read or whose format is unknown.
    """
    known: dict[str, tuple[Choice, str]] = {}
    files = []
    for path in paths:
        found = Imported(path)
        for spec, entry in _entries(path, found):
            about = {"backend": entry.backend, "device": found.device, **lookup_key(spec), "only": entry.only}
            other, source = known.setdefault(key := json.dumps(about), (entry, found.source))
            if other is entry:
                found.entries.append(entry)
            elif other.options == entry.options:
                found.repeated += 1
            else:
                found.contradict.append(f"{key}: {entry.options}, and {other.options} in {source}")
        files.append(found)
    return files


def sources_of(files: Sequence[Imported]) -> tuple[Source, ...]:
    """The choices of these files. Raises InputError if no entry was taken."""
    if not any(found.entries for found in files):
        reasons = next((reason for found in files for reason, _ in found.refused.most_common(1)), "they have none")
        raise InputError(f"no entry of these files can be used: {reasons}.")
    return tuple(
        Source(name=found.source, device=found.device, imported=True, choices=tuple(found.entries),
               details={"contradict": found.contradict})
        for found in files if found.entries
    )  # fmt: skip


def summary(files: Sequence[Imported]) -> Iterator[str]:
    """A line per file, and a line per reason."""
    for found in files:
        match, against = len(found.entries) + found.repeated, len(found.contradict)
        counts = f"{match} match, {found.refused.total()} refused, {against} contradict"
        yield f"{found.path}: {found.total} entries, {counts}"
        yield from (f"  refused {count}: {reason}" for reason, count in found.refused.most_common())
        yield from (f"  contradicts: {line}" for line in found.contradict)


def _entries(path: Path, found: Imported) -> Iterator[_Found]:
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError(f"--import {path} has more than {_LARGEST >> 20} MiB, and is no table.")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"--import {path} cannot be read ({error.strerror}); give {FORMATS}.") from error
    digest = hashlib.sha256(data).hexdigest()[:12]
    read = {".json": _tokamax, ".py": _ragged}.get(path.suffix)
    if read is None:
        raise InputError(f"--import {path} is of no known format; give {FORMATS}.")
    yield from read(path, data, found, digest)


def _tokamax(path: Path, data: bytes, found: Imported, digest: str) -> Iterator[_Found]:
    kernel, folder = path.stem, path.absolute().parent.name
    kernels = {name + vjp for name in (_FORWARD, _SPLASH) for vjp in ("", "_vjp")}
    if kernel not in kernels or folder not in _DEVICES:
        raise InputError(
            f"--import {path}: {folder}/{kernel}.json is not accepted; this project calls {', '.join(sorted(kernels))} "
            f"and reads them in the folders {', '.join(sorted(_DEVICES))}."
        )
    with as_input(f"--import {path} is no table of tokamax: ", "."):
        table = parse_json(data)
        if not isinstance(table, dict) or not all(isinstance(configs, dict) for configs in table.values()):
            raise ValueError("it is no object of objects")
    found.source, found.device = f"tokamax, {folder}/{kernel}.json (SHA-256 {digest})", f"tpu:{_DEVICES[folder]}"
    for problem, configs in table.items():
        try:
            spec = _problem(_object(problem), backward=kernel.endswith("_vjp"))
            if len(configs) != 1:
                raise _RefusedError("it has no configuration" if not configs else "it has several configurations")  # noqa: TRY301
            options, left_out = _options(_object(next(iter(configs))), backward=kernel.endswith("_vjp"))
        except (_RefusedError, ValueError) as reason:  # ValueError: of AttentionSpec
            found.refused[str(reason).rstrip(".")] += 1
        else:
            only = {name: getattr(spec, name) for name in _SAME}
            yield spec, _choice(spec, "tokamax_splash", options, only, left_out=left_out)


def _choice(spec: AttentionSpec, backend: str, options: Any, only: Mapping[str, Any], **details: Any) -> Choice:
    return Choice(
        case=backend, problem=problem_of(spec), backend=backend, options=options, only=dict(only), details=details
    )


def _object(text: str) -> dict[str, Any]:
    try:
        data = parse_json(text.encode())
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise _RefusedError("a key is no JSON object")
    return data


def _problem(entry: Mapping[str, Any], *, backward: bool) -> AttentionSpec:
    """The problem of an entry. Raises _RefusedError, and ValueError for one that no spec can say."""
    for name, value in entry.items():
        if name not in _READ and name not in _PLAIN:
            raise _RefusedError(f"the field {name!r} is unknown")
        if name in _PLAIN and value not in _PLAIN[name]:
            raise _RefusedError(f"{name} is not {' or '.join(map(repr, _PLAIN[name]))}")
    q, k, v = (_array(entry.get(name)) for name in "qkv")
    if q[0] not in _DTYPES or {k[0], v[0]} != {q[0]}:
        raise _RefusedError(f"the dtypes are {q[0]}, {k[0]} and {v[0]}")
    if len(q[1]) == 4:  # batch, length, heads, dim
        (batch, rows, heads, dim), (_, keys, kv_heads, _) = q[1], k[1]
    else:  # heads, length, dim
        batch, (heads, rows, dim), (kv_heads, keys, _) = 1, q[1], k[1]
    return AttentionSpec(
        batch=batch, query_length=rows, key_value_length=keys, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        value_head_dim=v[1][-1], dtype=_DTYPES[q[0]], is_causal=_is_causal(entry.get("mask")), needs_grad=backward,
        logits_soft_cap=entry.get("logits_soft_cap", entry.get("attn_logits_soft_cap")),
    )  # fmt: skip


def _array(text: Any) -> tuple[str, tuple[int, ...]]:
    match = re.fullmatch(r"(\w+)\[(\d{1,9}(?:,\d{1,9}){2,3})\]", text) if isinstance(text, str) else None
    if match is None:
        raise _RefusedError("an array is not of three or four axes")
    return match[1], tuple(map(int, match[2].split(",")))


def _is_causal(mask: Any) -> bool:
    if not isinstance(mask, dict) or set(mask) - {*_PLAIN_MASK, "causal_mask", "is_causal"}:
        raise _RefusedError("the mask has unknown fields")
    if any(mask.get(name) is not None for name in _PLAIN_MASK):
        raise _RefusedError("the mask is an array or a range")
    if mask.get("causal_mask") not in (None, {"offset": 0, "window_size": None}):
        raise _RefusedError("the causal mask has an offset or a window")
    return bool(mask.get("causal_mask") or mask.get("is_causal"))


def _options(config: Mapping[str, Any], *, backward: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """The options of this project, and the fields that are not followed. Raises _RefusedError."""
    names = _BACKWARD_OPTIONS if backward else _OPTIONS
    if unknown := sorted(set(config) - set(names) - _LEFT_OUT):
        raise _RefusedError(f"the option {unknown[0]!r} is unknown")
    options = {option: config.get(name) for name, option in names.items()}
    if not all(isinstance(size, int) and size > 0 and size % 128 == 0 for size in options.values()):
        raise _RefusedError("a block size is no multiple of 128")
    return options, {name: value for name, value in config.items() if name in _LEFT_OUT}  # pyright: ignore[reportReturnType]


def _ragged(path: Path, data: bytes, found: Imported, digest: str) -> Iterator[_Found]:
    """Tables of ragged paged attention: only those of version 2 are of a kernel that this project calls (JAX's)."""
    table = _literal(path, data)
    found.source, found.device = f"{'/'.join(path.absolute().parts[-4:])} (SHA-256 {digest})", "tpu:v6e"
    for device, entries in table.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(key, tuple):
                found.refused["it is of version 3 of ragged paged attention, which no backend here calls"] += _leaves(
                    value
                )
            elif len(key) == 7:
                found.refused["it is of sglang-jax's kernel, whose cache is fused; no backend here calls it"] += 1
            elif device != "TPU v6":
                found.refused[f"{device!r} names more than one kind of TPU, or one that is unknown"] += 1
            else:
                try:
                    yield _ragged_entry(key, value)
                except (_RefusedError, ValueError) as reason:
                    found.refused[str(reason).rstrip(".")] += 1


def _ragged_entry(key: tuple[Any, ...], value: Any) -> _Found:
    sizes = (*key[2:], *value) if isinstance(value, tuple) else ()
    if len(sizes) != 8 or not all(isinstance(size, int) and 0 < size < 2**31 for size in sizes):
        raise _RefusedError("its sizes are not eight positive integers")
    if key[:2] != ("bfloat16", "bfloat16"):
        raise _RefusedError(f"its dtypes are {key[0]} and {key[1]}")
    heads, kv_heads, head_dim, page, tokens, slots, pages_per_block, queries_per_block = sizes
    only = {"heads_per_block": heads, "kv_heads_per_block": kv_heads, "page": page, "tokens": tokens, "slots": slots}
    spec = AttentionSpec(
        batch=1, query_length=tokens, key_value_length=slots, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, dtype="bfloat16", needs_grad=False,
    )  # fmt: skip
    options = {"pages_per_block": pages_per_block, "queries_per_block": queries_per_block}
    return spec, _choice(spec, "ragged_paged_attention", options, only)


def _literal(path: Path, data: bytes) -> dict[str, Any]:
    try:
        body = ast.parse(data.decode()).body
        values = [
            node.value
            for node in body
            if isinstance(node, ast.Assign)
            and [getattr(name, "id", "") for name in node.targets] == ["TUNED_BLOCK_SIZES"]
        ]
        table = ast.literal_eval(values[0]) if values else None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"--import {path} cannot be read as a table ({error}); give {FORMATS}.") from error
    if not isinstance(table, dict):
        raise InputError(f"--import {path} has no literal TUNED_BLOCK_SIZES; give {FORMATS}.")
    return table


def _leaves(value: Any) -> int:
    return sum(map(_leaves, value.values())) if isinstance(value, dict) else 1


def as_tokamax(records: Sequence[Record]) -> str | None:
    """What ``tune`` measured of tokamax's splash kernel, forward, as tokamax's cache has it; None if there is nothing.

    Every candidate that was timed is a configuration. tokamax takes the fastest.
    """
    table: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.requested != "tokamax_splash" or record.mode == "compile" or record.facts is None:
            continue
        case = TUNING.call(record.problem)
        timed = [trial for trial in record.facts.tried if trial.samples and set(_OPTIONS) <= set(trial.options)]
        plain = case == dataclasses.replace(
            case, window_size=None, chunk_size=None, mask="", soft_cap=None, documents=1
        )
        if plain and case.dtype == "bfloat16" and not case.needs_grad and timed:
            table[json.dumps(_arguments(case), separators=(",", ":"))] = {
                json.dumps(_configuration(trial.options), separators=(",", ":")): _times(trial.samples)
                for trial in timed
            }
    return json.dumps(table, indent=2) + "\n" if table else None


def _arguments(case: OpCase) -> dict[str, Any]:
    query = f"bf16[{case.batch},{case.sequence},{case.heads},{case.head_dim}]"
    key, value = (
        f"bf16[{case.batch},{case.sequence},{case.kv_heads},{dim}]"
        for dim in (case.head_dim, case.value_head_dim or case.head_dim)
    )
    mask = dict.fromkeys(_PLAIN_MASK) | {"causal_mask": {"offset": 0, "window_size": None} if case.causal else None}
    defaults = {name: _PLAIN[name][0] for name in _PLAIN}
    return {
        "q": query, "k": key, "v": value, "precision": defaults["precision"], "logits_dtype": "float32",
        "logits_scale": case.head_dim**-0.5, "bias": None, "logits_soft_cap": None, "mask": mask,
        **{name: defaults[name] for name in ("dropout_mask", "dropout_rate", "paging_info", "q_indices", "k_indices")},
        "normalize_output": True, "return_residuals": False,
    }  # fmt: skip


def _configuration(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the configuration that this project's call of the kernel uses, layouts with the head dim minor."""
    sizes = {name: options[name] for name in _OPTIONS}
    return sizes | dict.fromkeys(("q_layout", "k_layout", "v_layout"), 1) | {
        "use_experimental_scheduler": False, "use_base2_exp": False,
    }  # fmt: skip


def _times(samples: Sequence[float]) -> dict[str, Any]:
    milliseconds = [1e3 * sample for sample in samples]
    return {"compile_time_ms": 0.0, "lower_time_ms": 0.0, "evaluation_times_ms": milliseconds, "metadata": {},
            "peak_memory_mb": None}  # fmt: skip
