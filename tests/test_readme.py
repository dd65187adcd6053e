"""The README's Python runs as it stands, in order, in one namespace."""

import re
import warnings
from pathlib import Path

import backends

README = Path(__file__).parents[1] / "README.md"


def test_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", backends.BackendFallbackWarning)  # shown on purpose
        for block in blocks:
            exec(compile(block, str(README), "exec"), namespace)  # noqa: S102 (our own README)
    assert namespace["out"].shape == (1, 1024, 8, 64)
    assert "cudnn: dtype=float32" in capsys.readouterr().out
