"""The sizes of the presets: fields of :class:`~attnsuite.models.config.ModelConfig` that differ from their defaults.

The first five are byte-level: they need no tokenizer and train on any text. The others are published models. Their
sizes are those of the base model's ``config.json`` at the publisher (Meta's, Mistral AI's, Qwen's, Google's, Ai2's,
Microsoft's). Each gives the publisher's number of parameters (``tests/models/test_presets.py`` has both).
"""

from __future__ import annotations

from typing import Any

from .rope_scaling import RopeScaling

_BYTES = {"vocab_size": 256}
_BFLOAT16 = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
_UNTIED = {"tie_embeddings": False}
_LLAMA_3 = _BFLOAT16 | {"vocab_size": 128256, "num_kv_heads": 8, "max_length": 131072, "rope_theta": 500000.0}
_QWEN = _BFLOAT16 | {"vocab_size": 151936, "rope_theta": 1000000.0, "norm_eps": 1e-6}
_QWEN_2 = _QWEN | {"qkv_bias": True}
_QWEN_3 = _QWEN | {"qk_norm": True, "num_kv_heads": 8, "head_dim": 128, "max_length": 40960}
_GEMMA = _BFLOAT16 | {
    "norm_eps": 1e-6,
    "head_dim": 256,
    "attention_scale": 256**-0.5,
    "norms": "both",
    "norm_plus_one": True,
    "scale_embeddings": True,
    "activation": "gelu_tanh",
}


def _sized(hidden: int, intermediate: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_layers": layers, "num_heads": heads}
    return sizes | others


PRESETS: dict[str, dict[str, Any]] = {
    "debug": _BYTES | _sized(64, 172, 2, 2),
    "tiny": _BYTES | _sized(192, 512, 4, 8, num_kv_heads=2, head_dim=32),
    "small": _BYTES | _sized(512, 1408, 8, 8, num_kv_heads=4, max_length=8192),
    "medium": _BYTES | _sized(768, 2048, 12, 12, num_kv_heads=4, max_length=8192),
    "large": _BYTES | _sized(1024, 2816, 24, 16, num_kv_heads=8, max_length=8192),
    "llama-2-7b": _BFLOAT16 | _UNTIED | _sized(4096, 11008, 32, 32, vocab_size=32000, max_length=4096),
    "llama-3.2-1b": _LLAMA_3 | _sized(2048, 8192, 16, 32, rope_scaling=RopeScaling(factor=32.0)),
    "llama-3.2-3b": _LLAMA_3 | _sized(3072, 8192, 28, 24, rope_scaling=RopeScaling(factor=32.0)),
    "llama-3.1-8b": _LLAMA_3 | _UNTIED | _sized(4096, 14336, 32, 32, rope_scaling=RopeScaling(factor=8.0)),
    "llama-3.1-70b": _LLAMA_3 | _UNTIED | _sized(8192, 28672, 80, 64, rope_scaling=RopeScaling(factor=8.0)),
    # Version 0.1, whose layers see a window.
    "mistral-7b": _BFLOAT16
    | _UNTIED
    | {"attention": "sliding", "window_size": 4096}
    | _sized(4096, 14336, 32, 32, num_kv_heads=8, vocab_size=32000, max_length=32768),
    "mistral-7b-v0.3": _BFLOAT16
    | _UNTIED
    | {"rope_theta": 1000000.0}
    | _sized(4096, 14336, 32, 32, num_kv_heads=8, vocab_size=32768, max_length=32768),
    "qwen2.5-0.5b": _QWEN_2 | _sized(896, 4864, 24, 14, num_kv_heads=2, max_length=32768),
    "qwen2.5-1.5b": _QWEN_2 | _sized(1536, 8960, 28, 12, num_kv_heads=2, max_length=131072),
    "qwen2.5-3b": _QWEN_2 | _sized(2048, 11008, 36, 16, num_kv_heads=2, max_length=32768),
    "qwen2.5-7b": _QWEN_2 | _UNTIED | _sized(3584, 18944, 28, 28, num_kv_heads=4, vocab_size=152064, max_length=131072),
    "qwen3-0.6b": _QWEN_3 | _sized(1024, 3072, 28, 16),
    "qwen3-1.7b": _QWEN_3 | _sized(2048, 6144, 28, 16),
    "qwen3-4b": _QWEN_3 | _sized(2560, 9728, 36, 32),
    "qwen3-8b": _QWEN_3 | _UNTIED | _sized(4096, 12288, 36, 32),
    "gemma-2-2b": _GEMMA
    | {"attention": ("sliding", "global") * 13, "window_size": 4096, "logits_soft_cap": 50.0, "final_soft_cap": 30.0}
    | _sized(2304, 9216, 26, 8, num_kv_heads=4, vocab_size=256000, max_length=8192),
    "gemma-3-1b": _GEMMA
    | {"attention": (("sliding",) * 5 + ("global",)) * 4 + ("sliding",) * 2, "window_size": 512, "qk_norm": True}
    | {"rope_theta": 1000000.0, "sliding_rope_theta": 10000.0}
    | _sized(1152, 6912, 26, 4, num_kv_heads=1, vocab_size=262144, max_length=32768),
    "olmo-2-1b": _BFLOAT16
    | _UNTIED
    | {"norms": "after", "qk_norm": True, "qk_norm_over": "projection", "rope_theta": 500000.0, "norm_eps": 1e-6}
    | _sized(2048, 8192, 16, 16, vocab_size=100352, max_length=4096),
    "phi-3-mini-4k": _BFLOAT16
    | _UNTIED
    | {"attention": "sliding", "window_size": 2047}
    | _sized(3072, 8192, 32, 32, vocab_size=32064, max_length=4096),
    "mixtral-8x7b": _BFLOAT16
    | _UNTIED
    | {"num_experts": 8, "experts_per_token": 2, "rope_theta": 1000000.0}
    | _sized(4096, 14336, 32, 32, num_kv_heads=8, vocab_size=32000, max_length=32768),
    "qwen3-30b-a3b": _QWEN_3
    | _UNTIED
    | {"num_experts": 128, "experts_per_token": 8, "num_kv_heads": 4}
    | _sized(2048, 768, 48, 32),
}
