"""Kascade's schedules for whole models: calibration, and the search for a schedule by its loss."""

from attnsuite.submodules import submodules_of

__getattr__ = submodules_of(__name__)
