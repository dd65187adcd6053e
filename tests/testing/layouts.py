"""What the arrays of a named problem are made from: layouts and terms as functions of its sizes.

Each function returns, or is, a builder: ``build(sizes, rng)`` gives the arrays by the names of their fields. The sizes
are those of ``problems.Case``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attnsuite.backends.operands import OPERANDS, Operand

TRAILING = -1  # any negative segment id is padding


def segments(query: list[int], key: list[int] | None = None) -> Callable[..., dict[str, np.ndarray]]:
    """Ids given as [id, count, id, count, ...], the same in every batch entry but the last, which is one segment."""

    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        rows = []
        for runs, length in ((query, sizes[1]), (query if key is None else key, sizes[2])):
            ids = np.repeat(runs[::2], runs[1::2]).astype(np.int32)
            assert len(ids) == length, f"runs {runs} cover {len(ids)} of {length}"
            rows.append(np.stack([ids] * (sizes[0] - 1) + [np.full(length, runs[0], np.int32)]))
        return {"query_segment_ids": rows[0], "key_value_segment_ids": rows[1]}

    return build


def lengths(*lengths: int) -> Callable[..., dict[str, np.ndarray]]:
    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"key_value_seq_lengths": np.array(lengths, np.int32)}

    return build


def positions(
    query: Callable[..., np.ndarray] | None, key: Callable[..., np.ndarray] | None = None
) -> Callable[..., dict[str, np.ndarray]]:
    """Positions as a function of the slots on either side, the same in every batch entry."""

    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        sides = (("query_positions", query, sizes[1]), ("key_value_positions", key, sizes[2]))
        return {
            name: np.stack([make(np.arange(length)).astype(np.int32)] * sizes[0])
            for name, make, length in sides
            if make is not None
        }

    return build


def decoding(*cached: int) -> Callable[..., dict[str, np.ndarray]]:
    """The last T tokens of sequences that fill ``cached`` slots of a longer cache."""

    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        used = np.array(cached, np.int32)
        return {
            "query_positions": (used[:, None] - sizes[1] + np.arange(sizes[1])).astype(np.int32),
            "key_value_seq_lengths": used,
        }

    return build


def ragged(page_size: int, *sequences: tuple[int, int, int]) -> Callable[..., dict[str, np.ndarray]]:
    """One row of tokens: of each sequence (new tokens, filled slots, pages), then padding."""

    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        query: list[tuple[int, int]] = []
        key: list[tuple[int, int]] = []
        for i, (new, filled, pages) in enumerate(sequences):
            query += [(i, filled - new + n) for n in range(new)]
            key += [(i if slot < filled else TRAILING, slot) for slot in range(pages * page_size)]
        query += [(TRAILING, 0)] * (sizes[1] - len(query))
        (q_ids, q_at), (k_ids, k_at) = (np.array(side, np.int32).T[:, None] for side in (query, key))
        return {
            "query_segment_ids": q_ids,
            "key_value_segment_ids": k_ids,
            "query_positions": q_at,
            "key_value_positions": k_at,
        }

    return build


def mask(heads: bool, dead_rows: bool = False) -> Callable[..., dict[str, np.ndarray]]:
    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        B, T, S, N = sizes[:4]
        mask = rng.random((B, N, T, S) if heads else (1, 1, T, S)) < 0.3
        if dead_rows:
            mask[:, :, 3:9] = False
        return {"mask": mask}

    return build


def bias(heads: bool) -> Callable[..., dict[str, np.ndarray]]:
    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        B, T, S, N = sizes[:4]
        return {"bias": rng.standard_normal((B, N, T, S) if heads else (1, N, 1, S)).astype(np.float32)}

    return build


def learned(operand: Operand) -> Callable[..., dict[str, np.ndarray]]:
    """The table's example of an operand."""

    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {operand.name: operand.example(sizes, rng)}

    return build


sinks, alibi = (learned(operand) for operand in OPERANDS if operand.name in ("sinks", "alibi"))


def closing_bias(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """-inf for some pairs, and for all pairs of some rows."""
    closing = bias(heads=True)(sizes, rng)["bias"]
    closing[rng.random(closing.shape) < 0.3] = -np.inf
    closing[:, :, 3:9] = -np.inf
    return {"bias": closing}


def together(*parts: Callable[..., dict[str, np.ndarray]]) -> Callable[..., dict[str, np.ndarray]]:
    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {name: array for part in parts for name, array in part(sizes, rng).items()}

    return build


def shuffled(slots: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(slots)
