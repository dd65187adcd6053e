"""The attention calls of a step are found with their counts and places, and nothing is left changed."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

from attnsuite import backends
from attnsuite.backends.contract import AttentionSpec, Plan
from attnsuite.models import ModelConfig
from attnsuite.models.parameters import initialise
from attnsuite.models.planning import resolve_attention
from attnsuite.models.training import Batch, training_step
from attnsuite.suite import step_time
from attnsuite.suite.harvest_suite import NOT_IN_A_CASE, problems_of, to_toml
from attnsuite.suite.statistics import Interval
from attnsuite.suite.suites import find_suite
from attnsuite.suite.traced_calls import Harvest, harvest, traced
from command import code_of

HERE = "test_harvest.py"


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=32, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x, is_causal=True)  # here nnx attends


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(NnxBlock.__call__)(block, x)
        return x


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        layer = linen.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.1, deterministic=False)
        return x + layer(x, mask=mask, dropout_rng=jax.random.key(0)), None  # here linen attends


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        layers = linen.scan(
            linen.remat(LinenLayer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
            in_axes=linen.broadcast,
        )
        return layers()(x, linen.make_causal_mask(x[..., 0]))[0]


def place_of(comment):
    lines = inspect.getsource(inspect.getmodule(place_of)).splitlines()
    return f"{HERE}:{next(i for i, line in enumerate(lines, 1) if line.endswith(comment))}"


def functions_as_they_are():
    functions = (jax.nn.dot_product_attention, nnx.dot_product_attention, linen.dot_product_attention)
    return [
        Plan.run,
        *((f.__code__, f.__defaults__, f.__kwdefaults__, inspect.signature(f), f.__dict__.copy()) for f in functions),
    ]


def test_training_step_of_nnx_layers_with_remat_counts_each_layer_once():
    model = nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(NnxModel(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param))

    @nnx.jit
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: model(x).sum())(model)
        optimizer.update(model, gradients)
        return loss

    (row,) = problems_of(traced(step, model, optimizer, shaped(2, 16, 32)))
    assert (row.count, row.sentences) == (3, ())
    assert row.case.name == "forward-backward-s16-h2k2-d16-b2-f32"
    assert [
        place.endswith(f"{place_of('# here nnx attends')} (flax.nnx.dot_product_attention)") for place in row.call_sites
    ]


def test_scanned_layers_of_linen_count_as_often_as_they_run_and_mask_and_dropout_are_told():
    model = LinenModel()
    params = jax.eval_shape(model.init, jax.random.key(0), shaped(2, 16, 32))
    step = jax.jit(jax.value_and_grad(lambda params, x: model.apply(params, x).sum()))
    (row,) = problems_of(traced(step, params, shaped(2, 16, 32)))
    (place,) = row.call_sites
    assert row.count == 4
    assert row.case.name == "forward-backward-s16-h2k2-d16-b2-full-f32"
    assert place_of("# here linen attends") in place
    assert [sentence.split(" (")[0] for sentence in row.sentences] == [
        "a mask array",
        "dropout of 0.1 on the attention weights",
    ]


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_training_step_of_a_model_counts_its_layers_in_each_part_of_the_batch(remat):
    config = ModelConfig.from_preset("debug")
    found = resolve_attention(config, batch=2, query_length=32, needs_grad=True, backend="chunked")
    step = training_step(config, found, optax.sgd(0.1), remat=remat)
    params = jax.eval_shape(lambda key: initialise(config, key), jax.random.key(0))
    state = jax.eval_shape(optax.sgd(0.1).init, params)
    (row,) = problems_of(traced(step, params, state, Batch(shaped(3, 2, 32, dtype=jnp.int32)), None))
    assert row.count == 3 * config.num_layers
    assert row.case.kind == "op_forward_backward"
    assert (row.case.batch, row.case.sequence, row.case.heads) == (2, 32, config.num_heads)
    assert all("models/" in place for place in row.call_sites)


def test_jitted_layer_counts_each_time_it_is_called_and_vmap_multiplies_the_batch():
    @jax.jit
    def layer(x):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, local_window_size=(3, 0))

    def step(x, times):
        for _ in range(times):
            x = layer(x)
        across = jax.vmap(lambda x: jax.nn.dot_product_attention(x, x[:3], x[:3]))(x)
        return across, jax.lax.fori_loop(0, 5, lambda _, x: jax.vmap(layer)(jnp.stack([x, x, x]))[0], x)

    windowed, wide, across = problems_of(traced(step, shaped(4, 8, 2, 16, dtype=jnp.bfloat16), 2))
    assert (windowed.count, windowed.case.name) == (2, "forward-s8-h2k2-d16-b4-sliding4-bf16")
    assert (wide.count, wide.case.name) == (5, "forward-s8-h2k2-d16-b12-sliding4-bf16")
    assert (across.count, across.case) == (1, None)
    assert across.sentences == ("8 queries and 3 keys: a case has as many queries as keys, or one query.",)


def test_a_while_loop_and_a_condition_say_that_their_calls_count_once():
    def step(x):
        attend = jax.nn.dot_product_attention
        last = jax.lax.while_loop(lambda x: x.sum() < 5, lambda x: attend(x, x, x), x)
        return last, jax.lax.cond(x.sum() > 0, lambda: attend(x, x, x, is_causal=True), lambda: x)

    rows = problems_of(traced(step, shaped(1, 8, 2, 16)))
    assert [(row.count, row.sentences) for row in rows] == [
        (1, ("how often its while loop runs (counted once)",)),
        (1, ("which branch of its condition runs (each is counted once)",)),
    ]


def test_call_through_this_package_says_decode_steps_and_what_no_case_has():
    def step(q, k, ids, lengths):
        packed = backends.attention(
            k, k, k, query_segment_ids=ids, key_value_segment_ids=ids, scale=0.5, backend="standard"
        )
        at = jnp.full((1, 1), 7)
        kept = {"is_causal": True, "key_value_seq_lengths": lengths, "backend": "standard"}
        half = k[:, :4]
        computed = jax.nn.dot_product_attention(half, half, half, scale=1 / jnp.sqrt(k.shape[-1]))
        return packed, backends.attention(q, k, k, query_positions=at, **kept), computed

    integers = (shaped(1, 8, dtype=jnp.int32), shaped(1, dtype=jnp.int32))
    packed, computed, decode = problems_of(traced(step, shaped(1, 1, 4, 16), shaped(1, 8, 2, 16), *integers))
    assert packed.sentences == (
        "scale = 0.5",
        "segment ids (set documents to the number of documents in a sequence)",
    )
    assert decode.case.name == "decode-s8-h4k2-d16-f32"
    assert decode.sentences == ("lengths of the keys (the case attends to all 8)",)
    assert computed.sentences == ("a scale that the program computes",)


def test_every_array_that_a_call_may_bring_and_no_case_has_is_told_in_words():
    brought = {field.name for field in dataclasses.fields(AttentionSpec) if field.name.startswith("has_")}
    assert brought <= set(NOT_IN_A_CASE)


def test_everything_is_as_it_was_after_the_block_also_after_an_exception():
    before = functions_as_they_are()
    x = shaped(1, 4, 2, 8)
    with contextlib.suppress(ZeroDivisionError), harvest() as found:
        assert functions_as_they_are() != before
        with pytest.raises(RuntimeError, match="a harvest is open already"), harvest():
            pass
        jax.eval_shape(jax.nn.dot_product_attention, x, x, x)
        raise ZeroDivisionError
    assert functions_as_they_are() == before
    jax.eval_shape(jax.nn.dot_product_attention, x, x, x)
    assert len(found.calls) == 1


def test_block_computes_what_it_always_computes_and_leaves_no_marker_in_a_compiled_step():
    step = jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True))
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    expected = step(x)
    with harvest() as found:
        inside = step(x)  # compiled before, and found all the same
        assert "attention_call" in str(jax.make_jaxpr(step)(x))
    assert (inside == expected).all()
    assert [row.count for row in problems_of(found)] == [1]
    assert "attention_call" not in str(jax.make_jaxpr(step)(x))


def test_other_threads_are_not_collected():
    x = jnp.ones((1, 4, 2, 8))
    with harvest() as found:
        thread = threading.Thread(target=jax.nn.dot_product_attention, args=(x, x, x))
        thread.start()
        thread.join()
    assert found.calls == []


SCRIPT = """
import flax.linen, jax, jax.numpy as jnp

