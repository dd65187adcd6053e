"""The verb ``attnsuite train``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..errors import InputError, as_input
from .flags import arguments_of, directory, flag, tell, text_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train a model on text, or LoRA adapters on top of one; a killed run goes on with --resume."""

    model: Annotated[str, flag("NAME|DIR")] = "tiny"
    """A preset (trained from scratch), text (the checkpoint in this package), or a checkpoint's directory."""
    text: Annotated[Path | None, flag("FILE", "prose that ships with Python")] = None
    """Text to train on, as bytes."""
    text_field: Annotated[str | None, flag("NAME", "plain text")] = None
    """Field of JSON lines that holds the text."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-train")] = None
    """Directory for the model, its losses and what resuming needs."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the run in --out, asked for in the same words."""
    steps: Annotated[int, flag("N")] = 200
    """Updates."""
    batch: Annotated[int, flag("N")] = 8
    """Rows per update."""
    length: Annotated[int, flag("N")] = 256
    """Tokens per row."""
    accumulate: Annotated[int, flag("N")] = 1
    """Parts that the rows of an update are computed in, one after the other: less memory, the same update."""
    optimizer: Annotated[Literal["adamw", "muon"], flag("NAME")] = "adamw"
    """adamw or muon."""
    learning_rate: Annotated[float, flag("RATE")] = 0.002
    """Peak learning rate."""
    weight_decay: Annotated[float, flag("RATE")] = 0.1
    """Decay of matrices."""
    dtype: Annotated[Literal["float32", "bfloat16"], flag("DTYPE")] = "float32"
    """What is computed in; parameters that are trained are kept in float32."""
    remat: Annotated[Literal["none", "dots", "layer"], flag("POLICY")] = "none"
    """What is computed again in the backward pass: none, dots (all but projections), layer (all)."""
    packed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Pack whole paragraphs into rows, each seeing only itself."""
    lora_rank: Annotated[int | None, flag("N", "no LoRA")] = None
    """Train adapters of this rank instead of the model."""
    lora_alpha: Annotated[float, flag("X")] = 16.0
    """The update is scaled by alpha / rank."""
    lora_targets: Annotated[str, flag("NAMES")] = "q_proj,v_proj"
    """Projections to adapt, separated by commas."""
    backend: Annotated[str, flag("NAME")] = "auto"
    """Attention backend; one that cannot do it is an error."""
    options: Annotated[str, flag("NAME=VALUE,...", "the backend's")] = ""
    """Options of the backend, such as top_k=0.25,min_keys=0, separated by commas."""
    calibration: Annotated[Path | None, flag("FILE", "none: every layer selects")] = None
    """What attnsuite calibrate wrote for this model; which layers select, and for which."""
    mode: Annotated[Literal["native", "interpret"], flag("MODE")] = "native"
    """native, or interpret for kernels of a device that is not here."""
    save_every: Annotated[int, flag("STEPS")] = 50
    """Steps between saves (extra train); 0 saves nothing."""
    seed: Annotated[int, flag("N")] = 0
    """Seed of parameters and batches."""
    mesh: Annotated[str | None, flag("AXIS=N,...", "one device")] = None
    """Devices along data, fsdp, heads and context; on a CPU as many are made of its cores."""


def run(command: Train) -> int:
    """Train, from the start or from what was saved."""
    from attnsuite.models.lora import LoraConfig

    from .. import training_run as training
    from ..flag_values import parse_options, parts_of, spelled
    from ..host_devices import make_host_devices, parse_mesh

    if command.resume and command.out is None:
        raise InputError("--resume needs --out with the directory of the run to go on with.")
    fields = dataclasses.fields(command)
    adapting = [f.name for f in fields if f.name.startswith("lora_") and getattr(command, f.name) != f.default]
    if command.lora_rank is None and adapting:
        raise InputError(f"{spelled(adapting)} is about adapters; add --lora-rank, or leave it out.")
    out = directory(command.out, "train")
    settings = {field.name: getattr(command, field.name) for field in fields}
    rank, alpha, targets = (settings.pop(name) for name in ("lora_rank", "lora_alpha", "lora_targets"))
    del settings["out"], settings["resume"], settings["text_field"]
    settings["text"], settings["options"] = text_of(command), parse_options(command.options)
    if command.mesh is not None:
        with as_input("--"):
            settings["mesh"] = parse_mesh(command.mesh)
        make_host_devices(settings["mesh"].count)
    with as_input("--lora-"):
        adapters = None if rank is None else LoraConfig(rank=rank, alpha=alpha, targets=tuple(parts_of(targets)))
    try:
        training.execute(training.TrainRequest(**settings, lora=adapters), out, resume=command.resume)
    except KeyboardInterrupt:
        tell(f"interrupted: {_resuming(command, out)}")
        raise
    print(f"trained: {out}")
    return 0


def _resuming(command: Train, out: Path) -> str:
    """How the run in ``out`` is continued."""
    from ..training_run import SETTINGS

    if not command.save_every or not (out / SETTINGS).is_file():
        return f"nothing was saved{'' if command.save_every else ' (--save-every 0)'}; start again."
    return f"go on with: {shlex.join(arguments_of(dataclasses.replace(command, resume=True, out=out)))}"
