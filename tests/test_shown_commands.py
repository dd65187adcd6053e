"""Every command that the documentation shows can be read, and is run by a test or needs what a row says."""

import importlib
import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import pytest
import tyro

from attnsuite.suite import statistics
from attnsuite.suite.verbs import VERBS
from attnsuite.suite.verbs.flags import extended
from command import code_of
from landing import is_landing
from test_coming_from import command_exists, exists

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "reports" / "published"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TOOLS = {"attnsuite", "pip", "pytest", "tox", "python"}
# Pages whose commands a test reads from the page and runs.
REPLAYED = {"docs/tutorial.md": "tests/test_tutorial.py", "docs/how-to/guard.md": "tests/suite/test_guard.py"}
# The first row that fits a command says what it needs.
NEEDS = {
    r"--executor ray|--shard|runs/shard-|runs/jax-": "several machines (tests/suite/test_fleet.py has nodes)",
    r"^pip |pre-commit": "a network",
    r"\bDIR\b|Llama-3|\bFILE\b|c4|wiki": "weights or text of yours",
    r"^attnsuite compile|--target ": "the compilers of other devices (extras tpu, compile-cuda, kvax), and minutes",
    r"--import ": "tables of another package",
    r"--trend": "the extra history",
    r"\w\.py:|\w\.toml|mine\.txt|mine\.safetensors|on-mine": "a file of yours",
    r"^attnsuite (run|judge|tune|train|calibrate)": "minutes",
    r"^(pytest|tox|python)": "minutes, or an environment of tox.ini",
}
HERE = r"attnsuite (doctor|report|choose|compare|--tyro)"  # what is left of these is run below, on published records
LATER = {("doctor",), ("report", "results", "compiled")}  # beside doctor --all, and other reports
RUNS = {
    "cpu-intel-xeon": ("results", "results-before", "results-after", "others", "mine", "tuned"),
    "compiled-v5e": ("compiled", "mine-h100"),
}


def simple_commands(line):
    """The commands of a shell line whose first word is a tool, each as its words."""
    lexer = shlex.shlex(re.sub(r"\$\{\{.*?\}\}", "1", line), posix=True, punctuation_chars=True)
    lexer.wordchars += "$:=,[]@{}^%+"
    try:
        words = [*lexer, ";"]
    except ValueError:  # a quotation that goes on in the next line
        return
    command = []
    for word in words:
        if set(word) <= set("&;|()"):
            if command and command[0] in TOOLS:
                yield command
            command = []
        elif command or word not in ("$", "run:", "-", "!"):
            command.append(word)


def shown(page):
    """The commands in the shell blocks of a page."""
    kind = None
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            kind = None if kind is not None else line[3:]
        elif kind in ("sh", "", "yaml") or (kind == "console" and line.startswith("$ ")):
            for words in simple_commands(line):
                yield words[: words.index(">")] if ">" in words else words


def mentioned(page):
    """The commands of this package in the sentences and tables of a page."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(words.split()) for words in re.findall(r"`attnsuite ([^`]+)`", prose)]


def way(page, words):
    """What runs a command, or what it needs; None where no row says it."""
    name, command = str(page.relative_to(ROOT)), " ".join(words)
    if name in REPLAYED:
        return REPLAYED[name]
    for pattern, need in NEEDS.items():
        if re.search(pattern, command):
            return need
    return "here" if re.match(HERE, command) else None


def unreadable(words):
    """Why a command cannot be read; None where it can."""
    tool, *rest = words
    if tool == "attnsuite" and rest[0] in VERBS:
        module = importlib.import_module(f"attnsuite.suite.verbs.{rest[0]}")
        try:
            tyro.cli(extended(getattr(module, rest[0].capitalize()), rest[0]), args=rest[1:])
        except SystemExit:
            return f"attnsuite {' '.join(rest)}: its flags are not those of the verb"
    elif tool == "attnsuite":
        return None if rest[0] == "--tyro-print-completion" else f"{rest[0]} is not a verb"
    elif tool == "python" and rest[0] == "-m":
        return None if rest[1] == "venv" or importlib.util.find_spec(rest[1]) else f"there is no module {rest[1]}"
    elif tool == "tox" and "-e" in rest:
        return None if exists(f"tox -e {rest[rest.index('-e') + 1]}") else f"{rest} is not in tox.ini"
    else:
        listed = [re.match(r"[./a-z-]*\[(.*)\]$", word) for word in rest if not word.startswith("lm-eval")]
        extras = [extra for found in listed if found for extra in found[1].split(",")]
        files = [word for word in rest if re.match(r"(tests|docs)/.*\.py$", word)]
        missing = [extra for extra in extras if tool == "pip" and not exists(f".[{extra}]")]
        missing += [file for file in files if not (ROOT / file).is_file()]
        return f"{' '.join(words)}: there is no {missing}" if missing else None
    return None


EVERY = [(page, words) for page in PAGES for words in shown(page)]


def test_every_command_is_read():
    assert len(EVERY) > 80
    assert [said for _, words in EVERY if (said := unreadable(words))] == []


@pytest.mark.parametrize("page", [*PAGES, PUBLISHED / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_have_verbs_and_flags_that_exist(page):
    if not page.exists():
        pytest.skip("a source distribution has no published pages")
    for command in mentioned(page):
        assert command.split()[0] in ("VERB", "--tyro-print-completion") or command_exists(command), command


@pytest.mark.parametrize(
    "line",
    [
        "attnsuite walk",
        "attnsuite run --backend chunked",
        "pip install '.[nothing]'",
        "cd x && pytest tests/test_nothing.py",
        "tox -e nothing",
        "python -m attnsuite.nothing",
    ],
)
def test_command_that_nobody_can_run_is_found(line):
    (words,) = simple_commands(line)
    assert unreadable(words)


def test_every_command_is_run_by_a_test_or_says_what_it_needs():
    assert [" ".join(words) for page, words in EVERY if way(page, words) is None] == []
    assert way(PAGES[0], ["attnsuite", "convert"]) is None
    assert set(NEEDS.values()) <= {way(page, words) for page, words in EVERY}, "no row is too many"
    for page, test in REPLAYED.items():
        assert Path(page).name.removesuffix(".md") in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="a source distribution has no published records")
def test_commands_that_need_nothing_run_on_published_records(tmp_path, monkeypatch, capsys):
    """In the order of the pages, so that `report mine.zip` finds what `--bundle mine.zip` wrote."""
    for published, names in RUNS.items():
        for name in names:
            shutil.copytree(PUBLISHED / published, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(statistics, "_RESAMPLES", 10)  # what is printed is not read
    monkeypatch.setattr(statistics, "_estimate", statistics._estimate.__wrapped__)
    shown = dict.fromkeys(tuple(words[1:]) for page, words in EVERY if way(page, words) == "here")
    for words in [words for words in shown if not (is_landing() and words in LATER)]:
        assert code_of(*words) in (0, 3, None), (words, capsys.readouterr())  # None: tyro ends with no code, which is 0
        assert capsys.readouterr().out, words
