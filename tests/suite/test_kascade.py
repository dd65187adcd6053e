"""Kascade's rows: equal budgets, controls that fail, dense where everything is selected, honest counts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Target, registry
from attnsuite.backends.contract import may_attend
from attnsuite.backends.kascade import Tiling, kept_fraction, manual
from attnsuite.models.planning import attention_spec
from attnsuite.suite.cell import Means, Request
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds import kind_of
from attnsuite.suite.kinds.kascade import dense, row_quality, stack_case
from attnsuite.suite.kinds.kascade.controls import SCORES, Watched, quest_bound
from attnsuite.suite.kinds.kascade.extension import applied
from attnsuite.suite.kinds.kascade.methods import CONTROLS, METHODS, settings_of
from attnsuite.suite.kinds.kascade.selection_case import SelectionCase
from attnsuite.suite.kinds.kascade.selection_kind import SELECTION
from attnsuite.suite.kinds.kascade.stack_case import StackCase
from landing import swept

GATE = SelectionCase(kind="kascade_gate", sequence=256, sequences=8, tile_size=16, top_k=0.25)
STACK = StackCase(kind="kascade_prefill", sequence=256, layers=3, anchors=2, heads=4, kv_heads=2, head_dim=16,
                  tile_size=32, top_k=0.25)  # fmt: skip
SELECTING = sorted(
    {name for name in METHODS if {"kascade_text", "kascade_gate"} & {*METHODS[name].kinds}}
    - {"dense", "kascade_both_phases", *SCORES}
    | {"other_model"}
)
# One row for each way in which layers attend; the others differ in what they select.
ATTENDING = ("kascade", "kascade_token", "dropped_tiles", "oracle_query", "quest")
BY_TILES = [name for name in SELECTING if name not in ("kascade_token", "dropped_tiles")]


@functools.cache
def layers():
    """Queries, keys and values of three layers, and their dense attention."""
    spec = AttentionSpec(batch=2, query_length=112, key_value_length=112, num_heads=4, num_kv_heads=2, head_dim=16,
                         is_causal=True, needs_grad=False)  # fmt: skip
    rng = np.random.default_rng(0)
    inputs = tuple(jnp.asarray(rng.standard_normal((3, 2, 112, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    standard = registry.get("standard").plan(spec, Layout(), target=Target("cpu"))
    exact = jnp.stack([standard.run(*(x[i] for x in inputs))[0] for i in range(3)])
    return spec, inputs, np.asarray(exact)


@functools.cache
def one_pass(method, top_k):
    """Two layers behind a dense one on random queries and keys, with what they kept."""
    spec, inputs, exact = layers()
    case = dataclasses.replace(GATE, top_k=top_k, name="")
    others = [(query[::-1], key[::-1]) for query, key in zip(*inputs[:2], strict=True)]
    watched = Watched(method, settings_of(case), manual((0, 1), num_layers=3, kv_heads=2), others=others)

    @jax.jit
    def run(query, key, value):
        watched.retained.clear()
        plan, carry, outs = watched.plan(spec, Layout(), target=Target("cpu")), (), []
        for layer in range(3):
            out, carry = plan.run(query[layer], key[layer], value[layer], layer=layer, carry=carry)
            outs.append(out)
        return jnp.stack(outs), list(watched.retained)

    outs, kept = run(*inputs)
    return spec, case, np.asarray(outs), exact, kept


def reasons_of(row, case):
    """Why a row of a case is refused on this machine."""
    (cell,) = kind_of(case.kind).cells(case, Request(rows=(row,), cases=(case,)))
    return cell.reasons


@pytest.mark.parametrize("method", swept(ATTENDING, ("kascade",)))
def test_row_is_dense_where_everything_is_selected(method):
    _, _, outs, exact, kept = one_pass(method, 1.0)
    if method == "dropped_tiles":  # leaves tiles out however many are selected
        assert np.abs(outs - exact).max() > 1e-3
        return
    np.testing.assert_allclose(outs, exact, atol=2e-6)
    assert all(np.allclose(layer.mass, 1.0, atol=1e-5) for layer in kept)


@pytest.mark.thorough
@pytest.mark.parametrize("method", SELECTING)
def test_row_is_not_dense_where_not_everything_is_selected(method):
    spec, _, outs, exact, kept = one_pass(method, 0.25)
    np.testing.assert_allclose(outs[0], exact[0], atol=2e-6)  # layer 0 is dense in every row
    assert all(np.abs(outs[layer] - exact[layer]).max() > 1e-3 for layer in (1, 2))
    assert len(kept) == 2
    assert all(0.0 < float(layer.mass.min()) < 0.999 for layer in kept)
    assert int(kept[0].causal) == int(may_attend(spec, Layout()).sum()) * spec.batch * spec.num_heads


@pytest.mark.thorough
def test_rows_of_tiles_compute_equally_many_pairs_and_as_many_as_the_formula_says():
    counted = {}
    for method in BY_TILES:
        spec, case, _, _, kept = one_pass(method, 0.25)
        counted[method] = {float(layer.pairs / layer.causal) for layer in kept}
    by_formula = kept_fraction(spec, settings_of(case, schedule=manual((0, 1), num_layers=3, kv_heads=2)), 3).reuse
    for method, shares in counted.items():
        assert all(share == pytest.approx(by_formula, rel=1e-6) for share in shares), (method, shares, by_formula)


def test_each_oracle_keeps_more_attention_than_what_it_stands_above():
    mean = {
        name: np.mean([float(layer.mass.mean()) for layer in one_pass(name, 0.25)[4]])
        for name in ("oracle_query", "oracle_pooled", "kascade", "random_tiles")
    }
    assert mean["oracle_query"] > mean["oracle_pooled"] > mean["kascade"] > mean["random_tiles"]


def test_quest_bound_is_above_every_logit():
    spec, case, *_ = one_pass("quest", 0.25)
    tiling = Tiling.of(spec, settings_of(case))
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(rng.standard_normal((2, 112, heads, 16)), jnp.float32) for heads in (4, 2))
    bound = np.asarray(quest_bound(spec, tiling, query, key))
    logits = np.einsum("btkgh,bskh->bkgts", np.asarray(query).reshape(2, 112, 2, 2, 16), np.asarray(key))
    largest = logits.reshape(2, 2, 2, 7, 16, 7, 16).max((2, 4, 6))
    assert np.all(bound >= largest - 1e-4)
    assert np.all(bound < 4 * largest.max())


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    path = tmp_path_factory.mktemp("gate") / "dense.npz"
    dense.write_dense(GATE, path, None)
    return path


@functools.cache
def of_gate(gate, name):
    return row_quality.measure(GATE, name, gate, None)


@pytest.mark.thorough
def test_gate_finds_all_with_kascade_and_every_control_fails(gate):
    found = {name: of_gate(gate, name) for name in SELECTION.rows(GATE)}
    recall = {name: row.quality["recall"] for name, row in found.items()}
    assert recall["dense"] == recall["kascade"] == 1.0
    assert set(CONTROLS) < set(recall)
    assert max(recall[name] for name in CONTROLS) < 0.85, recall  # of 64: the Wilson interval lies below dense's
    assert min(recall[name] for name in CONTROLS) > 0.1, recall  # none breaks the layers altogether
    assert found["kascade"].quality["kept_pairs"] < 0.5
    assert "1 anchor" in found["kascade"].notes[0]


@pytest.mark.thorough
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_kascade_finds_all_at_the_flops_that_it_says(gate, phase):
    case = dataclasses.replace(GATE, name="", phase=phase)
    found = (of_gate(gate, "kascade") if case == GATE else row_quality.measure(case, "kascade", gate, None)).quality
    assert found["recall"] == 1.0
    assert found["flops"] == pytest.approx(expected_flops(case), rel=1e-6)


def test_decode_cases_are_decode_only_but_for_the_row_that_fills_its_own_cache():
    """What the rows of a decode case ask of the model to fill the cache."""
    case = dataclasses.replace(GATE, name="", kind="kascade_retrieval", phase="decode")
    model, schedule = dense.case_model(case), manual((0, 1), num_layers=6, kv_heads=2)

    class Filled(Exception):  # noqa: N818
        """Carries the arguments out of the program."""

    class Watching:
        config, arrays, new_cache = model.config, model.arrays, model.new_cache

        def prefill(self, tokens, cache, **call):
            raise Filled(tokens.shape, call)

    asked = {}
    for row in ("quest", "kascade", "kascade_both_phases"):
        with pytest.raises(Filled) as filled:
            row_quality._program(case, Watching(), row, schedule)(jnp.zeros((4, 256), jnp.int32))
        shape, asked[row] = filled.value.args
        assert shape == (4, 256 - 16)  # the tokens before those that are decoded
    assert asked["kascade"] == asked["quest"] == {"backend": "standard", "last_only": True}
    assert asked["kascade_both_phases"] == {
        "backend": "kascade",
        "backend_options": settings_of(case, schedule=schedule).as_options(),
        "on_unavailable": "raise",
        "last_only": True,
    }


def expected_flops(case):
    """By hand: layer 0 dense, one anchor of six, four reuse layers; an anchor scores everything once more."""
    config, settings = dense.case_model(case).config, settings_of(case)
    if case.phase == "prefill":
        spec = attention_spec(config, "global", batch=1, query_length=case.sequence, needs_grad=False)
        reuse = kept_fraction(spec, settings).reuse
    else:
        spec = attention_spec(
            config, "global", batch=1, query_length=1, key_value_length=case.sequence, needs_grad=False
        )
        at = range(case.sequence - 16, case.sequence)
        reuse = np.average([kept_fraction(spec, settings, position=p).reuse for p in at], weights=np.array(at) + 1)
    return (1.0 + (reuse + 0.5) + 4 * reuse) / 6


@pytest.mark.parametrize("method", swept(["dense", "kascade", "kascade_token", "anchor_layer"], ["kascade"]))
@pytest.mark.parametrize("kind", ["kascade_prefill", "kascade_decode"])
def test_stack_with_everything_selected_is_dense(kind, method):
    """A layer that reuses is judged in the run of ``test_kascade_commands.py``."""
    alone = {"layers": 1, "anchors": 1} if method == "anchor_layer" else {}
    assert stack_case.judge(dataclasses.replace(STACK, name="", kind=kind, **alone), method, 1)["out"].passed


WHOLE = dataclasses.replace(STACK, name="", layers=2, anchors=1, sequence=64, tile_size=16)


@pytest.mark.parametrize(
    ("case", "method", "mode"), [(STACK, "kascade", "native"), (WHOLE, "kascade_pallas", "interpret")]
)
def test_judging_a_stack_sees_what_is_left_out(monkeypatch, case, method, mode):
    fewer = {"top_k": 0.25}
    monkeypatch.setattr(stack_case, "settings_of", lambda case, **others: settings_of(case, **others | fewer))
    assert not stack_case.judge(case, method, 1, mode)["out"].passed


def test_row_that_may_run_dense_says_so_and_counts_as_dense():
    most = dataclasses.replace(STACK, name="", top_k=0.9)
    (note,) = stack_case.plan_notes(most, "kascade_profitable")
    assert "when='profitable' runs dense" in note
    assert stack_case.figures(most, "kascade_profitable") == {"kept_pairs": 1.0, "flops": 1.0}
    assert reasons_of("kascade_profitable", most) == ()


def test_row_that_would_repeat_another_is_refused_with_the_reason():
    longer = dataclasses.replace(STACK, name="", sequence=4096, layers=16)
    assert "would repeat kascade" in reasons_of("kascade_profitable", longer)[0]
    recall = dataclasses.replace(GATE, kind="kascade_retrieval", name="")
    assert "greedy" in reasons_of("kascade_greedy", dataclasses.replace(recall, schedule="greedy"))[0]
    assert "no decode steps" in reasons_of("kascade_both_phases", recall)[0]
    assert reasons_of("kascade_both_phases", dataclasses.replace(recall, phase="decode")) == ()
    assert "single keys" in reasons_of("kascade_token", dataclasses.replace(recall, granularity="token"))[0]


def test_nothing_falls_back_to_a_row():
    assert set(METHODS) & set(registry.names()) == {"kascade"}


def test_words_change_cases_and_name_them_anew():
    words = {"tile_size": 64, "schedule": "manual", "anchors": "0,2,3", "top_k": 0.2}
    changed = applied(words, (GATE, STACK))
    assert (changed[0].schedule, changed[0].anchors, changed[0].tile_size) == ("manual", "0,2,3", 64)
    assert (changed[1].anchors, changed[1].top_k) == (3, 0.2)
    assert changed[0].name != GATE.name
    assert applied({}, (GATE,)) == (GATE,)
    swept = [dataclasses.replace(GATE, name="", top_k=k) for k in (0.1, 0.2)]
    assert len(applied({"top_k": 0.5}, swept)) == 1


def test_several_thresholds_and_distances_make_every_case_of_quality_once_for_each_pair():
    words = {"schedule": "greedy", "threshold": "0.5,0.7", "max_reuse_dist": "2,4"}
    text = SelectionCase(kind="kascade_text", sequence=64, top_k=0.25)
    swept = applied(words, (text, STACK))
    assert [(c.threshold, c.max_reuse_dist) for c in swept[:-1]] == [(0.5, 2), (0.5, 4), (0.7, 2), (0.7, 4)]
    assert len({case.name for case in swept}) == 5
    assert swept[0].name == "kascade-text-prefill-s64-k0.25-t16-th0.5-d2"
    assert swept[-1] == STACK  # its time does not depend on the rule
    assert len({SELECTION.judged_by(dataclasses.replace(c, name="n"), "native") for c in swept[:-1]}) == 1
    (only,) = applied({"schedule": "greedy", "threshold": "0.5"}, (text,))
    assert (only.threshold, only.name) == (0.5, text.name)


def test_row_of_another_kernel_is_interpreted_where_it_cannot_run_and_refused_where_it_repeats_kascade():
    rows, kind = ("kascade", "kascade_xla", "kascade_pallas"), kind_of(WHOLE.kind)
    cells = {cell.row: cell for cell in kind.cells(WHOLE, Request(rows=rows, cases=(WHOLE,)))}
    assert "would repeat" in cells["kascade_xla"].reasons[0]
    assert (cells["kascade"].mode, cells["kascade_pallas"].mode) == ("native", "interpret")
    prepared = kind.prepare(cells["kascade_pallas"], WHOLE, Means(reference=None, memory_limit=2**33))
    assert prepared.timed is None
    assert prepared.outcome.accuracy["out"].passed
    assert "executed by an interpreter" in prepared.outcome.notes[-1]
    by_pallas = dataclasses.replace(WHOLE, kernel="pallas", name="")
    assert "kernel='pallas' of kascade is for TPUs and NVIDIA GPUs" in reasons_of("kascade", by_pallas)[0]
    assert applied({"kernel": "pallas"}, (WHOLE,)) == (by_pallas,)


@pytest.mark.thorough
def test_each_row_is_trained_with_its_own_attention_before_it_is_measured(tmp_path):
    case = SelectionCase(kind="kascade_text", sequence=96, sequences=4, top_k=0.5, training_steps=2)
    dense.write_dense(case, reference := tmp_path / "reference.npz", None)
    lost = {}
    for method in ("dense", "kascade", "random_tiles", "other_model"):
        series = row_quality.measure(case, method, reference, None).series
        lost[method] = np.mean(np.subtract(series["nll"], series["standard_nll"]))
    assert abs(lost["dense"]) < 1e-4
    assert min(lost["random_tiles"], lost["other_model"]) > 0.02 + abs(lost["kascade"])
    before = dense.case_model(case)(dense.problem(case, None).tokens, backend="standard", needs_grad=False)
    assert np.abs(before - dense.read_dense(reference)).max() > 0.01


@pytest.mark.parametrize(
    ("flags", "told"), [({"top_k": "x"}, "top_k = 'x' must be a number"), ({"odd": 1}, "it has no key 'odd'")]
)
def test_flags_of_a_damaged_manifest_are_refused(flags, told):
    with pytest.raises(InputError, match=told):
        applied(flags, (GATE,))
