"""tokamax's Pallas kernel for TPUs, its further development of splash attention, behind the contract.

The kernel is ``splash_attention`` of tokamax 0.0.17, or of its build 0.0.18.dev20261026: JAX's splash with one
backward kernel for dq, dk and dv, and with blocks skipped that the segment ids empty. It runs natively on TPUs, in
Pallas' interpreter anywhere, and compiles for absent TPUs; nothing of this project has run it on a TPU. The module is
private in tokamax, hence only these versions are taken. The backward pass keeps a dq of its own for each block of keys
and adds them at the end: its memory grows with the number of these blocks. ``splash_operands.py`` adds what the kernel
leaves to its caller.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from . import tokamax_package
from .contract import AttentionSpec, Layout, Plan
from .devices import Target
from .features import Mode, Takes
from .splash_blocks import TUNED_OPTION, as_options, candidates, checked, read_options, work_of
from .splash_mask import Masking, SlotMask, of_nothing
from .splash_operands import BLOCK_OPTIONS, DTYPES, FEATURES, Blocks, blocks_of, plan_of, reasons
from .tunable import KernelWork

OPTIONS = BLOCK_OPTIONS | TUNED_OPTION

# Where the kernel is, by version. The last build before 0.0.18 has moved it, and changed its imports alone.
_PACKAGE = "tokamax._src.ops.experimental.tpu.splash_attention"
_MOVED = {"0.0.18.dev20261026": "tokamax._src.ops.splash_attention"}


@dataclasses.dataclass(frozen=True, slots=True)
class TokamaxSplash:
    """The ``tokamax_splash`` backend."""

    name: str = "tokamax_splash"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """Masks that slots and segment ids can express."""
        because = {"dtype": "whose kernel computes as TPUs do", "mask": "whose mask is by slot"}
        return Takes(features=FEATURES, dtypes=DTYPES, because=because)

    def refuses(
        self, spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any] | None
    ) -> tuple[str, ...]:
        """Devices that are no TPU, what a mask by slot cannot say, and a missing package.

        The package is asked for on the present device, and in modes that run on the host (interpreting and compiling).
        """
        found = reasons(self.name, spec, target, mode)
        if not found and (target.present or mode != "native"):
            return missing()
        return found

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Make the block masks once for all layers. Options: see :data:`OPTIONS`.

        Raises ValueError for other options, and ImportError, with the reason, where tokamax cannot be used here.
        """
        given, notes = read_options(self.name, OPTIONS, spec, target, options)
        blocks = blocks_of(self.name, spec, target, given)
        if why_not := missing():
            raise ImportError(" ".join(why_not))
        masking = Masking.of(spec, *blocks.lengths)
        run = _kernel_of(masking, blocks, spec.needs_grad, spec.logits_soft_cap, mode == "interpret")
        return plan_of(spec, layout, blocks.lengths, run, notes)

    def defaults(self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rule's block sizes, with which ``attnsuite tune`` compares the candidates."""
        return as_options(spec, blocks_of(self.name, spec, target, checked(self.name, OPTIONS, dict(given))))

    def candidates(
        self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Block sizes for ``attnsuite tune``: of the backward pass if there is one, else of the forward pass."""
        return candidates(spec)

    def work(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> KernelWork:
        """The blocks that the kernel visits, and what it loads for them."""
        return work_of(self.name, spec, target, checked(self.name, OPTIONS, dict(options)), passes=1)


@functools.lru_cache(maxsize=32)
def _kernel_of(
    masking: Masking, blocks: Blocks, backward: bool, soft_cap: float | None, interpret: bool
) -> Callable[..., Array]:
    """The kernel for this mask, with its tables as NumPy arrays (see ``splash_kernel.py``).

    ``use_base2_exp`` is off: in base 2 the kernel multiplies the query by log2(e) in its own dtype, and a query of
    bfloat16 is rounded once more.
    """
    if masking.hides_everything:
        return of_nothing
    package = _MOVED.get(metadata.version("tokamax"), _PACKAGE)
    kernel, masks = (importlib.import_module(f"{package}.splash_attention_{part}") for part in ("kernel", "mask"))
    sizes = {}
    if backward:
        sizes = {"block_q_dkv": blocks.q_backward, "block_kv_dkv": blocks.kv_backward}
        sizes |= {"block_kv_dkv_compute": blocks.kv_backward_compute}
    config = kernel.SplashConfig(
        block_q=blocks.q,
        block_kv=blocks.kv,
        block_kv_compute=blocks.kv_compute,
        **sizes,
        attn_logits_soft_cap=soft_cap,
        use_base2_exp=False,
        interpret=interpret,
    )
    lengths = masking.query_length, masking.key_value_length
    mask = masks.FullMask(lengths) if masking.mask is None else SlotMask(masking, masking.mask)
    with jax.ensure_compile_time_eval():  # plans are made inside of jit too
        return jax.tree.map(np.asarray, kernel.make_splash_mha_single_device(mask, config=config))


def missing() -> tuple[str, ...]:
    """Why tokamax cannot be used in this environment; nothing where it can."""
    kernel = "splash_attention_kernel"
    moved = {version: f"{package}.{kernel}" for version, package in _MOVED.items()}
    return tokamax_package.missing("tokamax_splash", f"{_PACKAGE}.{kernel}", moved)


TOKAMAX_SPLASH = TokamaxSplash()
