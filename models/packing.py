"""Pack documents into rows of one length, with segment ids that keep them apart.

Best fit: each document goes into the row whose room it fills best. A document longer than a row is cut into pieces. The
rest of a row is padding (id -1). No token attends across documents, positions restart in each (``forward_pass.py``),
and the loss has no target across a border (``loss.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from .checks import LARGEST_SIZE

PADDING = -1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Tokens and the document that each belongs to, int32. Padding has token 0 and id -1."""

    tokens: Int[np.ndarray, "rows length"]
    segment_ids: Int[np.ndarray, "rows length"]


def pack(documents: Iterable[Sequence[int] | np.ndarray], length: int) -> Packed:
    """Documents in rows of ``length`` tokens, their ids counted from 0 in each row.

    Documents of one token are left out: they hold nothing to predict. Raises ValueError where none is left, and for a
    document that is no row of tokens.

    >>> packed = pack([[1, 2, 3], [4, 5, 6, 7], [8, 9]], length=5)
    >>> packed.tokens.tolist(), packed.segment_ids.tolist()
    ([[1, 2, 3, 8, 9], [4, 5, 6, 7, 0]], [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]])
    """
    if not isinstance(length, int | np.integer) or length < 2:
        raise ValueError(f"length={length} leaves nothing to predict in a row; give at least 2.")
    rows: list[list[np.ndarray]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the tokens that they have left
    for number, document in enumerate(documents):
        whole = np.asarray(document)
        is_integer = not whole.size or np.issubdtype(whole.dtype, np.integer)
        if whole.ndim != 1 or not is_integer or (whole.size and not 0 <= whole.min() <= whole.max() <= LARGEST_SIZE):
            raise ValueError(
                f"document {number} is {whole.dtype}{list(whole.shape)}; expected tokens, integers from 0 to "
                f"{LARGEST_SIZE} in one dimension."
            )
        for piece in (whole[at : at + length] for at in range(0, len(whole), length)):
            if len(piece) < 2:
                continue
            room = next((left for left in range(len(piece), length) if by_room[left]), length)
            if room == length:
                rows.append([])
                by_room[length].append(len(rows) - 1)
            row = by_room[room].pop()
            rows[row].append(piece)
            by_room[room - len(piece)].append(row)
    if not rows:
        raise ValueError("there is no document of two tokens or more; give text with something to predict.")
    tokens = np.zeros((len(rows), length), np.int32)
    segment_ids = np.full((len(rows), length), PADDING, np.int32)
    for i, row in enumerate(rows):
        at = 0
        for number, piece in enumerate(row):
            tokens[i, at : at + len(piece)] = piece
            segment_ids[i, at : at + len(piece)] = number
            at += len(piece)
    return Packed(tokens, segment_ids)
