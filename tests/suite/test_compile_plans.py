"""What every suite would run on devices that are not here: asked of a TPU v5e and an H100, traced as far as a CPU can.

A row that says native has to reach a program: it is planned and traced with the device's own kernels, which are never
compiled or run here.
"""

import dataclasses
import warnings
from collections import defaultdict

import jax
import pytest

from attnsuite.backends import Target, registry
from attnsuite.backends.kascade import manual
from attnsuite.suite import suites as model_suite
from attnsuite.suite.grid.work import find_cells
from attnsuite.suite.kinds import model_program
from attnsuite.suite.kinds.attention_call import OpCase, op_program
from attnsuite.suite.kinds.kascade import controls, dense, row_quality, stack_case
from attnsuite.suite.kinds.kascade.extension import applied
from attnsuite.suite.kinds.kascade.methods import METHODS
from attnsuite.suite.kinds.kascade.selection_case import SelectionCase
from attnsuite.suite.kinds.kascade.stack_case import StackCase
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.suites import QUICK, SUITES
from landing import is_landing, swept

TARGETS = ("v5e", "h100")
KERNEL = "kascade_attend"  # the name of the Pallas kernels in a jaxpr


@pytest.fixture
def on(monkeypatch):
    """Makes a device that is not here the default one."""

    def pretend(kind):
        target = Target.named(kind)
        monkeypatch.setattr(Target, "here", staticmethod(lambda: target))
        return target

    return pretend


def planned(cases, rows):
    """(kind of case, row) -> what runs, as resolved and mode; a refusal as its reasons."""
    found = defaultdict(set)
    kinds = {case.name: case.kind for case in cases}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fallbacks are in the plans
        cells = find_cells(tuple(rows), tuple(cases))["cells"]
    for cell in cells:
        what = f"{cell.resolved} {cell.mode}" if cell.mode else "refused: " + " ".join(cell.reasons)
        found[kinds[cell.case.name], cell.row].add(what)
    return found


def jaxpr(function, *arguments):
    return str(jax.make_jaxpr(function)(*arguments))


TIMED = ("kascade", "kascade_profitable", "anchor_layer", "reuse_layer")


@pytest.mark.parametrize("kind", TARGETS)
def test_every_row_of_the_kascade_suite_is_run_or_refused_for_the_devices_own_kernel(kind, on):
    on(kind)
    found = planned(SUITES["kascade"].cases, METHODS)
    dense = {"v5e": "splash", "h100": "chunked"}[kind]
    repeats = "refused: kascade_profitable: it runs sparse here, so this row would repeat kascade."
    for (case, row), whats in found.items():
        timed = case in ("kascade_prefill", "kascade_decode")
        if row == "dense":
            assert whats == {f"{dense if timed else 'standard'} native"}
        elif timed and row == "kascade_token":
            assert len(whats) == 1
            assert "granularity='token' is not supported by kascade's Pallas kernels" in whats.pop()
        elif row == "kascade_profitable":
            assert whats <= {repeats, f"{row} native"}
        elif row == "kascade_pallas":
            assert "would repeat it" in whats.pop(), "its kernels are the device's own"
        elif row == "kascade_flash_cpu":
            assert whats.pop().startswith("refused: "), "its kernels are for CPUs"
        elif row == "kascade_both_phases":
            assert {f"{row} native"} == {what for what in whats if not what.startswith("refused: ")}, (case, row)
            assert all("a prefill case has no decode steps" in what for what in whats - {f"{row} native"})
            assert len(whats) == 2
        else:
            assert whats == {f"{row} native"}, (case, row)
    assert ("kascade_prefill", "kascade_profitable") in found


def small(case):
    """As the case, in a few layers of a few tiles."""
    layers = min(case.layers, 4)
    return dataclasses.replace(case, name="", sequence=1024, layers=layers, anchors=min(case.anchors, layers, 2))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("row", swept(TIMED, ("kascade", "reuse_layer")))
