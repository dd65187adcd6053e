"""The command ``attnsuite``: run a suite, look at the machine, tune, report, compare, compile, convert.

Exit codes (docs/measuring.md): 0 when the command did what it was asked (failed cells are results), 1 where it did and
there is no result (``compile`` without a compiler, ``perplexity`` of losses that are not finite), 2 for input that
cannot be used and results that cannot be written (one sentence on stderr), 128 and the number of the signal that ended
it (130 after Ctrl-C; what is done is kept).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from attnsuite import reports
from attnsuite.backends import Target

from . import compile_run, sharded, typed
from .checkpoint import CheckpointWords
from .compile_request import ModelWords, compile_request
from .compile_run import nothing_compiled
from .doctor import describe, examine_here
from .errors import InputError
from .kascade.words import KascadeWords
from .loss_curves import CURVES, Setting
from .memory import machine_bytes
from .progress import ProgressDisplay
from .run import RunRequest, checked_text, execute, new_request, resumed_request
from .runner import Limits
from .store import MANIFEST, RECORDS, parse_records
from .suites import select
from .summary import summary_lines
from .tuning import TUNED, TuneRequest, tunable, tune

_BAD_INPUT = 2
_NO_RESULT = 1
_MEMORY_SHARE = 0.7  # of the machine, for one cell; the other cells of its case wait beside it
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def _flag(metavar: str, default: str) -> Any:
    """How a flag that may be left out stands in the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measure every backend on every case of a suite and write a report."""

    suite: Annotated[str | None, _flag("NAME|FILE", "quick")] = None
    """quick, full, cpu-speed, kascade, or the path of a .toml file."""
    model: Annotated[str | None, _flag("NAME|DIR", "none")] = None
    """Instead of a suite: every backend in a checkpoint, on text and on the clock; text, or a directory."""
    backends: Annotated[str | None, _flag("NAMES", "all, and the suite's peers")] = None
    """Backends (and peers) to compare, separated by commas."""
    cases: Annotated[str | None, _flag("PATTERNS", "all of the suite")] = None
    """Glob patterns of case names, separated by commas."""
    out: Annotated[Path | None, _flag("DIR", "runs/<UTC time>-<suite>")] = None
    """Directory for records and report."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff, _flag("", "off")] = False
    """Go on with the run in --out; finished cells are kept."""
    text: Annotated[Path | None, _flag("FILE", "prose that ships with Python")] = None
    """Text (UTF-8) to measure perplexity on."""
    seq_len: Annotated[int | None, _flag("TOKENS", "512")] = None
    """With --model: length of the texts and prompts."""
    batch: Annotated[int | None, _flag("N", "1")] = None
    """With --model: prompts at a time; several are of unequal length."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, _flag("DTYPE", "as stored")] = None
    """With --model: what it computes in."""
    cell_timeout: Annotated[float, _flag("SECONDS", "120")] = 120.0
    """Time that a cell may take to get ready, and again for its samples."""
    cell_memory: Annotated[str | None, _flag("SIZE", "70% of the machine")] = None
    """Memory that a cell may hold, such as 4GiB or 500MB."""
    tile_size: Annotated[int | None, _flag("KEYS", "the case's")] = None
    """Kascade: keys per tile."""
    top_k: Annotated[float | None, _flag("SHARE", "the case's")] = None
    """Kascade: share of the earlier keys that are attended to, above 0 and at most 1."""
    threshold: Annotated[float | None, _flag("SHARE", "0.65")] = None
    """Kascade, greedy schedule: least similarity to the anchor."""
    max_reuse_dist: Annotated[int | None, _flag("LAYERS", "4")] = None
    """Kascade, greedy schedule: how far behind its anchor a layer may be."""
    schedule: Annotated[str | None, _flag("NAME", "dp")] = None
    """Kascade: dp, greedy or manual."""
    anchors: Annotated[str | None, _flag("N|LAYERS", "2")] = None
    """Kascade: how many layers select (dp), or which (manual), such as 0,2."""
    granularity: Annotated[str | None, _flag("NAME", "tile")] = None
    """Kascade: tile or token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Measure over some text how well one layer's selection serves another, and show Kascade's schedule."""

    model: Annotated[str, _flag("NAME|DIR", "text")] = "text"
    """text (the checkpoint that ships here), or the directory of a byte-level checkpoint."""
    text: Annotated[Path | None, _flag("FILE", "training part of Python's prose")] = None
    """Text to calibrate on."""
    out: Annotated[Path, _flag("FILE", "calibration.safetensors")] = Path("calibration.safetensors")
    """File to write, a .json beside it; existing ones are replaced."""
    prompts: Annotated[int, _flag("N", "8")] = 8
    """Prompts, spread evenly over the text."""
    length: Annotated[int, _flag("TOKENS", "512")] = 512
    """Tokens of a prompt."""
    tile_size: Annotated[int, _flag("KEYS", "16")] = 16
    """Keys per tile, and queries that share a selection."""
    top_k: Annotated[float, _flag("SHARE", "0.125")] = 0.125
    """Share of the earlier keys that is selected."""
    min_keys: Annotated[int, _flag("KEYS", "0")] = 0
    """Least number of earlier keys."""
    granularity: Annotated[str, _flag("NAME", "tile")] = "tile"
    """tile or token."""
    schedule: Annotated[str, _flag("NAME", "dp")] = "dp"
    """dp, greedy or manual: the schedule that is shown."""
    anchors: Annotated[str, _flag("N|LAYERS", "a quarter of the layers")] = ""
    """How many layers select (dp), or which (manual), such as 0,2."""
    threshold: Annotated[float, _flag("SHARE", "0.65")] = 0.65
    """Greedy schedule: least similarity to the anchor."""
    max_reuse_dist: Annotated[int, _flag("LAYERS", "4")] = 4
    """Greedy schedule: how far behind its anchor a layer may be."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Show devices, versions, and for each backend the mode it would run in or why it would not."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write JSON to stdout."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Render the report of a run again from its records."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run; the report is written there."""
    others: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Directories of runs that follow on the same page."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Hold the second run against the first, cell by cell, as Markdown."""

    run_a: tyro.conf.Positional[Path]
    """Directory of the first run."""
    run_b: tyro.conf.Positional[Path]
    """Directory of the second run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """Find options of a backend: the fastest here, or the most plausible for a device that is not here."""

    backends: Annotated[str | None, _flag("NAMES", "all that can be tuned")] = None
    """Backends to tune, separated by commas."""
    target: Annotated[str, _flag("NAME", "here")] = "here"
    """Device to tune for: here, or a kind such as h100, for which candidates are compiled and not timed."""
    cases: Annotated[str | None, _flag("PATTERNS", "all")] = None
    """Glob patterns of case names, separated by commas."""
    out: Annotated[Path, _flag("FILE", "tuned.json")] = Path("tuned.json")
    """File to write; an existing one is replaced."""
    cell_timeout: Annotated[float, _flag("SECONDS", "120")] = 120.0
    """Time that a case may take; five times that for all its candidates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    """Compile every backend for devices that are not here: does it compile, does it fit. Nothing is run."""

    backends: Annotated[str | None, _flag("NAMES", "all that are registered")] = None
    """Backends to compile, separated by commas."""
    targets: Annotated[str | None, _flag("NAMES", "all that are known")] = None
    """Devices to compile for, such as v5e,h100, separated by commas."""
    suite: Annotated[str | None, _flag("NAME|FILE", "compile")] = None
    """Where the cases are from: compile, quick, full, or the path of a .toml file."""
    cases: Annotated[str | None, _flag("PATTERNS", "all, or none with --model")] = None
    """Glob patterns of case names, separated by commas."""
    model: Annotated[str | None, _flag("NAMES|DIRS", "none")] = None
    """Whole models to compile (presets such as llama-3.2-1b, text, directories), separated by commas."""
    seq_lens: Annotated[str | None, _flag("LENGTHS", "2048")] = None
    """Sequence lengths of the models, separated by commas."""
    phases: Annotated[str | None, _flag("NAMES", "prefill,train,decode")] = None
    """What the models do, separated by commas."""
    longest: Annotated[str | None, _flag("PHASES", "none")] = None
    """Phases whose longest sequence that fits each device is searched (to 131072, by quarters of powers of two)."""
    batch: Annotated[int, _flag("N", "1")] = 1
    """Sequences per batch of the models."""
    dtype: Annotated[str, _flag("DTYPE", "bfloat16")] = "bfloat16"
    """What the models compute in."""
    out: Annotated[Path | None, _flag("DIR", "runs/<UTC time>-compile")] = None
    """Directory for records and report."""
    cache: Annotated[Path | None, _flag("DIR", "~/.cache/attnsuite/compile")] = None
    """Where answers of the compilers are kept."""
    cell_timeout: Annotated[float, _flag("SECONDS", "600")] = 600.0
    """Time that one program may take to compile."""
    cell_memory: Annotated[str | None, _flag("SIZE", "70% of the machine")] = None
    """Memory of this machine that one compiler may hold, such as 4GiB."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """Write a checkpoint (Hugging Face's safetensors, or Meta's .pth) as safetensors and JSON, tensor by tensor."""

    input: Annotated[Path, tyro.conf.arg(metavar="DIR|PRESET")]
    """Directory of the checkpoint; or a preset such as llama-3.1-8b, which is written with random weights."""
    output: Annotated[Path | None, _flag("DIR", "the input's name with -converted")] = None
    """Directory to write; it must be new or empty."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, _flag("DTYPE", "as stored")] = None
    """float32, bfloat16 or float16."""
    quantize: Annotated[Literal["none"], _flag("none", "none")] = "none"
    """How weights are quantized; there is none yet."""
    chunked: Annotated[bool, tyro.conf.FlagCreatePairsOff, _flag("", "off")] = False
    """Write a file per layer."""
    preset: Annotated[str | None, _flag("NAME", "the one with these sizes")] = None
    """Preset whose RoPE scaling holds, for Meta's checkpoints, which lack it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train a model on text, or LoRA adapters on top of one; a killed run goes on with --resume."""

    model: Annotated[str, _flag("NAME|DIR", "tiny")] = "tiny"
    """A preset (trained from scratch), text (the checkpoint in this package), or a checkpoint's directory."""
    text: Annotated[Path | None, _flag("FILE", "prose that ships with Python")] = None
    """Text to train on, as bytes."""
    out: Annotated[Path | None, _flag("DIR", "runs/<UTC time>-train")] = None
    """Directory for the model, its losses and what resuming needs."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff, _flag("", "off")] = False
    """Go on with the run in --out, asked for in the same words."""
    steps: Annotated[int, _flag("N", "200")] = 200
    """Updates."""
    batch: Annotated[int, _flag("N", "8")] = 8
    """Rows per update."""
    length: Annotated[int, _flag("N", "256")] = 256
    """Tokens per row."""
    accumulate: Annotated[int, _flag("N", "1")] = 1
    """Parts that the rows of an update are computed in, one after the other: less memory, the same update."""
    optimizer: Annotated[Literal["adamw", "muon"], _flag("NAME", "adamw")] = "adamw"
    """adamw or muon."""
    learning_rate: Annotated[float, _flag("RATE", "0.002")] = 0.002
    """Peak learning rate."""
    weight_decay: Annotated[float, _flag("RATE", "0.1")] = 0.1
    """Decay of matrices."""
    dtype: Annotated[Literal["float32", "bfloat16"], _flag("DTYPE", "float32")] = "float32"
    """What is computed in; parameters that are trained are kept in float32."""
    remat: Annotated[Literal["none", "dots", "layer"], _flag("POLICY", "none")] = "none"
    """What is computed again in the backward pass: none, dots (all but projections), layer (all)."""
    packed: Annotated[bool, tyro.conf.FlagCreatePairsOff, _flag("", "off")] = False
    """Pack whole paragraphs into rows, each seeing only itself."""
    lora_rank: Annotated[int | None, _flag("N", "no LoRA")] = None
    """Train adapters of this rank instead of the model."""
    lora_alpha: Annotated[float, _flag("X", "16")] = 16.0
    """The update is scaled by alpha / rank."""
    lora_targets: Annotated[str, _flag("NAMES", "q_proj,v_proj")] = "q_proj,v_proj"
    """Projections to adapt, separated by commas."""
    backend: Annotated[str, _flag("NAME", "auto")] = "auto"
    """Attention backend; one that cannot do it is an error."""
    mode: Annotated[Literal["native", "interpret"], _flag("MODE", "native")] = "native"
    """native, or interpret for kernels of a device that is not here."""
    save_every: Annotated[int, _flag("STEPS", "50")] = 50
    """Steps between saves (extra train); 0 saves nothing."""
    seed: Annotated[int, _flag("N", "0")] = 0
    """Seed of parameters and batches."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Train with every backend and hold its loss curve to the standard backend's, within its noise."""

    preset: Annotated[str, _flag("NAME", "tiny")] = "tiny"
    """The model: a preset of vocabulary 256."""
    backends: Annotated[str, _flag("NAMES", "chunked,splash,kvax")] = "chunked,splash,kvax"
    """Backends to train with beside standard, separated by commas."""
    steps: Annotated[int, _flag("N", "60")] = 60
    """Updates with what runs natively here."""
    interpreted_steps: Annotated[int, _flag("N", "8")] = 8
    """Updates with what runs in an interpreter."""
    out: Annotated[Path | None, _flag("DIR", "runs/<UTC time>-curves")] = None
    """Directory for curves, page and picture; what it holds of them is replaced."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Hold attention that is dealt to many devices (data, heads, context) to the oracle, on devices of the host."""

    out: Annotated[Path | None, _flag("DIR", "runs/<UTC time>-sharded")] = None
    """Directory for the table."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Perplexity of a checkpoint on text, layer by layer: for models larger than memory.

    Exits with 1 where losses are not finite (no figure), with 2 for weights that are not.
    """

    model: Annotated[str, tyro.conf.arg(metavar="NAME|DIR")]
    """text (the checkpoint that ships here), or the directory of a checkpoint."""
    text: Annotated[Path | None, _flag("FILE", "prose that ships with Python")] = None
    """Text (UTF-8) to measure on."""
    random_tokens: Annotated[bool, tyro.conf.FlagCreatePairsOff, _flag("", "off")] = False
    """Random tokens in place of text: for time and memory alone, of a checkpoint without a tokenizer."""
    seq_len: Annotated[int, _flag("TOKENS", "512")] = 512
    """Tokens of a sequence."""
    sequences: Annotated[int, _flag("N", "8")] = 8
    """Sequences, spread evenly over the text; each layer is read once for all of them."""
    batch: Annotated[int, _flag("N", "1")] = 1
    """Sequences that are computed at a time."""
    backend: Annotated[str, _flag("NAME", "auto")] = "auto"
    """What computes attention."""
    options: Annotated[str, _flag("NAME=VALUE,...", "the backend's")] = ""
    """Options of the backend, such as top_k=0.125,min_keys=0, separated by commas."""
    calibration: Annotated[Path | None, _flag("FILE", "none")] = None
    """Kascade: what attnsuite calibrate wrote; its settings hold where --options does not say otherwise."""
    schedule: Annotated[str | None, _flag("NAME", "dp with --calibration, else none")] = None
    """Kascade: dp, greedy or manual; without one every layer selects for itself."""
    anchors: Annotated[str, _flag("N|LAYERS", "a quarter of the layers")] = ""
    """Kascade: how many layers select (dp), or which (manual), such as 0,2."""
    threshold: Annotated[float, _flag("SHARE", "0.65")] = 0.65
    """Kascade, greedy schedule: least similarity to the anchor."""
    max_reuse_dist: Annotated[int, _flag("LAYERS", "4")] = 4
    """Kascade, greedy schedule: how far behind its anchor a layer may be."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, _flag("DTYPE", "as stored")] = None
    """What is computed in."""
    out: Annotated[Path | None, _flag("DIR", "runs/<UTC time>-perplexity")] = None
    """Directory for the record."""


Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Compile, tyro.conf.subcommand("compile")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Curves, tyro.conf.subcommand("curves")]
    | Annotated[Shard, tyro.conf.subcommand("sharded")]
    | Annotated[Perplexity, tyro.conf.subcommand("perplexity")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """What ``attnsuite`` does (``entry.py`` calls it); exits the process."""
    try:
        code = _act(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (InputError, reports.ReportError) as error:
        _tell(f"attnsuite: {error}")
        code = _BAD_INPUT
    except OSError as error:
        _give_up_stdout()
        _tell(f"attnsuite: {_of_the_system(error)}")
        code = _BAD_INPUT
    except KeyboardInterrupt as error:
        code = 128 + next(iter(error.args), signal.SIGINT)
    sys.exit(code)


def _act(arguments: Sequence[str] | None) -> int:
    command = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType]  (a union of annotated types is a type to tyro)
        prog="attnsuite",
        description="Which attention implementation, for your shapes, on your device: measured, and checked.",
        args=arguments,
    )
    words = sys.argv[1:] if arguments is None else arguments
    actions: dict[type, Callable[[Any], int]] = {
        Run: _run,
        Tune: _tune,
        Calibrate: _calibrate,
        Doctor: _doctor,
        Report: lambda asked: _report(asked.run_dir, *asked.others),
        Compare: lambda asked: _compare(asked.run_a, asked.run_b),
        Compile: lambda asked: _compile(asked, words),
        Convert: _convert,
        Perplexity: _perplexity,
        Train: _train,
        Curves: _curves,
        Shard: _sharded,
    }
    return actions[type(command)](command)


def _tell(sentence: str) -> None:
    """One line on stderr, where there is one."""
    with contextlib.suppress(OSError):
        print(" ".join(sentence.split()), file=sys.stderr)  # noqa: T201 (the command line's output)


def _of_the_system(error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return "stdout was closed before all of it was written."
    return f"{error.filename or 'the output cannot be written'}: {error.strerror or error}."


def _give_up_stdout() -> None:
    """What could not be written is not tried again when the interpreter ends."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # there is none, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(command: Run) -> int:
    request = _request(command)
    errors = Console(stderr=True)
    try:
        with ProgressDisplay(errors) as display:
            execute(request, display)
    except KeyboardInterrupt:
        hint = "nothing was measured yet; start the run again."
        if (request.out / MANIFEST).is_file():
            kept = "what is done is kept; " if (request.out / RECORDS).is_file() else ""
            hint = f"{kept}go on with: attnsuite run --resume --out {request.out}"
        _tell(f"interrupted: {hint}")
        raise
    return _report(request.out)


