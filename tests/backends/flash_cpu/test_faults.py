"""What goes wrong around the kernels becomes a reason, an error of XLA's, or nothing at all; never a wrong number."""

import dataclasses
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import AttentionSpec, Layout, Target, make_spec, plan, registry, resolve
from attnsuite.backends.flash_cpu import (
    availability,
    backward,
    backward_buffers,
    calls,
    compiler,
    forward,
    object_cache,
    targets,
)
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.backends.flash_cpu.visibility import visibility
from declared import sized
from drawn import draw
from emitted import set_apart
from script import run

ISA = compiler.Processor.here().isa().of("float32")
SPEC = sized(70, K=1, H=16, is_causal=True)


def _inputs():
    return draw(1, 70, 2, 16), draw(1, 70, 1, 16, seed=1), draw(1, 70, 1, 16, seed=2)


# What every process below computes, and how it shows it.
PRELUDE = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np
from attnsuite import backends
def digest(x):
    return hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((2, 300, n, 16)).astype(np.float32)) for n in (4, 2, 2))
def attend(q, k, v):
    return backends.attention(q, k, v, is_causal=True, backend="flash_cpu", on_unavailable="raise")
"""


def test_without_llvmlite_chunked_runs_and_the_reason_names_the_extra():
    done = run("""
import sys
sys.modules["llvmlite"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "llvmlite" else found(name, *rest)
from attnsuite import backends
spec = backends.AttentionSpec(batch=1, query_length=64, key_value_length=64, num_heads=1, num_kv_heads=1, head_dim=16)
resolution = backends.resolve("auto", spec)
print(resolution.backend.name, *resolution.reasons)
""")
    assert done.stdout.startswith("chunked flash_cpu: "), done.stderr
    assert "it comes with this package on Linux" in done.stdout


@pytest.fixture
def asked_anew():
    """Whether the kernels work here is asked in the test, and again after it."""
    availability.why_not.cache_clear()
    yield
    availability.why_not.cache_clear()


OLD = Processor("x86_64-unknown-linux-gnu", "core2", (("sse4.1", True),))


@pytest.mark.parametrize(
    ("where", "name", "wrong", "words"),
    [
        (targets, "api_version", lambda: (1, 0), "version 1.0"),
        (Processor, "here", staticmethod(lambda: OLD), "core2 has none of them"),
        (availability, "_run", lambda _: "flash_cpu's self-test failed on this machine.", "self-test failed"),
    ],
    ids=["another major version of the FFI", "an old processor", "a self-test that fails"],
)
def test_kernels_that_cannot_work_here_are_refused_with_a_sentence(
    where, name, wrong, words, monkeypatch, tmp_path, asked_anew
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(where, name, wrong)
    resolution = resolve("auto", SPEC)
    assert resolution.backend.name == "chunked"
    (reason,) = (reason for reason in resolution.reasons if words in reason)
    assert reason.endswith(".")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        ("elements._EXP2 = elements._EXP2_FRACTION = (*elements._EXP2[:-1], 1.001)", "float32"),
        pytest.param(
            "pairs = elements.pairs; elements.pairs = softmax.pairs = lambda e, low, high: pairs(e, high, low)",
            "bfloat16",
            marks=pytest.mark.skipif(
                not any(isa.multiplies_bfloat16 for isa in Processor.here().isas()),
                reason="this processor does not multiply bfloat16",
            ),
        ),
    ],
)
def test_self_test_fails_where_a_kernel_is_wrong(fault, dtype):
    multiplies = (isa.name for isa in Processor.here().isas() if isa.multiplies_bfloat16 or dtype == "float32")
    done = run(f"""
from attnsuite.backends.flash_cpu import softmax
softmax._LAZY = -1e30
from attnsuite.backends.flash_cpu import elements, object_cache
object_cache.read = lambda key: None
object_cache.write = lambda key, content: None
{fault}
from attnsuite.backends.flash_cpu import self_test
self_test.main({next(multiplies)!r})
""")
    assert done.returncode != 0
    assert f"in {dtype} is not what the oracle says" in done.stderr


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """The file of the key ``key`` in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    object_cache.write("key", b"content of an object file")
    assert object_cache.read("key") == b"content of an object file"
    return object_cache.directory() / "key.o"


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda _: b"", lambda _: b"foreign"]
)
def test_damaged_cache_file_or_one_of_another_key_counts_as_absent(cached, damage):
    cached.with_name("two.o").write_bytes(cached.read_bytes())
    assert object_cache.read("two") is None
    cached.write_bytes(damage(cached.read_bytes()))
    assert object_cache.read("key") is None
    object_cache.write("key", b"content of an object file")
    assert object_cache.read("key") == b"content of an object file"


