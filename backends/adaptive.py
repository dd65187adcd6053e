"""The functions that users of Kvax wrappers know, on top of the registry.

``adaptive_flash_attention`` and ``get_flash_attention_config`` are called as in those wrappers.
:func:`attnsuite.backends.resolve` decides which kernel runs. For meshes use :func:`attnsuite.backends.Sharded`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from . import registry
from .attention import Scale, attention
from .devices import Target
from .spec import AttentionSpec
from .support import support

# Every flash kernel takes this shape, so availability is judged by it.
_PROBE = AttentionSpec(
    batch=1,
    query_length=512,
    key_value_length=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    dtype="bfloat16",
    is_causal=True,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlashAttentionConfig(Mapping[str, Any]):
    """The flash attention that is available here, by attribute or by key (``config["kvax_available"]``).

    ``flash_attention_supported`` says whether any exact flash kernel runs here, ``reasons`` why Kvax does not.
    ``device_type`` is "cpu", "gpu" or "tpu"; ``device_info`` is JAX's name of the first device.
    """

    kvax_available: bool
    device_type: str
    flash_attention_supported: bool
    device_info: str
    reasons: tuple[str, ...]

    @property
    def supported(self) -> bool:
        """The same as ``flash_attention_supported``."""
        return self.flash_attention_supported

    def __getitem__(self, key: str) -> Any:
        if key not in _KEYS:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)


_KEYS = tuple(field.name for field in dataclasses.fields(FlashAttentionConfig))


def get_flash_attention_config() -> FlashAttentionConfig:
    """Whether Kvax, or any flash kernel, runs natively on this machine.

    >>> get_flash_attention_config()["device_type"] in ("cpu", "gpu", "tpu")
    True
    """
    target = Target.here()
    reasons = ("kvax is not registered in this installation.",)
    if "kvax" in registry.names():
        reasons = support(registry.get("kvax"), _PROBE, target).reasons
    backends = [registry.get(name) for name in registry.names() if name not in ("standard", "chunked")]
    return FlashAttentionConfig(
        kvax_available=not reasons,
        device_type=target.platform if target.platform in ("cpu", "tpu") else "gpu",
        flash_attention_supported=any(support(each, _PROBE, target) for each in backends if each.exact),
        device_info=str(jax.devices()[0]),
        reasons=reasons,
    )


def adaptive_flash_attention(
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads head_dim"],
    scale: Scale | None = None,
    causal: bool = True,
    padding_mask: Bool[Array, "batch kv_len"] | None = None,
    use_flash_attention: bool = True,
) -> Float[Array, "batch q_len heads head_dim"]:
    """Flash attention where it is available; the standard formula with ``use_flash_attention=False``.

    ``scale`` may be a concrete scalar array, as ``1.0 / jnp.sqrt(d)`` gives outside ``jax.jit``. ``padding_mask`` is
    True for real tokens. Rows of padding give zero if query and key lengths are equal.
    """
    segments: dict[str, Any] = {}
    if padding_mask is not None:
        padding_mask = padding_mask.astype(bool)
        key_ids = padding_mask.astype(jnp.int32) - 1  # real: 0, padding: -1
        query_ids = key_ids if query.shape[1] == key.shape[1] else jnp.zeros(query.shape[:2], jnp.int32)
        segments = {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    backend = "auto" if use_flash_attention else "standard"
    return attention(query, key, value, scale=scale, is_causal=causal, backend=backend, **segments)
