"""What a decode kernel is compiled for, where a thread keeps its rows, and where the slots of a cache lie.

``decode.py`` explains the method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from . import rows
from .added import Added, Arrays
from .emit import Value, aligned, i32, i64, ptr
from .forward import SUMS, operands
from .handler import Dims, Operand
from .isa import NEON, Isa
from .products import split

BLOCK_KEYS = 64
WEIGHED_KEYS = 16  # whose values meet all rows before the next keys' do, so that they stay in the first cache
MOST_ROWS_PER_TILE = 4
MOST_ROWS = 48  # of a KV head: tokens times the heads of a group


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeKernel:
    """What a decode kernel is compiled for.

    ``side_by_side``: keys and values lie ``[B, S, K, D]`` with so many KV heads; 0: they lie ``[B, K, S, D]``.
    ``sums``: each row's maximum and sum are results too, as in the forward pass. ``out_dtype`` is the output's.

    ``units`` says what is done with units of ``unit`` keys: only those that are ``"listed"`` for a KV head are attended
    to, or the ``"mass"`` of each is a result, mostly without values (dimension 0).
    ``arrays`` are those of ``added.py``. ``page``: slots of a page, of which a table gives some to each sequence; 0: no
    pages. ``kv_dtype``: of keys and values that have scales; else they are of ``dtype``.
    """

    dtype: str
    head_dim: int
    value_head_dim: int
    soft_cap: bool
    rows_per_tile: int
    side_by_side: int
    out_dtype: str
    sums: bool = False
    units: Literal["", "listed", "mass"] = ""
    unit: int = 0
    arrays: Arrays = Arrays()  # noqa: RUF009 (a frozen value)
    page: int = 0
    kv_dtype: str = ""

    @property
    def stored(self) -> str:
        """The dtype of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands of the forward pass, and ``ranges``, whose length is the number of ranges of keys.

        ``listed`` has distinct indices of units, then -1 to the end.
        """
        row, slot = ("G", self.page) if self.page else ("B", "S")
        lies = (row, slot, "K") if self.side_by_side else (row, "K", slot)
        found = operands(self.dtype, self.head_dim, self.value_head_dim, lies, self.stored)
        if self.units == "mass":  # the result says how many units there are
            return tuple(x for x in found if self.value_head_dim or x.name != "value")
        listed = [Operand("listed", "int32", ("B", "K", "W"))] if self.units == "listed" else []
        pages = [Operand("pages", "int32", ("B", "E"))] if self.page else []
        scales = [Operand(name, "float32", lies) for name in ("key_scale", "value_scale")] if self.kv_dtype else []
        return (
            *(*found, Operand("ranges", "float32", ("L", "P"))),
            *(*listed, *self.arrays.operands, *pages, *scales),
        )

    @property
    def results(self) -> tuple[Operand, ...]:
        """The mass of each unit, the output, and maximum and sum per row: those that there are."""
        return (
            *([Operand("mass", "float32", ("B", "K", "P"))] if self.units == "mass" else []),
            *([Operand("out", self.out_dtype, ("B", "T", "N", self.value_head_dim))] if self.value_head_dim else []),
            *(SUMS if self.sums else []),
        )


class Buffers:
    """Where a thread keeps the rows of its KV heads. Widths in numbers of four bytes, everything else in bytes."""

    def __init__(self, isa: Isa, kernel: DecodeKernel) -> None:
        self.isa, self.kernel = isa, kernel
        self.heads = kernel.side_by_side or 1  # of an item
        self.width = rows.padded(kernel.head_dim, isa)  # of a row of keys, in whole vectors
        self.value_width = rows.padded(kernel.value_head_dim, isa)
        self.partial = self.value_width + isa.lanes  # what a range leaves of a row: output, maximum, sum
        # Where a row ends inside a vector or has a scale, a key, or a block of values, is copied first.
        self.widens_keys = bool(kernel.kv_dtype) or self.width != kernel.head_dim
        self.widens_values = bool(kernel.kv_dtype) or self.value_width != kernel.value_head_dim
        # The numbers of bfloat16 rows are widened in halves: each two vectors hold those at even places, then at odd.
        self.halves_keys, self.halves_values = (
            kernel.stored == "bfloat16" and width == whole and whole % (2 * isa.lanes) == 0 and isa.lanes > NEON.lanes
            for width, whole in ((kernel.head_dim, self.width), (kernel.value_head_dim, self.value_width))
        )
        # One behind the other: a copied key, flags of a block's keys, a copied block of values, what is added to the
        # rows' scores (positions of a block's keys, and the rows of ``added.py``), the rows.
        # Room for more keys than one, so that a head's rows lie further than a page from those of the next.
        self.flags = aligned(isa.lanes * self.width * 4)
        self.values = self.flags + aligned(BLOCK_KEYS * 4)
        self.positions = self.values + (BLOCK_KEYS * self.value_width * 4 if self.widens_values else 0)
        self.added = self.positions + BLOCK_KEYS * 4 * kernel.arrays.any
        self.fixed = self.added + aligned(Added.row_bytes(MOST_ROWS)) * kernel.arrays.any
        self.per_row = (self.width + 2 * BLOCK_KEYS + isa.lanes) * 4  # query, scores, products, interval and id

    def padded_rows(self, dims: Dims) -> Any:
        """Rows of a KV head, in whole tiles."""
        n = self.kernel.rows_per_tile
        return (dims["T"] * (dims["N"] // dims["K"]) + (n - 1)) // n * n

    def shared_bytes(self, dims: Dims) -> Any:
        """What the ranges leave."""
        return dims["B"] * dims["K"] * dims["P"] * self.padded_rows(dims) * (self.partial * 4)

    def head_bytes(self, dims: Dims) -> Any:
        """Of a thread, for one KV head."""
        return self.padded_rows(dims) * self.per_row + self.fixed

    def worker_bytes(self, dims: Dims) -> Any:
        """Of a thread."""
        return self.head_bytes(dims) * self.heads


class Rows:
    """Pointers into a thread's rows: query, scores, products, and (first, last, id)."""

    def __init__(self, buffers: Buffers, workspace: Value) -> None:
        self._rows, self._buffers = workspace.at(buffers.fixed), buffers

    def query(self, row: Any) -> Value:
        """``width`` numbers."""
        return self._rows.at(row, self._buffers.per_row)

    def scores(self, row: Any) -> Value:
        """One per key of a block; later their weights."""
        return self.query(row).at(self._buffers.width, 4)

    def products(self, row: Any) -> Value:
        """One per key of a block, not scaled."""
        return self.scores(row).at(BLOCK_KEYS, 4)

    def number(self, row: Any, n: int) -> Value:
        """The first (0) and last (1) position that the row sees, and its id (2); int32."""
        return self.products(row).at(BLOCK_KEYS + n, 4)


