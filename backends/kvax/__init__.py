"""Kvax flash attention: native on NVIDIA GPUs, executed on any CPU, compiled for GPUs that are not here."""

from .backend import KVAX as KVAX
from .backend import Kvax as Kvax