def _limits(command: Run | Compile) -> Limits:
    if not command.cell_timeout > 0:
        raise InputError(f"--cell-timeout {command.cell_timeout:g} must be above 0 seconds.")
    memory = int(_MEMORY_SHARE * machine_bytes()) if command.cell_memory is None else parse_size(command.cell_memory)
    return Limits(command.cell_timeout, memory)


def _compile(command: Compile, arguments: Sequence[str]) -> int:
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    request = compile_request(
        suite=command.suite,
        cases=command.cases,
        backends=command.backends,
        targets=command.targets,
        models=ModelWords(
            command.model, command.seq_lens, command.phases, command.batch, command.dtype, command.longest
        ),
        out=command.out or Path("runs") / f"{now}-compile",
        limits=_limits(command),
        cache=command.cache,
        command=("attnsuite", *arguments),
    )
    try:
        with ProgressDisplay(Console(stderr=True)) as display:
            compile_run.execute(request, display)
    except KeyboardInterrupt:
        _tell("interrupted: what is compiled is kept; ask for the same again to go on.")
        raise
    _report(request.out)
    records, _, _ = parse_records(request.out / RECORDS)
    if nothing_compiled(records):
        _tell("attnsuite: nothing was compiled, for want of a compiler; the reasons above say how to get one.")
        return _NO_RESULT
    return 0


