"""Where this package keeps what need not be computed again in another process."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """``$XDG_CACHE_HOME/attnsuite/NAME``, by default under ``~/.cache``.

    For a user without a home directory it is below ``/dev/null``, where no file is and none can be written.
    """
    home = os.path.expanduser("~")  # noqa: PTH111 (Path.home raises where there is none)
    base = os.environ.get("XDG_CACHE_HOME") or (os.devnull if home == "~" else f"{home}/.cache")
    return Path(base, "attnsuite", name)
