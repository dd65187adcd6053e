"""docs/tutorial.md is followed from an empty folder, and docs/tutorial.py notices a command that fails."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from command import known_machine

TUTORIAL = runpy.run_path(str(Path(__file__).parents[1] / "docs/tutorial.py"))


def test_every_command_of_the_tutorial_works_in_an_empty_folder(tmp_path):
    page = TUTORIAL["PAGE"].read_text(encoding="utf-8")
    quick = page
    for shown, here in (("--out mine\n", "--out mine --sample-seconds 0.01\n"), ("(1, 1024)", "(1, 128)")):
        assert shown in page
        quick = quick.replace(shown, here)
    known_machine(tmp_path / "mine")
    done = TUTORIAL["replayed"](quick, tmp_path)
    for said in ("attention is", "with auto it takes", "says is_causal=True", "use this", "policy:", "of the time"):
        assert said in page, "the page shows another program's outputs"
        assert said in done


def test_a_command_that_fails_is_no_page(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 2"):
        TUTORIAL["replayed"]("```console\n$ attnsuite runn\n```\n", tmp_path)