@pytest.mark.parametrize("which", ["directory", "file"])
@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(lambda path: path.chmod(path.stat().st_mode | 0o020), id="group"),
        pytest.param(lambda path: path.chmod(path.stat().st_mode | 0o002), id="all"),
        pytest.param(
            lambda path: os.chown(path, 12345, -1),
            id="owner",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away"),
        ),
    ],
)
def test_code_that_others_may_write_is_not_run(cached, which, shared):
    shared(cached.parent if which == "directory" else cached)
    assert object_cache.read("key") is None
    if which == "directory":
        with pytest.warns(RuntimeWarning, match="Run chmod 700 on it if it is yours, or set XDG_CACHE_HOME"):
            object_cache.write("other", b"content")
        assert not cached.with_name("other.o").exists()


def test_cache_is_for_the_user_alone_whatever_the_umask(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        object_cache.write("key", b"content")
    finally:
        os.umask(before)
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (object_cache.directory(), object_cache.directory() / "key.o")
    ]
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize("home", ["file", None])
def test_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path, homeless, home):
    if home is not None:
        (tmp_path / home).write_text("not a directory")
        monkeypatch.setenv("HOME", str(tmp_path / home))
    object_cache.write("key", b"content")
    assert object_cache.read("key") is None


@pytest.mark.thorough
def test_several_processes_with_one_empty_cache_agree(tmp_path):
    script = PRELUDE + "print(digest(attend(q, k, v)))"
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda _: run(script, XDG_CACHE_HOME=str(tmp_path)), range(2)))
    assert len({done.stdout for done in results}) == 1
    assert all(done.returncode == 0 for done in results), results[0].stderr
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_a_key_stands_for_is_all_that_the_code_depends_on(monkeypatch):
    kernel = calls.Calls(SPEC, ISA).kernel
    here = compiler.Processor.here()
    keys = [targets.cache_key("forward", kernel, ISA, here), targets.cache_key("backward", kernel, ISA, here)]
    keys.append(targets.cache_key("forward", kernel, ISA, compiler.Processor(here.triple, "another", here.features)))
    version = targets.metadata.version
    for package in ("llvmlite", "jaxlib"):
        with monkeypatch.context() as patched:
            patched.setattr(
                targets.metadata, "version", lambda name, old=package: "0.0.1" if name == old else version(name)
            )
            keys.append(targets.cache_key("forward", kernel, ISA, here))
    with monkeypatch.context() as patched:
        patched.setattr(targets, "generator_digest", lambda: "another")
        keys.append(targets.cache_key("forward", kernel, ISA, here))
    assert len(set(keys)) == len(keys)


def _forward_with(change):
    """The forward kernel, called with its operands and results changed."""
    call = calls.Calls(SPEC, ISA)
    name = targets.target("forward", call.kernel, ISA).name
    results = [jax.ShapeDtypeStruct((1, 70, 2, 16), jnp.float32), *[jax.ShapeDtypeStruct((1, 70, 2), jnp.float32)] * 2]
    results.append(jax.ShapeDtypeStruct((2**22,), jnp.uint8))
    arguments = [*_inputs(), *map(jnp.asarray, visibility(SPEC, Layout()).by_name.values()), jnp.asarray(call.numbers)]
    arguments.append(jnp.zeros((1, call._heads_per_stage())))
    change(arguments, results)
    return jax.block_until_ready(jax.ffi.ffi_call(name, results)(*arguments))


def _set(which, index, value):
    def change(arguments, results):
        {"arguments": arguments, "results": results}[which][index] = value

    return change


def test_unchanged_operands_are_taken():
    out = _forward_with(lambda *_: None)[0]
    expected = plan(registry.get("standard"), SPEC, target=Target.here()).run(*_inputs())[0]
    np.testing.assert_allclose(out, expected, atol=1e-5)


FLOAT = jnp.float32
WRONG = {
    "value is not": _set("arguments", 1, jnp.zeros((1, 71, 1, 16))),
    "key is not": _set("arguments", 1, jnp.zeros((1, 70, 1, 17))),
    "query is not float32": _set("arguments", 0, jnp.zeros((1, 70, 2, 16), jnp.bfloat16)),
    "first is not": _set("arguments", 3, jnp.zeros((1, 69), jnp.int32)),
    "position has fewer": _set("arguments", 6, jnp.zeros(70, jnp.int32)[0]),
    "rows do not divide": lambda arguments, _: arguments.__setitem__(slice(3, 8), [jnp.zeros((3, 70), jnp.int32)] * 5),
    "multiple of the KV heads": lambda arguments, _: arguments.__setitem__(
        slice(1, 3), [jnp.zeros((1, 70, 3, 16))] * 2
    ),
    "divides the work is empty": _set("arguments", 9, jnp.zeros((1, 0))),
    "number of operands": lambda arguments, _: arguments.pop(),
    "out is not": _set("results", 0, jax.ShapeDtypeStruct((1, 70, 2, 15), FLOAT)),
    "scratch memory is smaller": _set("results", 3, jax.ShapeDtypeStruct((1000,), jnp.uint8)),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_operands_that_do_not_fit_are_an_error_of_xla(sentence):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"flash_cpu: .*{sentence}"):
        _forward_with(WRONG[sentence])


