"""Where the slots of a cache lie: those of a sequence behind each other, or in pages that a table gives to sequences.

A function of the module is given a block of slots of one head as :func:`types` of arguments: a pointer to its first
slot; or a pointer into the first page of the pool, the sequence's table, the bytes of a page, and the first slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .decode_buffers import BLOCK_KEYS, DecodeKernel
from .emit import Value, i32, i64, ptr
from .handler import Dims


def types(kernel: DecodeKernel) -> list[Any]:
    """Of the arguments that are a block of slots."""
    return [ptr, ptr, i64, i64] if kernel.page else [ptr]


def place(kernel: DecodeKernel, block: Sequence[Value], slot: Value, step: Value) -> Value:
    """Where slot ``slot`` of a block lies; ``step``: bytes from a slot to the next."""
    if not kernel.page:
        return block[0].at(slot * step)
    pool, table, by_page, first = block
    slot = first + slot
    page = table.at(slot // kernel.page, 4).load(i32).integer(i64)
    return pool.at(page * by_page).at(slot % kernel.page * step)


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """Keys, values or scales of an item's heads. All in bytes; ``width`` of a slot of one head.

    ``start``: the first head's first slot, of the sequence or of the pool. ``table``: the sequence's; None: no pages.
    """

    start: Value
    table: Value | None
    by_head: Any
    by_page: Any
    by_key: int
    width: int

    @classmethod
    def of(cls, kernel: DecodeKernel, dims: Dims, start: Value, table: Value | None, head: Value, width: int) -> Side:
        """Of the heads from ``head`` on, counted over all sequences. ``start``: of the whole array."""
        slots = kernel.page or dims["S"]
        by_key = width * (kernel.side_by_side or 1)
        by_head = width if kernel.side_by_side else slots * width
        by_page = dims["K"] * slots * width  # of a page, or of a sequence
        first = head % dims["K"] * by_head
        if not kernel.page:
            first = head // dims["K"] * by_page + first
        return cls(start.at(first), table, by_head, by_page, by_key, width)

    def block(self, slot: Value, head: Value) -> tuple[Value, ...]:
        """The block of a head that begins at ``slot``."""
        if self.table is None:
            return (self.start.at(slot * self.by_key).at(head * self.by_head),)
        e = slot.e
        by_page = self.by_page if isinstance(self.by_page, Value) else e.const(i64, self.by_page)
        return self.start.at(head * self.by_head), self.table, by_page, slot

    def fetched(self, slot: Value, head: Value) -> tuple[tuple[Value, ...], Value]:
        """What is fetched beside the work of a head, and the bytes to the next row.

        Of a sequence's slots it is a part of the block in the order of memory; of pages it is the head's own.
        """
        e = slot.e
        if self.table is None:
            at = self.start.at(slot * self.by_key).at(head * (BLOCK_KEYS * self.width))
            return (at,), e.const(i64, self.width)
        return self.block(slot, head), e.const(i64, self.by_key)


def moved(block: Sequence[Value], numbers: int, size: int) -> tuple[Value, ...]:
    """The same block, ``numbers`` of ``size`` bytes further in each slot."""
    return (block[0].at(numbers, size), *block[1:])
