"""The names of ``kvax.ops`` and ``kvax.utils`` on the NVIDIA GPU that is here; see ``direct.py``."""

from .direct import PADDING_SEGMENT_ID as PADDING_SEGMENT_ID
from .direct import FlashAttentionParamsConfig as FlashAttentionParamsConfig
from .direct import Functions

_FUNCTIONS = Functions("native")
flash_attention = _FUNCTIONS.flash_attention
create_attention_mask = _FUNCTIONS.create_attention_mask
attention_specs = _FUNCTIONS.attention_specs
permute_tokens_context_parallelism = _FUNCTIONS.permute_tokens_context_parallelism
unpermute_tokens_context_parallelism = _FUNCTIONS.unpermute_tokens_context_parallelism
