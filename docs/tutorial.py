"""``python docs/tutorial.py`` runs docs/tutorial.md in an empty folder and writes the outputs of its commands down."""

from __future__ import annotations

import datetime as dt
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).with_name("tutorial.md")
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


def main() -> None:
    """Replay the page and say when and where."""
    with tempfile.TemporaryDirectory() as folder:
        text = replayed(PAGE.read_text(encoding="utf-8"), Path(folder))
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE}: replayed on {dt.date.today()}")  # noqa: DTZ011, T201


if __name__ == "__main__":
    main()
