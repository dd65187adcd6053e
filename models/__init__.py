"""The shared transformer, its checkpoints, and its texts. This module names everything public.

A name is imported when it is asked for: Flax and optax take as long as half of JAX, and a process that computes
attention alone needs neither.
"""

from typing import TYPE_CHECKING

from attnsuite.submodules import submodules_of

if TYPE_CHECKING:
    from .cache import KVCache as KVCache
    from .checked_json import CheckpointError as CheckpointError
    from .checkpoint import Checkpoint as Checkpoint
    from .checkpoint import open_checkpoint as open_checkpoint
    from .config import PRESETS as PRESETS
    from .config import ModelConfig as ModelConfig
    from .generation import generate as generate
    from .loss import next_token_loss as next_token_loss
    from .rope_scaling import DynamicScaling as DynamicScaling
    from .rope_scaling import LinearScaling as LinearScaling
    from .rope_scaling import RopeScaling as RopeScaling
    from .rope_scaling import YarnScaling as YarnScaling
    from .streaming import streamed_nats as streamed_nats
    from .text import Corpus as Corpus
    from .text import load_text as load_text
    from .text_file import TextFile as TextFile
    from .tokenizer import Tokenizer as Tokenizer
    from .tokenizer import load_tokenizer as load_tokenizer
    from .transformer import Transformer as Transformer
    from .weights import convert as convert
    from .weights import load as load
    from .weights import load_layer as load_layer
    from .weights import load_shipped as load_shipped
    from .weights import save as save
    from .weights import write_random as write_random

_HOMES = {
    "KVCache": "cache",
    "CheckpointError": "checked_json",
    "Checkpoint": "checkpoint",
    "open_checkpoint": "checkpoint",
    "ModelConfig": "config",
    "PRESETS": "config",
    "generate": "generation",
    "next_token_loss": "loss",
    "DynamicScaling": "rope_scaling",
    "LinearScaling": "rope_scaling",
    "RopeScaling": "rope_scaling",
    "YarnScaling": "rope_scaling",
    "streamed_nats": "streaming",
    "Corpus": "text",
    "load_text": "text",
    "TextFile": "text_file",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
    "Transformer": "transformer",
    "convert": "weights",
    "load": "weights",
    "load_layer": "weights",
    "load_shipped": "weights",
    "save": "weights",
    "write_random": "weights",
}

__getattr__ = submodules_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
