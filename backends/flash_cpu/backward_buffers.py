"""The operands of a backward pass, and where a thread keeps a block of keys and a panel of rows (``backward.py``)."""

from __future__ import annotations

from typing import Any

from . import masking, rows
from .added import Added
from .emit import Function, Value, offsets
from .forward import SUMS, Kernel
from .handler import Dims, Operand
from .isa import Isa
from .slopes import QUERY_ID

BLOCK_KEYS = 96
PANEL_TILES = 12  # most tiles of rows that are packed at a time; 32 is no faster


def operands(kernel: Kernel) -> tuple[Operand, ...]:
    """The forward pass's operands and results, the cotangent, and an array whose length is the number of parts."""
    value = ("B", "T", "N", kernel.value_head_dim)
    return (
        *kernel.operands,
        Operand("out", kernel.dtype, value),
        *SUMS,
        Operand("d_out", kernel.dtype, value),
        Operand("d_lse", "float32", ("B", "T", "N")),
        Operand("parts", "float32", ("L", "P")),
    )


def results(kernel: Kernel) -> tuple[Operand, ...]:
    """The gradients, in ``kernel.out_dtype``. Those of what is added to the scores and is learned are float32.

    ``d_slope`` has the sum of ``dS`` times distance of each row and part.
    """
    learned = kernel.arrays.learned
    return (
        Operand("d_query", kernel.out_dtype, ("B", "T", "N", kernel.head_dim)),
        Operand("d_key", kernel.out_dtype, ("B", "S", "K", kernel.head_dim)),
        Operand("d_value", kernel.out_dtype, ("B", "S", "K", kernel.value_head_dim)),
        *([Operand("d_bias", "float32", ("BB", "BN", "BT", "BS"))] if "bias" in learned else []),
        *([Operand("d_slope", "float32", ("B", "T", "N", "P"))] if "alibi" in learned else []),
    )


class Buffers:
    """Where a thread keeps a tile of rows and a block of keys. Offsets and sizes in bytes.

    A product sums over its operands' rows (queries, keys) or along them (the head dimension). Where a term is a pair of
    bfloat16 numbers, these are two layouts: ``key`` and ``key_joined``; ``query`` of the block, which a tile is joined
    from, and of the tile. With tile registers ``key_joined`` is transposed, and so is ``d_query`` until it is written.

    ``listed``: of a kernel whose query tiles have lists of keys (``sparse_backward.py``). A panel is a query tile.
    """

    def __init__(self, isa: Isa, kernel: Kernel, *, listed: bool = False) -> None:
        self.isa, self.kernel, self.pack = isa, kernel, isa.pack(kernel.dtype)  # numbers of a term
        self.listed = listed
        self.rows = 64 if isa.tiles else 48  # of a tile
        # A row of keys or queries, and one of values or cotangents: its numbers, and its terms, in whole vectors.
        self.width, self.value_width = (rows.padded(n, isa) for n in (kernel.head_dim, kernel.value_head_dim))
        self.key_terms, self.value_terms = (
            rows.padded(n, isa, self.pack) for n in (kernel.head_dim, kernel.value_head_dim)
        )
        keys, n, paired, added = BLOCK_KEYS, self.rows, self.pack - 1, kernel.arrays.any
        # Of a block of keys, at the start of the workspace.
        self.block = offsets(
            key=keys * self.key_terms * 4,
            key_joined=paired * keys // 2 * self.width * 4,
            plain=isa.tiles * max(keys // 2, n) * self.width * 4,  # what is transposed, before or after
            value=keys * self.value_terms * 4,
            scores=keys * n * 4,
            added=keys * n * 4 * added,
            d_probs=keys * n * 4,
            by_key=paired * keys // 2 * n * 4,
            position=keys * 4,
            key_id=keys * 4,
            slots=keys * 4 * listed,
            records=masking.RECORD * (1 + keys // isa.strip),
            query=paired * n * self.key_terms * 4,
            d_out=paired * n * self.value_terms * 4,
        )
        # Of a tile of rows; the tiles of a panel follow each other behind the block.
        self.tile = offsets(
            d_query=n * self.width * 4,
            query=n // self.pack * self.width * 4,
            query_turned=n * self.key_terms * 4,
            d_out=n // self.pack * self.value_width * 4,
            d_out_turned=n * self.value_terms * 4,
            numbers=n * (QUERY_ID + 1) * 4,
            bounds=n // isa.group * masking.QUERY_RECORD,
            whole=masking.QUERY_RECORD,
            added_rows=Added.row_bytes(n) * added,
        )
        # Of the float32 gradients of a block of keys; those of an item follow each other behind the panel.
        self.gradients = offsets(d_key=keys * self.width * 4, d_value=keys * self.value_width * 4)

    def tiles(self, dims: Dims) -> Any:
        """Tiles of rows of one KV head."""
        if self.listed:
            return dims["I"] * self.panel(dims)
        return (dims["T"] * (dims["N"] // dims["K"]) + (self.rows - 1)) // self.rows

    def rows_of(self, e: Function, dims: Dims, n: Value) -> tuple[Value, Value]:
        """The first row of tile ``n`` of a KV head, and how many it has; none where a short query tile has fewer."""
        group = dims["N"] // dims["K"]
        if not self.listed:
            return n * self.rows, e.min(dims["T"] * group - n * self.rows, self.rows)
        within, of_tile = n % self.panel(dims) * self.rows, dims["Q"] * group
        start = n // self.panel(dims) * of_tile + within
        return start, e.min(e.min(of_tile - within, dims["T"] * group - start), self.rows)

    def panel(self, dims: Dims) -> Any:
        """Tiles of a panel; a head's panels are as equal as can be."""
        if self.listed:
            return (dims["Q"] * (dims["N"] // dims["K"]) + (self.rows - 1)) // self.rows
        count = self.tiles(dims)
        panels = (count + (PANEL_TILES - 1)) // PANEL_TILES
        return (count + (panels - 1)) // panels

    def gradient_bytes(self, dims: Dims) -> Any:
        """One float32 dQ of one head."""
        return self.tiles(dims) * (self.rows * self.width * 4)

    def several(self, dims: Dims) -> Any:
        """1 where a head has several parts, otherwise 0."""
        return (dims["P"] * 2 - 2) // dims["P"]

    def shared_bytes(self, dims: Dims) -> Any:
        """Room for the dQ of every head and part, where they are added."""
        return dims["B"] * dims["K"] * dims["P"] * self.gradient_bytes(dims) * self.several(dims)

    def worker_bytes(self, dims: Dims) -> Any:
        """The block, a panel, and the gradients of a part's keys; where keys are listed, also those of a block."""
        keys = (blocks(dims) + (dims["P"] - 1)) // dims["P"]
        return self.panel(dims) * self.tile[1] + self.block[1] + (keys + int(self.listed)) * self.gradients[1]


def blocks(dims: Dims) -> Any:
    """Blocks of the keys of one KV head."""
    return (dims["S"] + (BLOCK_KEYS - 1)) // BLOCK_KEYS
