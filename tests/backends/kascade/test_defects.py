"""Each defect of the earlier JAX fork of Kascade as a claim.

Wrong ways to attend to a right selection (1, 2, 3, 7, 8, 9) are found by ``test_sparse.py``, which compares with the
reference.
"""

import contextlib
import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Target, registry, resolve
from attnsuite.backends.contract import may_attend
from attnsuite.backends.kascade import (
    KASCADE,
    LayerRole,
    Schedule,
    Selection,
    Settings,
    kept_fraction,
    manual,
)
from attnsuite.backends.kascade.selection import with_local
from sparse_problems import PROBLEMS, SETTINGS, Sparse, sparse

CPU = Target("cpu")


def plan_of(problem: Sparse, **options):
    return KASCADE.plan(problem.spec, problem.layout, target=CPU, options=problem.options | options)


def anchor(problem: Sparse, *inputs):
    """One anchor layer's output and selection."""
    return problem.layer(inputs=inputs)


def changed_rows(attend, problem, at):
    """Whether each row's output changes when everything from token ``at`` on is replaced."""
    other = sparse(problem.settings, seed=9)
    edited = [
        jnp.concatenate([a[:, :at], b[:, at:]], axis=1) for a, b in zip(problem.inputs, other.inputs, strict=True)
    ]
    before, after = attend(problem.inputs), attend(tuple(edited))
    return np.asarray((before != after).any((0, 2, 3)))