def test_allocation_that_fails_is_an_error_of_xla():
    """XLA allocates the scratch memory: a size that no machine has is refused by XLA, and the process goes on."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)memory|alloc|RESOURCE_EXHAUSTED"):
        _forward_with(_set("results", 3, jax.ShapeDtypeStruct((2**50,), jnp.uint8)))
    test_unchanged_operands_are_taken()


def test_threads_may_call_at_once():
    q, k, v = _inputs()
    spec = make_spec(q, k, v, is_causal=True)
    planned = plan(registry.get("flash_cpu"), spec, target=Target.here())
    layers = jax.jit(lambda q: [planned.run(q + i, k, v)[0] for i in range(4)])
    expected = [np.asarray(x) for x in layers(q)]
    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(lambda _: layers(q), range(120)):
            for x, right in zip(found, expected, strict=True):
                np.testing.assert_array_equal(x, right)


def test_threads_may_compile_one_kernel_at_once():
    spec = AttentionSpec(batch=1, query_length=5, key_value_length=5, num_heads=1, num_kv_heads=1, head_dim=13)
    kernel = calls.Calls(spec, ISA).kernel
    with ThreadPoolExecutor(4) as pool:
        names = set(pool.map(lambda _: targets.target("forward", kernel, ISA).name, range(4)))
    assert len(names) == 1


@pytest.mark.parametrize("heads_per_stage", [1, 3])
def test_number_of_stages_changes_no_bit_of_the_forward_pass(heads_per_stage, monkeypatch):
    """Ten KV heads of two sequences, whose documents differ; three heads leave a last group of one."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((2, 130, n, 16)).astype(np.float32)) for n in (10, 5, 5))
    value = value.at[1, 40, 3, 2].set(np.nan)
    ids = np.stack([np.repeat([0, 1, 2], [50, 60, 20]), np.repeat([3, 4, -1], [20, 90, 20])]).astype(np.int32)
    layout = Layout(query_segment_ids=ids, key_value_segment_ids=ids)
    spec = dataclasses.replace(make_spec(query, key, value, is_causal=True), has_segment_ids=True)
    seen = visibility(spec, layout)
    expected = calls.Calls(spec, ISA).forward(query, key, value, seen)
    monkeypatch.setattr(calls.Calls, "_heads_per_stage", lambda _: heads_per_stage)
    for threads in (1, 4):
        found = calls.Calls(spec, ISA, threads=threads).forward(query, key, value, seen)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_number_of_panels_changes_no_bit_of_the_gradients(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    query, d_out, key, value = (
        jnp.asarray(rng.standard_normal((1, 120, n, 16)).astype(np.float32)) for n in (2, 2, 1, 1)
    )
    spec = make_spec(query, key, value, is_causal=True)

    def gradients():
        seen, found = visibility(spec, Layout()), []
        for threads in (1, 2):  # 2: the head's key blocks are in two parts
            call = calls.Calls(spec, ISA, threads=threads)
            found += call.backward(query, key, value, seen, *call.forward(query, key, value, seen), d_out, None)
        return found

    expected = gradients()
    set_apart(monkeypatch, tmp_path, "panels of two tiles")
    monkeypatch.setattr(backward_buffers, "PANEL_TILES", 2)
    for x, y in zip(gradients(), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_scratch_memory_of_a_forward_pass_has_room_for_two_groups_of_heads():
    spec = dataclasses.replace(SPEC, batch=1, query_length=4096, key_value_length=4096, num_heads=64, num_kv_heads=64)
    assert calls.Calls(spec, ISA, threads=2)._heads_per_stage() == 1
    blocks = forward.packed(ISA, calls.Calls(spec, ISA).kernel)
    sizes = {heads: blocks.shared_bytes({"B": 1, "S": 4096, "K": heads, "C": 1, "P": 1}) for heads in (1, 2, 64)}
    assert sizes[1] < sizes[2] == sizes[64]


def test_scratch_memory_of_a_backward_pass_does_not_grow_with_the_queries():
    kernel = calls.Calls(SPEC, ISA).kernel
    rows = backward_buffers.PANEL_TILES * backward_buffers.Buffers(ISA, kernel).rows
    dims = {"B": 1, "S": 4096, "N": 8, "K": 2, "C": 1, "P": 1}
    memory = backward.signature(ISA, kernel)
    few, many = (memory.scratch_bytes({**dims, "T": tokens}, 1) for tokens in (rows, 16 * rows))
    assert few == many


def test_fork_leaves_the_parents_kernels_as_they_were():
    """A child that XLA's threads did not follow into computes nothing; the parent goes on."""
    done = run(
        PRELUDE
        + """
import os, warnings
warnings.simplefilter("ignore")
before = digest(attend(q, k, v))
child = os.fork()
if child == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert digest(attend(q, k, v)) == before
print("same")
"""
    )
    assert done.stdout == "same\n", done.stderr