def tiles(buffers: Buffers) -> list[tuple[int, int, tuple[int, int]]]:
    """The rows of a tile times the numbers of a value: (row, number, (rows, vectors)) of each part.

    As many accumulators as elsewhere, but more of one row: a processor fetches ahead what is read in order.
    """
    isa, together = buffers.isa, 2 if buffers.halves_values else 1
    width = buffers.value_width // isa.lanes // together
    strips = [together * vectors for vectors in split(width, 2 * isa.value_vectors // together)]
    heights = split(buffers.kernel.rows_per_tile, 4 * isa.value_vectors // max(strips, default=1))
    return [
        (sum(heights[:i]), sum(strips[:j]) * isa.lanes, (height, vectors))
        for i, height in enumerate(heights)
        for j, vectors in enumerate(strips)
    ]


def types(kernel: DecodeKernel) -> list[Any]:
    """Of the arguments that are a block of slots of one head.

    Without pages a pointer to the first slot; else a pointer into the first page of the pool, the table of the
    sequence, the bytes of a page, and the first slot.
    """
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

    def block(self, slot: Value, head: Value | int) -> tuple[Value, ...]:
        """The block of a head that begins at ``slot``."""
        if self.table is None:
            return (self.start.at(slot * self.by_key).at(head * self.by_head),)
        e = slot.e
        by_page = self.by_page if isinstance(self.by_page, Value) else e.const(i64, self.by_page)
        return self.start.at(head * self.by_head), self.table, by_page, slot

    def fetched(self, slot: Value, first: Value, head: Value) -> tuple[tuple[Value, ...], Value]:
        """What is fetched while ``WEIGHED_KEYS`` slots from ``first`` on of a head's block are weighed.

        Of a sequence's slots it is a part of the block at ``slot``, in the order of memory; of pages it is the head's.
        """
        e = slot.e
        if self.table is None:
            before = first * (self.by_key // self.width - 1) + head * WEIGHED_KEYS
            return (self.start.at(slot * self.by_key).at(before * self.width),), e.const(i64, self.width)
        return self.block(slot, head), e.const(i64, self.by_key)


def moved(block: Sequence[Value], numbers: Value | int, size: int) -> tuple[Value, ...]:
    """The same block, ``numbers`` of ``size`` bytes further in each slot."""
    return (block[0].at(numbers, size), *block[1:])
