"""The instruction sets that kernels are emitted for, and those that a processor has.

The size of a register tile is chosen so that its accumulators, one row of the right operand and one broadcast fit the
vector registers: 32 in AVX-512 and NEON, 16 in AVX2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Isa:
    """One instruction set. Tiles are rows x vectors of accumulators.

    ``score_rows`` keys by ``score_vectors`` of queries in the score product; ``value_rows`` rows by ``value_vectors``
    of the head dimension in every product whose right operand is keys, values or queries. ``needs`` are LLVM's names of
    processor features. ``multiplies_bfloat16``: one instruction adds two products of bfloat16 numbers to a float32.
    ``tiles``: such products are taken by AMX's tile registers (``tiles.py``).
    """

    name: str
    lanes: int
    score_rows: int
    score_vectors: int
    value_rows: int
    value_vectors: int
    needs: tuple[str, ...]
    multiplies_bfloat16: bool = False
    tiles: bool = False

    def of(self, dtype: str) -> Isa:
        """The instruction set for this dtype: tile registers take only bfloat16."""
        return AVX512_BF16 if self.tiles and dtype != "bfloat16" else self

    def pack(self, dtype: str) -> int:
        """Numbers that one term of a product holds, four bytes: two of bfloat16 where they are multiplied as such."""
        return 2 if self.multiplies_bfloat16 and dtype == "bfloat16" else 1

    @property
    def group(self) -> int:
        """Queries whose scores one register tile holds: one lane each."""
        return self.score_vectors * self.lanes

    @property
    def strip(self) -> int:
        """Keys that both products take as whole tiles; masked blocks are cut to their visible part in such strips."""
        return math.lcm(self.score_rows, self.value_rows)


AVX512 = Isa("avx512", 16, 8, 3, 6, 4, ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"))
AVX512_BF16 = dataclasses.replace(
    AVX512, name="avx512_bf16", needs=(*AVX512.needs, "avx512bf16"), multiplies_bfloat16=True
)
AVX2 = Isa("avx2", 8, 4, 3, 6, 2, ("avx2", "fma", "f16c"))
AMX_BF16 = dataclasses.replace(
    AVX512_BF16,
    name="amx_bf16",
    score_rows=16,
    score_vectors=2,
    value_rows=16,
    needs=(*AVX512_BF16.needs, "amx-tile", "amx-bf16"),
    tiles=True,
)
NEON = Isa("neon", 4, 8, 3, 6, 4, ("neon",))
KNOWN = (AMX_BF16, AVX512_BF16, AVX512, AVX2, NEON)


def available(features: Mapping[str, bool], machine: str) -> tuple[Isa, ...]:
    """Those of :data:`KNOWN` that a processor with these features has, in the order in which one is chosen.

    AVX-512's product of bfloat16 is fast on AMD's processors, which ``sse4a`` tells. On Intel's it takes longer than to
    widen the numbers and multiply float32: 1.7 times on an Emerald Rapids (``python tests/instruction_sets.py``).
    """
    if machine in ("aarch64", "arm64"):
        return (NEON,)  # part of every 64-bit ARM; Apple's LLVM names do not list it
    vectors = (AVX512_BF16, AVX512) if features.get("sse4a") else (AVX512, AVX512_BF16)
    return tuple(isa for isa in (AMX_BF16, *vectors, AVX2) if all(features.get(name) for name in isa.needs))


def features_for(isa: Isa, features: Mapping[str, bool]) -> dict[str, bool]:
    """The processor's features without those by which LLVM could leave the instruction set."""
    if isa is not AVX2:
        return dict(features)
    wider = ("avx512", "avx10", "amx", "evex")
    return {name: has and not name.startswith(wider) for name, has in features.items()}