def step(x, y):
    a = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    return a, jax.nn.dot_product_attention(y, y, y), jax.nn.dot_product_attention(x[:, :2], x, x)

def fn():
    print("what a script prints is no line of the suite file")
    shape = jax.ShapeDtypeStruct((1, 8, 4, 16), jnp.float32)
    return step, (shape, jax.ShapeDtypeStruct((1, 8, 4, 16), jnp.bfloat16))

def method():
    model, x = flax.linen.MultiHeadDotProductAttention(2), jnp.ones((1, 8, 16))
    return model.apply, (jax.eval_shape(model.init, jax.random.key(0), x), x)

def nothing():
    return jnp.sin, (1.0,)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def finished(capsys, *words):
    code = code_of("harvest", *words)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_command_writes_a_suite_file_that_runs_take(script, capsys):
    code, out, err = finished(capsys, "train.py:fn", "--out", "mine.toml")
    assert (code, out) == (0, "suite: mine.toml\n")
    assert "left out: 2 queries and 8 keys" in err
    suite = find_suite("mine.toml")
    assert [case.name for case in suite.cases] == ["forward-s8-h4k4-d16-f32", "forward-s8-h4k4-d16-full-bf16"]
    code, out, _ = finished(capsys, "train.py:fn")
    assert code == 0
    assert Path("mine.toml").read_text() == out
    assert "# The attention calls of train.py:fn: 3 calls, 3 problems.\n" in out
    assert "# 1 call: train.py:5 (jax.nn.dot_product_attention)\n" in out
    Path("elsewhere").mkdir()
    Path("moving.py").write_text(f"import os\n{SCRIPT}\nos.chdir('elsewhere')\n")
    assert finished(capsys, "moving.py:fn", "--out", "again.toml")[0] == 0
    os.chdir("..")
    assert Path("again.toml").is_file()
    _, out, _ = finished(capsys, "train.py:method")
    assert "# 1 call: the step itself (flax.linen.dot_product_attention)\n" in out


