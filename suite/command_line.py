"""The command ``attnsuite``: finds the verb, reads its flags, and prints an error as one sentence.

Exit codes (docs/reference/command-line.md):

- 0: the command did its work. Failed cells are results.
- 1: the work gave no result (``compile`` without a compiler, ``perplexity`` of losses that are not finite), or
  ``judge`` found something wrong.
- 2: input that cannot be used, or results that cannot be written (one sentence on stderr).
- 3: a check that was asked for did not pass (``compare --fail-on``, ``choose --check``).
- 128 plus the number of the signal that ended it (130 after Ctrl-C). Finished results are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from attnsuite import __version__
from attnsuite.sentences import quoted

from .errors import InputError
from .verbs import VERBS
from .verbs.flags import BAD_INPUT, extended, tell

_DESCRIPTION = "Which attention implementation, for your shapes, on your device: measured, and checked."
_COMPLETION = "--tyro-print-completion"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command ``attnsuite`` (``entry.py`` calls this function); exits the process."""
    try:
        code = _act(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
    except InputError as error:
        tell(f"attnsuite: {error}")
        code = BAD_INPUT
    except ValueError as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith("jax/_src/config.py"):
            raise
        variables = ", ".join(sorted(name for name in os.environ if name.startswith("JAX_")))
        tell(f"attnsuite: JAX does not take a variable of the environment ({error}); change or unset it: {variables}.")
        code = BAD_INPUT
    except OSError as error:
        _give_up_stdout()
        tell(f"attnsuite: {_of_the_system(error)}")
        code = BAD_INPUT
    except KeyboardInterrupt as error:
        code = 128 + next(iter(error.args), signal.SIGINT)
        # CPython remembers an interrupt that passed through exec of a string (a dataclass is made so) and would end the
        # process by SIGINT, whatever the exit code. Another exec makes it forget.
        exec("")  # noqa: S102
    sys.exit(code)


def _act(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_help())  # noqa: T201 (the command line's output)
        return 0 if arguments else BAD_INPUT
    if arguments[0] == "--version":
        print(f"attnsuite {__version__}")  # noqa: T201
        return 0
    if arguments[0] == _COMPLETION:
        by_verb = {verb: extended(_flags_of(verb), verb) for verb in VERBS}
        tyro.extras.subcommand_cli_from_dict(by_verb, prog="attnsuite", description=_DESCRIPTION, args=arguments)
    verb, *rest = arguments
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(VERBS)}."
        raise InputError(f"{verb!r} is not a verb; {hint}")
    _check_values(verb, rest)
    flags = extended(_flags_of(verb), verb, rest)
    _check_guides_flags(flags, rest)
    command = tyro.cli(flags, prog=f"attnsuite {verb}", args=rest, config=(tyro.conf.DisallowNone,))
    _check_integers(command)
    return _module(verb).run(command)


def _check_values(verb: str, arguments: Sequence[str]) -> None:
    """An empty value is a variable that the shell did not know; as a path it would be the present directory.

    Of a flag that is given twice, the parser would take the last value without a word.
    """
    for before, word in zip([verb, *arguments], arguments, strict=False):
        if not word or (word.startswith("--") and word.endswith("=")):
            raise InputError(f"{word.removesuffix('=') or before} is given an empty value; give one, or leave it out.")
        path = word.partition("=")[2] if word.startswith("--") else word
        if path == "~" or path.startswith("~/"):
            raise InputError(f"{word}: the shell left ~ as it is; write $HOME{path[1:]} instead.")
        if _is_loop(path):
            raise InputError(f"{word}: {os.strerror(errno.ELOOP)}; give another path.")
    named = [word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")]
    for name in named:
        if named.count(name) > 1:
            raise InputError(f"{name} is given twice; give it once, with commas between its values if it has several.")


def _is_loop(path: str) -> bool:
    """Whether it is a link that leads back to itself, which no path can be made absolute from."""
    try:
        Path(path).stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    except ValueError:  # it has a null character
        return False
    return False


# Flags of the earlier guides, and what says the same here (docs/how-to/coming-from.md).
_GUIDES_FLAGS = {
    "attention": "--backends NAMES",
    "device": "JAX_PLATFORMS=cpu, cuda or tpu, or --targets NAMES of compile for a device that is not here",
    "preset": "--model NAME, or --model DIR for a checkpoint",
    "use-lora": "--lora-rank N of train",
    "use-splash-kernel": "--backends splash, or for Kascade --options kernel=pallas",
    "weights-dir": "--model DIR",
}


def _check_guides_flags(flags: type, arguments: Sequence[str]) -> None:
    """Raise InputError for a flag of the guides that this verb does not have, with what to write instead."""
    known = {field.name.replace("_", "-") for field in dataclasses.fields(flags)}
    for word in arguments:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if word.startswith("--") and name in _GUIDES_FLAGS and name not in known:
            raise InputError(f"{word.partition('=')[0]} is a flag of the guides; here it is {_GUIDES_FLAGS[name]}.")


def _check_integers(command: Any) -> None:
    """Raise InputError for an integer that is larger than any seed, or than any length or number that is counted."""
    for field in dataclasses.fields(command):
        value, most = getattr(command, field.name), 2**32 - 1 if field.name == "seed" else 2**31 - 1
        if isinstance(value, int) and value > most:  # JAX drops a seed's higher bits
            raise InputError(f"--{field.name.replace('_', '-')} {quoted(value)} must be at most {most}.")


def _module(verb: str) -> Any:
    return importlib.import_module(f".verbs.{verb}", __package__)


def _flags_of(verb: str) -> type:
    return getattr(_module(verb), verb.capitalize())


def _help() -> str:
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {verb:<{width}}{sentence}" for verb, sentence in VERBS.items())
    return (
        f"usage: attnsuite [-h] [--version] VERB ...\n\n{_DESCRIPTION}\n\n{verbs}\n\n"
        "attnsuite VERB --help says what a verb takes.\n"
        f"Completion: attnsuite {_COMPLETION} bash|zsh|tcsh (docs/reference/command-line.md says where it goes)."
    )


def _of_the_system(error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return "stdout was closed before all of it was written."
    if isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd
        return "the current directory was removed; change to one that is there."
    return f"{error.filename or 'the output cannot be written'}: {error.strerror or error}."


def _give_up_stdout() -> None:
    """Drop the rest of stdout, so that the interpreter does not try to write it again when it ends."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # there is none, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