def _sharded(command: Shard) -> int:
    out = command.out or Path("runs") / f"{dt.datetime.now(dt.UTC).strftime('%Y%m%dT%H%M%SZ')}-sharded"
    with Console(stderr=True).status("starting") as status:
        facts = sharded.run(out, status.update)
    print(f"{sharded.page(facts)}\npage: {out / sharded.PAGE}")  # noqa: T201
    return 0


def _request(command: Run) -> RunRequest:
    limits = _limits(command)
    names = ("tile_size", "top_k", "threshold", "max_reuse_dist", "schedule", "anchors", "granularity")
    words = KascadeWords(**{name: getattr(command, name) for name in names})
    checkpoint = _checkpoint(command)
    if command.resume:
        if command.out is None:
            raise InputError("--resume needs --out with the directory of the run to go on with.")
        said = words.flags() or ("--model" if checkpoint else "")
        if said:
            raise InputError(f"{said} cannot change a run that was begun; leave it out, or start a new run.")
        return resumed_request(command.suite, command.backends, command.cases, command.text, command.out, limits)
    suite = command.suite or "quick"
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    name = Path(checkpoint.model).resolve().name if checkpoint else Path(suite).stem
    out = command.out or Path("runs") / f"{now}-{name}"
    return new_request(checkpoint or suite, command.backends, command.cases, command.text, out, limits, words)


