"""Blocks per core against NVIDIA's own calculator, and waves by hand."""

from __future__ import annotations

import pytest

from attnsuite.backends.tunable import KernelBuild
from attnsuite.suite.compile.occupancy import Occupancy, occupancy

# target, registers of a thread, warps and shared bytes of a block -> blocks of a core, and what allows no more: answers
# of cudaOccMaxActiveBlocksPerMultiprocessor (cuda_occupancy.h of nvidia-cuda-runtime-cu12 12.9.79). 12000 random
# kernels were compared once, with the largest carve-out of shared memory; these have every limit that came up.
ANSWERS = [
    ("h100", 176, 8, 1304, 1, "registers"),
    ("a100", 62, 2, 5373, 16, "registers"),
    ("a100", 208, 1, 6756, 8, "registers"),
    ("a100", 11, 8, 2385, 8, "warps"),
    ("b200", 22, 16, 36406, 4, "warps"),
    ("a100", 46, 25, 159156, 1, "registers, shared memory"),
    ("h100", 11, 2, 7277, 28, "shared memory"),
    ("a100", 23, 27, 108238, 1, "shared memory"),
    ("a100", 43, 8, 30830, 5, "registers, shared memory"),
    ("h100", 47, 1, 203, 32, "blocks"),
    ("h100", 29, 4, 1086, 16, "warps, registers"),
    ("h100", 10, 17, 64206, 3, "warps, shared memory"),
    ("b200", 10, 2, 1414, 32, "warps, blocks"),
    ("h100", 61, 1, 2744, 32, "blocks, registers"),
    ("h100", 10, 1, 6041, 32, "blocks, shared memory"),
    ("h100", 29, 2, 6238, 32, "warps, blocks, registers, shared memory"),
]


def kernel(registers=64, warps=4, shared=0, blocks=1000, **changed):
    sizes = {"registers": registers, "shared_bytes": shared, "blocks": blocks} | changed
    return KernelBuild(name="attend", configuration={"num_warps": warps}, **sizes)


@pytest.mark.parametrize(("device", "registers", "warps", "shared", "blocks", "limits"), ANSWERS)
def test_blocks_of_a_core_are_those_of_nvidias_calculator(device, registers, warps, shared, blocks, limits):
    found = occupancy(kernel(registers, warps, shared), f"cuda:{device}")
    assert (found.blocks_per_core, ", ".join(found.limits), found.warps) == (blocks, limits, blocks * warps)


@pytest.mark.parametrize(
    ("blocks", "waves", "last"), [(1, 1, 1 / 1056), (1056, 1, 1.0), (1057, 2, 1 / 1056), (2 * 1056 + 264, 3, 0.25)]
)
def test_waves_of_a_grid_on_132_cores_of_8_blocks(blocks, waves, last):
    found = occupancy(kernel(blocks=blocks), "cuda:h100")
    assert found == Occupancy(blocks_per_core=8, limits=("registers",), warps=32, waves=waves, last_wave=last)


def test_tensor_memory_of_512_columns_is_shared_by_the_blocks():
    found = occupancy(kernel(tensor_columns=256), "cuda:b200")
    assert (found.blocks_per_core, found.limits, found.warps) == (2, ("tensor memory",), 8)


@pytest.mark.parametrize(
    ("sizes", "target"),
    [
        ({"blocks": None}, "cuda:h100"),
        ({"registers": None}, "cuda:h100"),
        ({"shared": None}, "cuda:h100"),
        ({"warps": "8"}, "cuda:h100"),
        ({"warps": 0}, "cuda:h100"),
        ({"registers": 255, "warps": 16}, "cuda:h100"),  # fits no core
        ({}, "cuda:no-such"),
        ({}, "tpu:v5e"),
    ],
)
def test_what_is_not_known_or_does_not_fit_has_no_occupancy(sizes, target):
    assert occupancy(kernel(), "cuda:h100") is not None
    assert occupancy(kernel(**sizes), target) is None
