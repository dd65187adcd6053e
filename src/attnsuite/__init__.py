"""Which attention implementation, for your shapes, on your device: ``from attnsuite import backends, models``."""
