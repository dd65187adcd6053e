"""Kvax flash attention: native on NVIDIA GPUs, interpreted on any CPU, compiled for absent GPUs."""

from .backend import KVAX as KVAX
from .backend import Kvax as Kvax
