"""The Python of the CPU page runs as it stands, in a process of its own; README is short."""

import re
from pathlib import Path

from script import printed

README = Path(__file__).parents[1] / "README.md"
CPU = Path(__file__).parents[1] / "docs" / "explanation" / "cpu.md"


def test_few_words_stand_before_the_first_command():
    before = README.read_text(encoding="utf-8").partition("```sh")[0]
    prose = re.sub(r"<picture>.*?</picture>", "", before, flags=re.DOTALL)
    assert len(prose.split()) <= 130


def test_all_cores_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", CPU.read_text(encoding="utf-8"), re.DOTALL)
    check = "\nassert out.shape == q.shape and len(out.sharding.device_set) == 2"
    printed(block + check)
