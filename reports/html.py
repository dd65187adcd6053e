"""Markdown to one self-contained HTML page: no script, nothing fetched, light or dark by the reader's preference."""

from __future__ import annotations

import base64
import html
import itertools
import re
from collections.abc import Mapping, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_TOGETHER = re.compile(r"(?:(?<=\b[BTSD])|(?<=\bheads)) (?=[0-9])|(?<=\(for) (?=\S+\))| (?=\(for )")
_DETAILS = re.compile(r"<details><summary>([^<>]+)</summary>|</details>")
_STYLE = """
:root { color-scheme: light dark; --text: #1c2128; --soft: #59636e; --line: #d8dee4; --head: #f3f5f7;
  --page: #ffffff; --code: #eef1f4; --loud: #b42318; --link: #0b57a4; }
@media (prefers-color-scheme: dark) {
  :root { --text: #dde3ea; --soft: #9aa5b1; --line: #343c46; --head: #1d232b; --page: #12161b;
    --code: #222a33; --loud: #ff8f80; --link: #7cb8ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 76rem; color: var(--text); background: var(--page);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; }
h1 + p { color: var(--soft); margin-top: 0; }
h1:not(:first-of-type) { margin-top: 4rem; border-top: 3px solid var(--line); padding-top: 2rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, li { max-width: 60rem; }
li { margin: .3rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 1rem 0 0; font-size: .9rem; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.wide { overflow-x: auto; margin: .5rem 0 1.2rem; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; text-align: left; vertical-align: top; }
th { background: var(--head); font-weight: 600; vertical-align: bottom; min-width: 4.5rem; line-height: 1.3; }
td { border-top: 1px solid var(--line); overflow-wrap: break-word; }
td.first { min-width: 13rem; max-width: 26rem; }
td[style*="right"] { white-space: nowrap; }
td strong { color: var(--loud); }
code { background: var(--code); border-radius: 4px; padding: .08em .3em; font: .9em ui-monospace, Consolas, monospace; }
pre { background: var(--code); border-radius: 6px; padding: .8rem 1rem; overflow-x: auto; }
pre code { padding: 0; background: none; }
summary { cursor: pointer; color: var(--link); margin: .6rem 0; }
img { max-width: 100%; background: #ffffff; border-radius: 6px; }
@media print { body { max-width: none; padding: 0; } .wide { overflow: visible; } nav { display: none; } }
"""


def render(markdown: str, title: str, pictures: Mapping[str, str]) -> str:
    """The HTML page of a Markdown report, with its ``pictures`` (file name -> SVG) inside.

    Raw HTML in the Markdown is shown as text, never passed through.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    headings = _name_headings(tokens)
    tokens = _span_merged_rows(_fold(tokens))
    _keep_together(tokens)
    _embed(tokens, pictures)
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    links = "".join(f'<a href="#{name}">{html.escape(text)}</a>' for name, text in headings)
    at = body.find("<h2")
    body = f"{body[:at]}<nav>{links}</nav>\n{body[at:]}" if at >= 0 and links else body
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def _embed(tokens: Sequence[Token], pictures: Mapping[str, str]) -> None:
    for token in tokens:
        for child in token.children or ():
            if child.type == "image" and (picture := pictures.get(str(child.attrGet("src")))):
                data = base64.b64encode(picture.encode()).decode("ascii")
                child.attrSet("src", f"data:image/svg+xml;base64,{data}")


def _fold(tokens: Sequence[Token]) -> list[Token]:
    """Let the lines that fold a part of a page be HTML. Foreign text is no such line: its brackets are escaped."""
    kept: list[Token] = []
    for token in tokens:
        kept.append(token)
        if token.type == "paragraph_close" and (found := _DETAILS.fullmatch(kept[-2].content)):
            summary = f"<details><summary>{html.escape(found[1])}</summary>\n" if found[1] else "</details>\n"
            kept[-3:] = [Token("html_block", "", 0, content=summary)]
    return kept


def _name_headings(tokens: Sequence[Token]) -> list[tuple[str, str]]:
    """Give every second-level heading an id; return the ids with their texts."""
    named: list[tuple[str, str]] = []
    for opening, content in itertools.pairwise(tokens):
        if opening.type == "heading_open" and opening.tag == "h2":
            words = re.sub(r"[^a-z0-9]+", "-", content.content.lower()).strip("-")
            used = {name for name, _ in named}
            name = words if words not in used else f"{words}-{len(named) + 1}"
            opening.attrSet("id", name)
            named.append((name, content.content))
    return named


def _span_merged_rows(tokens: Sequence[Token]) -> list[Token]:
    """The first cell of a row spans the rows below whose first cell is empty, because they repeat it."""
    kept: list[Token] = []
    spanning: Token | None = None
    position = 0
    while position < len(tokens):
        kept.append(tokens[position])
        starts_row = tokens[position].type == "tr_open" and tokens[position + 1].type == "td_open"
        if starts_row and not tokens[position + 2].content and spanning is not None:
            spanning.attrSet("rowspan", str(int(spanning.attrGet("rowspan") or 1) + 1))
            position += 3  # the empty cell: its opening, its content, its end
        elif starts_row:
            spanning = tokens[position + 1]
            spanning.attrSet("class", "first")
        position += 1
    return kept


def _keep_together(tokens: Sequence[Token]) -> None:
    """No line break between a dimension's letter and its number, nor inside ``chunked (for kvax)``."""
    for token in tokens:
        for child in token.children or ():
            if child.type == "text":
                child.content = _TOGETHER.sub("\u00a0", child.content)
