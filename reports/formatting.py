"""How a value is written in a table or a sentence: three significant digits, one dash for "no value", escaped text."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable

from attnsuite.suite.record import TensorError
from attnsuite.suite.statistics import Interval

DASH = "\u2013"
TIMES = "\u00d7"

Value = str | bool | int | float | Interval | TensorError | None

_MARKED = re.compile(r"([\\`*\[\]<>|~&])")
_EDGE_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")


def number(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits, without an exponent where it stays readable.

    >>> number(1234.5), number(0.045678), number(2.5), number(3.2e-07)
    ('1230', '0.0457', '2.50', '3.20e-07')
    """
    if not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def _digits(interval: Interval) -> int:
    """Enough digits to tell the ends apart, and to tell an end from 1 where it is not 1: from three to five."""
    for digits in (3, 4):
        low, high = number(interval.low or 0.0, digits), number(interval.high or 0.0, digits)
        one = number(1.0, digits)
        hides_one = (low == one and interval.low != 1) or (high == one and interval.high != 1)
        if low != high and not hides_one:
            return digits
    return 5


def bounds(interval: Interval | None) -> str:
    """``[low, high]``, or a dash if there are too few samples for an interval."""
    if interval is None or interval.low is None or interval.high is None:
        return DASH
    digits = _digits(interval)
    return f"[{number(interval.low, digits)}, {number(interval.high, digits)}]"


def estimate(interval: Interval) -> str:
    """``value [low, high]``, or the value alone if there are too few samples for an interval."""
    if interval.low is None:
        return number(interval.value)
    return f"{number(interval.value, _digits(interval))} {bounds(interval)}"


def escape(text: str) -> str:
    r"""Foreign text as Markdown that shows it unchanged, on one line, inside a table cell or a sentence.

    >>> print(escape("a|b  *c*"))
    a\|b \*c\*
    """
    line = "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
    return _EDGE_UNDERSCORE.sub(lambda found: "\\" + found.group(), _MARKED.sub(r"\\\1", line))


def code(text: str) -> str:
    """A name in code type, or escaped as text where a backtick or a pipe would break the code span."""
    plain = " ".join(text.split())
    return f"`{plain}`" if plain and plain.isprintable() and not set(plain) & set("`|\\") else escape(plain)


def command_line(arguments: Iterable[str]) -> str:
    r"""The arguments as a shell takes them, on one line.

    >>> print(command_line(["attnsuite", "run", "--suite", "my suite.toml", "it's\n"]))
    attnsuite run --suite 'my suite.toml' $'it\x27s\x0a'
    """
    return " ".join(shlex.quote(argument) if argument.isprintable() else _escaped(argument) for argument in arguments)


def _escaped(argument: str) -> str:
    plain = frozenset(range(32, 127)) - frozenset(b"'\\")
    return "$'" + "".join(chr(b) if b in plain else f"\\x{b:02x}" for b in argument.encode()) + "'"


def shorten(text: str, length: int = 240) -> str:
    """The first ``length`` characters of the text, with an ellipsis where more was there."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "\u2026"


def plural(count: int, noun: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show(value: Value) -> str:
    """Any table value as Markdown."""
    match value:
        case None | bool():
            return {None: DASH, True: "yes", False: "no"}[value]
        case int():
            return str(value)
        case float():
            return number(value)
        case Interval():
            return estimate(value)
        case TensorError():
            found = "not finite" if value.max_error is None else number(value.max_error)
            return f"{found} / {number(value.allowed)}"
        case str():
            return escape(value)
