"""Devices that are not in this machine: their topologies, programs without data, and compiling for them."""
