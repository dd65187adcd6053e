"""The XLA path: equal to the plain reference under any selection, and to dense attention where all is selected."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh

from attnsuite.backends import Layout, MeshAxes, Sharded, Target, attention, make_spec, names, plan, resolve, support
from attnsuite.backends.features import BASIC_FEATURES
from attnsuite.backends.kascade import (
    KASCADE,
    OPTIONS,
    LayerRole,
    Schedule,
    Selection,
    Settings,
    TileLayout,
    Tiling,
    manual,
    steps,
    xla,
)
from attnsuite.backends.resolve import PRIORITY
from attnsuite.testing import problems
from attnsuite.testing.checks import check_quantity, check_support
from landing import swept
from script import run
from sparse_problems import FIRST, PROBLEMS, cached, inner_jaxprs, settings, sparse

EVERYTHING = {
    "tiles": {"top_k": 1.0, "tile_size": 32, "query_tile": 64},
    "tile of query tiles": {"top_k": 1.0, "tile_size": 64, "query_tile": 16},
    "keys": {"top_k": 1.0, "granularity": "token"},
}


@functools.cache
def _spec(case):
    made = problems.CASES[case]
    layout, terms, inputs = problems.arrays(made, case)
    return make_spec(*inputs[:3], layout, terms, **made.options | {"needs_grad": False})


# Twice of the same for this backend: shapes that its own problems have too.
COMPARED = (
    "gqa-8",
    "scale",
    "head-dim-33",
    "length-1",
    "length-129",
    "more-keys-causal",
    "decode-4",
    "chunk-of-prefill",
    "segments-returning",
    "padding-left",
    "ragged-causal",
    "causal-bfloat16",
    "causal-float16",
    "big-logits-float32",
)


@pytest.mark.parametrize("case", swept(COMPARED, ("length-129", "segments-returning")))
def test_with_everything_selected_it_is_dense(case):
    """Anchor, and the dense layer, within the noise floor of the judge."""
    problem = problems.problem(case)
    spec = dataclasses.replace(problem.spec, needs_grad=False)
    options = EVERYTHING[list(EVERYTHING)[COMPARED.index(case) % 3]]
    schedule = manual((0, 1), num_layers=2, kv_heads=spec.num_kv_heads)
    plan = KASCADE.plan(spec, problem.layout, target=Target("cpu"), options={**options, "schedule": schedule})

    @jax.jit
    def both(q, k, v):
        return plan.run(q, k, v, layer=0)[0], plan.run(q, k, v, layer=1)[0]

    for output in both(*problem.inputs[:3]):
        check_quantity("output", output, problem)


@pytest.mark.parametrize("case", problems.CASES)
def test_takes_causal_attention_over_slots_and_refuses_the_rest(case):
    spec = _spec(case)
    by_slot = not spec.has_positions or spec.query_length == 1 or spec.has_seq_lengths
    plain = spec.is_causal and spec.window is None and spec.chunk_size is None
    taken = plain and by_slot and not spec.has_mask and not spec.has_bias and spec.features() <= BASIC_FEATURES
    check_support(KASCADE, spec, Target("cpu"), "native", refused=not taken)
    if spec.page_size is None and spec.kv_dtype is None:  # a cache has no gradient: there is no such spec
        check_support(KASCADE, dataclasses.replace(spec, needs_grad=True), Target("cpu"), "native", refused=not taken)


@pytest.mark.parametrize("name", swept(PROBLEMS, {*FIRST} - {"decode keys"}))
def test_selects_and_attends_as_the_reference_does(name):
    problem = PROBLEMS[name]()
    chooser = steps.select if problem.spec.query_length == 1 else xla.select

    @jax.jit
    def ours(q, k, v):
        selection, _ = chooser(problem.spec, problem.tiling, problem.tile_layout, q, k)
        same, dense = chooser(problem.spec, problem.tiling, problem.tile_layout, q, k, v)
        return selection, same, dense, xla.attend(problem.spec, problem.tiling, problem.tile_layout, q, k, v, selection)

    selection, same, dense, out = ours(*problem.inputs)
    expected = problem.selection()
    jax.tree.map(np.testing.assert_array_equal, selection, expected)
    jax.tree.map(np.testing.assert_array_equal, same, expected)
    close = {"float32": 1e-5, "bfloat16": 0.04}[problem.spec.dtype]
    wide = functools.partial(np.asarray, dtype=np.float32)
    np.testing.assert_allclose(wide(out), wide(problem.expected(expected)), atol=close)
    np.testing.assert_allclose(wide(dense), wide(problem.dense()), atol=close)
    if problem.tiling.slots:
        assert (np.asarray(selection.count) < problem.tiling.units).any()


@pytest.mark.parametrize("name", swept(["tiles", "keys", "decode"], ["keys", "decode"]))
def test_all_heads_share_one_selection_of_the_summed_mass(name):
    problem = PROBLEMS[name]()
    chooser = steps.select if problem.spec.query_length == 1 else xla.select
    ours = functools.partial(chooser, problem.spec, problem.tiling, problem.tile_layout, ablation="all_heads")
    shared, _ = jax.jit(ours)(*problem.inputs[:2])
    jax.tree.map(np.testing.assert_array_equal, shared, problem.selection("all_heads"))
    np.testing.assert_array_equal(shared.selected[:, 0], shared.selected[:, 1])
    own = problem.selection()
    assert (np.asarray(own.selected)[:, 0] != np.asarray(own.selected)[:, 1]).any()


def test_a_head_map_says_whose_selection_each_head_takes_unless_it_is_ablated():
    problem = sparse()
    straight, carry = manual((0,), num_layers=2, kv_heads=2), problem.selection()
    maps = {"crossed": (1, 0), "of the first": (0, 0)}
    schedules = {
        name: Schedule((straight.layers[0], dataclasses.replace(straight.layers[1], head_map=heads)))
        for name, heads in maps.items()
    }

    def out(schedule, ablation=None):
        return problem.layer(1, carry, schedule=schedule, ablation=ablation)[0]

    plain, crossed = out(straight), out(schedules["crossed"])
    np.testing.assert_array_equal(out(schedules["crossed"], "no_remap"), plain)
    np.testing.assert_allclose(crossed, problem.expected(jax.tree.map(lambda x: x[:, ::-1], carry)), atol=1e-5)
    assert np.abs(crossed - plain).max() > 0.1
    both_of_0 = jnp.concatenate([plain[:, :, :2], crossed[:, :, 2:]], axis=2)
    np.testing.assert_array_equal(out(schedules["of the first"]), both_of_0)


@pytest.mark.thorough
@hypothesis.settings(max_examples=6)
@hypothesis.given(st.data())
def test_any_tiles_of_any_problem(data):
    draw = data.draw
    tile, query_tile = draw(st.sampled_from([(8, 8), (16, 4), (4, 16), (8, 1)]))
    chosen = Settings(
        top_k=draw(st.sampled_from([0.01, 0.3, 0.77, 1.0])),
        min_keys=draw(st.sampled_from([0, 5, 40])),
        tile_size=tile,
        query_tile=query_tile,
        granularity=draw(st.sampled_from(["tile", "token"])),
    )
    T = draw(st.integers(1, 50))
    problem = sparse(chosen, T=T, S=T + draw(st.integers(0, 20)), batch=1, head_dim=8, seed=draw(st.integers(0, 9)))
    out, selection = problem.layer()
    chosen_units, count = np.asarray(selection.selected), np.asarray(selection.count)
    assert ((chosen_units >= 0).sum(-1) == count).all()
    for i in range(problem.tiling.query_tiles):
        first = int(problem.tile_layout.first_local[0, i])
        assert (chosen_units[:, :, i] < first).all()
        assert (count[:, :, i] == problem.tiling.budgets[first]).all()
    np.testing.assert_allclose(out, problem.expected(selection), atol=1e-5)


@pytest.mark.parametrize("length", [10, 60])
def test_keys_may_end_inside_the_first_unit_or_the_first_group_of_units(length, monkeypatch):
    """Shapes alone would forbid to read what is never visited. One KV head: behind it lies no other's keys."""
    monkeypatch.setattr(xla, "_KEYS_PER_SWEEP", 64)
    problem = sparse(T=length, batch=1, num_kv_heads=1)
    selection, _ = jax.jit(functools.partial(xla.select, problem.spec, problem.tiling, problem.tile_layout))(
        problem.query, problem.key
    )
    jax.tree.map(np.testing.assert_array_equal, selection, problem.selection())


