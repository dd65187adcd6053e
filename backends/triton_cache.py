"""Triton's cache directory across an import of jax-triton 0.3, which empties TRITON_CACHE_DIR.

No user of Triton in the process could compile afterwards. Kvax imports jax-triton, and tokamax does where it is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_NAME = "TRITON_CACHE_DIR"


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """A context. At its end the variable is what it was, or unset again."""
    before = os.environ.get(_NAME)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_NAME, None)
        else:
            os.environ[_NAME] = before