def test_what_is_timed_as_kascade_is_the_devices_own_kernel(row, kind, on):
    """These rows were passed kernel='xla', so that no Pallas kernel would ever have been timed."""
    on(kind)
    cases = dict.fromkeys(small(case) for case in SUITES["kascade"].cases if isinstance(case, StackCase))
    cases = [case for case in cases if (case.layers == 1) == row.endswith("_layer")]
    assert cases
    for case in {case.kind: case for case in cases}.values() if is_landing() else cases:
        arrays = stack_case._arrays(case)
        handed = (jax.eval_shape(stack_case._select(case, None), *arrays),) if row == "reuse_layer" else ()
        traced = jaxpr(stack_case._stack(case, row, None, "standard", "native"), *arrays, *handed)
        dense = row == "kascade_profitable" and stack_case.plan_notes(case, row)
        assert (KERNEL in traced) is not bool(dense), case.name
        assert "pallas_call" not in jaxpr(stack_case._stack(case, "dense", None, "standard", "native"), *arrays)


def test_a_cpu_has_no_kernel_of_its_own():
    case = small(next(case for case in SUITES["kascade"].cases if isinstance(case, StackCase)))
    assert "pallas_call" not in jaxpr(
        stack_case._stack(case, "anchor_layer", None, "standard", "native"), *stack_case._arrays(case)
    )


def traced_row(case, row):
    """Prefill of a row, over the retrieval checkpoint; and what is to be said of who computes it."""
    model = dense.case_model(case)
    schedule = manual((0, 2), num_layers=model.config.num_layers, kv_heads=model.config.kv_heads)
    tokens = jax.numpy.zeros((dense.AT_ONCE, case.sequence), jax.numpy.int32)
    run = row_quality._program(case, model, row, schedule)
    settings = row_quality.settings_of(case)
    spec = row_quality._spec(case, model.config)
    return jaxpr(run, tokens), controls.row_settings(row, settings, spec, Target.here())[1]


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(
    "row",
    swept(["kascade", "oracle_pooled", "kascade_all_heads", "kascade_token", "stale_indices"], ["kascade"]),
)
def test_a_row_that_is_watched_is_the_devices_kernel_or_says_that_it_is_not(row, kind, on):
    on(kind)
    case = SelectionCase(kind="kascade_gate", sequence=256, sequences=2, tile_size=16, top_k=0.25)
    traced, notes = traced_row(case, row)
    own = kind == "h100" and row != "kascade_token"  # a TPU's kernel takes tiles of 128 keys, none takes single keys
    assert (KERNEL in traced) is own
    assert bool(notes) is not own
    if not own:
        assert notes[0].startswith(f"{row}: XLA's code computed this row, not the kernel of ")
        assert "give a multiple of 128" in notes[0] or "which load whole tiles" in notes[0]
    if row == "kascade":
        traced, notes = traced_row(dataclasses.replace(case, name="", sequence=512, tile_size=128), row)
        assert KERNEL in traced
        assert not notes


@pytest.mark.parametrize("kind", TARGETS)
def test_a_checkpoints_timed_rows_are_refused_for_tiles_that_the_kernel_does_not_take(kind, on, shipped):
    """On a TPU the rows said native and crashed in plan."""
    on(kind)
    cases = model_suite.model_suite(model_suite.ModelSuiteFlags(model=shipped, sequence=256), ["kascade"]).cases
    found = planned(cases, model_suite.model_rows(["standard", "kascade"]))
    fits = planned(applied({"tile_size": 128}, cases), model_suite.model_rows(["standard", "kascade"]))
    for case in ("model_prefill", "model_decode"):
        (what,) = found[case, "kascade"]
        assert what == ("kascade native" if kind == "h100" else "splash fallback")
        assert fits[case, "kascade"] == {"kascade native"}
    assert found["kascade_text", "kascade"] == {"kascade native"}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_checkpoints_timed_rows_reach_the_devices_kernel(kind, on, shipped):
    on(kind)
    for step in ("model_prefill", "model_decode"):
        case = ModelCase(kind=step, model=str(shipped), sequence=256, new_tokens=2, top_k=0.25, tile_size=128)
        model = model_program.open_model(case)
        program = model_program.model_program(case, model, "kascade")
        assert KERNEL in jaxpr(program.function, *program.arguments), step


@pytest.mark.parametrize(("kind", "row"), [("v5e", "splash"), ("v5e", "kascade"), ("h100", "kascade")])
def test_an_attention_call_that_is_native_reaches_a_kernel(kind, row, on):
    target = on(kind)
    kinds = set()
    for case in QUICK.cases:
        if isinstance(case, OpCase) and case.kind not in kinds and (row != "kascade" or not case.needs_grad):
            kinds.add(case.kind)
            program = op_program(case, registry.get(row), "native", target)
            assert "pallas_call" in jaxpr(program.function, *program.arguments), case.name
    assert "op_decode" in kinds
