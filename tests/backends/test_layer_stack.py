"""Kascade in models of flax: each layer has its role and gets the selection of its anchor, in a list and in a scan."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from attnsuite import backends
from attnsuite.backends.kascade import manual
from landing import swept

LENGTH, TILE, HEADS, DIM = 256, 16, 2, 8
WIDTH = HEADS * DIM
# Layer 0 is dense and selects for layer 1; layer 2 selects for layer 3, whose heads are crossed.
SCHEDULE = manual((0, 2), num_layers=4, kv_heads=HEADS)
OPTIONS = {"schedule": SCHEDULE, "top_k": 0.1, "min_keys": 0, "tile_size": TILE, "query_tile": TILE}
HOW = {"is_causal": True, "needs_grad": False, "on_unavailable": "raise", "backend_options": OPTIONS}
X = jax.random.normal(jax.random.key(0), (1, LENGTH, WIDTH))


def attend_as(layer):
    return backends.attention_fn("kascade", layer=layer, **HOW)


class NnxBlock(nnx.Module):
    def __init__(self, attend, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=attend, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x)


def nnx_list(stack, attends):
    blocks = [NnxBlock(attend, nnx.Rngs(seed)) for seed, attend in enumerate(attends)]

    def model(x):
        for block in blocks:
            x = block(x)
        return x

    return lambda x: stack.run(model, x)


def nnx_scan(stack, attends):
    (attend,) = set(attends)
    blocks = [NnxBlock(attend, nnx.Rngs(seed)) for seed in range(4)]
    graph, _ = nnx.split(blocks[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(block) for block in blocks))
    return lambda x: stack.scan(lambda x, one: nnx.merge(graph, one)(x), x, stacked)


def linen_block(attend):
    return linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attend)


def linen_parameters():
    plain = linen.MultiHeadDotProductAttention(num_heads=HEADS)
    return [plain.init(jax.random.key(seed), X) for seed in range(4)]


def linen_list(stack, attends):
    def model(x):
        for parameters, attend in zip(linen_parameters(), attends, strict=True):
            x = x + linen_block(attend).apply(parameters, x)
        return x

    return lambda x: stack.run(model, x)


def linen_scan(stack, attends):
    (attend,) = set(attends)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *linen_parameters())
    return lambda x: stack.scan(lambda x, one: x + linen_block(attend).apply(one, x), x, stacked)


MODELS = {"nnx": nnx_list, "linen": linen_list, "nnx-scan": nnx_scan, "linen-scan": linen_scan}


def recorded(attend, seen):
    def recording(query, key, value, **keywords):
        out = attend(query, key, value, **keywords)
        jax.debug.callback(lambda *arrays: seen.append(arrays), query, key, value, out, ordered=True)
        return out

    return recording


@functools.cache
def calls_of(name):
    """Query, key, value and output of each layer's attention."""
    model, stack, seen = MODELS[name], backends.LayerStack(4), []
    if "scan" not in name:
        attends = [recorded(attend_as(stack[i]), seen) for i in range(4)]
    else:
        attends = [recorded(attend_as(stack), seen)] * 4
    jax.block_until_ready(jax.jit(model(stack, attends))(X))
    jax.effects_barrier()
    return seen


@functools.cache
def planned(name):
    """Outputs of the same calls by one plan, which hands the selection on by itself."""
    plan = plan_of()

    @jax.jit
    def outputs(calls):
        carry, outs = (), []
        for layer, (query, key, value, _) in enumerate(calls):
            out, carry = plan.run(query, key, value, layer=layer, carry=carry)
            outs.append(out)
        return outs

    return outputs(calls_of(name))


def plan_of(backend=None, **options):
    query = X.reshape(1, LENGTH, HEADS, DIM)
    spec = backends.make_spec(query, query, query, is_causal=True, needs_grad=False)
    backend = backends.get("kascade") if backend is None else backend
    return backends.plan(backend, spec, target=backends.Target.here(), options=OPTIONS | options)


@pytest.mark.parametrize("name", swept(MODELS, ("nnx-scan",)))
def test_each_layer_computes_its_role_with_its_anchors_selection(name):
    calls = calls_of(name)
    assert len(calls) == 4
    for layer, ((query, key, value, out), expected) in enumerate(zip(calls, planned(name), strict=True)):
        np.testing.assert_allclose(out, expected, atol=1e-5)
        dense = backends.attention(query, key, value, is_causal=True, backend="standard")
        assert (np.abs(out - dense).max() > 0.05) == (layer > 0), "only the first layer of this schedule is dense"


def test_the_selection_of_another_layer_is_not_the_same():
    """The control of the first test: a layer that got its own selection would not have passed."""
    calls = calls_of("nnx-scan")
    query, key, value, out = calls[1]
    own = {name: value for name, value in OPTIONS.items() if name != "schedule"}
    selected_itself = backends.attention(query, key, value, backend="kascade", **(HOW | {"backend_options": own}))
    assert np.abs(selected_itself - out).max() > 0.05