def _checkpoint(command: Run) -> CheckpointWords | None:
    sizes = {"--seq-len": command.seq_len, "--batch": command.batch, "--dtype": command.dtype}
    given = [flag for flag, value in sizes.items() if value is not None]
    if command.model is None:
        if given:
            raise InputError(f"{', '.join(given)} is about a checkpoint; add --model.")
        return None
    if command.suite is not None:
        raise InputError("--model brings its own cases; leave out --suite.")
    words = {"sequence": command.seq_len, "batch": command.batch, "dtype": command.dtype}
    said = {name: value for name, value in words.items() if value is not None}
    try:
        return typed.convert({"model": command.model, **said}, CheckpointWords)
    except ValueError as error:
        raise InputError(f"--model {command.model}: {error}.") from error


def _report(*directories: Path) -> int:
    curves = [directory for directory in directories if (directory / CURVES).is_file()]
    if curves and len(directories) > 1:
        raise InputError(f"{curves[0]} holds loss curves, whose page stands alone; give that directory by itself.")
    if curves:
        print(f"report: {reports.render_curves(curves[0])}")  # noqa: T201
        return 0
    path = reports.render(*directories)
    for directory in directories:
        if reports.is_compiled(reports.load(directory)):
            print(reports.compiled_overview(directory))  # noqa: T201
        else:
            print(*summary_lines(parse_records(directory / RECORDS)[0]), sep="\n")  # noqa: T201
        print(f"records: {directory / RECORDS}")  # noqa: T201
    print(f"report:  {path}")  # noqa: T201
    return 0


