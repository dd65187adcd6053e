"""The command answers at once: what computes is imported where it computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnsuite.suite import command_line
from attnsuite.suite.verbs import FORMER, VERBS

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


def test_mistyped_verb_is_met_with_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["compare-runs"])
    assert ended.value.code == 2
    assert "compare" in capsys.readouterr().err


@pytest.mark.parametrize("verb", FORMER)
def test_former_verb_is_answered_with_the_new_command(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main([verb, "--out", "somewhere"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"attnsuite: {verb} is no longer a verb; use {FORMER[verb]}.\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--suite", "sharded", "--cases", "x"], "--cases is not for --suite sharded, which takes --suite, --out"),
        (["--suite", "curves", "--top-k", "0.5"], "--top-k is not for --suite curves"),
        (["--mesh", "data=2"], "--mesh is about loss curves; add --suite curves."),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_flag_without_a_meaning_for_the_suite_is_refused(words, told, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["run", *words, "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_every_verb_stands_in_the_help(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(f"  {verb} " in told for verb in VERBS)


@pytest.mark.parametrize("words", [["run", "--out", ""], ["run", "--out="], ["report", ""]], ids=" ".join)
def test_empty_value_is_refused_and_no_path_to_the_present_directory(words, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(words)
    assert ended.value.code == 2
    assert "is given an empty value; give one, or leave it out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["run", "--weights_dir", "DIR"], "--model DIR"),
        (["run", "--device=gpu"], "JAX_PLATFORMS"),
        (["perplexity", "--use_splash_kernel"], "--options kernel=pallas"),
        (["train", "--use-lora"], "--lora-rank N"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_flag_of_the_guides_is_met_with_ours(words, instead, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(words)
    assert ended.value.code == 2
    assert f"{words[1].partition('=')[0]} is a flag of the guides; here it is " in (told := capsys.readouterr().err)
    assert instead in told
