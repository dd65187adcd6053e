"""The verb ``attnsuite harvest``: its flags, and the function that runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..errors import InputError
from .flags import NO_RESULT, flag, tell

_FORM = "give SCRIPT.py:NAME, a file and a function in it that takes nothing and returns (step, args)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """Trace a step of yours (train.py:fn), and print the attention calls in it as a suite file."""

    script: tyro.conf.Positional[Annotated[str, flag("FILE.py:NAME")]]
    """FILE.py:NAME of a function that takes nothing and returns (step, args): step(*args) is traced."""
    out: Annotated[Path | None, flag("FILE.toml", "stdout")] = None
    """File to write, which must not exist."""
    time: bool = False
    """Run the step too: how much of it is attention, how long it takes with auto, and the lines to change."""


def run(command: Harvest) -> int:
    """Print or write the suite file; exit code 1 where no call can be a case."""
    from ..files import check_file, write_text
    from ..harvest_suite import problems_of, to_toml
    from ..traced_calls import traced
    from ..user_function import check_reference, load_module

    path, _, name = check_reference(command.script, _FORM).rpartition(":")
    out = command.out and command.out.absolute()  # the script may change the directory
    if command.out is not None:
        if command.out.suffix != ".toml":
            raise InputError(f"--out {command.out} is no suite file; give a name that ends in .toml.")
        if command.out.exists():
            raise InputError(f"{command.out} exists; give another --out.")
        check_file(command.out)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the suite file's
        function = getattr(load_module(Path(path)), name, None)
    if not callable(function) or not _takes_nothing(function):
        raise InputError(f"{path} has no function {name} that takes nothing; {_FORM}.")
    step, args = _step(command.script, _of_user(command.script, function))
    found = _of_user(f"the step of {command.script}", lambda: traced(step, *args))
    rows = problems_of(found)
    if not rows:
        tell(
            f"{command.script}: no attention call was found; found are calls of this package, "
            "jax.nn.dot_product_attention and flax's dot_product_attention, not products and a softmax written out."
        )
        return NO_RESULT
    text = to_toml(rows, command.script)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)
        print(f"suite: {command.out}")
    for row in rows:
        for sentence in row.sentences:
            tell(f"{'left out' if row.case is None else row.case.name}: {sentence} ({', '.join(row.call_sites)})")
    _say_masks(command.script, found, step, args)
    if command.time:
        _say_times(command.script, found, step, args)
    return 0 if any(row.case for row in rows) else NO_RESULT


def _say_masks(script: str, found: Any, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Say which mask arrays a flag would say, from a run of the step; nothing where it passes none."""
    from ..mask_arrays import sentences
    from ..traced_calls import executed

    if not any(call.spec is not None and call.spec.has_mask for call in found.calls):
        return
    ran = _of_user(f"the step of {script}", lambda: executed(step, *args))
    if ran is None:
        tell("mask arrays are not read: an argument of the step has a shape and no numbers.")
        return
    for sentence in sentences(ran):
        tell(sentence)


def _say_times(script: str, found: Any, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from ..step_time import measure, sentences

    times = _of_user(f"the step of {script}", lambda: measure(step, args))
    if times is None:
        tell("the step was not timed: one of its arguments has a shape and no numbers.")
        return
    for sentence in sentences(found, times):
        print(sentence)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def _step(script: str, made: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step and its arguments, as the user's function returned them. Raises InputError."""
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list):
        return made[0], tuple(made[1])
    raise InputError(
        f"{script} returned {type(made).__name__}, not (step, args); return the function of the step and a tuple of "
        "its arguments, arrays or jax.ShapeDtypeStruct among them."
    )


def _of_user(what: str, function: Callable[[], Any]) -> Any:
    """What the user's code returns. Raises InputError with what it raised, and where."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the suite file's
            return function()
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"{what} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error
