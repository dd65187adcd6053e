"""Support is judged in one place, and every plan goes through one door."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import (
    Backend,
    BackendFallbackWarning,
    Layout,
    MeshAxes,
    Plan,
    Sharded,
    Takes,
    Target,
    Terms,
    make_spec,
    plan,
    registry,
    resolve,
    support,
)
from attnsuite.backends.features import FEATURES
from attnsuite.backends.kascade import KASCADE
from attnsuite.backends.standard import STANDARD
from declared import LOADING, PLAIN, Asked, Declared, home

pytestmark = [pytest.mark.standard, pytest.mark.newest]

BOTH = tuple(name for name in LOADING if name != "kascade")  # causal and not
CPU, H100, V5E = Target("cpu"), Target("cuda", "h100"), Target("tpu", "v5e")
AUTO = resolve("auto", PLAIN, CPU).backend.name
B, T, N, H = PLAIN.batch, PLAIN.query_length, PLAIN.num_heads, PLAIN.head_dim
IDS = np.repeat([[0, 1]], T // 2, axis=1).repeat(B, axis=0).astype(np.int32)
ARRAYS = {
    "has_segment_ids": {"query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "has_positions": {"query_positions": IDS + 3},
    "has_seq_lengths": {"key_value_seq_lengths": np.full((B,), 7, np.int32)},
    "has_mask": {"mask": np.ones((1, 1, T, T), bool)},
}


def varied(**changes):
    return dataclasses.replace(PLAIN, **changes)


def operands(spec=PLAIN):
    shape = (spec.batch, spec.query_length, spec.num_heads, spec.head_dim)
    return (jnp.ones(shape, spec.dtype),) * 3


# What a backend does wrong when it is asked.


def raises(*_):
    raise KeyError("tile_of")


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (raises, "KeyError: 'tile_of'"),
        (lambda *_: None, "TypeError"),
        pytest.param(lambda *_: (None,), "its reasons are not all sentences: (None,)", marks=pytest.mark.wrong_types),
        (lambda *_: True, "TypeError"),
    ],
    ids=["raises", "nothing", "no sentence", "a bool"],
)
def test_an_error_of_the_backend_is_its_reason(answer, word):
    (reason,) = support(Asked(answer=answer), PLAIN, CPU).reasons
    assert word in reason
    assert reason.startswith("declared failed when asked what it takes (")
    assert reason.endswith("a fault of its own; use backend='chunked'.")


def test_an_error_while_the_allow_list_is_made_is_the_reason_too():
    class Broken(Declared):
        def takes(self, target, mode):
            raise AttributeError("no attribute 'sm_count'")

    assert "no attribute 'sm_count'" in support(Broken(Takes(features=frozenset(FEATURES))), PLAIN, CPU).reasons[0]


def test_one_sentence_that_is_no_tuple_is_one_reason():
    assert support(Asked(answer=lambda *_: "not on Mondays."), PLAIN, CPU).reasons == ("not on Mondays.",)


def test_an_error_of_the_backend_stops_no_resolution(monkeypatch):
    monkeypatch.setattr(registry.DEFAULT, "_loaded", {**registry.DEFAULT._loaded, "declared": Asked(answer=raises)})
    with pytest.warns(BackendFallbackWarning, match="declared failed when asked"):
        assert resolve("declared", PLAIN, CPU).backend.name == AUTO


# Options are seen.


def test_options_are_judged_with_the_spec():
    options = {"kernel": "pallas", "granularity": "token"}
    (reason,) = support(KASCADE, PLAIN, CPU, "interpret", options).reasons
    assert "granularity='token' is not supported by kascade's Pallas kernels" in reason
    assert support(KASCADE, PLAIN, CPU, options={"granularity": "token"})
    assert "kernel='xla'" in support(KASCADE, PLAIN, CPU, "interpret", {"kernel": "xla"}).reasons[0]
    with pytest.raises(ValueError, match="granularity='token' is not supported by kascade's Pallas kernels"):
        plan(KASCADE, PLAIN, target=CPU, options=options)
    with pytest.warns(BackendFallbackWarning, match="granularity='token'"):
        assert resolve("kascade", PLAIN, CPU, options=options).backend.name == AUTO


def test_asking_about_a_device_that_is_not_here_imports_no_kernel_and_touches_no_device(loaded_by):
    initialised, packages = loaded_by("""
from attnsuite.backends import registry, support
from declared import HOME, PLAIN
for name, (target, mode) in HOME.items():
    assert support(registry.get(name), PLAIN, target, mode), name
