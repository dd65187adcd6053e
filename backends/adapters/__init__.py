"""Backends behind the attention hooks of other libraries, one file per library.

``keras.py`` is for Keras 3, ``maxtext.py`` for MaxText; functions for flax's layers come from
``backends/flax_attention.py``. No adapter imports its library before it is used, and no library is a dependency.
docs/how-to/adapters.md says how to switch each on.
"""

from attnsuite.submodules import submodules_of

__getattr__ = submodules_of(__name__)
