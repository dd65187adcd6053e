"""What other transformers call the fields of :class:`~attnsuite.models.config.ModelConfig`.

The names are those of Hugging Face's ``config.json``, Meta's ``params.json``, GPT-2, nanoGPT, MaxText, and of the
transformers in the guides that this project grew out of. They are not accepted: a configuration has one name for each
fact. The refusal says ours.
"""

from __future__ import annotations

from attnsuite.backends import names

_OURS = {
    "vocab_size": ("vocab", "n_vocab", "num_tokens"),
    "hidden_size": ("d_model", "dim", "n_embd", "emb_dim", "embed_dim", "model_dim", "base_emb_dim"),
    "intermediate_size": ("d_ff", "ff_dim", "ffn_dim", "ffn_hidden_size", "mlp_dim", "base_mlp_dim", "n_inner"),
    "num_layers": ("n_layers", "n_layer", "num_hidden_layers", "depth", "base_num_decoder_layers"),
    "num_heads": ("n_heads", "n_head", "num_attention_heads", "num_query_heads", "base_num_query_heads"),
    "num_kv_heads": ("n_kv_heads", "n_kv_head", "num_key_value_heads", "base_num_kv_heads"),
    "head_dim": ("d_head", "head_size", "dim_head"),
    "max_length": (
        "max_len",
        "max_seq_len",
        "max_seq_length",
        "max_position_embeddings",
        "max_target_length",
        "context_length",
        "block_size",
        "n_positions",
    ),
    "rope_theta": ("theta", "rope_base", "rope_max_timescale"),
    "norm_eps": ("eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "tie_embeddings": ("tie_word_embeddings", "tied_embeddings", "logits_via_embedding"),
    "window_size": ("sliding_window", "sliding_window_size", "local_window_size"),
    "qkv_bias": ("attention_bias", "use_bias"),
    "qk_norm": ("use_qk_norm", "qk_layernorm"),
    "param_dtype": ("weight_dtype",),
    "dtype": ("torch_dtype", "compute_dtype"),
}
_OF_THE_CALL = (
    "use_flash_attention",
    "use_flash",
    "use_splash_kernel",
    "attention_impl",
    "attn_implementation",
    "attention_backend",
    "attention_type",
    "backend",
)
_NONE = {
    "dropout": "there is no dropout here",
    "dropout_rate": "there is no dropout here",
    "attention_dropout": "there is no dropout here",
    "hidden_dim": "hidden_dim is hidden_size in some places and intermediate_size in others; say which",
    **dict.fromkeys(
        ("use_lora", "lora_rank", "lora_alpha"),
        "LoRA is added to a model, by attnsuite.models.lora or attnsuite train --lora-rank 8",
    ),
    "preset": 'the preset comes first: ModelConfig.from_preset("tiny", ...)',
    "max_batch_size": "a cache has its batch from model.new_cache(batch, capacity)",
}


def our_name(name: str) -> str | None:
    """A sentence without its full stop that says what ``name`` is called here; None for a name that nobody has.

    >>> our_name("d_model")
    'd_model is called hidden_size here'
    >>> our_name("use_flash_attention")
    'use_flash_attention is no fact of a model: the backend is given to the call, model(tokens, backend="auto")'
    """
    if name in _OF_THE_CALL or name.removeprefix("use_") in names():
        return f'{name} is no fact of a model: the backend is given to the call, model(tokens, backend="auto")'
    found = next((ours for ours, others in _OURS.items() if name in others), None)
    return _NONE.get(name) if found is None else f"{name} is called {found} here"
