"""The interface between Kascade's algorithm and the kernels that compute it.

``xla`` runs on every platform. ``pallas_tpu`` and ``pallas_triton`` are Pallas kernels with the same functions;
``flash_cpu`` is native code for CPUs. Only the option ``kernel`` chooses among them. A kernel refuses problems that it
cannot compute.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from ..contract import AttentionSpec
from ..devices import Target
from .selection import Places
from .settings import Kernel, Settings, Tiling


@runtime_checkable
class Kernels(Protocol):
    """Functions of a kernel module (the module itself is the object), for prefill and decoding (``query_length`` 1).

    Arrays lie as in the contract: ``query [B, T, N, H]``, ``key [B, S, K, H]``, ``value [B, S, K, Hv]``, of
    ``spec.dtype``, neither padded nor scaled (``spec.softmax_scale``, then ``spec.logits_soft_cap``). ``places`` holds
    query positions padded to whole query tiles, key lengths, and segment ids or None; NumPy arrays if static.
    """

    def refuses(self, spec: AttentionSpec, settings: Settings, target: Target) -> tuple[str, ...]:
        """Every reason, one sentence each, why the kernels cannot compute this; () where they can."""
        ...

    def geometry(self, spec: AttentionSpec, tiling: Tiling, settings: Settings) -> Any:
        """The static data of a problem that the module's other functions need; made once per plan."""
        ...

    def pooled_mass(
        self,
        geometry: Any,
        places: Places,
        query: Float[Array, "batch q_len heads head_dim"],
        key: Float[Array, "batch kv_len kv_heads head_dim"],
        *,
        interpret: bool,
    ) -> Float[Array, "batch kv_heads query_tiles units"]:
        """As ``reference.pooled_mass``: post-softmax, summed over rows of a tile and a group.

        float32. Never writes an array of the size of queries x keys. Rows beyond ``query_length`` must not contribute;
        a row that sees no key adds 0.
        """
        ...

    def dense(
        self,
        geometry: Any,
        places: Places,
        query: Float[Array, "batch q_len heads head_dim"],
        key: Float[Array, "batch kv_len kv_heads head_dim"],
        value: Float[Array, "batch kv_len kv_heads v_dim"],
    ) -> tuple[Float[Array, "batch q_len heads v_dim"], Float[Array, "batch kv_heads query_tiles units"]] | None:
        """Attention to all keys and the pooled mass, in one pass over the keys; None where there is no such pass."""
        ...

    def attend(
        self,
        geometry: Any,
        places: Places,
        query: Float[Array, "batch q_len heads head_dim"],
        key: Float[Array, "batch kv_len kv_heads head_dim"],
        value: Float[Array, "batch kv_len kv_heads v_dim"],
        listed: Int[Array, "batch kv_heads query_tiles slots"],
        *,
        interpret: bool,
    ) -> Float[Array, "batch q_len heads v_dim"]:
        """Attention of query tile i of KV head k to the units ``listed[b, k, i]``, in the dtype of the query.

        ``listed`` int32 is the result of :func:`attnsuite.backends.kascade.selection.with_own`: ascending, distinct, -1
        to the end, own region included. Unit u holds the key slots ``u * tiling.unit`` to
        ``(u + 1) * tiling.unit - 1``; slots from ``places.lengths`` on do not exist.
        :func:`attnsuite.backends.kascade.selection.may_see` is the mask inside a unit. It is needed for units that
        reach beyond the tile's first query position or beyond the length, and if there are segment ids. A row that sees
        nothing is exactly zero.
        """
        ...


def of(kernel: Kernel | None, target: Target) -> Kernels:
    """The kernels of that name (other than ``xla``) for ``target``.

    Pallas has a Triton form for NVIDIA GPUs and a TPU form for all else, which an interpreter runs anywhere. Raises
    ImportError if they are not installed.
    """
    if kernel == "flash_cpu":
        from . import flash_cpu  # noqa: PLC0415 (llvmlite may be missing)

        return flash_cpu
    if target.platform == "cuda":
        from . import pallas_triton  # noqa: PLC0415 (Pallas' parts for one device may be missing)

        return pallas_triton
    from . import pallas_tpu  # noqa: PLC0415

    return pallas_tpu
