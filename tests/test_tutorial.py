"""docs/tutorial.md is followed from an empty folder; the notebook is the page; a command that fails is noticed."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from command import known_machine

TUTORIAL = runpy.run_path(str(Path(__file__).parents[1] / "docs/tutorial.py"))


@pytest.mark.thorough
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


def test_the_notebook_is_the_page():
    page = TUTORIAL["PAGE"].read_text(encoding="utf-8")
    assert TUTORIAL["NOTEBOOK"].read_text(encoding="utf-8") == TUTORIAL["notebook"](page)
    code = [cell["source"] for cell in json.loads(TUTORIAL["notebook"](page))["cells"] if cell["cell_type"] == "code"]
    assert {source.split()[0] for source in code} == {"%%writefile", "%%bash"}
    blocks = [block for kind, block in TUTORIAL["_BLOCK"].findall(page) if kind == "console"]
    assert [source.splitlines()[1:] for source in code if source.startswith("%%bash")] == [
        TUTORIAL["commands"](block) for block in blocks
    ]
