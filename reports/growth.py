"""The growth of temporary memory with the length: the exponent of S, fitted over the compiled lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attnsuite.suite.kinds import phase_of, title_of
from attnsuite.suite.kinds.op_case import is_plain
from attnsuite.suite.reportable import shows_memory

from .cells import Group, cells_of
from .plot import PASSES
from .table import Column, Table, table

_FEWEST = 3
_SHORTEST = 1024  # below, buffers of constant size distort the fit


def growth(groups: Sequence[Group]) -> Table | None:
    """One row per kind of pass, shape and backend with at least three lengths; None if there is none."""
    sizes: dict[tuple[str, str, str], dict[int, int]] = {}
    for cell in cells_of(groups):
        kind, problem, size = cell.record.kind, cell.record.problem, cell.record.memory.get("compiled_temp")
        length = problem.get("sequence")
        plain = phase_of(kind) in PASSES and is_plain(problem | {"causal": True})
        if plain and size and shows_memory(cell.record) and type(length) is int and length >= _SHORTEST:
            shape = (
                f"heads {problem.get('heads')}/{problem.get('kv_heads')}, D {problem.get('head_dim')}, "
                f"{problem.get('dtype')}"
            )
            sizes.setdefault((kind, shape, cell.label), {})[length] = size
    columns = (
        Column("kind", "pass", lambda at: title_of(at[0][0]), merge=True),
        Column("shape", "shape", lambda at: at[0][1], merge=True),
        Column("backend", "backend", lambda at: at[0][2]),
        Column("lengths", "S", lambda at: f"{min(at[1])} to {max(at[1])}"),
        Column("exponent", "temporary memory grows as S to the power", lambda at: _exponent(at[1])),
        Column("per_token", "bytes per token at the longest", lambda at: at[1][max(at[1])] / max(at[1])),
    )
    fitted = [item for item in sizes.items() if len(item[1]) >= _FEWEST]
    return table("memory_growth", "Growth with the length", columns, fitted) if fitted else None


def _exponent(sizes: Mapping[int, int]) -> float:
    lengths = sorted(sizes)
    return float(np.polyfit(np.log(lengths), np.log([sizes[length] for length in lengths]), 1)[0])
