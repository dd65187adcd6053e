"""The pages: one module each, which names its sections in their order."""
