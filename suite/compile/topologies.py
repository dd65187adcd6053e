"""Devices that are not in this machine: the compiler that each needs, and JAX device objects to compile for.

A TPU comes from ``libtpu``, an NVIDIA GPU from XLA's CUDA plugin and a description of the chip; neither needs a driver
or an accelerator. Both compilers allow one kind of device per process. Call :func:`device` in a process of its own,
with the variables :data:`ENVIRONMENT` (see ``compile_run.py``). The figures of chips are in ``backends/devices.py``.
"""

from __future__ import annotations

import functools
from importlib import util
from typing import Any

from attnsuite.backends import Target
from attnsuite.backends.devices import NVIDIA_GPUS, TPUS

# Without these libtpu asks a metadata server and its own chip for the topology, and takes a lock.
ENVIRONMENT = {
    "TPU_LOG_DIR": "disabled",  # libtpu would write to /tmp/tpu_logs, whatever TMPDIR says
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

KINDS = (*TPUS, *NVIDIA_GPUS)

# The modules of each compiler, and the extra that brings them. Of JAX's CUDA plugin, XLA itself is the second part.
_MODULES = {
    "tpu": (("libtpu",), "tpu"),
    "cuda": (("jax_cuda12_plugin", "jax_plugins.xla_cuda12"), "compile-cuda"),
}


def missing(target: Target) -> str | None:
    """A sentence with the line that installs the compiler for ``target``; None where the compiler is installed."""
    modules, extra = _MODULES[target.platform]
    if all(map(_is_installed, modules)):
        return None
    return f"the compiler for {target} is not installed; install it with: pip install '.[{extra}]'."


def _is_installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that the module would be in
        return False


def device(target: Target) -> Any:
    """A device of this kind to compile for. The first call in a process decides the kind that the process can have."""
    return devices(target)[0]


@functools.cache
def devices(target: Target) -> tuple[Any, ...]:
    """The devices of a slice, or at least one of a kind. Raises the compiler's error for an unknown slice."""
    from jax.experimental import topologies  # noqa: PLC0415 (initialises nothing, but takes its time)

    if target.platform == "tpu":
        name = target.name if target.topology else f"{target.kind}:{TPUS[target.kind].smallest_slice}"
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    return tuple(
        topologies.get_topology_desc(
            platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=_target_config(target)
        ).devices
    )


def _target_config(target: Target) -> str:
    """XLA's ``GpuTargetConfigProto`` as text."""
    chip, (major, minor) = NVIDIA_GPUS[target.kind], target.compute_capability or (0, 0)
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          threads_per_core_limit: 2048
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {chip.shared_memory - 1024}
          shared_memory_per_core: {chip.shared_memory}
          core_count: {chip.cores}
          fpus_per_core: {chip.float_units}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          thread_dim_limit_x: 1024
          thread_dim_limit_y: 1024
          thread_dim_limit_z: 64
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          memory_bandwidth: {chip.bandwidth}
          l2_cache_size: {chip.l2_cache}
          clock_rate_ghz: {chip.clock}
          device_memory_size: {target.memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
          runtime_version: "12.9.0"
          driver_version: "13.0.0"
          compile_time_toolkit_version: "12.9.0"
          dnn_version: "9.10.0"
          name: "{chip.name}"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{chip.name}"
    """
