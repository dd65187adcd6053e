"""Kvax flash attention: native on NVIDIA GPUs, executed on any CPU, compiled for GPUs that are not here."""

from backends.kvax.backend import KVAX as KVAX
from backends.kvax.backend import Kvax as Kvax
