"""Markdown to one self-contained HTML page: nothing fetched, light or dark by the reader's preference.

The page reads the same without its script, ``page.js``, which sorts tables and copies code. The page's policy names
the script by its hash, so that no other script runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import re
from collections.abc import Mapping, Sequence
from importlib import resources

from markdown_it import MarkdownIt
from markdown_it.token import Token

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{hash}'"
_TOGETHER = re.compile(r"(?:(?<=\b[BTSD])|(?<=\bheads)) (?=[0-9])|(?<=\(for) (?=\S+\))| (?=\(for )")
_DETAILS = re.compile(r"<details><summary>([^<>]+)</summary>|</details>")


def render(markdown: str, title: str, pictures: Mapping[str, str]) -> str:
    """The HTML page of a Markdown report, with its ``pictures`` (file name -> SVG) inside.

    Raw HTML in the Markdown is shown as text, never passed through.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    headings = _name_headings(tokens)
    tokens = _span_merged_rows(_fold(tokens))
    _finish(tokens, pictures)
    body = parser.renderer.render(tokens, parser.options, {})
    for tag, div in (("table", '<div class="wide" tabindex="0">'), ("pre", '<div class="code">')):
        body = body.replace(f"<{tag}>", f"{div}<{tag}>").replace(f"</{tag}>", f"</{tag}></div>")
    body = body.replace("<p>Versions: ", '<p class="versions">Versions: ')
    links = "".join(f'<a href="#{name}">{html.escape(text)}</a>' for name, text in headings)
    at = body.find("<h2")
    body = f"{body[:at]}<nav>{links}</nav>\n{body[at:]}" if at >= 0 and links else body
    style, script = _shipped("page.css"), _shipped("page.js")
    policy = _POLICY.format(hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}<script>{script}</script>\n</body>\n</html>\n"
    )


def _shipped(name: str) -> str:
    return (resources.files("attnsuite.reports") / name).read_text(encoding="utf-8")


def _fold(tokens: Sequence[Token]) -> list[Token]:
    """Let the lines that fold a part of a page be HTML. Foreign text is no such line: its brackets are escaped."""
    folded: list[Token] = []
    for token in tokens:
        folded.append(token)
        if token.type == "paragraph_close" and (found := _DETAILS.fullmatch(folded[-2].content)):
            summary = f"<details><summary>{html.escape(found[1])}</summary>\n" if found[1] else "</details>\n"
            folded[-3:] = [Token("html_block", "", 0, content=summary)]
    return folded


def _name_headings(tokens: Sequence[Token]) -> list[tuple[str, str]]:
    """Give every second-level heading an id; return the ids with their texts."""
    named: list[tuple[str, str]] = []
    for opening, content in itertools.pairwise(tokens):
        if opening.type == "heading_open" and opening.tag == "h2":
            slug = re.sub(r"[^a-z0-9]+", "-", content.content.lower()).strip("-")
            used = {name for name, _ in named}
            name = slug if slug not in used else f"{slug}-{len(named) + 1}"
            opening.attrSet("id", name)
            named.append((name, content.content))
    return named


def _span_merged_rows(tokens: Sequence[Token]) -> list[Token]:
    """The first cell of a row spans the rows below whose first cell is empty, because they repeat it."""
    merged: list[Token] = []
    spanning: Token | None = None
    position = 0
    while position < len(tokens):
        merged.append(tokens[position])
        starts_row = tokens[position].type == "tr_open" and tokens[position + 1].type == "td_open"
        if starts_row and not tokens[position + 2].content and spanning is not None:
            spanning.attrSet("rowspan", str(int(spanning.attrGet("rowspan") or 1) + 1))
            position += 3  # the empty cell: its opening, its content, its end
        elif starts_row:
            spanning = tokens[position + 1]
            spanning.attrSet("class", "first")
        position += 1
    return merged


def _finish(tokens: Sequence[Token], pictures: Mapping[str, str]) -> None:
    """Embed the pictures, and keep a dimension's letter by its number, and ``chunked (for kvax)``, on one line."""
    for token in tokens:
        for child in token.children or ():
            if child.type == "text":
                child.content = _TOGETHER.sub("\u00a0", child.content)
            elif child.type == "image" and (picture := pictures.get(str(child.attrGet("src")))):
                data = base64.b64encode(picture.encode()).decode("ascii")
                child.attrSet("src", f"data:image/svg+xml;base64,{data}")
