"""Kinds of hostile input: each starts from valid files, changes them, and says which commands are to read them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from attnsuite.backends import Target
from attnsuite.backends.choices import VARIABLE
from attnsuite.backends.devices import usable_cores
from attnsuite.suite.command_line import main
from attnsuite.suite.kinds import make_case, problem_of
from hostile_values import as_json, as_toml, changed, damaged

PUBLISHED = Path(__file__).parents[1] / "reports" / "published"
ENVIRONMENT = {
    "versions": {"python": "3.12", "jax": "0.12"},
    "source": "0",
    "git_revision": None,
    "target": "cpu",
    "device_kind": "cpu",
    "device_count": 1,
    "platform": "Linux",
    "cpu": "CPU",
    "cores": 2,
    "machine_memory": 2**34,
    "flags": {},
}
CASES = [
    {"kind": "op_forward", "sequence": 64, "heads": 4, "kv_heads": 2, "window_size": 16, "soft_cap": 5.0},
    {"kind": "op_forward_backward", "sequence": 64, "documents": 3, "name": "packed"},
    {"kind": "op_decode", "sequence": 64, "dtype": "bfloat16"},
    {"kind": "model_prefill", "sequence": 64, "batch": 2, "ragged": True, "top_k": 0.5, "tile_size": 16, "anchors": 1},
    {"kind": "perplexity", "sequence": 64, "sequences": 2},
    {"kind": "retrieval", "sequence": 128, "prompts": 2},
    {"kind": "kascade_text", "sequence": 64, "sequences": 2, "schedule": "manual", "anchors": "0,2", "tile_size": 16},
    {"kind": "kascade_decode", "sequence": 256, "layers": 4, "anchors": 2, "heads": 4, "kv_heads": 2, "tile_size": 16},
]
MACHINE = {
    "matmul_flops": {"float32": 1e11, "bfloat16": 1e11},
    "copy_bytes_per_second": 1e10,
    "read_bytes_per_second": 1e10,
}
COMPILED = {"suite": "compile", "targets": ["tpu:v5e"], "backends": ["chunked"], "cases": [CASES[0]], "searches": [],
            "command": ["attnsuite", "compile"]}  # fmt: skip
ALONE = ("sharded", "training-cpu-intel-xeon")  # published records whose pages stand alone
BEGUN = {
    "verb": "tune",
    "options": {"target": "here", "backends": "chunked", "cases": "decode-*", "minutes": 2},
    **{name: ENVIRONMENT[name] for name in ("versions", "source", "git_revision", "target", "flags")},
}
_CASES_OF_A_KIND = 2
TRAIN = ["train", "--model", "debug", "--steps", "3", "--batch", "1", "--length", "16", "--save-every", "1"]

Commands = Iterator[list[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Valid:
    """Valid places: published records by case, a checkpoint, a calibration, and a training run's settings."""

    records: tuple[tuple[str, ...], ...]
    checkpoint: Path
    calibration: Path
    training: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Hand:
    """Who changes a valid input. One that does not spoil leaves everything as it was: a control of the kinds."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    spoils: bool = True

    def one_of(self, values: Sequence[Any]) -> Any:
        """Any of these."""
        return self.draw(st.sampled_from(values))

    def changed(self, data: Any) -> Any:
        """The data with changes."""
        return self.draw(changed(data)) if self.spoils else data

    def written(self, path: Path, text: str) -> None:
        """Write the text, which may be damaged on the way."""
        path.write_bytes(self.draw(damaged(text)) if self.spoils else text.encode())


def make_valid(folder: Path) -> Valid:
    """Make the valid places. Training ends before its first step (``nothing_begins``), which is enough."""
    checkpoint, calibration, trained = folder / "checkpoint", folder / "calibration.safetensors", folder / "trained"
    for words in (
        ["convert", "--input", "debug", "--output", str(checkpoint)],
        ["calibrate", "--prompts", "1", "--length", "64", "--out", str(calibration)],
    ):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main(words)
    return Valid(tuple(_published()), checkpoint, calibration, trained / "training.json")


def _published() -> Iterator[tuple[str, ...]]:
    """Published records, the lines of a case together: of every folder the first two cases of each kind."""
    for path in sorted(PUBLISHED.glob("*/records.jsonl")):
        if path.parent.name in ALONE:
            continue
        cases: dict[tuple[str, str], list[str]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            cases.setdefault((said["kind"], said["case"]), []).append(line)
        kinds = [kind for kind, _ in cases]
        yield from (
            tuple(lines) for at, lines in enumerate(cases.values()) if kinds[:at].count(kinds[at]) < _CASES_OF_A_KIND
        )


def manifest() -> dict[str, Any]:
    """What ``run.json`` holds of a run of two cases."""
    return {
        "suite": "mine",
        "cases": [problem_of(make_case(CASES[i])) for i in (0, 6)],
        "backends": ["standard", "chunked"],
        "all_cores": False,
        "cells": 0,  # what a probe without a worker finds
        "kascade": {"tile_size": 16},
        "checkpoint": {"model": "/nowhere", "sequence": 64, "batch": 1, "dtype": None},
        "text": None,
        "file": "my suite.toml",
        **{name: ENVIRONMENT[name] for name in ("versions", "source", "git_revision", "target", "flags")},
    }


def records(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """Verbs that read records of whole cases, some of which have fields of others and changes."""
    other = folder / "other"
    other.mkdir()
    lines = [*hand.one_of(valid.records), *hand.one_of(((), *valid.records))]
    (other / "records.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for at in hand.draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=2)) if hand.spoils else ():
        spoilt, donor = json.loads(lines[at]), json.loads(hand.one_of(hand.one_of(valid.records)))
        for name in hand.draw(st.lists(st.sampled_from(sorted(donor)), max_size=2)):
            spoilt[name] = donor[name]
        of_figures = {name: spoilt[name] for name in ("problem", "quality", "series", "samples", "accuracy", "memory")}
        if hand.one_of((True, False)):
            changed_figures = hand.changed(of_figures | {"mode": spoilt["mode"], "exact": spoilt["exact"]})
            spoilt = {**spoilt, **changed_figures} if isinstance(changed_figures, dict) else changed_figures
        else:
            spoilt = hand.changed(spoilt)
        lines[at] = as_json(spoilt)
    hand.written(folder / "records.jsonl", "".join(f"{line}\n" for line in lines))
    yield ["report", str(folder)]
    yield ["compare", *hand.draw(st.permutations([str(folder), str(other)]))]
    yield ["report", str(other), str(folder)]
    if hand.spoils:  # what is valid may be worse than before, or no time of a backend
        yield ["compare", str(folder), str(other), "--fail-on", "wrong,failed,slower:10%,memory:10%"]
        yield ["choose", str(folder), "--out", str(folder / "policy.json"), "--check", str(other)]


def manifests(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """``report`` and ``--resume`` of a run whose run.json was changed."""
    (folder / "records.jsonl").write_text(hand.one_of(valid.records)[0] + "\n", encoding="utf-8")
    base = hand.one_of([manifest(), manifest(), COMPILED, BEGUN]) if hand.spoils else manifest()
    hand.written(folder / "run.json", as_json(hand.changed(base)))
    (folder / "machine.json").write_text(as_json(MACHINE))
    yield ["report", str(folder)]
    yield ["run", "--resume", "--out", str(folder)]
    if hand.spoils:
        yield ["run", "--suite", "curves", "--resume", "--out", str(folder)]


def machines(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """``--resume`` of a run whose machine.json was changed."""
    (folder / "records.jsonl").write_text(hand.one_of(valid.records)[0] + "\n", encoding="utf-8")
    (folder / "run.json").write_text(as_json(manifest()))
    hand.written(folder / "machine.json", as_json(hand.changed(MACHINE)))
    yield ["run", "--resume", "--out", str(folder)]


def suites(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """``run`` and ``compile`` of a suite file that was changed."""
    cases = [CASES[0], *(hand.one_of(CASES[1:]) for _ in range(hand.one_of((0, 1))))]
    base = {"name": "mine", "peers": ["jax_nn"], "all_cores": hand.one_of((True, False)), "case": cases}
    path = folder / "suite.toml"
    hand.written(path, as_toml(hand.changed(base)))
    yield ["run", "--suite", str(path), "--out", str(folder / "run")]
    yield ["compile", "--suite", str(path), "--targets", "v5e", "--out", str(folder / "compiled")]


def curves(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """``report`` of loss curves, or of sharded attention, of which a record was changed."""
    lines = (PUBLISHED / hand.one_of(ALONE) / "records.jsonl").read_text(encoding="utf-8").splitlines()
    at = hand.one_of(range(len(lines)))
    lines[at] = as_json(hand.changed(json.loads(lines[at])))
    hand.written(folder / "records.jsonl", "".join(f"{line}\n" for line in lines))
    yield ["report", str(folder)]


def trainings(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """``train --resume`` behind settings or losses that were changed."""
    settings = json.loads(valid.training.read_text())
    losses: list[Any] = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]
    if hand.one_of((True, False)):
        settings = hand.changed(settings)
    else:
        losses = [hand.changed(line) for line in losses]
    hand.written(folder / "training.json", as_json(settings))
    hand.written(folder / "losses.jsonl", "".join(f"{as_json(line)}\n" for line in losses))
    yield [*TRAIN, "--resume", "--out", str(folder)]


def policies(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """``train`` by ``auto`` with a policy that was changed in $ATTNSUITE_POLICY, then ``tune``, which extends it."""

    def some(data: Any) -> Any:
        return hand.changed(data) if hand.one_of((True, False, False)) else data

    problem = {"batch": 1, "query_length": 16, "key_value_length": 16, "num_heads": 4, "num_kv_heads": 2,
               "head_dim": 16, "is_causal": True}  # fmt: skip
    backend = {"case": "short", "problem": some(problem), "backend": hand.one_of(("standard", "chunked")), "ratio": 0.5,
               "interval": [0.4, 0.6], "memory": 1024}  # fmt: skip
    options = {"case": "tuned", "problem": problem, "backend": "chunked", "options": some({"block_backward": 64})}
    here = {"device": str(Target.here()), "cores": usable_cores(), "versions": {"jax": metadata.version("jax")}}
    sources = [
        some({"name": "runs/a", **here, "choices": [some(backend), some(options)]}),
        {"name": "b", "device": "tpu:v6e", "choices": [options]},
    ]
    hand.written(folder / "policy.json", as_json(some({"schema": 2, "sources": sources})))
    with mock.patch.dict(os.environ, {VARIABLE: str(folder / "policy.json")}):
        yield [*TRAIN, "--out", str(folder / "out")]
    table = folder / "tuned_block_sizes.py"
    table.write_text('TUNED_BLOCK_SIZES = {"TPU v6": {("bfloat16", "bfloat16", 8, 8, 128, 128, 64, 1024): (8, 16)}}')
    yield ["tune", "--import", str(table), "--out", str(folder)]


def configurations(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """Every verb that opens a checkpoint, with a config.json that was changed."""
    base = json.loads((valid.checkpoint / "config.json").read_text())
    hand.written(folder / "config.json", as_json(hand.changed(base)))
    (folder / "model.safetensors").symlink_to(valid.checkpoint / "model.safetensors")
    yield from of_checkpoint(folder)


def weights(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """Every verb that opens a checkpoint, with a header of safetensors (or an index) that was changed."""
    header, tensors = _taken_apart(valid.checkpoint / "model.safetensors")
    shutil.copyfile(valid.checkpoint / "config.json", folder / "config.json")
    if hand.one_of((True, False, False)):
        index = {"metadata": {}, "weight_map": {name: "one.safetensors" for name in header if name != "__metadata__"}}
        (folder / "one.safetensors").symlink_to(valid.checkpoint / "model.safetensors")
        hand.written(folder / "model.safetensors.index.json", as_json(hand.changed(index)))
    else:
        _put_together(hand, folder / "model.safetensors", header, tensors)
    yield from of_checkpoint(folder)


def _taken_apart(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _put_together(hand: Hand, path: Path, header: Any, tensors: bytes) -> None:
    """A file of safetensors whose header was changed, and sometimes its length."""
    hand.written(path, as_json(hand.changed(header)))
    told = path.read_bytes()
    length = hand.one_of([len(told)] * 5 + [0, 2**63, len(told) - 1, len(told) + len(tensors)])
    path.write_bytes((length if hand.spoils else len(told)).to_bytes(8, "little") + told + tensors)


def of_checkpoint(folder: Path) -> Commands:
    """Every verb that opens a checkpoint."""
    out, model = folder / "out", ["--model", str(folder)]
    yield ["run", *model, "--backends", "standard,kascade", "--seq-len", "64", "--out", str(out)]
    yield ["perplexity", *model, "--seq-len", "32", "--out", str(out / "perplexity")]
    yield ["calibrate", *model, "--prompts", "1", "--length", "32", "--out", str(folder / "c.safetensors")]
    yield ["convert", "--input", str(folder), "--output", str(out / "converted")]


def calibrations(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """``perplexity`` with a calibration that was changed."""
    about = json.loads(valid.calibration.with_suffix(".json").read_text())
    hand.written(folder / "c.json", as_json(hand.changed(about)))
    if hand.one_of((True, False)):
        _put_together(hand, folder / "c.safetensors", *_taken_apart(valid.calibration))
    else:
        shutil.copyfile(valid.calibration, folder / "c.safetensors")
    flags = ["--backend", "kascade", "--seq-len", "32", "--out", str(folder / "out")]
    yield ["perplexity", "--model", "text", "--calibration", str(folder / "c.safetensors"), *flags]


KINDS = (records, manifests, machines, suites, curves, trainings, policies, configurations, weights, calibrations)
