"""What a module of kernels has to bring to compute Kascade: the seam between the algorithm and who executes it.

``xla`` runs on every platform; ``pallas_tpu`` and ``pallas_triton`` are Pallas forms with the same functions, and
``flash_cpu`` is native code for CPUs. Which one computes is the option ``kernel``, nothing else: a kernel that cannot
do a problem refuses it.
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
    """Functions of a kernel module (the module itself is the object). Prefill and decoding (``query_length`` 1) alike.

    Arrays lie as in the contract: ``query [B, T, N, H]``, ``key [B, S, K, H]``, ``value [B, S, K, Hv]``, of
    ``spec.dtype``, not padded and not scaled (``spec.softmax_scale``, then ``spec.logits_soft_cap``). ``places`` says
    who stands where: query positions padded to whole query tiles, key lengths, segment ids or None; NumPy where static.
    """

    def refuses(self, spec: AttentionSpec, settings: Settings, target: Target) -> tuple[str, ...]:
        """Every reason, one sentence each, why the kernels cannot compute this; () where they can."""
        ...

    def geometry(self, spec: AttentionSpec, tiling: Tiling, settings: Settings) -> Any:
        """What the module's own two functions below need to know of a problem beside its data; made once per plan."""
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

        float32. Never writes anything of the size of queries x keys. Of rows beyond ``query_length`` nothing may be
        in it, and a row that sees no key adds 0.
        """
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

        ``listed`` int32 is what :func:`attnsuite.backends.kascade.selection.with_own` gives: ascending, distinct, -1 to
        the end, own region included; unit u holds the key slots ``u * tiling.unit`` to ``(u + 1) * tiling.unit - 1``,
        of which those from ``places.lengths`` on do not exist. The mask inside a unit is
        :func:`attnsuite.backends.kascade.selection.may_see`: needed for units that reach beyond the tile's first query
        position, beyond the length, or where there are segment ids. A row that sees nothing is exactly zero.
        """
        ...


def of(kernel: Kernel | None, target: Target) -> Kernels:
    """The kernels of that name (other than ``xla``) for ``target``.

    Pallas has Triton's form for NVIDIA, else the TPU's, which an interpreter runs anywhere. Raises ImportError where
    they are not installed.
    """
    if kernel == "flash_cpu":
        from . import flash_cpu  # noqa: PLC0415 (llvmlite may be missing)

        return flash_cpu
    if target.platform == "cuda":
        from . import pallas_triton  # noqa: PLC0415 (Pallas' parts for one device may be missing)

        return pallas_triton
    from . import pallas_tpu  # noqa: PLC0415

    return pallas_tpu
