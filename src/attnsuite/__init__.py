"""Which attention implementation, for your shapes, on your device: ``from attnsuite import backends, models``."""

from .submodules import submodules_of

__version__ = "0.1.0"
__getattr__ = submodules_of(__name__)
