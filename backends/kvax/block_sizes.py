"""Block sizes of Kvax's kernels: chosen per GPU generation, or given by the user and checked.

They are always passed explicitly. Kvax's own default asks the present device for its name and knows only "H100". So an
H200 would silently get the small blocks, and a GPU would be required even where none is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..contract import is_whole
from ..devices import Target
from ..spec import AttentionSpec

_PARAMETERS = {
    "query_block_size": ("query rows per block", "16, 32, 64, 128 or 256", (16, 32, 64, 128, 256)),
    "kv_block_size": ("keys per block", "16, 32, 64, 128 or 256", (16, 32, 64, 128, 256)),
    "num_warps": ("warps per thread block", "1, 2, 4, 8 or 16", (1, 2, 4, 8, 16)),
    "num_stages": ("stages of the loads' pipeline", "1 to 8", range(1, 9)),
}
OPTIONS = {
    f"{prefix}{name}": f"{meaning}, {which} ({accepted})"
    for prefix, which in (("", "forward"), ("backward_", "backward"))
    for name, (meaning, accepted, _) in _PARAMETERS.items()
}

PREPROCESS_BLOCK = 128  # rows per block of the backward pass's first kernel; fixed in Kvax, which drops a remainder


@dataclasses.dataclass(frozen=True, slots=True)
class FlashAttentionParamsConfig:
    """Block sizes and launch parameters of a pass; the defaults are Kvax's for GPUs that are no H100."""

    query_block_size: int = 64
    kv_block_size: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    """Parameters of both passes."""

    forward: FlashAttentionParamsConfig
    backward: FlashAttentionParamsConfig

    def step(self, needs_grad: bool) -> int:
        """Padded lengths are multiples of this number: every block divides it (all are powers of two)."""
        passes = (self.forward, self.backward) if needs_grad else (self.forward,)
        sizes = [size for blocks in passes for size in (blocks.query_block_size, blocks.kv_block_size)]
        return max(*sizes, PREPROCESS_BLOCK)


_SMALL = Passes(FlashAttentionParamsConfig(), FlashAttentionParamsConfig())
# Kvax's own for an H100, used for all of its generation; also on a CPU, so that the same kernels are verified there.
_LARGE = Passes(FlashAttentionParamsConfig(128, 128, 8, 3), FlashAttentionParamsConfig(64, 128, 8, 3))


# For head dimensions above 128, where Kvax's own need more shared memory than there is. Of those tried it fits an
# A100, an H100 and a B200 and spills least (tests/backends/kvax/test_build.py compiles it for each).
_WIDE = Passes(FlashAttentionParamsConfig(64, 64, 8, 2), FlashAttentionParamsConfig(32, 64, 8, 2))


# Candidates for tuning: query rows, keys, warps, stages. Kvax's own and their neighbours.
_FORWARD_CANDIDATES = (
    (128, 128, 8, 3),
    (128, 128, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 4, 3),
    (64, 64, 8, 2),
    (64, 64, 4, 3),
)
_BACKWARD_CANDIDATES = (
    (64, 128, 8, 3),
    (64, 128, 8, 2),
    (32, 128, 8, 2),
    (64, 64, 8, 2),
    (32, 64, 8, 2),
    (64, 64, 4, 3),
)


def choose(spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> Passes:
    """The blocks for a target, with those that ``options`` names replaced.

    Raises ValueError for a value that is not accepted, with the option's name and the accepted values.
    """
    blocks = _default(spec, target)
    replaced: dict[str, dict[str, int]] = {"": {}, "backward_": {}}
    for option in OPTIONS.keys() & options.keys():
        name, value = option.removeprefix("backward_"), options[option]
        if not is_whole(value) or value not in _PARAMETERS[name][2]:
            raise ValueError(f"kvax: {option}={value!r} is not accepted; {option} is {OPTIONS[option]}.")
        replaced["backward_" if option.startswith("backward_") else ""][name] = value
    return Passes(
        dataclasses.replace(blocks.forward, **replaced[""]),
        dataclasses.replace(blocks.backward, **replaced["backward_"]),
    )


def candidates(*, backward: bool) -> tuple[dict[str, int], ...]:
    """Block sizes worth trying for one of the passes, as options."""
    tried = [
        FlashAttentionParamsConfig(*sizes) for sizes in (_BACKWARD_CANDIDATES if backward else _FORWARD_CANDIDATES)
    ]
    return tuple(as_options(Passes(each, each), backward=backward) for each in tried)


def as_options(blocks: Passes, *, backward: bool) -> dict[str, int]:
    """The block sizes of one of the passes, as options."""
    prefix, sizes = ("backward_", blocks.backward) if backward else ("", blocks.forward)
    return {f"{prefix}{name}": size for name, size in dataclasses.asdict(sizes).items()}


def _default(spec: AttentionSpec, target: Target) -> Passes:
    if max(spec.head_dim, spec.value_head_dim or 0) > 128:
        return _WIDE
    if target.platform == "cpu" or (target.compute_capability or (0, 0))[0] == 9:
        return _LARGE
    return _SMALL