@pytest.mark.parametrize("at", [37, 48, 95])
def test_1_later_tokens_change_no_earlier_tile(at):
    problem = sparse()
    changed = changed_rows(lambda inputs: anchor(problem, *inputs)[0], problem, at)
    assert not changed[: at // 16 * 16].any()
    assert changed[at:].all()


def check_distinct(problem, selection):
    """Nothing is visited twice, nothing that was selected is lost, the local region is there."""
    listed = np.asarray(with_local(problem.tiling, problem.tile_layout, selection))
    for place in np.ndindex(listed.shape[:3]):
        visited = listed[place][listed[place] >= 0].tolist()
        chosen = np.asarray(selection.selected)[place]
        assert len(set(visited)) == len(visited)
        assert visited == sorted(visited)
        own = int(np.asarray(problem.tile_layout.first_local)[0, place[2]])
        assert set(visited) == {*chosen[chosen >= 0].tolist(), own}
        assert (chosen >= 0).sum() == np.asarray(selection.count)[place]


def test_3_nothing_is_listed_twice_or_overwritten():
    problem = sparse()
    selection = problem.selection()
    check_distinct(problem, selection)
    repeated = Selection(selection.selected.at[0, 0, 5].set(2), selection.count)
    with pytest.raises(AssertionError):
        check_distinct(problem, repeated)


SCHEDULE = manual((0, 2), num_layers=4, kv_heads=2)


def test_4_a_reuse_layer_without_a_selection_is_refused():
    problem = sparse()
    plan = plan_of(problem, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="layer 1 reuses a selection, but none was handed to it"):
        plan.run(*problem.inputs, layer=1)
    carry = jax.tree.map(lambda x: x[:, :, :4], problem.selection())  # a shorter prompt's
    with pytest.raises(ValueError, match=r"of shape .*; expected \(2, 2, 6"):
        plan.run(*problem.inputs, layer=1, carry=carry)


@contextlib.contextmanager
def leaks_found():
    """JAX looks for leaked tracers among all objects. Those of earlier tests are left out: a search takes seconds."""
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()


def test_4_two_models_in_turns_do_not_mix_and_no_tracer_leaks():
    problems_, carries = (sparse(), sparse(seed=5)), [(), ()]
    plans = [plan_of(problem, schedule=SCHEDULE) for problem in problems_]
    alone = []
    for problem in problems_:
        carry, outs = (), []
        for layer in range(2):
            out, carry = problem.layer(layer, carry, schedule=SCHEDULE)
            outs.append(out)
        alone.append(outs)
    with leaks_found():
        for layer in range(2):
            for i, (plan, problem) in enumerate(zip(plans, problems_, strict=True)):
                step = jax.jit(
                    lambda inputs, carry, plan=plan, layer=layer: plan.run(*inputs, layer=layer, carry=carry)
                )
                out, carries[i] = step(problem.inputs, carries[i])
                np.testing.assert_allclose(out, alone[i][layer], atol=1e-5)


# 5 (perplexity of a broken model) is in tests/models/test_kascade.py.


def counted(problem: Sparse, selection: Selection):
    """Pairs attended to as a share of causal ones, by counting."""
    return float(problem.mask(selection).mean() / may_attend(problem.spec, problem.layout).mean())


@pytest.mark.parametrize("name", ["tiles", "query tile of two tiles", "tile of four query tiles", "keys"])
def test_6_the_kept_fraction_is_that_of_causal_pairs(name):
    problem = PROBLEMS[name]()
    share = counted(problem, problem.selection())
    schedule = manual((0, 2), num_layers=4, kv_heads=2)
    kept = kept_fraction(problem.spec, dataclasses.replace(problem.settings, schedule=schedule), 4)
    assert kept.reuse == pytest.approx(share)
    assert kept.pairs == pytest.approx((1 + 3 * share) / 4)
    select = 0.5 if problem.settings.granularity == "tile" else 1.0
    assert kept.flops == pytest.approx((1 + (select - 0.5) + share + (share + select) + share) / 4)
    # The controls: layers counted as sparsity, and tiles of the whole square.
    square = float(problem.mask(problem.selection()).mean())
    assert abs(kept.pairs - 2 / 4) > 0.05
    assert abs(kept.reuse - square) > 0.05


def test_6_decoding_is_counted_at_its_position():
    problem = PROBLEMS["decode"]()
    mask = np.asarray(problem.mask(problem.selection()))
    for row, used in enumerate((200, 77)):
        kept = kept_fraction(problem.spec, problem.settings, position=used - 1)
        assert kept.reuse == pytest.approx(mask[row].mean() * 200 / used)


def reuse(problem: Sparse, key, value, *, head_map=(0, 1)):
    """Output of a reuse layer behind an anchor on the problem's own keys and values."""
    schedule = Schedule((LayerRole("anchor", 0), LayerRole("reuse", 0, head_map)))
    _, carry = anchor(problem)
    return problem.layer(1, carry, (problem.query, key, value), schedule=schedule)[0], carry


@pytest.mark.parametrize("name", ["tiles", "decode"])
def test_10_a_reuse_layer_attends_to_its_own_keys_and_values(name):
    problem = PROBLEMS[name]()
    own = dataclasses.replace(problem, key=problem.key[:, ::-1] * 0.5, value=problem.value[::-1] + 1.0)
    out, carry = reuse(problem, own.key, own.value)
    np.testing.assert_allclose(out, own.expected(carry), atol=1e-5)
    for wrong in (problem, dataclasses.replace(own, key=problem.key), dataclasses.replace(own, value=problem.value)):
        assert np.abs(np.asarray(out) - wrong.expected(carry)).max() > 0.1


def test_the_head_map_says_whose_selection_each_head_takes():
    problem = sparse()
    straight, carry = reuse(problem, problem.key, problem.value)
    crossed, _ = reuse(problem, problem.key, problem.value, head_map=(1, 0))
    both_of_0, _ = reuse(problem, problem.key, problem.value, head_map=(0, 0))
    swapped = jax.tree.map(lambda x: x[:, ::-1], carry)
    np.testing.assert_allclose(crossed, problem.expected(swapped), atol=1e-5)
    assert np.abs(crossed - straight).max() > 0.1
    np.testing.assert_array_equal(both_of_0[:, :, :2], straight[:, :, :2])
    np.testing.assert_array_equal(both_of_0[:, :, 2:], crossed[:, :, 2:])


def test_11_running_dense_is_said_and_is_dense():
    problem = sparse()
    always = plan_of(problem)
    assert always.notes == ()
    dense = plan_of(problem, when="profitable")
    assert len(dense.notes) == 1
    ran = resolve("auto", problem.spec, Target("cpu")).backend.name
    assert f"{ran} ran." in dense.notes[0]
    expected = registry.get("standard").plan(problem.spec, problem.layout, target=CPU).run(*problem.inputs)[0]
    np.testing.assert_allclose(jax.jit(dense.run)(*problem.inputs)[0], expected, atol=1e-5)
    assert np.abs(np.asarray(anchor(problem)[0]) - expected).max() > 0.1
    worth = Settings(
        top_k=0.05,
        min_keys=0,
        tile_size=16,
        query_tile=16,
        when="profitable",
        schedule=manual((0,), num_layers=8, kv_heads=2),
    )
    long = dataclasses.replace(problem.spec, query_length=4096, key_value_length=4096)
    assert kept_fraction(long, worth, 8).flops < 0.3
    options = {
        name: getattr(worth, name) for name in ("top_k", "min_keys", "tile_size", "query_tile", "when", "schedule")
    }
    assert KASCADE.plan(long, Layout(), target=CPU, options=options).notes == ()


def test_decode_only_runs_several_query_tokens_dense_and_a_single_one_sparse():
    """The paper's decode-only variant, as the programs that are traced."""
    several, single = sparse(), PROBLEMS["decode"]()
    assert (
        f"query_length={several.spec.query_length}, and when='decode' runs several query tokens dense"
        in (plan_of(several, when="decode").notes[0])
    )
    assert plan_of(single, when="decode").notes == ()
    traced = {
        (name, when): str(jax.make_jaxpr(plan_of(problem, when=when).run)(*problem.inputs))
        for name, problem in (("several", several), ("single", single))
        for when in ("always", "profitable", "decode")
    }
    assert plan_of(single, when="profitable").notes != ()  # dense
    assert traced["several", "decode"] == traced["several", "profitable"] != traced["several", "always"]
    assert traced["single", "decode"] == traced["single", "always"] != traced["single", "profitable"]


assert SETTINGS.tile_size == 16  # what the masks above are written for
