"""The flash_cpu backend passes the whole conformance suite; it refuses mask and bias arrays and nothing else."""

import pytest
from conformance import Conformance

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite (pip install 'attention-suite[cpu]')")


class TestFlashCpu(Conformance):
    backend = "flash_cpu"
    refuses = frozenset({"mask-*", "bias-*", "log-sum-exp-and-bias"})