def test_step_without_an_attention_call_gives_no_suite(script, capsys):
    code, out, err = finished(capsys, "train.py:nothing")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no attention call was found" in err


def test_places_of_one_problem_are_told_with_their_counts():
    def step(x):
        first = jax.nn.dot_product_attention(x, x, x)
        return jax.nn.dot_product_attention(first, x, x) + jax.nn.dot_product_attention(x, first, x)

    text = to_toml(problems_of(traced(step, shaped(1, 8, 2, 16))), "a step")
    assert text.count("[[case]]") == 1
    assert "# 3 calls: " in text
    assert "(jax.nn.dot_product_attention) x 1, " in text
    assert "(jax.nn.dot_product_attention) x 2\n" in text


TIMED = """
import jax, jax.numpy as jnp
x = jnp.ones((1, 512, 4, 32))

def attend(q, k, v, w):
    out = jax.nn.dot_product_attention(q @ w, k, v, is_causal=True)
    return (out + jax.nn.dot_product_attention(q, k, v, query_seq_lengths=jnp.array([300]))).sum()

def fn():
    def step(q, k, v, w):
        return jax.grad(attend, argnums=3)(q, k, v, w), 2 * q
    return jax.jit(step, donate_argnums=0), (x, x, x, jnp.ones((32, 32)))

def shapes():
    return attend, (jax.ShapeDtypeStruct(x.shape, x.dtype), x, x, jnp.ones((32, 32)))
"""