def _tune(command: Tune) -> int:
    try:
        target = None if command.target == "here" else Target.named(command.target)
    except ValueError as error:
        raise InputError(f"--target: {error}") from error
    if target is not None and target.topology:
        raise InputError(
            f"--target {target.name} is a slice; block sizes are those of one chip: --target {target.kind}."
        )
    if not command.out.parent.is_dir():
        raise InputError(f"--out {command.out}: the directory {command.out.parent} does not exist; make it first.")
    backends = tunable(None if command.backends is None else command.backends.split(","), target)
    words = ["attnsuite", "tune", "--backends", ",".join(backends), "--target", command.target]
    words += [] if command.cases is None else ["--cases", command.cases]
    request = TuneRequest(
        backends=backends,
        cases=TUNED if command.cases is None else select(TUNED, command.cases.split(",")),
        target=target,
        limits=Limits(command.cell_timeout, int(_MEMORY_SHARE * machine_bytes())),
        out=command.out,
        command=shlex.join(words),
    )
    errors = Console(stderr=True)
    if target is not None:
        errors.print(
            f"{target} is not here: candidates are ranked by what compiles; no time is measured.", soft_wrap=True
        )
    with errors.status("starting") as status:
        tune(request, status.update)
    print(f"tuned:   {command.out}")  # noqa: T201
    return 0


