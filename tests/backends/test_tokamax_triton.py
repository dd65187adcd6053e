"""tokamax's Triton kernels through Pallas' interpreter: judged with gradients."""

import dataclasses
import os
import sys

import jax
import jax.numpy as jnp
import pytest

from attnsuite.backends import Layout, Target, plan, tokamax_package, tokamax_triton
from attnsuite.backends.tokamax_triton import TOKAMAX_TRITON, missing
from attnsuite.testing import problems
from attnsuite.testing.checks import (
    check_quantity,
)
from declared import sized

pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]  # tokamax promotes dtypes and ranks by itself
needs_tokamax = pytest.mark.skipif(
    bool(missing()) and "ATTNSUITE_REQUIRE_TOKAMAX" not in os.environ, reason="; ".join(missing())
)

SPEC = sized(64, N=4, K=2, dtype="bfloat16")


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_import_of_tokamax_leaves_tritons_cache_as_it_was(before, monkeypatch, tmp_path):
    """jax-triton, which tokamax imports where it is there, empties the variable: Kvax could not compile any more."""
    (tmp_path / "empties.py").write_text("import os\nos.environ['TRITON_CACHE_DIR'] = ''\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    monkeypatch.delitem(sys.modules, "empties", raising=False)
    assert tokamax_package._import_error.__wrapped__("empties") == ()
    assert os.environ.get("TRITON_CACHE_DIR") == before


@needs_tokamax
@pytest.mark.parametrize(("scale", "words"), [(None, ()), (0.3, ("The scale 0.3 is no power of two",))])
def test_notes_say_where_the_scale_rounds_the_query(scale, words):
    made = plan(TOKAMAX_TRITON, dataclasses.replace(SPEC, scale=scale), target=Target.here(), mode="interpret")
    assert tuple(note[: len(word)] for note, word in zip(made.notes, words, strict=True)) == words


@needs_tokamax
def test_output_of_a_window_passes_the_judge():
    problem = problems.problem("window-more-queries", "bfloat16")
    problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, needs_grad=False))
    run = jax.jit(problems.planned(TOKAMAX_TRITON, problem, Target.here(), "interpret", None))
    check_quantity("output", run(*problem.inputs[:3]), problem)


@pytest.mark.thorough
@needs_tokamax
def test_why_the_backward_pass_is_padded(monkeypatch):
    """At 48 tokens, causal, its kernel reads rows behind the last one, and checks no bounds."""
    sizes = {"query_length": 48, "key_value_length": 48, "num_heads": 1, "num_kv_heads": 1}
    spec = dataclasses.replace(SPEC, **sizes, is_causal=True)
    query = jnp.ones((1, 48, 1, 64), jnp.bfloat16)
    monkeypatch.setattr(tokamax_triton, "_whole_blocks", lambda x, *_, **__: x)
    monkeypatch.setattr(tokamax_triton, "_mask", lambda *_: None)
    made = plan(TOKAMAX_TRITON, spec, Layout(), target=Target.here(), mode="interpret")
    gradient = jax.jit(jax.grad(lambda q: made.run(q, query, query)[0].astype(jnp.float32).sum()))(query)
    assert not jnp.isfinite(gradient).all()
