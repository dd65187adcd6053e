"""README is short."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_few_words_stand_before_the_first_command():
    before = README.read_text(encoding="utf-8").partition("```sh")[0]
    prose = re.sub(r"<picture>.*?</picture>", "", before, flags=re.DOTALL)
    assert len(prose.split()) <= 130
