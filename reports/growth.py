"""The growth of temporary memory with the length: the exponent of S, fitted over the compiled lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnsuite.suite.kinds import title_of
from attnsuite.suite.kinds.op_case import is_plain
from attnsuite.suite.shown import shows_memory

from .cells import Group
from .table import Column, Table, table
from .words import Value

_KINDS = ("op_forward", "op_forward_backward")
_FEWEST = 3
_SHORTEST = 1024  # below, buffers of constant size distort the fit


def growth(groups: Sequence[Group]) -> Table | None:
    """One row per kind of pass, shape and backend with at least three lengths; None if there is none."""
    sizes: dict[tuple[str, str, str], dict[int, int]] = {}
    for group in groups:
        for cell in group.cells:
            problem, size = cell.record.problem, cell.record.memory.get("compiled_temp")
            length = problem.get("sequence")
            plain = group.kind in _KINDS and is_plain(problem | {"causal": True})
            if not plain or not size or not shows_memory(cell.record):
                continue
            if type(length) is int and length >= _SHORTEST:
                shape = (f"heads {problem.get('heads')}/{problem.get('kv_heads')}, D {problem.get('head_dim')}, "
                         f"{problem.get('dtype')}")  # fmt: skip
                sizes.setdefault((group.kind, shape, cell.label), {})[length] = size
    rows = [_row(*key, dict(sorted(found.items()))) for key, found in sizes.items() if len(found) >= _FEWEST]
    columns = (
        Column("kind", "pass", merge=True),
        Column("shape", "shape", merge=True),
        Column("backend", "backend"),
        Column("lengths", "S"),
        Column("exponent", "temporary memory grows as S to the power"),
        Column("per_token", "bytes per token at the longest"),
    )
    return table("memory_growth", "Growth with the length", columns, rows) if rows else None


def _row(kind: str, shape: str, backend: str, sizes: dict[int, int]) -> dict[str, Value]:
    lengths = list(sizes)
    exponent = np.polyfit(np.log(lengths), np.log(list(sizes.values())), 1)[0]
    return {
        "kind": title_of(kind),
        "shape": shape,
        "backend": backend,
        "lengths": f"{lengths[0]} to {lengths[-1]}",
        "exponent": float(exponent),
        "per_token": sizes[lengths[-1]] / lengths[-1],
    }
