"""Kvax's kernels compiled ahead of time for an absent NVIDIA GPU: no GPU, no driver, no jax-triton.

The launches of one forward (and backward) pass are recorded by tracing the backend's own plan abstractly. Triton
compiles each launch for the target, and the ``ptxas`` that Triton brings assembles it. The results are sizes: whether a
kernel compiles and fits, registers, spills, shared memory, wide and narrow loads. Never a speed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.backends.nvidia import compiler as nvidia  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]
from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

from ..devices import SHARED_LIMITS, Target
from ..layout import ARRAYS, Layout, shape_of
from ..spec import AttentionSpec
from ..tunable import KernelBuild
from . import upstream
from .block_sizes import Passes
from .mesh import OneDevice, plan_with

_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
_DIVISIBLE = (("tt.divisibility", 16),)
_SECONDS = 300.0  # for one run of ptxas


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One launch: the kernel, its run-time arguments in order (shapes or numbers), its constants and parameters.

    ``blocks`` is the product of its grid.
    """

    kernel: JITFunction
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    blocks: int


def compile_kernels(
    spec: AttentionSpec, target: Target, blocks: Passes, *, stride_hint: bool = True
) -> tuple[KernelBuild, ...]:
    """Every kernel that the spec launches, compiled for the target.

    ``stride_hint=False`` does not tell Triton that strides are divisible by 16, as jax-triton 0.3 on its own.
    """
    return tuple(_compile(launch, target, stride_hint) for launch in record_launches(spec, blocks))


def record_launches(spec: AttentionSpec, blocks: Passes) -> tuple[RecordedLaunch, ...]:
    """The launches of one pass on one device, without running any."""
    launches: list[RecordedLaunch] = []
    kvax = upstream.load(functools.partial(_record, launches))

    def run(layout: Layout, query: Any, key: Any, value: Any) -> Any:
        def forward(query: Any, key: Any, value: Any) -> Any:
            return plan_with(kvax, spec, layout, blocks, OneDevice()).run(query, key, value)[0]

        if not spec.needs_grad:
            return forward(query, key, value)
        out, pullback = jax.vjp(forward, query, key, value)
        return pullback(out)

    jax.eval_shape(run, *_abstract_arguments(spec))
    return tuple(launches)


def _record(
    launches: list[RecordedLaunch], *args: Any, kernel: Any, out_shape: Any, grid: tuple[int, ...], **options: Any
) -> Any:
    """Takes the place of ``jax_triton.triton_call``."""
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x for x in args]
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    launches.append(
        RecordedLaunch(
            kernel,
            (*arguments, *jax.tree.leaves(out_shape)),
            constants,
            options.get("num_warps", 4),
            options.get("num_stages", 3),
            math.prod(grid),
        )
    )
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)


def _abstract_arguments(spec: AttentionSpec) -> tuple[Any, ...]:
    B, T, S = spec.batch, spec.query_length, spec.key_value_length
    abstract: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape_of(spec, axes), jnp.int32)
        for name, (announced, axes) in ARRAYS.items()
        if getattr(spec, announced)
    }
    shapes = (
        (B, T, spec.num_heads, spec.head_dim),
        (B, S, spec.num_kv_heads, spec.head_dim),
        (B, S, spec.num_kv_heads, spec.value_head_dim),
    )
    return Layout(**abstract), *(jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype)) for shape in shapes)


def _compile(launch: RecordedLaunch, target: Target, stride_hint: bool) -> KernelBuild:
    limit = SHARED_LIMITS.get(target.compute_capability or (0, 0))
    blocks = {k: x for k, x in launch.constants.items() if "block_size" in k and isinstance(x, int)}
    build = KernelBuild(
        name=launch.kernel.fn.__name__,
        configuration=blocks | {"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        shared_limit_bytes=limit,
        blocks=launch.blocks,
    )
    try:
        compiled = compile_launch(launch, target, stride_hint)
        report = assemble(compiled.asm["ptx"], _architecture(target))
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is the result)
        return dataclasses.replace(build, error=_first_line(error))
    shared = compiled.metadata.shared
    loads = count_loads(compiled.asm["ptx"])
    return dataclasses.replace(
        build,
        registers=_number(r"Used (\d+) registers", report),
        spilled_bytes=_number(r"(\d+) bytes spill stores", report),
        shared_bytes=shared,
        vector_loads=loads["vector"],
        scalar_loads=loads["scalar"],
        tensor_columns=compiled.metadata.tmem_size,
        error=None if limit is None or shared <= limit else f"needs {shared} bytes of shared memory of {limit}.",
    )


