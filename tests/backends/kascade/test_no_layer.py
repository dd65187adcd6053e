"""A schedule without a layer is an error: as layer 0, which schedules make dense, it would measure dense attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from attnsuite import backends
from attnsuite.backends import MeshAxes, Sharded, Target, make_spec, plan, registry
from attnsuite.backends.kascade import manual

pytestmark = pytest.mark.filterwarnings("error")
OPTIONS = {
    "schedule": manual((0, 2), num_layers=4, kv_heads=2),
    "min_keys": 0, "top_k": 0.1, "tile_size": 16, "query_tile": 16,
}  # fmt: skip
RNG = np.random.default_rng(0)
QUERY = jnp.asarray(RNG.standard_normal((1, 256, 4, 16)), jnp.float32)
KEY, VALUE = (jnp.asarray(RNG.standard_normal((1, 256, 2, 16)), jnp.float32) for _ in range(2))
WORDS = r"names no layer.*plan\.run\(query, key, value, layer=i, carry=carry\)"


def planned(**options):
    spec = make_spec(QUERY, KEY, VALUE, is_causal=True, needs_grad=False)
    return plan(registry.get("kascade"), spec, target=Target.here(), options={**OPTIONS, **options})


@pytest.mark.parametrize("on_unavailable", ["raise", "fallback"])
def test_a_call_says_what_to_write(on_unavailable):
    asked = {"backend": "kascade", "backend_options": OPTIONS, "on_unavailable": on_unavailable}
    with pytest.raises(ValueError, match=WORDS):
        backends.attention(QUERY, KEY, VALUE, is_causal=True, needs_grad=False, **asked)


def test_a_function_for_flax_says_what_to_write():
    attend = backends.attention_fn("kascade", is_causal=True, needs_grad=False, backend_options=OPTIONS)
    with pytest.raises(ValueError, match=WORDS):
        attend(QUERY, KEY, VALUE)


def test_a_plan_says_what_to_write_and_runs_where_a_layer_is_named():
    made = planned()
    with pytest.raises(ValueError, match=WORDS):
        made.run(QUERY, KEY, VALUE)
    dense, carry = made.run(QUERY, KEY, VALUE, layer=0)
    sparse, _ = made.run(QUERY, KEY, VALUE, layer=1, carry=carry)
    assert jnp.abs(dense - sparse).max() > 0.1


def test_a_plan_that_decided_to_run_dense_is_no_exception():
    with pytest.raises(ValueError, match=WORDS):
        planned(min_keys=10_000).run(QUERY, KEY, VALUE)


def test_a_sharded_plan_is_no_exception():
    sharded = Sharded(registry.get("kascade"), Mesh(np.array(jax.devices()[:1]), ("batch",)), MeshAxes(data="batch"))
    spec = make_spec(QUERY, KEY, VALUE, is_causal=True, needs_grad=False)
    made = plan(sharded, spec, target=Target.here(), options=OPTIONS)
    with pytest.raises(ValueError, match=WORDS):
        made.run(QUERY, KEY, VALUE)


def test_without_a_schedule_a_single_call_selects_for_itself():
    options = {name: value for name, value in OPTIONS.items() if name != "schedule"}
    out = backends.attention(
        QUERY, KEY, VALUE, is_causal=True, needs_grad=False, backend="kascade", backend_options=options
    )
    assert jnp.abs(out - backends.attention(QUERY, KEY, VALUE, is_causal=True)).max() > 0.1
