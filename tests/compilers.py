"""The compilers for TPUs and GPUs: ``tox -e compile`` has and requires them; elsewhere their tests are skipped."""

import os
from importlib import util

import pytest

MISSING = [name for name in ("libtpu", "jax_cuda12_plugin") if util.find_spec(name) is None]
needed = [
    pytest.mark.compile,
    pytest.mark.skipif(
        bool(MISSING) and "ATTNSUITE_COMPILERS_REQUIRED" not in os.environ,
        reason=f"not installed: {', '.join(MISSING)} (tox -e compile has them)",
    ),
]