def test_fewer_keys_than_a_tile_are_its_local_region():
    """Of one KV head and one sequence: a whole tile cannot be read, and there is none to select."""
    query, key = jnp.ones((1, 1, 2, 8)), jax.random.normal(jax.random.key(0), (1, 30, 1, 8))
    call = {"is_causal": True, "query_positions": [[29]], "key_value_seq_lengths": [30], "on_unavailable": "raise"}
    out, expected = (attention(query, key, key, backend=name, **call) for name in ("kascade", "standard"))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_is_registered_approximate_and_never_chosen():
    assert "kascade" in names()
    assert not KASCADE.exact
    assert all("kascade" not in order for order in PRIORITY.values())
    spec = sparse().spec
    assert resolve("auto", spec, Target("cpu")).backend.name != "kascade"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"top_k": 0.0}, "top_k=0.0 is not accepted"),
        ({"top_k": 1.5}, "top_k=1.5 is not accepted"),
        ({"top_k": True}, "top_k=True"),
        ({"min_keys": -1}, "min_keys=-1"),
        ({"tile_size": 0.5}, "tile_size=0.5"),
        ({"query_tile": 48, "tile_size": 32}, "one must be a multiple of the other"),
        ({"granularity": "block"}, "granularity='block'"),
        ({"ablation": "none"}, "ablation='none'"),
        ({"kernel": "triton"}, "kernel='triton'"),
        ({"when": "never"}, "when='never'"),
        ({"schedule": (0, 1)}, "schedule="),
        ({"reselect_every": 4}, "no option 'reselect_every'"),
    ],
    ids=str,
)
def test_option_that_is_not_accepted_is_refused_before_anything_is_traced(options, word):
    with pytest.raises(ValueError, match=word):
        KASCADE.plan(sparse().spec, Layout(), target=Target("cpu"), options=options)
    assert set(options) <= set(OPTIONS) or "reselect_every" in options


