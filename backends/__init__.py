"""Interchangeable attention backends behind one contract. This module names everything public."""

from attnsuite.submodules import submodules_of

from . import masks as masks
from .adaptive import adaptive_flash_attention as adaptive_flash_attention
from .adaptive import get_flash_attention_config as get_flash_attention_config
from .attention import attention as attention
from .attention import dot_product_attention as dot_product_attention
from .choices import Policy as Policy
from .choices import PolicyNotUsedWarning as PolicyNotUsedWarning
from .choices import load_policy as load_policy
from .contract import AttentionSpec as AttentionSpec
from .contract import Backend as Backend
from .contract import Layout as Layout
from .contract import Plan as Plan
from .contract import Support as Support
from .contract import Terms as Terms
from .devices import Target as Target
from .features import FEATURES as FEATURES
from .features import Takes as Takes
from .flax_attention import attention_fn as attention_fn
from .function import from_function as from_function
from .layer_stack import LayerStack as LayerStack
from .layout import make_spec as make_spec
from .merging import merge_parts as merge_parts
from .registry import Registry as Registry
from .registry import UnknownBackendError as UnknownBackendError
from .registry import get as get
from .registry import names as names
from .registry import register as register
from .resolve import BackendFallbackWarning as BackendFallbackWarning
from .resolve import BackendUnavailableError as BackendUnavailableError
from .resolve import Rejection as Rejection
from .resolve import Resolution as Resolution
from .resolve import resolve as resolve
from .sharding import MeshAxes as MeshAxes
from .sharding import Sharded as Sharded
from .sharding import balanced_order as balanced_order
from .support import plan as plan
from .support import support as support

__getattr__ = submodules_of(__name__)
