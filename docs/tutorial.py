"""``python docs/tutorial.py`` runs docs/tutorial.md in an empty folder and writes the outputs of its commands down.

``tutorial.ipynb`` is the page as a notebook: a cell writes a file of the page, or runs its commands in bash.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    """The commands of a console block."""
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def run(command: str, folder: Path) -> tuple[str, float]:
    """What a command prints, and its seconds. Raises RuntimeError where it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    start = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}")
    return done.stdout, time.perf_counter() - start


def replayed(page: str, folder: Path) -> str:
    """The page with the outputs that its commands print in ``folder``, an empty one."""

    def filled(found: re.Match[str]) -> str:
        kind, block = found.groups()
        if kind == "python":
            if block.startswith("# "):
                name, _, text = block.partition("\n")
                (folder / name.removeprefix("# ")).write_text(text, encoding="utf-8")
            return found[0]
        parts = []
        for command in commands(block):
            text, seconds = run(command, folder)
            parts.append(f"$ {command}\n{text.replace(str(folder), '.')}")
            if seconds > 1:
                parts.append(f"[{seconds:.0f} s]\n")
        return f"```console\n{''.join(parts)}```"

    return _BLOCK.sub(filled, page)


def notebook(page: str) -> str:
    """The page as a notebook with its outputs (nbformat 4.5)."""
    cells: list[dict[str, object]] = []

    def add(kind: str, source: str, **more: object) -> None:
        if source.strip():
            cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": source, **more})

    end = 0
    for found in _BLOCK.finditer(page):
        add("markdown", page[end : found.start()].strip())
        kind, block = found.groups()
        end, outputs = found.end(), []
        name, _, text = block.partition("\n")
        source = f"%%writefile {name.removeprefix('# ')}\n{text}"
        if kind == "console":
            source = "\n".join(["%%bash", *commands(block)])
            said = [line for line in block.splitlines(keepends=True) if not line.startswith("$ ")]
            outputs = [{"output_type": "stream", "name": "stdout", "text": "".join(said)}] if said else []
        add("code", source.rstrip(), execution_count=None, outputs=outputs)
    add("markdown", page[end:].strip())
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1) + "\n"


def main() -> None:
    """Replay the page and say when and where."""
    with tempfile.TemporaryDirectory() as folder:
        text = replayed(PAGE.read_text(encoding="utf-8"), Path(folder))
    PAGE.write_text(text, encoding="utf-8")
    NOTEBOOK.write_text(notebook(text), encoding="utf-8")
    print(f"{PAGE}: replayed on {dt.date.today()}")  # noqa: DTZ011, T201


if __name__ == "__main__":
    main()