def compile_launch(launch: RecordedLaunch, target: Target, stride_hint: bool = True) -> Any:
    """Triton's compiled kernel (``.asm``, ``.metadata``). Raises whatever Triton raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # block pointers and "and" on tensors: Kvax uses both
        warnings.simplefilter("ignore", DeprecationWarning)  # Triton 3.7 builds syntax trees as Python 3.13 deprecates
        return triton.compile(
            _source(launch, stride_hint),
            target=GPUTarget("cuda", _architecture(target), 32),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        )


def _architecture(target: Target) -> int:
    major, minor = target.compute_capability or (0, 0)
    return 10 * major + minor


def _source(launch: RecordedLaunch, stride_hint: bool) -> ASTSource:
    """The kernel with the types of its arguments, as jax-triton hands it to Triton."""
    names: Sequence[str] = launch.kernel.arg_names
    constants, signature, attributes = dict(launch.constants), {}, {}
    rest = iter(launch.arguments)
    for index, name in enumerate(names):
        if name in constants:
            continue
        value = next(rest)
        if isinstance(value, jax.ShapeDtypeStruct):
            signature[name] = _POINTERS[np.dtype(value.dtype).name]
            attributes[(index,)] = [list(x) for x in _DIVISIBLE]  # XLA's buffers are aligned
        elif type(value) is int and value == 1:
            constants[name] = 1
        else:
            signature[name] = "fp64" if isinstance(value, float) else "i32"
            if stride_hint and upstream.is_divisible(value):
                attributes[(index,)] = [list(x) for x in _DIVISIBLE]
    return ASTSource(
        fn=launch.kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )


@functools.lru_cache(maxsize=64)
def assemble(ptx: str, architecture: int, assembler: int | None = None) -> str:
    """The output of ``ptxas -v`` for a kernel. Raises RuntimeError with its message if it refuses.

    Triton brings several versions of ``ptxas``; ``assembler`` asks for that of another architecture.
    Triton caches compiled kernels, and this function assembled ones: candidates of a tuning share most kernels.
    """
    with tempfile.TemporaryDirectory(prefix="attnsuite-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [
            nvidia.get_ptxas(assembler or architecture).path,
            "-v",
            f"--gpu-name={nvidia.sm_arch_from_capability(architecture)}",
        ]
        done = subprocess.run(  # noqa: S603 (Triton's own assembler)
            [*command, str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"ptxas ended with {done.returncode}")
    return done.stderr


def count_loads(ptx: str) -> collections.Counter[str]:
    """Loads from global memory by width: ``vector`` (16 bytes at once) and ``scalar`` (anything narrower).

    >>> count_loads("ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1];")["vector"]
    1
    >>> count_loads("cp.async.cg.shared.global [%r1], [%rd1], 0x10;")["vector"]
    1
    >>> count_loads("ld.global.b16 %rs1, [%rd1];")["scalar"]
    1
    """
    loads: collections.Counter[str] = collections.Counter()
    for line in ptx.splitlines():
        if copy := re.search(r"cp\.async\.c[ag]\.shared\.global.*?, (?:0x)?([0-9a-f]+)", line):
            loads["vector" if copy[1] in ("10", "16") else "scalar"] += 1
        elif load := re.search(r"ld\.global(?:\.[a-z:]\w*)*?(?:\.v(\d))?\.[bfsu](\d+)\b", line):
            loads["vector" if int(load[1] or 1) * int(load[2]) >= 128 else "scalar"] += 1
    return loads


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
