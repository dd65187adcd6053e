"""The shared transformer, its checkpoints, and the text it is measured on. Everything public is named here."""

from models.cache import KVCache as KVCache
from models.checkpoint import Checkpoint as Checkpoint
from models.checkpoint import open_checkpoint as open_checkpoint
from models.config import PRESETS as PRESETS
from models.config import ModelConfig as ModelConfig
from models.config import RopeScaling as RopeScaling
from models.generate import generate as generate
from models.loss import next_token_loss as next_token_loss
from models.reading import CheckpointError as CheckpointError
from models.streaming import streamed_nats as streamed_nats
from models.text import Corpus as Corpus
from models.text import load_text as load_text
from models.tokenizer import Tokenizer as Tokenizer
from models.tokenizer import load_tokenizer as load_tokenizer
from models.transformer import Transformer as Transformer
from models.weights import convert as convert
from models.weights import load as load
from models.weights import load_layer as load_layer
from models.weights import load_shipped as load_shipped
from models.weights import save as save
from models.weights import write_random as write_random
