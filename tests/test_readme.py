"""The Python of the quick start runs as it stands; README is short."""

import re
import warnings
from pathlib import Path

from attnsuite import backends

README = Path(__file__).parents[1] / "README.md"
QUICKSTART = Path(__file__).parents[1] / "docs" / "how-to" / "quickstart.md"


def test_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", QUICKSTART.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", backends.BackendFallbackWarning)  # shown on purpose
        for block in blocks:
            exec(compile(block, str(QUICKSTART), "exec"), namespace)  # noqa: S102 (our own page)
    assert namespace["out"].shape == (1, 1024, 8, 64)
    assert "cudnn: dtype=float32" in capsys.readouterr().out


def test_few_words_stand_before_the_first_command():
    before = README.read_text(encoding="utf-8").partition("```sh")[0]
    prose = re.sub(r"<picture>.*?</picture>", "", before, flags=re.DOTALL)
    assert len(prose.split()) <= 130
