"""CPU devices of this process, as many as a mesh asks for: a mesh without accelerators, to try and to test with.

JAX takes the number once, before it starts. Accelerators are not affected.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import jax

from .errors import InputError
from .flag_values import is_whole

if TYPE_CHECKING:
    from attnsuite.models.sharded_training import MeshSizes

_FORCED = "xla_force_host_platform_device_count"  # the older way to say it, which JAX refuses beside the newer one


def parse_mesh(text: str) -> MeshSizes:
    """The sizes in words such as ``data=2,heads=2``. Raises InputError.

    >>> parse_mesh("fsdp=4, heads=2").count
    8
    """
    from attnsuite.models.sharded_training import MeshSizes  # noqa: PLC0415 (optax)

    axes = list(MeshSizes.__dataclass_fields__)
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        if name not in axes or name in sizes or not is_whole(size) or int(size) < 1:
            raise InputError(
                f"mesh {text!r} must be AXIS=DEVICES separated by commas, each of {', '.join(axes)} at most once, "
                "such as data=2,heads=2."
            )
        sizes[name] = int(size)
    return MeshSizes(**sizes)


def variables(count: int) -> dict[str, str]:
    """Environment variables of a process in which JAX makes ``count`` CPU devices; {} where their number is known."""
    if count == 1 or _FORCED in os.environ.get("XLA_FLAGS", ""):
        return {}
    # Threads of XLA: a device that waits for another one keeps a thread, and too few would wait for ever.
    return {"JAX_NUM_CPU_DEVICES": str(count), "NPROC": os.environ.get("NPROC", str(max(16, 2 * count)))}


def make_host_devices(count: int) -> None:
    """Let JAX make ``count`` CPU devices, where it has not started yet and nobody else has said how many."""
    if found := variables(count):
        os.environ["NPROC"] = found["NPROC"]
        with contextlib.suppress(RuntimeError):  # JAX has started; whoever makes the mesh counts its devices
            jax.config.update("jax_num_cpu_devices", count)
