"""How the chips of a slice share a case, without a compiler for them; tests/suite/test_compiling.py has one."""

import dataclasses

import jax
import pytest

from attnsuite.backends import Target
from attnsuite.suite.compile import compilation as compile_cell
from attnsuite.suite.compile import slices, topologies
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.kinds.model_case import ModelCase

MODEL = ModelCase(kind="model_prefill", model="debug", sequence=64, dtype="bfloat16", new_tokens=1)
ONE_CHIP = Target.named("v5e:1x1")


@pytest.fixture
def chips(monkeypatch):
    """This machine's first device in the place of the only chip."""
    monkeypatch.setattr(topologies, "missing", lambda _: None)
    monkeypatch.setattr(topologies, "devices", lambda _: tuple(jax.devices()[:1]))


def test_chips_that_nothing_is_left_for_are_refused_with_the_numbers():
    decode = ModelCase(kind="model_decode", model="llama-3.1-8b", sequence=2048, new_tokens=1)
    reason = slices.shard(decode, Target.named("v5e:4x4"))
    assert reason == (
        "of the 16 chips of tpu:v5e:4x4 8 share num_kv_heads=8, and 2 are left, which batch=1 cannot be dealt to; give "
        "a batch that 2 divides, or a smaller slice."
    )


@pytest.mark.parametrize(
    "case",
    [
        MODEL,
        dataclasses.replace(MODEL, kind="model_train", name=""),
        dataclasses.replace(MODEL, kind="model_decode", name=""),
        OpCase(kind="op_forward_backward", sequence=64, documents=2),
        OpCase(kind="op_decode", sequence=64),
    ],
    ids=lambda case: case.name,
)
def test_every_kind_of_program_is_dealt_and_compiled(chips, case):
    found = compile_cell.compile_cell(case, "standard", ONE_CHIP)
    assert (found.status, found.error) == ("ok", None)
    assert found.memory["compiled_argument"] > 0
    assert found.notes == ("Sizes are of one chip; every chip has all of it.",)


def test_what_a_share_is_refused_for_is_not_compiled(chips):
    found = compile_cell.compile_cell(OpCase(kind="op_forward", sequence=64), "kascade", ONE_CHIP)
    assert found.status == "unsupported"
    assert "kascade selects in one layer what the next ones attend to" in found.reasons[0]


def test_compiler_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setattr(topologies, "missing", lambda _: "no compiler for it.")
    assert compile_cell.compile_cell(MODEL, "standard", ONE_CHIP).reasons == ("no compiler for it.",)
