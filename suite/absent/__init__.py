"""Devices that are not here: their topologies, programs without data, and what a compiler says of them."""
