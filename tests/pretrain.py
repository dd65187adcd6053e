"""Train and measure a byte-level model on text. The checkpoint in the package was made by this script.

``python tests/pretrain.py train --out DIR [--text FILE ...]`` and ``python tests/pretrain.py evaluate``. The optimizer
is Muon, the step is that of ``models/training.py``. All seeds are fixed. Unigram and bigram models of bytes are the
baselines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Float

from attnsuite.backends import Target
from attnsuite.models.config import ModelConfig
from attnsuite.models.loss import token_nats
from attnsuite.models.optimizer import make_optimizer
from attnsuite.models.planning import resolve_attention
from attnsuite.models.text import Bytes, Corpus, load_text, random_windows, windows
from attnsuite.models.training import Batch, compiled_step, training_step
from attnsuite.models.transformer import Transformer
from attnsuite.models.weights import TEXT, load, save, trained
from attnsuite.suite.measure.environment import versions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train a model from scratch on CPython's own prose and any further files, and save it."""

    out: Path
    """Directory for model.safetensors, config.json and training.json (what was done, and how it went)."""
    text: tuple[Path, ...] = ()
    """Further files to train on, whole, after the training part of CPython's prose."""
    preset: str = "tiny"
    """Sizes: a preset of vocabulary 256."""
    stages: tuple[tuple[int, int, int], ...] = ((1200, 8, 256), (200, 4, 512))
    """Steps, batch and bytes per sequence of each stage, short sequences first: they cost less per byte."""
    learning_rate: float = 0.02
    """Peak, for matrices; embeddings and norms get a fifth of it."""
    weight_decay: float = 0.1
    backend: str = "standard"
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Bits per byte of a checkpoint on what CPython's prose holds out and on files, beside the baselines."""

    checkpoint: str = TEXT
    """text (the checkpoint in this package), or a directory that models.load reads."""
    text: tuple[Path, ...] = ()
    """Files to measure on, whole, beside the held-out part of CPython's prose."""
    fit: tuple[Path, ...] = ()
    """Files that were trained on: the baselines are fitted on them and on the training part of the prose."""
    length: int = 512
    backend: str = "auto"


def train(arguments: Train, corpora: list[Corpus]) -> tuple[Transformer, dict[str, Any]]:
    """Train as asked on the training parts of ``corpora``; returns the model and a record of the run."""
    config = ModelConfig.from_preset(arguments.preset)
    data = np.concatenate([corpus.train for corpus in corpora])
    steps = sum(stage[0] for stage in arguments.stages)
    update = make_optimizer(
        "muon", steps=steps, learning_rate=arguments.learning_rate, weight_decay=arguments.weight_decay
    )
    params = Transformer(config, rngs=nnx.Rngs(arguments.seed)).arrays()
    state = jax.jit(update.init)(params)
    rng = np.random.default_rng(arguments.seed)
    began = time.perf_counter()
    losses: list[float] = []
    for count, batch, length in arguments.stages:
        resolutions = resolve_attention(
            config, batch=batch, query_length=length, backend=arguments.backend, on_unavailable="raise"
        )
        step = compiled_step(training_step(config, resolutions, update))
        for _ in range(count):
            tokens = random_windows(data, length, batch, rng)
            params, state, value = step(params, state, Batch(tokens[None]), None)
            losses.append(float(value))
            if len(losses) % 100 == 0 or len(losses) == steps:
                bits, seconds = np.mean(losses[-100:]) / math.log(2), time.perf_counter() - began
                print(f"step {len(losses)}/{steps}: {bits:.3f} bits/byte, {seconds:.0f} s", flush=True)  # noqa: T201
    record = dataclasses.asdict(arguments) | {
        "out": str(arguments.out),
        "tokens": sum(math.prod(stage) for stage in arguments.stages),
        "text": [
            {"name": c.name, "bytes": len(c.train), "sha256": hashlib.sha256(c.train.tobytes()).hexdigest()}
            for c in corpora
        ],
        "final_bits_per_byte": round(float(np.mean(losses[-100:])) / math.log(2), 4),
        "wall_seconds": round(time.perf_counter() - began),
        "device": str(Target.here()),
        "versions": versions(),
    }
    return Transformer(config, params), record


def evaluate(
    model: Transformer, fit: Bytes, data: Bytes, *, length: int = 512, backend: str = "auto"
) -> dict[str, Any]:
    """Bits per byte of the model and of the baselines on the whole windows of ``data``, and the standard error."""
    bits = bits_per_byte(model, data, length=length, backend=backend)
    data = data[: len(bits) * length + 1]
    return {
        "bytes": len(data),
        "sha256": hashlib.sha256(data.tobytes()).hexdigest(),
        "model": round(float(bits.mean()), 4),
        "standard_error": round(float(bits.std(ddof=1) / math.sqrt(len(bits))), 4) if len(bits) > 1 else None,
        "bigram": round(bigram_bits(fit, data), 4),
        "unigram": round(unigram_bits(fit, data), 4),
    }


def bits_per_byte(
    model: Transformer, data: Bytes, *, length: int = 512, backend: str = "auto"
) -> Float[np.ndarray, " windows"]:
    """Mean bits per byte of a byte-level model in each window of ``length``: their mean is the figure to report."""
    nats = [
        token_nats(model(row[None, :-1], backend=backend, needs_grad=False), row[None, 1:]).mean()
        for row in windows(data, length)
    ]
    return np.array(nats) / math.log(2)


def unigram_bits(fit: Bytes, data: Bytes) -> float:
    """Bits per byte of ``data`` under the byte frequencies of ``fit`` (each counted once more)."""
    counts = np.bincount(fit, minlength=256) + 1.0
    return float(-np.log2(counts / counts.sum())[data[1:]].mean())


def bigram_bits(fit: Bytes, data: Bytes) -> float:
    """Bits per byte of ``data`` where each byte is predicted from the one before, by the counts in ``fit``.

    Unseen pairs count 0.05 of one that was seen once.
    """
    counts = np.full((256, 256), 0.05)
    np.add.at(counts, (fit[:-1], fit[1:]), 1.0)
    shares = counts / counts.sum(1, keepdims=True)
    return float(-np.log2(shares[data[:-1], data[1:]]).mean())


def main(arguments: Train | Evaluate) -> None:
    """Do what the command line asks and print the result as JSON."""
    prose = load_text()
    if isinstance(arguments, Train):
        corpora = [prose, *(load_text(path, held_out=0.0) for path in arguments.text)]
        model, record = train(arguments, corpora)
        save(model, arguments.out)
        (arguments.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(record, indent=1))  # noqa: T201
        return
    with trained(arguments.checkpoint) as directory:
        model = load(directory)
    fit = np.concatenate([prose.train, *(load_text(path, held_out=0.0).train for path in arguments.fit)])
    texts = {prose.name: prose.held_out}
    texts |= {path.name: load_text(path, held_out=0.0).train for path in arguments.text}
    for name, data in texts.items():
        figures = evaluate(model, fit, data, length=arguments.length, backend=arguments.backend)
        print(json.dumps({"text": name, "length": arguments.length, **figures}))  # noqa: T201


if __name__ == "__main__":
    main(tyro.cli(Train | Evaluate))  # pyright: ignore[reportArgumentType]
