"""The cases to measure, the runs that measure them, their records, and the command line."""

from attnsuite.submodules import submodules_of

__getattr__ = submodules_of(__name__)
