"""Each defect of the earlier JAX fork of Kascade as a claim.

Wrong ways to attend to a right selection (1, 2, 3, 7, 8, 9) are found by ``test_sparse.py``, which compares with the
reference.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Target, registry, resolve
from attnsuite.backends.contract import may_attend
from attnsuite.backends.kascade import KASCADE, Settings, kept_fraction, manual
from landing import swept
from sparse_problems import PROBLEMS, SETTINGS, sparse

CPU = Target("cpu")


def plan_of(problem, **options):
    return KASCADE.plan(problem.spec, problem.layout, target=CPU, options=problem.options | options)


def anchor(problem, *inputs):
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


def test_1_later_tokens_change_no_earlier_tile():
    problem = sparse()
    for at in (37, 48, 95):
        changed = changed_rows(lambda inputs: anchor(problem, *inputs)[0], problem, at)
        assert not changed[: at // 16 * 16].any()
        assert changed[at:].all()


SCHEDULE = manual((0, 2), num_layers=4, kv_heads=2)


def test_4_a_reuse_layer_without_a_selection_is_refused():
    problem = sparse()
    plan = plan_of(problem, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="layer 1 reuses a selection, but none was handed to it"):
        plan.run(*problem.inputs, layer=1)
    carry = jax.tree.map(lambda x: x[:, :, :4], problem.selection())  # a shorter prompt's
    with pytest.raises(ValueError, match=r"of shape .*; expected \(2, 2, 6"):
        plan.run(*problem.inputs, layer=1, carry=carry)


# 5 (perplexity of a broken model) is in tests/models/test_kascade.py.


def counted(problem, selection):
    """Pairs attended to as a share of causal ones, by counting."""
    return float(problem.mask(selection).mean() / may_attend(problem.spec, problem.layout).mean())


@pytest.mark.parametrize(
    "name",
    swept(
        ["tiles", "query tile of two tiles", "tile of four query tiles", "keys"], ["tile of four query tiles", "keys"]
    ),
)
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
    options = {"top_k": 0.05, "min_keys": 0, "tile_size": 16, "query_tile": 16, "when": "profitable"}
    options["schedule"] = manual((0,), num_layers=8, kv_heads=2)
    long = dataclasses.replace(problem.spec, query_length=4096, key_value_length=4096)
    assert kept_fraction(long, Settings(**options), 8).flops < 0.3
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
