"""The HTML page in a browser: Chromium of this machine, driven by Playwright."""

import importlib.util
import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest
import tyro
from markdown_it import MarkdownIt

from attnsuite import reports
from attnsuite.suite.verbs import run as run_verb

PAGES = Path(__file__).parents[2] / "reports" / "published"
PUBLISHED = PAGES / "cpu-intel-xeon"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
SCREENS = {"desk": (1280, 800), "phone": (390, 844)}
WIDER = """() => [...document.querySelectorAll("body *")].filter(
    (one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".wide, pre, nav")
).map((one) => `${one.tagName} ${one.textContent.slice(0, 40)}`)"""
CONTRAST = """() => {
    const light = (color) => color.match(/\\d+/g).slice(0, 3).map((one) => one / 255)
        .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
        .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
    const style = getComputedStyle(document.body);
    const [text, page] = [light(style.color), light(style.backgroundColor)];
    return [page, (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05)];
}"""
# GitHub's tables of Markdown, in a column of 830 pixels. The font that is here is scaled to the width of Arial, and may
# be 2% wider in other letters.
GITHUB = """<!doctype html><style>body { margin: 0; width: 830px; font: 16px/1.5 Arial, sans-serif; }
table { display: block; width: max-content; max-width: 100%; overflow: auto; border-collapse: collapse; }
th, td { padding: 6px 13px; border: 1px solid; }
code { font-size: 85%; padding: .2em .4em; }</style><span>abcdefghijklmnopqrstuvwxyz0123456789</span>"""
TOO_WIDE = """() => {
    document.body.style.fontSize = `${16 * 292.6 / document.querySelector("span").getBoundingClientRect().width}px`;
    return [...document.querySelectorAll("table")].filter((one) => one.scrollWidth > 1.02 * 830)
        .map((one) => `${one.scrollWidth} ${one.tHead.textContent}`);
}"""

