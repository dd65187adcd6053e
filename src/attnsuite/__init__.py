"""Which attention implementation, for your shapes, on your device: ``from attnsuite import backends, models``."""

__version__ = "0.1.0"
