"""Builds the site: `tox -e docs`, or `python docs/build.py FOLDER SITE`.

The pages of docs/ and of reports/published/ are laid out in FOLDER with one page of reference per room and the keys of
suite files, and zensical makes SITE of them. A warning, such as a link to a page that does not exist, fails the build.
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import suite_keys  # beside this file

ROOT = Path(__file__).parents[1]
ROOMS = {"attnsuite.backends": "backends", "attnsuite.models": "models", "attnsuite.reports": "reports"}


def public(module: str, room: str) -> list[str]:
    """What a room exports, by where it is defined: `from .x import name as name` in its `__init__.py`."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
    imports = [
        (node.module, alias) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    named = [(origin, alias.name) for origin, alias in imports if alias.asname == alias.name]
    return [".".join((module, *([origin] if origin else []), name)) for origin, name in named]  # or a module: masks


def reference(module: str, room: str) -> str:
    """A page with the docstring of every public name of a room."""
    return "\n\n".join([f"# {module}", *(f"::: {name}" for name in public(module, room))]) + "\n"


def lay_out(pages: Path) -> None:
    """Write every page of the site into ``pages``; links to published pages stay within the site."""
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in pages.rglob("*.md"):  # published pages lie a folder lower in the repository than in the site
        up = "../" * (len(page.relative_to(pages).parts) - 1)
        text = page.read_text(encoding="utf-8").replace(f"](../{up}reports/published/", f"]({up}published/")
        page.write_text(text.replace("/published/README.md", "/published/index.md"), encoding="utf-8")
    only_pages = shutil.ignore_patterns("*.json", "*.jsonl", "*.npz")
    shutil.copytree(ROOT / "reports" / "published", pages / "published", ignore=only_pages)
    (pages / "published" / "README.md").rename(pages / "published" / "index.md")
    with (pages / "reference" / "suite-files.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{suite_keys.generated()}")
    for module, room in ROOMS.items():
        (pages / "reference" / f"attnsuite-{room}.md").write_text(reference(module, room), encoding="utf-8")


def main(folder: Path, site: Path) -> int:
    """Build ``site`` by way of ``folder``; both are made anew. The exit code of zensical."""
    for made in (folder, site):
        shutil.rmtree(made, ignore_errors=True)
    lay_out(folder / "docs")
    settings = (ROOT / "zensical.toml").read_text(encoding="utf-8").replace("{root}", str(ROOT))
    (folder / "zensical.toml").write_text(settings, encoding="utf-8")
    code = subprocess.run(["zensical", "build", "--strict"], cwd=folder, check=False).returncode
    if code == 0:
        shutil.copytree(folder / "site", site)
    return code


if __name__ == "__main__":
    sys.exit(main(*(Path(word).resolve() for word in sys.argv[1:])))