pytestmark = [
    pytest.mark.report,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH (one of {', '.join(BROWSERS)})"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 (only the environment of these tests has it)

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    reports.render(PUBLISHED, out=folder)
    return folder / "report.html"


@pytest.fixture
def show(browser):
    """A function that opens a page; whatever the page tells the console or asks of a network fails the test."""
    contexts, told = [], []

    def opened(path, screen="desk", **options):
        width, height = SCREENS[screen]
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else told.append(asked.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert told == []


def column(page, table, header):
    """The texts of a column, without those of cells that the row above shows too."""
    script = """([place, header]) => {
        const table = document.querySelectorAll("table")[place];
        const heads = [...table.tHead.rows[0].cells];
        const at = heads.findIndex((one) => one.textContent.startsWith(header)) - heads.length;
        return [...table.tBodies[0].rows].map((row) => row.cells[row.cells.length + at].textContent);
    }"""
    return page.evaluate(script, [table, header])


def button(page, table, header):
    return page.locator("table").nth(table).locator("th button").filter(has_text=header)


@pytest.mark.parametrize("screen", SCREENS)
def test_answer_is_seen_without_scrolling_and_nothing_is_wider_than_the_screen(show, report, screen):
    page = show(report, screen)
    assert page.evaluate(WIDER) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    width, height = SCREENS[screen]
    for header in ("use this", "time relative"):
        at = page.locator("table").first.locator("tbody tr").first.locator("td")
        place = 1 if header == "use this" else 2
        box = at.nth(place).bounding_box()
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= height
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate(WIDER) == []


def narrowest(markdown):
    """The tables of a page, each with one row of the longest words of a column: as narrow as the table can be."""
    for is_table, lines in itertools.groupby(markdown.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            head, rule, *rows = lines
            columns = zip(*(re.split(r"(?<!\\)\|", row)[1:-1] for row in rows), strict=True)
            words = [" ".join(sorted(set(" ".join(column).split()), key=len)[-9:]) for column in columns]
            yield "\n".join((head, rule, f"| {' | '.join(words)} |"))


def too_wide(page, markdown):
    page.set_content(GITHUB + MarkdownIt().enable("table").render("\n\n".join(narrowest(markdown))))
    return page.evaluate(TOO_WIDE)


def test_tables_of_times_fit_the_column_of_github_in_every_published_page(browser):
    page = browser.new_page()
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*/report.md")}
    wide = [(name, head) for name, text in texts.items() for head in too_wide(page, text)]
    assert [each for each in wide if "median" in each[1]] == []  # those of counts, verdicts and quality may scroll
    heads = ["median (ms) [95% interval]"] * 12
    table = "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["--:"] * 12, ["1610 [1560, 1670]"] * 12))
    assert too_wide(page, table), "a table of twelve such columns does not fit"
    page.close()


def test_numbers_and_intervals_are_sorted_by_value_with_the_keyboard_too(show, report):
    page = show(report)
    written = column(page, 0, "time relative")
    header = button(page, 0, "time relative")
    header.focus()
    page.keyboard.press("Enter")
    values = [float(text.split()[0]) for text in column(page, 0, "time relative")]
    assert values == sorted(values) != [float(text.split()[0]) for text in written]
    assert page.locator("th[aria-sort=ascending]").count() == 1
    header.click()
    assert [float(text.split()[0]) for text in column(page, 0, "time relative")] == values[::-1]
    header.click()
    assert column(page, 0, "time relative") == written
    assert page.locator("th[aria-sort]").count() == 0
    button(page, 0, "median").click()
    medians = [float(text) for text in column(page, 0, "median")]
    assert medians == sorted(medians)  # 1040 after 329, as numbers and not as words


def test_row_keeps_its_case_when_rows_are_sorted_and_a_missing_value_is_last(show, record, write_run):
    cells = []
    for length in (512, 1024, 4096):
        problem = {**record().problem, "sequence": length}
        cells.append(record(case=f"s{length}", problem=problem))
        if length != 1024:
            cells.append(record("chunked", case=f"s{length}", problem=problem, samples=(length * 1e-6,) * 10))
    reports.render(folder := write_run(*cells))
    page = show(folder / "report.html")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    heads = page.locator("table").evaluate_all("all => all.map((one) => one.tHead.textContent)")
    overview = next(place for place, head in enumerate(heads) if "chunked" in head)
    speed = next(place for place, head in enumerate(heads) if "samples" in head)
    for expected in (["0.512", "4.10", "\u2013"], ["4.10", "0.512", "\u2013"]):
        button(page, overview, "chunked").click()
        assert column(page, overview, "chunked") == expected
    button(page, speed, "median").click()
    lengths = [case.replace("\u00a0", " ").split(", ")[1] for case in column(page, speed, "case")]
    assert lengths[:2] == ["T 512", "T 4096"]  # the rows of chunked, whose cases stood in the rows above them
    assert column(page, speed, "backend") == ["chunked", "chunked", "standard", "standard", "standard"]


def test_reproduce_line_is_copied_as_the_command_of_the_run(show, report):
    page = show(report, permissions=["clipboard-read", "clipboard-write"])
    page.locator(".code button").last.click()
    page.get_by_text("Copied").wait_for()
    name, verb, *words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert (name, verb) == ("attnsuite", "run")
    asked = tyro.cli(run_verb.Run, args=words)  # the suite may have other cases since
    run = reports.load(PUBLISHED)
    assert tuple(asked.backends.split(",")) == run.manifest.backends
    assert set(asked.cases.split(",")) == {record.case for record in run.records}


def test_page_is_light_or_dark_as_the_reader_prefers(show, report):
    light, light_contrast = show(report, color_scheme="light").evaluate(CONTRAST)
    dark, dark_contrast = show(report, color_scheme="dark").evaluate(CONTRAST)
    assert dark < 0.1
    assert light > 0.9
    assert min(light_contrast, dark_contrast) > 7  # WCAG 2.2, level AAA
