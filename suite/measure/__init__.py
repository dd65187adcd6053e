"""Measuring one program: speed, memory, correctness; and the machine and environment that it ran on."""