def _calibrate(command: Calibrate) -> int:
    # Only this command computes in this process; the others do not pay for importing flax.
    from .kascade import calibrate  # noqa: PLC0415

    names = ("tile_size", "top_k", "min_keys", "granularity")
    settings = {name: getattr(command, name) for name in names} | {"query_tile": command.tile_size}
    rest = {name: getattr(command, name) for name in ("model", "text", "out", "prompts", "length", "schedule",
                                                      "anchors", "threshold", "max_reuse_dist")}  # fmt: skip
    with Console(stderr=True).status("starting") as status:
        path, calibration, schedule = calibrate.run(
            calibrate.CalibrateRequest(settings=settings, **rest), status.update
        )
    least = calibration.mass.min(axis=(1, 2))
    print(f"schedule {schedule.method}, anchors {', '.join(map(str, schedule.anchors))}\n{schedule.table()}")  # noqa: T201
    print("mass kept by each layer's own selection, mean and least over heads and query tiles:")  # noqa: T201
    for layer, (mean, low) in enumerate(zip(calibration.mass.mean(axis=(1, 2)), least, strict=True)):
        print(f"  layer {layer}: {mean:.3f}, {low:.3f}; importance {calibration.importance[layer]:.4f}")  # noqa: T201
    print(f"calibration: {path}\n             {path.with_suffix('.json')}")  # noqa: T201
    return 0


