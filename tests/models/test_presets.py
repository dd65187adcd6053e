"""Presets against what their publishers say: the number of parameters, and ``config.json``."""

import pytest

from attnsuite.models import PRESETS, ModelConfig
from attnsuite.models.huggingface import from_hf
from attnsuite.models.parameters import count_parameters

PARAMETERS = {  # from llama-2-7b on: the counts that their publishers give
    "debug": 115_520,
    "tiny": 1_722_048,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "olmo-2-1b": 1_484_916_736,
    "phi-3-mini-4k": 3_821_079_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}
_NAMES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    "tie_word_embeddings",
)
# The values of these keys in the files of the publishers, and what else decides the computation.
PUBLISHED = {
    "llama-2-7b": (("llama", 4096, 11008, 32, 32, 32, 32000, 4096, 1e-5, 10000.0, False), {}),
    "mistral-7b": (
        ("mistral", 4096, 14336, 32, 32, 8, 32000, 32768, 1e-5, 10000.0, False),
        {"sliding_window": 4096},
    ),
    "mistral-7b-v0.3": (
        ("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, 1e-5, 1000000.0, False),
        {"sliding_window": None, "head_dim": 128},
    ),
    "qwen2.5-1.5b": (
        ("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, 1e-6, 1000000.0, True),
        {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "use_mrope": False},
    ),
    "qwen2.5-3b": (
        ("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, 1e-6, 1000000.0, True),
        {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 36, "use_mrope": False},
    ),
    "qwen2.5-7b": (
        ("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, 1e-6, 1000000.0, False),
        {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "use_mrope": False},
    ),
    "qwen3-1.7b": (("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, 1e-6, 1000000, True), {"head_dim": 128}),
    "qwen3-4b": (("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, 1e-6, 1000000, True), {"head_dim": 128}),
    "qwen3-8b": (("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, 1e-6, 1000000, False), {"head_dim": 128}),
    "gemma-2-2b": (
        ("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, 1e-6, 10000.0, True),
        {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_act": "gelu_pytorch_tanh"}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma-3-1b": (
        ("gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768, 1e-6, 1000000, True),
        {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512, "hidden_act": None}
        | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": 6, "rope_local_base_freq": 10000},
    ),
    "olmo-2-1b": (("olmo2", 2048, 8192, 16, 16, 16, 100352, 4096, 1e-6, 500000, False), {"attention_bias": False}),
    "phi-3-mini-4k": (
        ("phi3", 3072, 8192, 32, 32, 32, 32064, 4096, 1e-5, 10000.0, False),
        {"sliding_window": 2047, "original_max_position_embeddings": 4096, "rope_scaling": None},
    ),
    "mixtral-8x7b": (
        ("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, 1e-5, 1000000.0, False),
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "router_aux_loss_coef": 0.02},
    ),
    "qwen3-30b-a3b": (
        ("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, 1e-6, 1000000.0, False),
        {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48}
        | {"sliding_window": None, "use_sliding_window": False},
    ),
}


def test_every_published_preset_is_held_to_its_publisher():
    assert set(PRESETS) - set(PARAMETERS) == {"small", "medium", "large"}


@pytest.mark.parametrize("preset", PARAMETERS)
def test_preset_has_the_published_number_of_parameters(preset):
    assert count_parameters(ModelConfig.from_preset(preset)) == PARAMETERS[preset]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_published_config_file_reads_as_the_preset(preset):
    values, others = PUBLISHED[preset]
    file = {"hidden_act": "silu", "torch_dtype": "bfloat16"} | dict(zip(_NAMES, values, strict=True)) | others
    assert from_hf(file) == ModelConfig.from_preset(preset)
