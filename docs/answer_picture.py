"""Draw the answer of a run as the terminal shows it: ``python docs/answer_picture.py RUN``.

Writes ``docs/answer-light.svg`` and ``docs/answer-dark.svg``, which README shows. They hold text and no script.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

from attnsuite import reports

THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}


def picture(run: Path, theme: TerminalTheme) -> str:
    """The answer as SVG, 80 columns wide."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ attnsuite run", style="bold"))
    for line in reports.answer_lines(reports.load(run)):
        console.print(Text(line))
    drawn = console.export_svg(title="attnsuite run", theme=theme, unique_id="answer")
    return re.sub(r"\s*@font-face \{[^}]*\}", "", drawn)  # they would be fetched from elsewhere


if __name__ == "__main__":
    for name, theme in THEMES.items():
        Path(__file__).with_name(f"answer-{name}.svg").write_text(picture(Path(sys.argv[1]), theme), encoding="utf-8")
