"""Strict numerics, as equinox tests with: no silent promotion of a dtype or a rank in any backend."""

from collections.abc import Iterator

import jax
import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "foreign_numerics: runs code of JAX or flax that promotes dtypes or ranks")


@pytest.fixture(autouse=True)
def strict_numerics(request: pytest.FixtureRequest) -> Iterator[None]:
    """Off for tests marked ``foreign_numerics``: flax and JAX's own attention promote."""
    if request.node.get_closest_marker("foreign_numerics"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
