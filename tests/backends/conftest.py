"""Strict numerics, as equinox tests with: no silent promotion of a dtype or a rank in any backend."""

import json

import jax
import pytest

from script import printed


def pytest_configure(config):
    config.addinivalue_line("markers", "foreign_numerics: runs code of JAX or flax that promotes dtypes or ranks")
    config.addinivalue_line(
        "markers", "wrong_types: hands over what an annotation excludes; deselected where annotations are checked"
    )


@pytest.fixture(autouse=True)
def strict_numerics(request):
    """Off for tests marked ``foreign_numerics``: flax and JAX's own attention promote."""
    if request.node.get_closest_marker("foreign_numerics"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session")
def loaded_by():
    """Whether a fresh process that runs some code has initialised a device, and the packages that it has imported."""
    report = """
import json, sys
from jax._src import xla_bridge
print(json.dumps([xla_bridge.backends_are_initialized(), sorted({name.partition(".")[0] for name in sys.modules})]))
"""

    def run(code):
        initialised, packages = json.loads(printed(code + report))
        return initialised, set(packages)

    return run
