"""``batch_invariant=True`` gives a sequence the same bits in every company; without it the verdict is no."""

from __future__ import annotations

import functools

import pytest

from attnsuite.backends import Takes, Target, attention, from_function, registry
from attnsuite.suite.grid.work import subprocess
from attnsuite.suite.kinds.conformance_case import in_subprocess
from attnsuite.suite.user_function import register_functions
from attnsuite.testing import Conformance, verdicts

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

TAKES = Takes(
    features=frozenset(
        {"bidirectional", "causal", "grouped_queries", "cross_length", "lengths", "positions", "gradient"}
    ),
    modes=("native",),
)


class TestFlashCpuInOneOrder(Conformance):
    backend = "flash_cpu"
    options = {"batch_invariant": True}  # noqa: RUF012 (no test changes it)
    cases = ("decode-1", "decode-4", "length-1", "mqa", "combination", "pages-decode")
    random_problems = (6, 1, 4)
    cases_for_eager = cases_for_vmap = ("decode-1",)


def asked(verdict, elsewhere=None, **options):
    function = functools.partial(attention, backend="flash_cpu", on_unavailable="raise", backend_options=options)
    subject = verdicts.Subject(from_function(function, takes=TAKES, name="mine"), Target.here())
    return verdicts.ask(verdict, subject, elsewhere)


def test_batch_invariance_holds_entirely_with_the_option():
    found = asked("batch_invariant", batch_invariant=True)
    assert found.answer == "yes", found
    assert {"step-by-step decode", "prefill in chunks", "a training step in a batch (float32, bfloat16)."} <= {
        *found.message.split("; ")
    }


@pytest.mark.thorough
def test_default_decodes_in_another_order_than_it_prefills():
    found = asked("batch_invariant")
    assert found.answer == "no"
    assert found.message.startswith("step-by-step decode (1 tokens, float32): output: ")


MINE = """
from attnsuite.backends import attention

def mine(query, key, value, is_causal=False):
    options = {"batch_invariant": True}
    return attention(
        query, key, value, is_causal=is_causal, backend="flash_cpu", on_unavailable="raise", backend_options=options
    )
"""


@pytest.mark.thorough
def test_the_number_of_cores_changes_no_bit_with_the_option(tmp_path):
    """The function is in a file, because another process, with one core, computes it too."""
    (tmp_path / "mine.py").write_text(MINE)
    row = f"{tmp_path / 'mine.py'}:mine"
    register_functions([row])
    subject = verdicts.Subject(registry.get(row), Target.here(), seed=7)
    found = verdicts.ask("deterministic", subject, in_subprocess(row, subject, functools.partial(subprocess, row)))
    assert found.answer == "yes", found
    assert "one processor core" in found.message
