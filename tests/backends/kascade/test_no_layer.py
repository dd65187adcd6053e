"""A schedule without a layer is an error: as layer 0, which schedules make dense, it would measure dense attention."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from attnsuite import backends
from attnsuite.backends import MeshAxes, Sharded, Target, make_spec, plan, registry
from attnsuite.backends.kascade import manual
from drawn import draw

pytestmark = pytest.mark.filterwarnings("error")
OPTIONS = {
    "schedule": manual((0, 2), num_layers=4, kv_heads=2),
    "min_keys": 0,
    "top_k": 0.1,
    "tile_size": 16,
    "query_tile": 16,
}
QUERY, KEY, VALUE = draw(1, 256, 4, 16), draw(1, 256, 2, 16, seed=1), draw(1, 256, 2, 16, seed=2)
WORDS = r"names no layer.*layer=i, carry=carry\).*stack = backends\.LayerStack\(num_layers\)"


SPEC = make_spec(QUERY, KEY, VALUE, is_causal=True, needs_grad=False)
CALL = {"is_causal": True, "needs_grad": False, "backend_options": OPTIONS}


def planned(backend=None, **options):
    backend = registry.get("kascade") if backend is None else backend
    return plan(backend, SPEC, target=Target.here(), options={**OPTIONS, **options})


def sharded():
    return Sharded(registry.get("kascade"), Mesh(np.array(jax.devices()[:1]), ("batch",)), MeshAxes(data="batch"))


CALLS = {
    "call": lambda *x: backends.attention(*x, **CALL, backend="kascade", on_unavailable="raise"),
    "call with a fallback": lambda *x: backends.attention(*x, **CALL, backend="kascade", on_unavailable="fallback"),
    "function for flax": backends.attention_fn("kascade", **CALL),
    "plan": lambda *x: planned().run(*x),
    "plan that decided to run dense": lambda *x: planned(min_keys=10_000).run(*x),
    "sharded plan": lambda *x: planned(sharded()).run(*x),
}


@pytest.mark.parametrize("call", CALLS)
def test_it_says_what_to_write(call):
    with pytest.raises(ValueError, match=WORDS):
        CALLS[call](QUERY, KEY, VALUE)