def test_a_compiled_pass_runs_again_with_other_numbers():
    def compiled():
        stack = backends.LayerStack(4)
        return jax.jit(nnx_list(stack, [attend_as(stack[i]) for i in range(4)]))

    run = compiled()
    assert (run(X) != run(2 * X)).any()
    np.testing.assert_allclose(run(2 * X), compiled()(2 * X), atol=1e-5)


def numbered(transformed):
    """A pass whose blocks each run inside of a transformation."""
    stack = backends.LayerStack(4)
    blocks = [NnxBlock(attend_as(stack[i]), nnx.Rngs(i)) for i in range(4)]

    def model(x):
        for block in blocks:
            x = transformed(block)(x)
        return x

    return jax.eval_shape(functools.partial(stack.run, model), X)


def of_stack(model, layers, *, order=None):
    """A pass of a stack of so many layers, whose blocks have these numbers, or those of their turns."""
    stack = backends.LayerStack(layers)
    if order is None:
        return jax.eval_shape(model(stack, [attend_as(stack)] * 4), X)
    numbered = {i: attend_as(stack[i]) for i in order}
    return jax.eval_shape(model(stack, [numbered[i] for i in order]), X)


def sharded():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    return backends.Sharded(backends.get("kascade"), mesh, backends.MeshAxes(data="batch"))


ONE = [X.reshape(1, LENGTH, HEADS, DIM)] * 3
# As layer 0, which schedules make dense, it would measure dense attention.
UNNUMBERED = {
    "a call": lambda: backends.attention(*ONE, **HOW, backend="kascade"),
    "a call with a fallback": lambda: backends.attention(
        *ONE, **HOW | {"on_unavailable": "fallback"}, backend="kascade"
    ),
    "a function for flax": lambda: backends.attention_fn("kascade", **HOW)(*ONE),
    "a plan": lambda: plan_of().run(*ONE),
    "a plan that decided to run dense": lambda: plan_of(min_keys=10_000).run(*ONE),
    "a sharded plan": lambda: plan_of(sharded()).run(*ONE),
}


ERRORS = {
    "a layer outside of a pass": (lambda: attend_as(backends.LayerStack(4)[0])(*ONE), "ran outside of its LayerStack"),
    "too few layers": (lambda: of_stack(nnx_list, 4, order=range(3)), "3 of the 4 layers of the stack ran"),
    "too many layers": (lambda: of_stack(nnx_list, 4, order=[0, 1, 2, 3, 3]), "a layer ran behind layer 3"),
    "a shuffled order": (lambda: of_stack(linen_list, 4, order=[0, 2, 1, 3]), "layer 2 ran where layer 1 was expected"),
    **{
        f"a schedule without a layer, {name}": (
            call,
            r"names no layer.*layer=i, carry=carry\).*stack = backends\.LayerStack\(num_layers\)",
        )
        for name, call in UNNUMBERED.items()
    },
    "a number without a stack": (
        lambda: backends.attention(X, X, X, layer=0),
        r"layer=0 is no layer of a LayerStack; make stack = .*layer=stack\[i\]",
    ),
    **{
        f"a schedule of another number of layers, {name}": (
            lambda model=model: of_stack(model, 6),
            r"LayerStack has 6 layers and the schedule 4|stacked holds \[4\]",
        )
        for name, model in (("list", nnx_list), ("scan", nnx_scan))
    },
    "jit within the pass": (lambda: numbered(jax.jit), "layer 0 runs inside of a transformation"),
    "checkpoint within the pass": (lambda: numbered(jax.checkpoint), "layer 0 runs inside of a transformation"),
    "no layers": (lambda: backends.LayerStack(0), "expected the number of layers"),
    "a block without attention": (lambda: backends.LayerStack(4).step(lambda x: x, X, layer=0), "called no attention"),
    "a numbered layer in a scan": (
        lambda: of_stack(nnx_scan, 4, order=[1] * 4),
        "layer 1 ran where layer 0 was expected",
    ),
    "a scan over another number of layers": (
        lambda: backends.LayerStack(3).scan(lambda x, _: x, X, jnp.ones((4, 2))),
        "stacked holds",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_what_is_no_pass_over_the_layers_of_the_stack_is_an_error(error):
    call, sentence = ERRORS[error]
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_number_that_the_stack_does_not_have_is_an_error():
    with pytest.raises(IndexError, match="layer 4 of a LayerStack of 4 layers"):
        backends.LayerStack(4)[4]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_a_copied_model_runs(copied):
    stack = backends.LayerStack(4)
    stack, attends = copied((stack, [attend_as(stack[i]) for i in range(4)]))
    assert jax.eval_shape(nnx_list(stack, attends), X).shape == X.shape
