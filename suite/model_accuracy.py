"""Whether a whole model's numbers are right under a backend: held to the standard backend's in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .cases import ModelCase
from .measure.judge import as_model_error
from .model_cell import judged_program, open_model
from .record import TensorError

_STANDARD = "standard_"


def write_model_reference(case: ModelCase, path: Path) -> None:
    """Save what the standard backend gives for ``case``, at float32 and in the case's own dtype, to ``path`` (.npz)."""
    model = open_model(case)
    with jax.default_matmul_precision("highest"):
        wide = judged_program(case, model.with_config(dtype="float32"), "standard")
        expected = jax.jit(wide.function)(*wide.arguments)
    own = judged_program(case, model, "standard")
    standard = jax.jit(own.function)(*own.arguments)
    arrays = {name: np.asarray(tensor, np.float32) for name, tensor in expected.items()}
    arrays |= {_STANDARD + name: np.asarray(tensor, np.float32) for name, tensor in standard.items()}
    np.savez(path, allow_pickle=False, **arrays)


def judge_model(case: ModelCase, outputs: Mapping[str, Any], reference: Path) -> dict[str, TensorError]:
    """Judge the outputs of a model case's judged program."""
    with np.load(reference, allow_pickle=False) as arrays:
        return {
            name: as_model_error(tensor, arrays[name], arrays[_STANDARD + name], case.dtype)
            for name, tensor in outputs.items()
        }
