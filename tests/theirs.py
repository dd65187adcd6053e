"""What models are held to: those of transformers, with weights that are drawn here, and how far ours are from them.

PyTorch and transformers are in the environment ``llama`` alone; a test file that imports this one is skipped elsewhere.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

if os.environ.get("ATTNSUITE_REQUIRE_TRANSFORMERS"):  # set by tox -e llama
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
else:
    torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed; tox -e llama")
    transformers = pytest.importorskip("transformers", reason="compared with transformers; tox -e llama")

TOLERANCE = 5e-6  # of the largest number
CALL = {"backend": "standard"}


def config_of(kind: str, **fields: Any) -> Any:
    """The configuration that transformers has for the text models of this kind."""
    return getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Llama4") else f"{kind}Config")(**fields)


def drawn(kind: str, config: Any, seed: int, scale: Callable[[str], float | None]) -> Any:
    """A model of transformers in eval mode and float32, whose attention is far from uniform.

    ``scale`` gives the deviation of a weight by its name; None leaves the weight as transformers draws it.
    """
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif (size := scale(name)) is not None:
                parameter.normal_(0, size)
    return model


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Of one pass of a model of transformers."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def distance(got: Any, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest number that is expected."""
    return np.abs(np.asarray(got) - expected).max() / np.abs(expected).max()


def every_way(model: Any, tokens: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Logits from one pass, and from a cache: of the first ten tokens in one call, of the others one by one."""
    yield "full", np.asarray(model(tokens, **CALL))
    first, cache = model.prefill(tokens[:, :10], model.new_cache(2, tokens.shape[1] + 3), **CALL)
    parts = [np.asarray(first)]
    for step in range(10, tokens.shape[1]):
        logits, cache = model.decode(tokens[:, step], cache, **CALL)
        parts.append(np.asarray(logits)[:, None])
    yield "cached", np.concatenate(parts, axis=1)


def assert_agrees(model: Any, tokens: np.ndarray, expected: np.ndarray) -> None:
    """That a model of ours gives these logits in every way."""
    for way, logits in every_way(model, tokens):
        assert distance(logits, expected) <= TOLERANCE, way
