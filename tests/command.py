"""The command ``attnsuite`` in the process of the test."""

from __future__ import annotations

import pytest

from attnsuite.suite.command_line import main


def code_of(*words: object) -> object:
    """The exit code of the command with these words."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code
