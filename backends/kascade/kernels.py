"""The interface between Kascade's algorithm and the kernels that compute it.

``xla`` runs on every platform, and selects and attends to a selection without a list. ``pallas_tpu`` and
``pallas_triton`` are Pallas kernels, ``flash_cpu`` is native code for CPUs. Only the option ``kernel`` chooses among
them. A kernel refuses problems that it cannot compute.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from ..contract import AttentionSpec
from ..devices import Target
from .selection import Selection, TileLayout, select, with_local
from .settings import Settings, Tiling


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels for one problem, prefill or decoding (``query_length`` 1); made once per plan.

    Arrays lie as in the contract: ``query [B, T, N, H]``, ``key [B, S, K, H]``, ``value [B, S, K, Hv]``, output and
    ``d_out [B, T, N, Hv]``, of ``spec.dtype``, neither padded nor scaled (``spec.softmax_scale``, then
    ``spec.logits_soft_cap``). ``listed [B, K, query tiles, slots]`` int32 and the pooled mass
    ``[B, K, query tiles, units]`` are by tiles. ``layout`` holds query positions padded to whole query tiles, key
    lengths, and segment ids or None; NumPy arrays if static.
    """

    spec: AttentionSpec
    tiling: Tiling
    settings: Settings
    interpret: bool = False

    @classmethod
    def refuses(cls, spec: AttentionSpec, settings: Settings, target: Target) -> tuple[str, ...]:  # noqa: ARG003 (of the interface)
        """Every reason, one sentence each, why the kernels cannot compute this; () where they can."""
        return ()

    def pooled_mass(self, layout: TileLayout, query: Array, key: Array) -> Array:
        """As ``reference.pooled_mass``: post-softmax, summed over rows of a tile and a group.

        float32. Never writes an array of the size of queries x keys. Rows beyond ``query_length`` must not contribute;
        a row that sees no key adds 0.
        """
        raise NotImplementedError

    def select(self, layout: TileLayout, query: Array, key: Array) -> Selection:
        """The selection of an anchor, by :meth:`pooled_mass`."""
        return select(self.tiling, layout, self.pooled_mass(layout, query, key), self.settings.ablation)

    def dense_layer(self, layout: TileLayout, query: Array, key: Array, value: Array) -> tuple[Array, Selection] | None:
        """Attention to all keys, and the selection, in one pass over the keys; None where there is no such pass."""
        return None

    def attend_selected(
        self, layout: TileLayout, query: Array, key: Array, value: Array, selection: Selection
    ) -> Array:
        """:meth:`attend` to a selection and to the local region of each query tile."""
        return self.attend(layout, query, key, value, with_local(self.tiling, layout, selection))

    def attend_with_residuals(
        self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array
    ) -> tuple[Array, Any] | None:
        """:meth:`attend`, and what :meth:`gradients` needs of it; None where the kernels have no backward pass."""
        return None

    def gradients(
        self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array, residuals: Any, d_out: Array
    ) -> tuple[Array, Array, Array]:
        """Gradients of query, key and value in their dtypes, for the output's ``d_out``, from the residuals."""
        raise NotImplementedError

    def attend(self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array) -> Array:
        """Attention of query tile i of KV head k to the units ``listed[b, k, i]``, in the dtype of the query.

        ``listed`` is the result of :func:`attnsuite.backends.kascade.selection.with_local`: ascending, distinct,
        -1 to the end, local region included. Unit u holds the key slots ``u * tiling.unit`` to
        ``(u + 1) * tiling.unit - 1``; slots from ``layout.lengths`` on do not exist.
        :func:`attnsuite.backends.kascade.selection.may_see` is the mask inside a unit. It is needed for units that
        reach beyond the tile's first query position or beyond the length, and if there are segment ids. A row that sees
        nothing is exactly zero.
        """
        raise NotImplementedError
