"""The pages, one module each. A module lists its sections in their order."""
