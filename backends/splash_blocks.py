"""The block sizes of a splash kernel: read from options and tables, tried by ``attnsuite tune``, and counted.

For JAX's splash and tokamax's alike; no kernel is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import tuned
from .contract import AttentionSpec, check_options
from .devices import Target
from .splash_mask import Masking, visited_blocks
from .splash_operands import BLOCK_OPTIONS, LANES, Blocks, blocks_of, is_block, round_up
from .tunable import KernelWork

TUNED_OPTION = {"tuned": "path of a table that attnsuite tune wrote; the options given beside it hold over the table's"}
_SIZES = (256, 512, 1024, 2048)  # sizes that are tried: of 128 a grid has too many steps, 4096 fit no core


def read_options(
    name: str, accepted: Mapping[str, str], spec: AttentionSpec, target: Target, options: Mapping[str, Any] | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options, over those of the file that ``tuned`` names, and whose figures they follow. Raises ValueError."""
    given = check_options(name, options, accepted)
    path = given.pop("tuned", None)
    entries = () if path is None else tuned.entries_for(path, name, target, spec)
    return checked(name, accepted, {**tuned.merged(entries), **given}), tuned.whose(entries)


def checked(name: str, accepted: Mapping[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """The options. Raises ValueError if one has a value that its kind does not accept."""
    for option, value in options.items():
        right = is_block(value) if option in BLOCK_OPTIONS else option in accepted and isinstance(value, bool)
        if not right:
            what = accepted.get(option, "no option of this backend")
            raise ValueError(f"{name}: {option}={value!r} is not accepted; {option} is {what}.")
    return options


def as_options(spec: AttentionSpec, blocks: Blocks) -> dict[str, Any]:
    """The block sizes of the pass that is tuned, as options."""
    if spec.needs_grad:
        return {"block_q_backward": blocks.q_backward, "block_kv_backward": blocks.kv_backward}
    return {"block_q": blocks.q, "block_kv": blocks.kv, "block_kv_compute": blocks.kv_compute}


def candidates(spec: AttentionSpec) -> tuple[dict[str, Any], ...]:
    """Block sizes to try: of the backward pass if there is one, else of the forward pass."""
    longest = [round_up(length, LANES) for length in (spec.query_length, spec.key_value_length)]
    q, kv = (tuple(dict.fromkeys(min(size, length) for size in _SIZES)) for length in longest)
    if spec.needs_grad:
        return tuple({"block_q_backward": block_q, "block_kv_backward": block_kv} for block_q in q for block_kv in kv)
    return tuple(
        {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": step}
        for block_q in q
        for block_kv in kv
        for step in dict.fromkeys((min(block_kv, 512), block_kv))
        if block_kv % step == 0
    )


def crossed(tried: Sequence[Mapping[str, Any]], name: str, values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Each of ``tried`` with each value of one more option."""
    return tuple({**options, name: value} for options in tried for value in values)


def work_of(name: str, spec: AttentionSpec, target: Target, given: Mapping[str, Any], *, passes: int) -> KernelWork:
    """Of the forward pass, in which a block of queries stays while blocks of keys and values pass it.

    If there is a backward pass, of that: a block of keys stays while blocks of queries and of the output's gradient
    pass it. Its kernels visit every block ``passes`` times. Raises ValueError.
    """
    blocks = blocks_of(name, spec, target, given)
    q, kv, step = blocks.q, blocks.kv, blocks.kv_compute
    if spec.needs_grad:
        q, kv, step = blocks.q_backward, blocks.kv_backward, blocks.kv_backward_compute
    visited = visited_blocks(Masking.of(spec, *blocks.lengths), q, kv) * spec.batch * spec.num_heads
    visited *= passes if spec.needs_grad else 1
    dims = spec.head_dim + (spec.value_head_dim or spec.head_dim)
    element = 4 if spec.dtype == "float32" else 2
    moving, staying = (q, kv) if spec.needs_grad else (kv, q)
    return KernelWork(
        steps=visited,
        loaded_bytes=element * dims * visited * moving,
        buffer_bytes=2 * element * dims * (moving + staying) + 4 * (staying * dims + q * (step + 2 * LANES)),
    )
