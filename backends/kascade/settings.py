"""Kascade's options, and the tiles that follow from them for one problem.

The paper (arXiv 2512.16391) selects single keys (``granularity="token"``) for each tile of 32 queries. Selecting whole
tiles of keys (``"tile"``) is another, coarser method, which hardware reads well. The two are never mixed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Int

from ..contract import AttentionSpec, check_options, is_whole
from ..features import Options
from .schedule import Schedule

Granularity = Literal["tile", "token"]
Ablation = Literal["all_heads", "no_remap"]
Kernel = Literal["xla", "pallas", "flash_cpu"]
When = Literal["always", "profitable", "decode"]

LEAST = 16  # keys or queries of a block: rows of a bfloat16 register on a TPU; sides of Triton's smallest product

OPTIONS = {
    "schedule": "a backends.kascade.Schedule (default: every layer is an anchor)",
    "top_k": "fraction of the earlier keys that each query tile attends to, above 0 and at most 1 (default 0.1)",
    "min_keys": "least number of earlier keys, however short the input (default 128, the paper's)",
    "granularity": "'tile' or 'token': whether tiles of keys or single keys are selected (default 'tile')",
    "tile_size": "keys per tile (default 128); with granularity='token' it has no meaning",
    "query_tile": "queries that share a selection (default: 128, or 32 with granularity='token')",
    "ablation": "None, 'all_heads' (one selection for all KV heads) or 'no_remap' (each KV head reuses its own)",
    "kernel": "'xla', 'pallas' or 'flash_cpu' (default: on CPUs 'xla'; for TPUs, GPUs and mode 'interpret' 'pallas')",
    "block_q": "queries that a Pallas kernel takes at a time, at most: a power of two of at least 16 (default 512)",
    "block_kv_sparse": "keys that a Pallas kernel loads at a time, at most: likewise (default 256)",
    "block_kv_compute": "keys that a Pallas kernel computes with at a time, at most: likewise (default 128)",
    "tuned": "path of a policy that attnsuite tune wrote; options given beside it hold over the policy's",
    "when": "'always', 'profitable' (dense where sparse would be slower) or 'decode' (dense with several query tokens, "
    "as in a prefill); where dense ran, the plan's notes say so",
}


@dataclasses.dataclass(frozen=True, slots=True)
class KascadeBlockSizes:
    """Upper bounds of the queries and keys that a Pallas kernel takes at a time.

    Raises ValueError for a size that is no power of two, for one below 16, and for a step above its block.

    >>> KascadeBlockSizes()
    KascadeBlockSizes(block_q=512, block_kv_sparse=256, block_kv_compute=128)
    """

    block_q: int = 512
    block_kv_sparse: int = 256
    block_kv_compute: int = 128

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if not is_whole(size, LEAST) or size & (size - 1):
                raise ValueError(
                    f"kascade: {field.name}={size!r} is not accepted; it is a power of two of at least {LEAST}."
                )
        if self.block_kv_compute > self.block_kv_sparse:
            raise ValueError(
                f"kascade: block_kv_compute={self.block_kv_compute} is more than block_kv_sparse="
                f"{self.block_kv_sparse}; give at most a block."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of the ``kascade`` backend (:data:`OPTIONS`). Raises ValueError for values that are not accepted.

    ``kernel`` is None until the target decides it (:meth:`of`).

    >>> Settings(granularity="token").query_tile
    32
    """

    schedule: Schedule | None = None
    top_k: float = 0.1
    min_keys: int = 128
    granularity: Granularity = "tile"
    tile_size: int = 128
    query_tile: int = 0
    ablation: Ablation | None = None
    kernel: Kernel | None = None
    when: When = "always"
    block_q: int | None = None
    block_kv_sparse: int | None = None
    block_kv_compute: int | None = None
    tuned: str | None = None

    def __post_init__(self) -> None:
        if self.query_tile == 0:
            object.__setattr__(self, "query_tile", 32 if self.granularity == "token" else 128)
        good = {
            "schedule": self.schedule is None or isinstance(self.schedule, Schedule),
            "top_k": isinstance(self.top_k, int | float) and not isinstance(self.top_k, bool) and 0 < self.top_k <= 1,
            "min_keys": is_whole(self.min_keys, 0),
            "granularity": self.granularity in get_args(Granularity),
            "tile_size": is_whole(self.tile_size, 1),
            "query_tile": is_whole(self.query_tile, 1),
            "ablation": self.ablation is None or self.ablation in get_args(Ablation),
            "kernel": self.kernel is None or self.kernel in get_args(Kernel),
            "when": self.when in get_args(When),
            "tuned": self.tuned is None or isinstance(self.tuned, str),
        }
        for name, accepted in good.items():
            if not accepted:
                hint = share_of_tiles(self.top_k, self.tile_size) if name == "top_k" else ""
                raise ValueError(
                    f"kascade: {name}={getattr(self, name)!r} is not accepted; {name} is {OPTIONS[name]}.{hint}"
                )
        self.block_sizes()  # raises for sizes that are none
        if self.granularity == "tile" and self.tile_size % self.query_tile and self.query_tile % self.tile_size:
            raise ValueError(
                f"kascade: query_tile={self.query_tile} and tile_size={self.tile_size} do not fit; "
                "one must be a multiple of the other."
            )

    @staticmethod
    def of(options: Options, kernel: Kernel = "xla") -> Settings:
        """Settings of backend options; ``kernel`` is the default. Raises ValueError for a name that is no option."""
        settings = Settings(**check_options("kascade", options, OPTIONS))
        return settings if settings.kernel else dataclasses.replace(settings, kernel=kernel)

    def block_sizes(self) -> KascadeBlockSizes:
        """The block sizes of the options, else the defaults. A default step is never above a given block."""
        names = [field.name for field in dataclasses.fields(KascadeBlockSizes)]
        sizes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if "block_kv_sparse" in sizes and "block_kv_compute" not in sizes:
            sizes["block_kv_compute"] = min(sizes["block_kv_sparse"], KascadeBlockSizes().block_kv_compute)
        return KascadeBlockSizes(**sizes)

    def as_options(self) -> dict[str, Any]:
        """These settings as options. An open ``kernel`` is left out, for the target to decide."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How one problem is cut, all static.

    Queries are cut into ``query_tiles`` of ``query_tile`` rows (the last may be short). Keys are cut into ``units`` of
    ``unit`` slots: tiles, or single keys (``unit=1``). Key positions are slots. The *local* region of a query tile
    begins at the unit with the position of its first query and is ``local_units`` long. It is always attended to, under
    the causal mask. Selected units lie strictly before it: at most ``slots`` of them, and ``budgets[n]`` of ``n``
    candidates.

    >>> spec = AttentionSpec(batch=1, query_length=512, key_value_length=512, num_heads=2, num_kv_heads=2, head_dim=64)
    >>> tiling = Tiling.of(spec, Settings(top_k=0.5, min_keys=0, tile_size=64, query_tile=128))
    >>> tiling.query_tiles, tiling.units, tiling.local_units, tiling.slots
    (4, 8, 2, 3)
    """

    query_tile: int
    query_tiles: int
    unit: int
    units: int
    local_units: int
    slots: int
    budgets: tuple[int, ...]

    @staticmethod
    def of(spec: AttentionSpec, settings: Settings) -> Tiling:
        """The tiling of ``spec``: one query token (decoding) is a query tile of one row."""
        unit = 1 if settings.granularity == "token" else settings.tile_size
        rows = min(settings.query_tile, spec.query_length)
        units = -(-spec.key_value_length // unit)
        if rows == 1 or (not spec.has_positions and unit % settings.query_tile == 0):
            local = 1
        elif spec.has_positions:  # begins anywhere in a unit
            local = (rows - 2) // unit + 2
        else:
            local = -(-rows // unit)
        # Without positions the last query tile begins at a slot that is known.
        whole = spec.key_value_length // unit  # what the end of the keys cuts is never selected
        candidates = whole if spec.has_positions else min((spec.query_length - 1) // rows * rows // unit, whole)
        budgets = budget(settings, unit, candidates)
        return Tiling(
            rows, -(-spec.query_length // rows), unit, units, local, int(budgets[-1]), tuple(budgets.tolist())
        )

    @property
    def padded_queries(self) -> int:
        """Rows of all query tiles."""
        return self.query_tile * self.query_tiles


def budget(settings: Settings, unit: int, candidates: int) -> Int[np.ndarray, " n"]:
    """How many units are selected where there are n candidates, for n from 0 to ``candidates``.

    The paper's rolling k: min(max(min_keys, top_k * earlier keys), earlier keys), in whole units, rounded up.

    >>> budget(Settings(top_k=0.25, min_keys=0), 64, 8).tolist()
    [0, 1, 1, 1, 1, 2, 2, 2, 2]
    """
    n = np.arange(candidates + 1)
    share = np.ceil(n * settings.top_k - 1e-9)  # in units; 1e-9 undoes float error above a whole number
    return np.minimum(np.maximum(share, math.ceil(settings.min_keys / unit)), n).astype(np.int32)


def share_of_tiles(tiles: object, tile_size: object) -> str:
    """What to write for a number of tiles, which earlier guides gave as ``top_k``; empty where it is none."""
    if not (isinstance(tiles, int | float) and tiles > 1 and tiles == int(tiles) and is_whole(tile_size, 1)):
        return ""
    share = tiles * tile_size / 4096  # pyright: ignore[reportOperatorIssue]
    return f" {tiles:g} tiles of {tile_size} keys are top_k={share:g} of 4096 keys: divide by the tiles that there are."
