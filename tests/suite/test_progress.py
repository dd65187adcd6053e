"""What the bar of a run counts: cells that are measured, not those that are known to be unsupported."""

import io
import types

import pytest
from rich.console import Console
from rich.text import Text

from attnsuite.suite.grid.progress import ProgressDisplay


def record(status, reason="kvax runs on GPUs."):
    return types.SimpleNamespace(
        status=status, requested="kvax", target="cpu", reasons=(reason,), error=reason, resolved=None
    )


@pytest.fixture
def display(monkeypatch):
    monkeypatch.setattr("attnsuite.suite.grid.progress.record_line", lambda record: Text(f"{record.status} line"))
    return ProgressDisplay(Console(file=io.StringIO()))


def test_unsupported_cells_move_no_bar_and_say_their_reason_once(display):
    display.begin(2, 0)
    for status in ("unsupported", "unsupported", "ok"):
        display.done(record(status))
    (task,) = display._progress.tasks
    assert (task.completed, task.total, task.fields["left"]) == (1, 2, 1)
    assert display._console.file.getvalue() == "unsupported line\nok line\n"


def test_a_cell_that_turns_out_to_be_unsupported_leaves_the_total(display):
    display.begin(2, 0)
    display.done(record("ok"))
    display.done(record("unsupported"))
    display.fewer(1)
    (task,) = display._progress.tasks
    assert (task.completed, task.total, task.fields["left"]) == (1, 1, 0)


@pytest.mark.parametrize("terminal", [True, False])
def test_long_line_breaks_between_words_on_a_terminal_alone(monkeypatch, terminal):
    sentence = "unsupported forward-s1024-h8k2-d64-bf16 / kvax  " + "query_length=1024 is not supported by kvax " * 4
    monkeypatch.setattr("attnsuite.suite.grid.progress.record_line", lambda _: Text(sentence))
    file = io.StringIO()
    display = ProgressDisplay(Console(file=file, force_terminal=terminal, width=80, color_system=None))
    display.done(record("ok"))
    display.warn(sentence)
    first, *rest = file.getvalue().splitlines()
    assert file.getvalue().split() == [*sentence.split(), "warning:", *sentence.split()]
    assert max(map(len, (first, *rest))) <= 80 or not terminal
    assert len(rest) == (7 if terminal else 1)
