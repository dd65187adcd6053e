"""What models are held to: those of transformers, with weights that are drawn here, and how far ours are from them.

PyTorch and transformers are in the environment ``llama`` alone; a test file that imports this one is skipped elsewhere.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if os.environ.get("ATTNSUITE_REQUIRE_TRANSFORMERS"):  # set by tox -e llama
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
else:
    torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed; tox -e llama")
    transformers = pytest.importorskip("transformers", reason="compared with transformers; tox -e llama")

TOLERANCE = 5e-6  # of the largest number


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
