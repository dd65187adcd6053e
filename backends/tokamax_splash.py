"""tokamax's Pallas kernel for TPUs, its further development of splash attention, behind the contract.

The kernel is ``splash_attention`` of tokamax 0.0.17, or of its build 0.0.18.dev20261026: JAX's splash with one
backward kernel for dq, dk and dv, and with blocks skipped that the segment ids empty. It runs natively on TPUs, in
Pallas' interpreter anywhere, and compiles for absent TPUs; nothing of this project has run it on a TPU. The module is
private in tokamax, hence only these versions are taken. The backward pass keeps a dq of its own for each block of keys
and adds them at the end: its memory grows with the number of these blocks. ``splash_operands.py`` adds what the kernel
leaves to its caller.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import metadata

import jax
import numpy as np
from jaxtyping import Array

from . import tokamax_package
from .features import Mode, Takes
from .splash_blocks import TUNED_OPTION, SplashKernel, plan_of, read_blocks
from .splash_operands import BLOCK_OPTIONS, DTYPES, FEATURES, Blocks, Masking, of_nothing, reasons

OPTIONS = BLOCK_OPTIONS | TUNED_OPTION

# Where the kernel is, by version. The last build before 0.0.18 has moved it, and changed its imports alone.
_PACKAGE = "tokamax._src.ops.experimental.tpu.splash_attention"
_MOVED = {"0.0.18.dev20261026": "tokamax._src.ops.splash_attention"}


@functools.lru_cache(maxsize=32)
def _kernel_of(masking: Masking, blocks: Blocks, soft_cap: float | None, interpret: bool) -> Callable[..., Array]:
    """The kernel for this mask, with its tables as NumPy arrays (see ``splash.py``).

    ``use_base2_exp`` is off: in base 2 the kernel multiplies the query by log2(e) in its own dtype, and a query of
    bfloat16 is rounded once more.
    """
    if masking.hides_everything:
        return of_nothing
    package = _MOVED.get(metadata.version("tokamax"), _PACKAGE)
    kernel, masks = (importlib.import_module(f"{package}.splash_attention_{part}") for part in ("kernel", "mask"))
    sizes = {}
    if blocks.backward:
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
    mask = masks.FullMask(masking.shape) if masking.mask_function is None else masking
    with jax.ensure_compile_time_eval():  # plans are made inside of jit too
        return jax.tree.map(np.asarray, kernel.make_splash_mha_single_device(mask, config=config))


def missing(_: Mode = "native") -> tuple[str, ...]:
    """Why tokamax cannot be used in this environment; nothing where it can."""
    kernel = "splash_attention_kernel"
    moved = {version: f"{package}.{kernel}" for version, package in _MOVED.items()}
    return tokamax_package.missing("tokamax_splash", f"{_PACKAGE}.{kernel}", moved)


TOKAMAX_SPLASH = SplashKernel(
    name="tokamax_splash",
    allowed=Takes(
        features=FEATURES,
        dtypes=DTYPES,
        because={"dtype": "whose kernel computes as TPUs do", "mask": "whose mask is by slot"},
    ),
    platform="tpu",
    reasons=functools.partial(reasons, "tokamax_splash"),
    missing=missing,
    options=OPTIONS,
    check=functools.partial(read_blocks, "tokamax_splash", OPTIONS),
    make=functools.partial(plan_of, "tokamax_splash", OPTIONS, _kernel_of),
)