def _convert(command: Convert) -> int:
    from attnsuite import models  # noqa: PLC0415 (as above)

    output = command.output or command.input.resolve().with_name(command.input.resolve().name + "-converted")
    try:
        if str(command.input) in models.PRESETS and not command.input.exists():
            dtype = {} if command.dtype is None else {"dtype": command.dtype, "param_dtype": command.dtype}
            config = models.ModelConfig.from_preset(str(command.input), **dtype)
            models.write_random(config, output, chunked=command.chunked)
            print(f"{config.num_parameters:,} random parameters, {config.param_dtype}: {output}")  # noqa: T201
            return 0
        overrides = {}
        if command.preset is not None:
            overrides["rope_scaling"] = models.ModelConfig.from_preset(command.preset).rope_scaling
        config = models.convert(command.input, output, dtype=command.dtype, chunked=command.chunked, **overrides)
    except ValueError as error:
        raise InputError(str(error)) from error
    print(f"{config.num_parameters:,} parameters, {config.param_dtype}: {output}")  # noqa: T201
    return 0


def _train(command: Train) -> int:
    from attnsuite.models.lora import LoraConfig  # noqa: PLC0415 (as for calibrate)

    from . import train as training  # noqa: PLC0415

    if command.resume and command.out is None:
        raise InputError("--resume needs --out with the directory of the run to go on with.")
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    out = command.out or Path("runs") / f"{now}-train"
    given = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    rank, alpha, targets = (given.pop(name) for name in ("lora_rank", "lora_alpha", "lora_targets"))
    del given["out"], given["resume"]
    try:
        adapters = None if rank is None else LoraConfig(rank=rank, alpha=alpha, targets=tuple(targets.split(",")))
    except ValueError as error:
        raise InputError(f"--lora-{error}") from error
    try:
        training.execute(training.TrainRequest(**given, lora=adapters), out, resume=command.resume)
    except KeyboardInterrupt:
        _tell(f"interrupted: go on with the same words and --resume --out {out}")
        raise
    print(f"trained: {out}")  # noqa: T201
    return 0


def _curves(command: Curves) -> int:
    from .curves_run import run_curves  # noqa: PLC0415 (as for calibrate)

    for name in ("steps", "interpreted_steps"):
        if getattr(command, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(command, name)} must be at least 1.")
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    out = command.out or Path("runs") / f"{now}-curves"
    native = Setting("native", command.steps, batch=2, length=256)
    interpreted = Setting("interpreted", command.interpreted_steps, batch=1, length=256)
    run_curves(command.preset, command.backends.split(","), native, interpreted, out)
    print(f"report: {reports.render_curves(out)}")  # noqa: T201
    return 0


def _perplexity(command: Perplexity) -> int:
    from . import streamed  # noqa: PLC0415 (as above)
    from .kascade.schedules import ScheduleWords  # noqa: PLC0415

    for flag, value, least in (("--seq-len", command.seq_len, 2), ("--sequences", command.sequences, 1)):
        if value < least:
            raise InputError(f"{flag} {value} must be at least {least}.")
    words = ("schedule", "anchors", "threshold", "max_reuse_dist")
    said = {name: getattr(command, name) for name in words}
    if command.schedule is None:
        said["schedule"] = "dp"
        if command.calibration is None and said != dataclasses.asdict(ScheduleWords()):
            raise InputError("--anchors, --threshold and --max-reuse-dist are about a schedule; add --schedule NAME.")
    asked = command.schedule is not None or command.calibration is not None
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    request = streamed.StreamRequest(
        model=command.model,
        text=None if command.text is None else checked_text(command.text),
        random_tokens=command.random_tokens,
        sequence=command.seq_len,
        sequences=command.sequences,
        batch=command.batch,
        backend=command.backend,
        dtype=command.dtype,
        options=streamed.parse_options(command.options),
        calibration=command.calibration,
        schedule=ScheduleWords(**said) if asked else None,
        out=command.out or Path("runs") / f"{now}-perplexity",
    )
    found = streamed.run(request)
    print(*found.lines, f"record: {found.path}", sep="\n")  # noqa: T201
    return _NO_RESULT if found.record.status == "wrong" else 0


def _doctor(command: Doctor) -> int:
    found = examine_here()
    if command.json:
        print(json.dumps(found, indent=1))  # noqa: T201
    else:
        Console().print(describe(found))
    return 0


def _compare(run_a: Path, run_b: Path) -> int:
    print(reports.compare(run_a, run_b))  # noqa: T201
    return 0


def parse_size(text: str) -> int:
    """Bytes of a size such as ``4GiB``, ``500 MB`` or ``1e9``. Raises InputError.

    >>> parse_size("1.5GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise InputError(f"--cell-memory {text!r} is not a size; give one such as 4GiB or 500MB.")
    return size
