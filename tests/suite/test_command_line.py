"""The command answers at once: what computes is imported where it computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnsuite.suite.verbs import VERBS
from command import code_of

HEAVY = ("jax", "numpy", "flax", "scipy", "attnsuite.backends", "attnsuite.models", "attnsuite.reports")
ASK = """
import sys
from attnsuite.suite.command_line import main
try:
    main({words!r})
except SystemExit as end:
    code = end.code
found = [name for name in {heavy!r} if name in sys.modules]
print(file=sys.stderr)
print(code, found, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["runn"], 2),
        (["run", "--suit", "quick"], 2),
        *((([verb, "--help"]), 0) for verb in VERBS),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else str(given),
)
def test_help_and_mistakes_import_nothing_that_computes(words, code):
    script = ASK.format(words=words, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.splitlines()[-1] == f"{code} []", done.stderr


def test_every_verb_stands_in_the_help(capsys):
    assert code_of("--help") == 0
    told = capsys.readouterr().out
    assert all(f"  {verb} " in told for verb in VERBS)
