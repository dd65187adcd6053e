"""The command answers at once: what computes is imported where it computes."""

from __future__ import annotations

from attnsuite.suite.verbs import VERBS
from command import code_of
from script import run

HEAVY = ("jax", "numpy", "flax", "scipy", "attnsuite.backends", "attnsuite.reports")
ANSWERED = {"--help": 0, "--version": 0, "runn": 2, "run --suit quick": 2, **{f"{verb} --help": 0 for verb in VERBS}}
ASK = f"""
import sys
from attnsuite.suite.command_line import main
for words in {[*ANSWERED]}:
    try:
        main(words.split())
    except SystemExit as end:
        code = end.code
    found = [name for name in {HEAVY} if name in sys.modules]
    print()
    print("answered", words, code, found, sep="|")
"""


def test_help_and_mistakes_import_nothing_that_computes():
    done = run(ASK)
    said = [line.split("|")[1:] for line in done.stdout.splitlines() if line.startswith("answered|")]
    assert said == [[words, str(code), "[]"] for words, code in ANSWERED.items()], done.stderr


def test_every_verb_stands_in_the_help(capsys):
    assert code_of("--help") == 0
    told = capsys.readouterr().out
    assert all(f"  {verb} " in told for verb in VERBS)
