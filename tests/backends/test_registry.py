import dataclasses
import json
import re
from pathlib import Path

import pytest

from attnsuite.backends import AttentionSpec, Layout, Target, support
from attnsuite.backends.registry import Registry
from attnsuite.backends.standard import STANDARD, Standard
from command import installed
from script import python

pytestmark = pytest.mark.newest

SPEC = AttentionSpec(batch=1, query_length=4, key_value_length=4, num_heads=1, num_kv_heads=1, head_dim=8)
OTHER = dataclasses.replace(Standard(), name="other")


def test_registered_backend_is_found_in_its_registry_alone_and_its_name_is_taken():
    registry = Registry()
    registry.register(OTHER)
    assert registry.get("other") is OTHER
    assert registry.names()[-1] == "other"
    assert "other" not in Registry().names()
    for taken in (OTHER, STANDARD):
        with pytest.raises(ValueError, match=f"a backend named '{taken.name}' is already registered"):
            registry.register(taken)


OLD = type("Old", (), {"name": "old", "exact": True, "plan": len, "supports": len})()  # an interface before takes


@pytest.mark.parametrize(
    ("thing", "needs"),
    [
        *((thing, "") for thing in (object(), "standard", len, OLD)),
        (Standard, r"to be an instance: Standard\(...\)"),
        (type("Bare", (), {"name": "bare", "exact": True}), r"to be an instance: Bare\(...\)"),
    ],
)
def test_what_is_no_backend_is_refused(thing, needs):
    with pytest.raises(TypeError, match=f"is not a backend; it needs {needs}"):
        Registry().register(thing)


GOOD = """
import dataclasses
from attnsuite.backends.standard import Standard

BACKEND = dataclasses.replace(Standard(), name="thirdparty")

def make():
    return dataclasses.replace(Standard(), name="made")

class Unhashable(dict):
    name, exact = "unhashable", True
    def takes(self, target, mode): ...
    def plan(self, spec, layout, **given): ...

class Needy:
    def __init__(self, device): ...
"""
# The class that docs/how-to/my-kernel.md shows, word for word, and the kernel that it imports.
DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "my-kernel.md"
KERNEL = """
import jax, jax.numpy as jnp

def my_kernel(query, key, value, mask):
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), value)
"""
ENTRY_POINTS = """[attnsuite.backends]
thirdparty = thirdparty_attention:BACKEND
made = thirdparty_attention:make
mine = my_package:Mine
missing = thirdparty_attention:NOWHERE
misnamed = thirdparty_attention:BACKEND
number = thirdparty_attention:__doc__
broken = broken_attention:BACKEND
quits = quitting_attention:BACKEND
leaves = leaving_attention:BACKEND
unhashable = thirdparty_attention:Unhashable
needy = thirdparty_attention:Needy
"""
BROKEN = {
    "broken": "AttributeError: jax.experimental.shard_map has no Specs",
    "quits": "ModuleNotFoundError: No module named 'no_such_dependency'",
    "leaves": "SystemExit: no licence found",
    "missing": "NOWHERE",
    "misnamed": "is not a backend named 'misnamed'",
    "number": "is not a backend named 'number'; it needs name, exact, plan(...), takes(...)",
    "unhashable": "it needs to be hashable, since models pass it as a static argument of jax.jit",
    "needy": "missing 1 required positional argument: 'device'",
}
# What somebody sees who has that package installed; one process for all tests, since each takes seconds to start.
SEEN = """
import json, sys
import jax.numpy as jnp
from attnsuite.backends import AttentionSpec, Target, attention, get, names, support

seen = {"names": names()}
spec = AttentionSpec(batch=1, query_length=4, key_value_length=4, num_heads=1, num_kv_heads=1, head_dim=8)
seen["reasons"] = {name: support(get(name), spec, Target("cpu")).reasons for name in sys.argv[1:]}
x = jnp.ones((1, 4, 2, 8))
seen["shapes"] = {
    name: attention(x, x, x, backend=name, on_unavailable="raise").shape for name in ("standard", "thirdparty", "made")
}
seen["refused by mine"] = support(get("mine"), spec, Target("tpu", "v5e")).reasons
print(json.dumps(seen))
"""


def class_of_the_docs(name="Mine:"):
    (example,) = (block for block in DOCS.read_text(encoding="utf-8").split("```python\n") if f"class {name}" in block)
    return example.partition("```")[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with an installed package, of which two modules work and three do not."""
    folder = installed(
        tmp_path_factory.mktemp("site"),
        ENTRY_POINTS,
        thirdparty_attention=GOOD,
        broken_attention="raise AttributeError('jax.experimental.shard_map has no Specs')\n",
        quitting_attention="import no_such_dependency\n",
        leaving_attention="raise SystemExit('no licence found')\n",
    )
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text(class_of_the_docs(), encoding="utf-8")
    (folder / "my_package" / "kernel.py").write_text(KERNEL, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def seen(site):
    done = python("-W", "error", "-c", SEEN, *BROKEN, first=site)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_installed_package_joins_by_its_entry_point_and_runs(seen):
    names = seen["names"]
    assert {"standard", "thirdparty", "made", "mine", *BROKEN} <= set(names)
    assert names[:2] == ["standard", "chunked"]
    assert seen["shapes"] == {name: [1, 4, 2, 8] for name in ("standard", "thirdparty", "made")}


def test_entry_point_may_name_a_class_as_the_docs_show_it(seen):
    """The class, its allow-list and its own condition are the docs' own example; the next test judges its results."""
    assert 'mine = "my_package:Mine"' in DOCS.read_text(encoding="utf-8")
    device, head_dim = seen["refused by mine"]
    assert device == "mine runs on CPUs and NVIDIA GPUs, not on tpu:v5e; use backend='chunked'."
    assert head_dim.startswith("head_dim=8 is not supported by mine (accepted: 64, 128); pad the head dimension")


def test_class_of_the_docs_holds_the_package_to_the_contract_in_its_own_repository(site, tmp_path):
    (tmp_path / "test_mine.py").write_text(class_of_the_docs("TestMine(Conformance)"), encoding="utf-8")
    asked = "refus or (oracle and (head-dim-64 or head-dim-128))"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", asked)
    done = python(*words, tmp_path, folder=tmp_path, first=site)
    # Three problems refused as declared, the declaration itself, an unknown option, and a result of each size.
    assert re.search(r"^\.{7} ", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("name", BROKEN)
def test_broken_package_becomes_a_reason_and_takes_nobody_down(seen, name):
    (said,) = seen["reasons"][name]
    assert BROKEN[name] in said
    assert "made-up" in said  # the distribution


def test_built_in_backend_that_does_not_load_says_why_and_leaves_the_others():
    registry = Registry(
        {"standard": "attnsuite.backends.standard:STANDARD", "gone": "attnsuite.backends.no_such_module:GONE"}
    )
    gone = registry.get("gone")
    found = support(gone, SPEC, Target("cpu"))
    assert "gone does not load here (ModuleNotFoundError" in found.reasons[0]
    with pytest.raises(ImportError, match="gone does not load here"):
        gone.plan(SPEC, Layout(), target=Target("cpu"))
    assert support(registry.get("standard"), SPEC, Target("cpu"))