""")
    assert initialised is False  # that it can be True: test_devices.py
    assert "attnsuite" in packages
    assert not packages & {"kvax", "triton", "jax_triton", "tokamax"}


@pytest.mark.parametrize("name", LOADING)
def test_an_option_that_there_is_not_is_an_error_of_the_caller_and_no_fallback(name):
    target, mode = home(name)
    options = {"no_such_option": 1}
    assert support(registry.get(name), PLAIN, target, mode, options)
    with pytest.raises(ValueError, match="no_such_option"):
        plan(registry.get(name), PLAIN, target=target, mode=mode, options=options)


# The door.


def planned(name, spec, layout):
    target, mode = home(name)
    return resolve(name, spec, target, mode=mode, on_unavailable="raise").plan(layout)


@pytest.mark.parametrize(("name", "is_causal"), [(name, True) for name in LOADING] + [(name, False) for name in BOTH])
@pytest.mark.parametrize("field", ARRAYS)
def test_arrays_that_the_spec_does_not_announce_are_refused_by_every_backend(name, is_causal, field):
    with pytest.raises(ValueError, match=rf"the layout brings \w+.*, but the spec says {field}=False"):
        planned(name, varied(is_causal=is_causal), Layout(**ARRAYS[field]))


@pytest.mark.parametrize("field", ARRAYS)
def test_arrays_that_the_spec_announces_have_to_be_there(field):
    with pytest.raises(ValueError, match=f"the spec says {field}=True, but the layout brings no "):
        planned("standard", varied(**{field: True}), Layout())


@pytest.mark.wrong_types
@pytest.mark.parametrize("field", ARRAYS)
def test_the_door_checks_what_is_only_shapes(field):
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in ARRAYS[field].items()}
    with pytest.raises(ValueError, match=f"but the spec says {field}=False"):
        jax.eval_shape(lambda layout: planned("chunked", PLAIN, layout).run(*operands()), Layout(**shapes))


@pytest.mark.wrong_types
def test_a_name_in_the_place_of_what_it_names_is_refused():
    with pytest.raises(TypeError, match=r"backend='chunked' is a name; give the backend, backends\.get\('chunked'\)"):
        plan("chunked", PLAIN, target=CPU)
    with pytest.raises(TypeError, match=r"target='cpu' is no Target; give Target\.here\(\)"):
        plan(STANDARD, PLAIN, target="cpu")
    with pytest.raises(TypeError, match="target='cpu' is no Target"):
        resolve("auto", PLAIN, "cpu")
    for without in (lambda: resolve("chunked", None), lambda: plan(STANDARD, None, target=CPU)):
        with pytest.raises(TypeError, match="spec=None is no AttentionSpec"):
            without()
    with pytest.raises(TypeError, match=r"layout=\{\} is no Layout; give Layout\(mask=\.\.\.\)"):
        plan(STANDARD, PLAIN, {}, target=CPU)
    with pytest.raises(TypeError, match=r"terms=\{\} is no Terms; give Terms\(bias=\.\.\.\)"):
        plan(STANDARD, PLAIN, target=CPU).run(*operands(), terms={})
    for make in (resolve, lambda *_, **how: plan(STANDARD, PLAIN, target=CPU, **how)):
        with pytest.raises(ValueError, match=r"the options \['block_q'\] are no mapping; give backend_options"):
            make("chunked", PLAIN, options=["block_q"])


def test_a_backend_returns_a_plan():
    class Bare(Declared):
        def plan(self, *_, **__):
            return print

    with pytest.raises(TypeError, match=r"declared\.plan\(\.\.\.\) returned a builtin.*; a backend returns a Plan"):
        plan(Bare(Takes(features=frozenset(FEATURES))), PLAIN, target=CPU)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, T, N, H), (B, T, N, H), (B, T, N, H)), r"query has shape \(1, 64, 2, 64\); the spec of this plan says"),
        (((B, T, N, H), (B, 32, N, H), (B, T, N, H)), r"key has shape \(2, 32, 2, 64\)"),
        (((B, T, N, H), (B, T, N, H), (B, T, N, 32)), r"value has shape \(2, 64, 2, 32\)"),
    ],
)
def test_a_plan_runs_on_the_arrays_that_it_was_made_for(shapes, words):
    made = plan(STANDARD, PLAIN, target=CPU)
    with pytest.raises(ValueError, match=words):
        made.run(*(jnp.ones(shape, jnp.bfloat16) for shape in shapes))
    with pytest.raises(ValueError, match="query is float32; the spec of this plan says bfloat16"):
        made.run(*(x.astype(jnp.float32) for x in operands()))


# Terms.


@pytest.mark.wrong_types
def test_terms_that_are_missing_or_not_announced_or_of_another_shape_are_refused():
    with_bias = plan(STANDARD, varied(has_bias=True), target=CPU)
    with pytest.raises(ValueError, match=r"has_bias=True asks for bias, but it is None; give bias=\.\.\. \(to a plan"):
        with_bias.run(*operands())
    with pytest.raises(ValueError, match=r"bias has shape \(3, 1, 64, 64\); expected 4 dimensions that broadcast"):
        with_bias.run(*operands(), terms=Terms(bias=jnp.zeros((3, 1, T, T))))
    bias = Terms(bias=jnp.zeros((1, 1, T, T)))
    for name in ("standard", "chunked", "kascade"):
        with pytest.raises(ValueError, match=r"terms\.bias is given, but the spec of this plan says has_bias=False"):
            plan(registry.get(name), PLAIN, target=CPU).run(*operands(), terms=bias)
    with pytest.raises(ValueError, match=r"terms\.bias is given"):  # a plan that came past the door announces nothing
        STANDARD.plan(varied(has_bias=True), Layout(), target=CPU).run(*operands(), terms=bias)


def test_only_a_backend_whose_spec_announces_terms_is_handed_any():
    class Seen(Declared):
        def plan(self, *_, **__):
            return Plan(lambda *given: (len(given), ()))

    backend = Seen(Takes(features=frozenset(FEATURES)))
    assert plan(backend, PLAIN, target=CPU).run(*operands())[0] == 5
    bias = Terms(bias=jnp.zeros((1, 1, 1, 1)))
    assert plan(backend, varied(has_bias=True), target=CPU).run(*operands(), terms=bias)[0] == 6


# Positions that say nothing.

ARANGE = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))


@pytest.mark.parametrize("name", ["splash", "pallas_flash", "kascade", "cudnn"])
def test_positions_that_are_plainly_arange_are_not_refused(name):
    layout = Layout(query_positions=ARANGE, key_value_positions=ARANGE)
    spec = make_spec(*operands(), layout, is_causal=True, needs_grad=False)
    assert spec == PLAIN
    target, mode = home(name)
    assert support(registry.get(name), spec, target, mode)
    assert not support(registry.get(name), varied(has_positions=True), target, mode)


@pytest.mark.wrong_types
def test_positions_that_say_something_or_cannot_be_read_are_kept():
    def check(query, key=None):
        given = Layout(query_positions=query, key_value_positions=key)
        assert make_spec(*operands(), given, is_causal=True).has_positions

    other = ARANGE.copy()
    other[1, 5] = 4
    for given in (other, ARANGE + 1, ARANGE[:, ::-1]):
        check(given)
    check(ARANGE, other)
    jax.eval_shape(check, ARANGE)  # traced
    check(jnp.asarray(ARANGE))  # the host would wait for the device
    check(jax.ShapeDtypeStruct((B, T), np.int32))


def test_a_spec_that_announces_positions_gets_them_whatever_they_are():
    spec = varied(has_positions=True, dtype="float32")
    run = functools.partial(plan(STANDARD, spec, Layout(query_positions=ARANGE), target=CPU).run, *operands(spec))
    np.testing.assert_array_equal(run()[0], plan(STANDARD, varied(dtype="float32"), target=CPU).run(*operands(spec))[0])


# A wrapper says what it wraps.


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """As little of a backend as a wrapper needs."""

    inner: Backend
    name: str = "wrapper"
    exact: bool = True

    def takes(self, target, mode):
        return self.inner.takes(target, mode)

    def plan(self, spec, layout, **given):
        return plan(self.inner, spec, layout, **given)


def test_what_a_backend_declares_survives_a_wrapper():
    """Kascade's layers hand a selection on, across heads: a wrapper that hid it would let its heads be dealt out.

    Kascade deals its heads itself; who only passes its plan on cannot.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    assert support(Sharded(KASCADE, mesh, MeshAxes(heads="x")), PLAIN, CPU)
    for backend in (Wrapper(KASCADE), Sharded(Wrapper(KASCADE), mesh, MeshAxes(data="x"))):
        reasons = support(Sharded(backend, mesh, MeshAxes(heads="x")), PLAIN, CPU).reasons
        assert "selects in one layer what the next ones attend to" in reasons[0]
    ring = MeshAxes(context="x", exchange="ring")
    assert "cannot attend to a part of the keys" in support(Sharded(STANDARD, mesh, ring), PLAIN, CPU).reasons[0]


@pytest.mark.parametrize("name", LOADING)
def test_a_backend_has_the_methods_of_what_it_declares(name):
    backend, (target, mode) = registry.get(name), home(name)
    takes = backend.takes(target, mode)
    assert takes.parts == hasattr(backend, "part")
    assert takes.carries == hasattr(backend, "roles")


def test_a_ring_takes_no_array_that_it_would_drop():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    taking_all = Declared(dataclasses.replace(STANDARD.takes(CPU, "native"), parts=True))
    ring = Sharded(taking_all, mesh, MeshAxes(context="x", exchange="ring"))
    for changes in ({"has_mask": True}, {"has_bias": True}, {"return_log_sum_exp": True}, {"has_alibi": True}):
        assert support(Sharded(taking_all, mesh, MeshAxes(data="x")), varied(**changes), CPU)
        assert not support(ring, varied(**changes), CPU)
