"""The verb ``attnsuite convert``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..errors import InputError, as_input
from .flags import DType, flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """Write a checkpoint (Hugging Face's safetensors or .bin, Meta's .pth) as safetensors and JSON."""

    input: Annotated[Path, tyro.conf.arg(metavar="DIR|PRESET")]
    """Directory of the checkpoint; or a preset such as llama-3.1-8b, which is written with random weights."""
    output: Annotated[Path | None, flag("DIR", "the input's name with -converted")] = None
    """Directory to write; it must be new or empty."""
    dtype: Annotated[DType | None, flag("DTYPE", "as stored", choices=DType)] = None
    """float32, bfloat16 or float16."""
    quantize: Annotated[Literal["none"], flag("none")] = "none"
    """How weights are quantized; there is none yet."""
    chunked: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write a file per layer."""
    preset: Annotated[str | None, flag("NAME", "the one with these sizes")] = None
    """Preset whose RoPE scaling holds, for Meta's checkpoints, which lack it."""


def run(command: Convert) -> int:
    """Write the checkpoint."""
    from attnsuite import models
    from attnsuite.models.parameters import count_parameters

    source = command.input.resolve()
    if command.output is None and not source.name:
        raise InputError(f"--input {command.input} has no name that -converted could stand behind; give --output.")
    output = command.output or source.with_name(source.name + "-converted")
    with as_input():
        overrides = {}
        if command.preset is not None:
            overrides["rope_scaling"] = models.ModelConfig.from_preset(command.preset).rope_scaling
        # --input is a path first: Path drops the ./ that would tell a directory from the preset of its name.
        is_preset = str(command.input) in models.PRESETS and not command.input.exists()
        if overrides and (is_preset or (command.input / "config.json").is_file()):
            raise InputError(
                f"--preset gives Meta's checkpoints the RoPE scaling that they lack; {command.input} says its own. "
                "Leave --preset out."
            )
        if is_preset:
            dtype = {} if command.dtype is None else {"dtype": command.dtype, "param_dtype": command.dtype}
            config = models.ModelConfig.from_preset(str(command.input), **dtype)
            models.write_random(config, output, chunked=command.chunked)
            print(f"{count_parameters(config):,} random parameters, {config.param_dtype}: {output}")
            return 0
        config = models.convert(command.input, output, dtype=command.dtype, chunked=command.chunked, **overrides)
    print(f"{count_parameters(config):,} parameters, {config.param_dtype}: {output}")
    return 0
