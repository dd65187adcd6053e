"""How many blocks of a kernel an NVIDIA GPU holds at once, and in how many waves it takes the whole grid: no time.

A thread block stays on one core (NVIDIA: SM) until it ends. A core takes blocks until one of its resources is used up.
The limits are those of compute capabilities 8.0, 9.0 and 10.0, which are equal but for shared memory (CUDA programming
guide, "Technical Specifications per Compute Capability"). Units of allocation are those of ``cuda_occupancy.h`` of CUDA
12.9, the source of NVIDIA's occupancy calculator. Tensor memory is that of the PTX ISA, "Tensor Memory Addressing".
"""

from __future__ import annotations

import dataclasses

from attnsuite.backends.devices import NVIDIA_GPUS
from attnsuite.backends.tunable import KernelBuild

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
WARPS, BLOCKS, REGISTERS, TENSOR_COLUMNS = 64, 32, 65536, 512  # of a core
_PARTS = 4  # of a core; a warp has its registers in one of them
_REGISTER_UNIT, _SHARED_UNIT, _RESERVED = 256, 128, 1024  # registers of a warp; bytes; bytes of each block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What follows from a kernel's sizes and its grid.

    - ``blocks_per_core``: blocks that a core holds at once, and ``limits`` the resources that allow no more.
    - ``warps``: the warps of these blocks, of the ``WARPS`` that a core can hold; the occupancy is the quotient.
    - ``waves``: how often the whole device is filled until every block has run. ``last_wave`` is how much of the device
      the last one fills, from 0 (exclusive) to 1. Both suppose that all blocks take equally long.
    """

    blocks_per_core: int
    limits: tuple[str, ...]
    warps: int
    waves: int
    last_wave: float


def occupancy(kernel: KernelBuild, target: str) -> Occupancy | None:
    """The occupancy of ``kernel`` on ``target``, such as ``cuda:h100``.

    None where a size is not known, the compute capability is not one of ``CAPABILITIES``, or no block fits a core.
    """
    device, warps = NVIDIA_GPUS.get(target.removeprefix("cuda:")), kernel.configuration.get("num_warps")
    if device is None or device.compute_capability not in CAPABILITIES or not isinstance(warps, int) or warps < 1:
        return None
    if not kernel.blocks or not kernel.registers or kernel.shared_bytes is None:
        return None
    registers = _PARTS * (REGISTERS // _PARTS // _whole(32 * kernel.registers, _REGISTER_UNIT))
    allowed = {
        "warps": WARPS // warps,
        "blocks": BLOCKS,
        "registers": registers // warps,
        "shared memory": device.shared_memory // _whole(kernel.shared_bytes + _RESERVED, _SHARED_UNIT),
    }
    if kernel.tensor_columns:
        allowed["tensor memory"] = TENSOR_COLUMNS // kernel.tensor_columns
    if not (held := min(allowed.values())):
        return None
    whole, rest = divmod(kernel.blocks, held * device.cores)
    return Occupancy(
        blocks_per_core=held,
        limits=tuple(name for name, count in allowed.items() if count == held),
        warps=held * warps,
        waves=whole + (rest > 0),
        last_wave=rest / (held * device.cores) if rest else 1.0,
    )


def _whole(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
