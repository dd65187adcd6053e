"""Every Python block of the documentation runs, or says in its first line what it needs."""

import json
import re
import sys
from pathlib import Path

import pytest

import script
from landing import is_landing, swept

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = ("tutorial.md",)  # tests/test_tutorial.py runs it
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if "```python" in path.read_text(encoding="utf-8") and path.name not in ELSEWHERE
)
# Before a change lands these run; what the others run, training, loading and sharding, other tests run too.
FIRST = ("quickstart.md", "adapters.md", "attention.md", "attention-types.md", "my-kernel.md", "design.md")
FIRST_PAGES = [page for page in PAGES if page.name in FIRST]
NEEDS = re.compile(r"# needs: (.+)")
MET = "8 devices"
# The blocks of a page share their names, and no page sees those of another.
RUNNER = """
import json, signal, sys, time, traceback
told = {}
def too_long(*_):
    raise TimeoutError("the blocks of this page take longer than ten minutes")
signal.signal(signal.SIGALRM, too_long)
for page, blocks in json.load(open("pages.json")).items():
    names = {"__name__": page}
    start = time.perf_counter()
    signal.alarm(600)  # a page has its own time: the others do not fail with a slow one
    told[page] = ""
    for number, block in enumerate(blocks, 1):
        try:
            exec(compile(block, f"{page}, block {number}", "exec", dont_inherit=True), names)
        except BaseException:
            told[page] = traceback.format_exc(limit=-3)
            break
    signal.alarm(0)
    print(page, round(time.perf_counter() - start, 2), "s", file=sys.stderr)
print("\\n" + json.dumps(told))
"""


def blocks_of(path):
    """The blocks of a page, each with what it needs (an empty string where nothing)."""
    found = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [((NEEDS.match(block) or [""] * 2)[1], block) for block in found]


def run(pages, folder):
    """What went wrong in each page, by its name; an empty string where nothing did."""
    (folder / "pages.json").write_text(json.dumps(pages))
    done = script.run(RUNNER, folder=folder, limit=None, JAX_NUM_CPU_DEVICES="8", PYTHONWARNINGS="ignore")
    sys.stderr.write(done.stderr[-4000:])
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    pages = {
        str(page.relative_to(DOCS)): [block for needs, block in blocks_of(page) if needs in ("", MET)]
        for page in (FIRST_PAGES if is_landing() else PAGES)
    }
    broken = {"a broken page": ["value = 1", "assert value == 1", "missing + value"]}
    return run(pages | broken, tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("page", swept(PAGES, FIRST_PAGES), ids=lambda page: str(page.relative_to(DOCS)))
def test_blocks_of_a_page_run_or_say_what_they_need(page, outcome):
    assert outcome[str(page.relative_to(DOCS))] == ""
    for needs, block in blocks_of(page):
        compile(block, f"{page.name}, needs {needs or 'nothing'}", "exec")


def test_block_that_uses_a_name_nobody_defined_is_found(outcome):
    assert "NameError: name 'missing' is not defined" in outcome["a broken page"]


def test_few_words_of_the_readme_stand_before_the_first_command():
    before = (ROOT / "README.md").read_text(encoding="utf-8").partition("```sh")[0]
    assert len(re.sub(r"<picture>.*?</picture>", "", before, flags=re.DOTALL).split()) <= 130


def test_most_blocks_need_nothing():
    every = [needs for page in PAGES for needs, _ in blocks_of(page)]
    assert sum(needs in ("", MET) for needs in every) > len(every) / 2


def test_every_page_is_in_the_navigation_of_the_site():
    listed = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    made = {f"reference/attnsuite-{room}.md" for room in ("backends", "models", "reports")} | {"published/index.md"}
    assert sorted(listed) == sorted(made | {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")})


def broken_links(page):
    """The targets of links of a page that lead to no file, or to no heading of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (heading and file.suffix == ".md" and heading not in headings(file)):
            yield target


def headings(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    for title in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        yield re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("folder", ["docs", "."])
def test_links_of_pages_lead_somewhere(folder):
    published = ROOT / "reports" / "published" / "README.md"
    pages = DOCS.rglob("*.md") if folder == "docs" else filter(Path.exists, [*ROOT.glob("*.md"), published])
    broken = {str(page.relative_to(ROOT)): found for page in pages if (found := list(broken_links(page)))}
    assert broken == {}


def test_link_to_nothing_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#b) [c](page.md) [d](other.md#x) [e](https://x.org)\n")
    assert list(broken_links(page)) == ["#b", "other.md#x"]
