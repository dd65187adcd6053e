"""What a decode kernel is compiled for, and where a thread keeps its rows. ``decode.py`` explains the method."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from . import rows
from .added import Added, Arrays
from .emit import Value, aligned
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
        # Where a row ends inside a vector or has a scale, a few keys, or a block of values, are copied first.
        self.widens_keys = bool(kernel.kv_dtype) or self.width != kernel.head_dim
        self.widens_values = bool(kernel.kv_dtype) or self.value_width != kernel.value_head_dim
        # The numbers of bfloat16 rows are widened in halves: each two vectors hold those at even places, then at odd.
        self.halves_keys, self.halves_values = (
            kernel.stored == "bfloat16" and width == whole and whole % (2 * isa.lanes) == 0 and isa.lanes > NEON.lanes
            for width, whole in ((kernel.head_dim, self.width), (kernel.value_head_dim, self.value_width))
        )
        # One behind the other: copied keys, flags of a block's keys, a copied block of values, what is added to the
        # rows' scores (positions of a block's keys, and the rows of ``added.py``), the rows.
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
