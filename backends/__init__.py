"""Interchangeable attention backends behind one contract. Everything public is named here."""

from backends.adaptive import adaptive_flash_attention as adaptive_flash_attention
from backends.adaptive import get_flash_attention_config as get_flash_attention_config
from backends.attention import attention as attention
from backends.attention import dot_product_attention as dot_product_attention
from backends.contract import AttentionSpec as AttentionSpec
from backends.contract import Backend as Backend
from backends.contract import Layout as Layout
from backends.contract import Plan as Plan
from backends.contract import Support as Support
from backends.contract import make_spec as make_spec
from backends.devices import Target as Target
from backends.flax_attention import attention_fn as attention_fn
from backends.registry import Registry as Registry
from backends.registry import UnknownBackendError as UnknownBackendError
from backends.registry import get as get
from backends.registry import names as names
from backends.registry import register as register
from backends.resolve import BackendFallbackWarning as BackendFallbackWarning
from backends.resolve import BackendUnavailableError as BackendUnavailableError
from backends.resolve import Rejection as Rejection
from backends.resolve import Resolution as Resolution
from backends.resolve import resolve as resolve
from backends.sharding import MeshAxes as MeshAxes
from backends.sharding import Sharded as Sharded
from backends.sharding import balanced_order as balanced_order
from backends.sharding import plan_sharded as plan_sharded