@pytest.mark.parametrize(("low", "value", "high", "gain"), [(0.88, 1.05, 1.14, False), (0.7, 0.8, 0.9, True)])
def test_a_time_that_may_be_no_less_is_called_no_gain(low, value, high, gain):
    times = step_time.StepTimes(Interval(1.0, None, None, 1), None, Interval(value, low, high, 8), {})
    said = [line for line in step_time.sentences(Harvest(), times) if line.startswith("with auto")]
    ending = "" if gain else ", which is no gain"
    assert said == [f"with auto it takes {value:.2f} of that time ({low:.2f} to {high:.2f}){ending}."]


def test_what_auto_takes_is_told_of_each_problem_of_a_place(monkeypatch):
    def taken(_, spec, target):
        return backends.resolve("standard" if spec.query_length == 8 else "chunked", spec, target)

    monkeypatch.setattr(step_time, "resolve", taken)
    arrays = [shaped(1, length, 2, 16) for length in (8, 32, 8)]
    found = traced(lambda *arrays: [jax.nn.dot_product_attention(x, x, x) for x in arrays], *arrays)
    times = step_time.StepTimes(Interval(1.0, None, None, 1), None, None, {})
    said = [re.findall("auto takes ([a-z]+)", line) for line in step_time.sentences(found, times)]
    assert said == [[], ["standard"], ["chunked"]]


def test_a_step_is_timed_as_it_is_without_attention_and_with_auto(tmp_path, monkeypatch, capsys):
    """Its arrays are donated, so each run has its own; a call that auto does not have stays, and says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "timed.py").write_text(TIMED)
    code_of("harvest", "timed.py:fn", "--time")
    out, err = capsys.readouterr()
    assert not [line for line in err.splitlines() if line.startswith("attnsuite:")], err
    assert re.search(r"the step takes [\d.]+ .*[mu]?s on this machine", out)
    assert re.search(r"attention is -?\d+%", out)
    assert re.search(r"with auto it takes \d+\.\d\d of that time", out)
    assert "timed.py:6 runs XLA's formula of jax.nn; auto takes" in out
    assert "timed.py:7 stays as it is: it asks for lengths of the queries." in out
    code_of("harvest", "timed.py:shapes", "--time")
    assert "the step was not timed" in capsys.readouterr().err


def test_what_runs_instead_of_attention_is_auto_and_what_runs_without_it_is_not():
    """The control: the outputs of the three ways."""
    arrays = [jax.random.normal(key, (1, 64, 2, 16)) for key in jax.random.split(jax.random.key(0), 3)]
    step = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    unchanged = {}
    right = step(*arrays)
    with harvest(Harvest(lambda *given: step_time._with_auto(*given, unchanged))) as found:
        replaced = step(*arrays)
    with harvest(Harvest(step_time._without)):
        without = step(*arrays)
    assert not unchanged
    assert found.calls
    assert 0 < float(jnp.abs(replaced - right).max()) < 1e-5  # other rounding: another backend ran
    assert float(jnp.abs(without - right).max()) > 0.1
    assert (step(*arrays) == right).all()


def test_a_mask_of_fewer_axes_than_four_is_taken_as_flax_does():
    x, unchanged = jax.random.normal(jax.random.key(0), (2, 32, 2, 16)), {}
    mask = jnp.tril(jnp.ones((32, 32)))
    right = nnx.dot_product_attention(x, x, x, mask=mask)
    with harvest(Harvest(lambda *given: step_time._with_auto(*given, unchanged))):
        replaced = nnx.dot_product_attention(x, x, x, mask=mask)
    assert not unchanged
    assert jnp.allclose(replaced, right, atol=1e-5)


def test_a_step_that_returns_nothing_is_timed_until_what_it_wrote_is_there(monkeypatch):
    """An nnx step changes the model that it gets; what it returned would be waited for in no time."""
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.extend)
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(layer):
        layer.bias[...] += 1

    step_time._seconds(step, (layer,))
    assert any(x.shape == (4,) and (x == 1).all() for x in waited)