@pytest.mark.parametrize(
    ("layer", "schedule", "word"),
    [
        (2, manual((0,), num_layers=2, kv_heads=2), "layer 2 runs, but the schedule is for 2 layers"),
        ("0", manual((0,), num_layers=2, kv_heads=2), "layer '0' runs, but the schedule is for 2 layers"),
        (1, manual((0,), num_layers=2, kv_heads=4), "maps its KV heads to"),
        (1, Schedule((LayerRole("dense", 0), LayerRole("reuse", 0, (-1, 0)))), "maps its KV heads to"),
    ],
)
def test_a_schedule_for_another_model_is_refused(layer, schedule, word):
    with pytest.raises(ValueError, match=word):
        sparse().layer(layer, schedule=schedule)


def test_traced_layer_that_the_schedule_does_not_have_is_nan():
    problem, options = sparse(), {"schedule": manual((0, 1), num_layers=2, kv_heads=2)}
    plan = KASCADE.plan(problem.spec, Layout(), target=Target("cpu"), options=options)
    run = jax.jit(lambda number: plan.run(*problem.inputs, layer=number)[0])
    assert np.isnan(run(2)).all()
    assert np.isnan(run(-1)).all()
    np.testing.assert_array_equal(run(1), plan.run(*problem.inputs, layer=1)[0])


def test_key_positions_are_refused_at_the_plan():
    spec = dataclasses.replace(sparse(T=1, S=8).spec, has_positions=True)
    layout = Layout(key_value_positions=jnp.zeros((2, 8), jnp.int32))
    with pytest.raises(ValueError, match="key positions are slots"):
        KASCADE.plan(spec, layout, target=Target("cpu"))


