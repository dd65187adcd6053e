"""Attention functions of public projects, for ``attnsuite judge docs/public_attention.py:jax_nn``.

``tokamax_xla`` needs the extra ``tokamax``.
"""

import functools

import jax
import tokamax
from flax import nnx

jax_nn = jax.nn.dot_product_attention
flax_nnx = nnx.dot_product_attention
tokamax_xla = functools.partial(tokamax.dot_product_attention, implementation="xla")