@pytest.mark.thorough  # test_no_head_is_copied_for_a_query_tile reads the same from shapes
def test_memory_is_linear_in_the_length():
    """Compiled temporaries at twice the length: dense scores would be four times as large."""
    small = sparse(T=8, batch=1, head_dim=32)

    def temporaries(length):
        spec = dataclasses.replace(small.spec, query_length=length, key_value_length=length)
        plan = KASCADE.plan(spec, Layout(), target=Target("cpu"))
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 32), jnp.float32) for heads in (4, 2, 2)]
        return jax.jit(plan.run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(2048), temporaries(4096)
    assert long < 2.5 * short
    assert long < 4 * 4096 * 4096  # one head's scores are four times as much


@pytest.mark.parametrize("granularity", ["tile", "token"])
@pytest.mark.parametrize("T", [8192, 1])
def test_no_head_is_copied_for_a_query_tile(T, granularity):
    """Over shapes alone: in the loop over query tiles nothing is as large as one head's keys."""
    problem = settings(granularity=granularity, tile_size=128, query_tile=128)
    layout = cached(1, 8192) if T == 1 else Layout()
    small = sparse(T=8, layout=layout, batch=1, head_dim=64).spec
    spec = dataclasses.replace(small, query_length=T, key_value_length=8192)
    tiling = Tiling.of(spec, problem)
    tile_layout = TileLayout.of(spec, layout, tiling)
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32) for length, heads in ((T, 4), (8192, 2)))
    lead = (1, 2, tiling.query_tiles)
    selection = Selection(jax.ShapeDtypeStruct((*lead, tiling.slots), jnp.int32), jax.ShapeDtypeStruct(lead, jnp.int32))
    attend = jax.make_jaxpr(functools.partial(xla.attend, spec, tiling, tile_layout))(query, key, key, selection)
    select = jax.make_jaxpr(functools.partial(xla.select, spec, tiling, tile_layout))(query, key, key)
    for program in (attend, select):
        (loop,) = (x for x in program.jaxpr.eqns if x.primitive.name == "scan")
        assert 0 < _largest(loop.params["jaxpr"].jaxpr) < 8192 * 64


def _largest(jaxpr):
    """Elements of the largest array that a program makes on its way."""
    inner = [_largest(below) for equation in jaxpr.eqns for below in inner_jaxprs(equation)]
    return max([0, *inner, *(out.aval.size for equation in jaxpr.eqns for out in equation.outvars)])


def test_the_budget_rolls_and_has_a_floor():
    tiling = Tiling.of(sparse(T=256).spec, Settings(top_k=0.1, min_keys=64, tile_size=16, query_tile=16))
    assert tiling.budgets == (0, 1, 2, 3, *[4] * 12)
    rolling = Tiling.of(sparse(T=1024).spec, Settings(top_k=0.25, min_keys=0, tile_size=16, query_tile=16))
    assert [rolling.budgets[n] for n in (4, 5, 8, 9, 40, 63)] == [1, 2, 2, 3, 10, 16]
    assert rolling.slots == 16


DEVICES = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from sparse_problems import PROBLEMS
from jax.sharding import Mesh
from attnsuite.backends import MeshAxes, Sharded, Target
from attnsuite.backends.kascade import KASCADE, LayerRole, Schedule
mesh = Mesh(np.array(jax.devices()), ("cores",))
roles = (LayerRole("dense", 0), LayerRole("reuse", 0, (1, 0)), LayerRole("anchor", 2), LayerRole("reuse", 2, (0, 0)))
for name in ("packed", "decode"):
    problem, outs = PROBLEMS[name](), []
    for backend in (KASCADE, Sharded(KASCADE, mesh, MeshAxes(heads="cores"))):
        options = problem.options | {"schedule": Schedule(roles)}
        def layers(layout, q, k, v):
            plan = backend.plan(problem.spec, layout, target=Target("cpu"), options=options)
            carry, found = (), []
            for layer in range(4):
                out, carry = plan.run(q, k, v, layer=layer, carry=carry)
                found.append(out)
            return found
        outs.append(jax.jit(layers)(problem.layout, *problem.inputs))
    for one, two in zip(*outs):
        np.testing.assert_allclose(one, two, atol=1e-6)
print("same on", len(mesh.devices), "devices")
"""


@pytest.mark.thorough
def test_devices_that_divide_the_heads_compute_the_same():
    done = run(DEVICES)
    assert done.stdout == "same on 2 devices\n", done.stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ablation": "all_heads"}, "needs all of them at once"),
        ({"kernel": "pallas"}, "heads cannot be sharded by kascade with kernel='pallas'"),
    ],
)
def test_a_mesh_that_cannot_divide_is_refused(options, word):
    mesh = Mesh(np.array(jax.devices()[:1]), ("cores",))
    sharded = Sharded(KASCADE, mesh, MeshAxes(heads="cores"))
    with pytest.raises(ValueError, match=word):
        plan(sharded, sparse().spec, Layout(), target=Target("cpu"), options=options)


def test_heads_are_dealt_alone():
    """Beside the batch they are refused, as before: nobody has looked at both."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("rows", "cores"))
    sharded = Sharded(KASCADE, mesh, MeshAxes(data="rows", heads="cores"))
    (reason,) = support(sharded, sparse().spec, Target("cpu")).reasons
    assert "shard data only, or heads only where kascade shards them itself" in reason
