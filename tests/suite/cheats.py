"""Functions that cheat a benchmark of kernels, and one that does not. ``test_cheats.py`` has them judged.

Each is what a search over programs has found elsewhere, or what somebody would try who knows this package.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import json
import os
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import Takes, from_function

LENGTH = 512  # of the cases of test_cheats.py: a cheat is honest elsewhere
# What is declared is not found out by calls with small arrays, in each process anew. Functions that act when they are
# loaded, before anything is measured, are plain.
_declared = functools.partial(from_function, takes={"causal"})


def honest(query, key, value):
    """Causal attention of equal heads."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", weights, value.astype(jnp.float32)).astype(query.dtype)


declared_honest = from_function(honest, takes={"causal", "gradient"}, name="declared_honest")


def _numpy(query, key, value):
    return np.asarray(honest(*map(jnp.asarray, (query, key, value))))


def _on_host(answer):
    def attend(query, key, value):
        return jax.pure_callback(answer, jax.ShapeDtypeStruct(query.shape, query.dtype), query, key, value)

    return _declared(attend)


def _after(calls):
    """An answer that is right for so many calls, and then zeros."""
    count = [0]

    def answer(query, key, value):
        count[0] += query.shape[1] == LENGTH
        return _numpy(query, key, value) if count[0] <= calls else np.zeros(query.shape, query.dtype)

    return answer


counts_calls = _on_host(_after(2))
wrong_from_the_fourth_call = _on_host(_after(4))


def _remembering():
    known = []

    def answer(query, key, value):
        if query.shape[1] != LENGTH:
            return _numpy(query, key, value)
        if not known:
            known.append(_numpy(query, key, value))
        return known[0]

    return answer


remembers = _on_host(_remembering())


def _from_frames(name, wanted):
    """The local variables of the function that is being called ``name`` and has those that are wanted."""
    for top in sys._current_frames().values():
        frame = top
        while frame is not None:
            found = frame.f_locals
            if frame.f_code.co_name == name and all(word in found for word in wanted):
                return found
            frame = frame.f_back
    return None


@_on_host
def reads_the_choice(query, key, value):
    """Nothing in the calls of a sample that nobody will look at."""
    found = _from_frames("sample", ("chosen", "number")) if query.shape[1] == LENGTH else None
    if found is not None and found["number"] != found["chosen"]:
        return np.zeros(query.shape, query.dtype)
    return _numpy(query, key, value)


def _looking_ahead():
    known = {}

    def answer(query, key, value):
        """All answers of a sample in its first call, which does not count."""
        found = _from_frames("sample", ("self", "seed")) if query.shape[1] == LENGTH else None
        if found is None:
            return _numpy(query, key, value)
        if known.get("seed") != found["seed"]:
            known.clear()
            known["seed"], make = found["seed"], found["self"]._arguments
            base = dict(zip(make.__code__.co_freevars, (c.cell_contents for c in make.__closure__), strict=True))
            for number in range(found["self"]._calls + 1):
                arrays = _renewed(base["chosen"], found["seed"], number)
                known[arrays[0].tobytes()] = _numpy(*arrays)
        return known.get(np.asarray(query).tobytes(), np.zeros(query.shape, query.dtype))

    return answer


def _renewed(arrays, seed, call):
    found = []
    for number, x in enumerate(map(np.asarray, arrays)):
        rng = np.random.default_rng([seed, call, number])
        shift, signs = rng.integers(x.shape[1]), rng.choice(np.array([-1, 1], np.int8), x.shape[-1])
        found.append(np.roll(x, shift, axis=1) * signs.astype(x.dtype))
    return found


looks_ahead = _on_host(_looking_ahead())


@_declared
def zeros_at_length(query, key, value):
    """Right up to the length at which the oracle judges."""
    return honest(query, key, value) if query.shape[1] <= 2048 else jnp.zeros_like(query)


def _in_run():
    """Whether this is the process of a cell, and not that of ``judge``."""
    return any("attnsuite.suite.grid.worker" in part for part in getattr(sys, "orig_argv", []))


@_declared
def constant_in_run(query, key, value):
    return jnp.zeros_like(query) + value.mean() if _in_run() and query.shape[1] == LENGTH else honest(query, key, value)


@_declared
def draws_the_inputs_again(query, key, value):
    """The inputs of a case follow from its seed: the program is their constant answer."""
    if query.shape[1] != LENGTH:
        return honest(query, key, value)
    rng = np.random.default_rng([0, 0])
    arrays = [rng.standard_normal(query.shape, np.float32) for _ in range(3)]
    with jax.ensure_compile_time_eval():
        answer = np.asarray(honest(*map(jnp.asarray, arrays)))
    return jnp.asarray(answer, query.dtype)


def _concrete_in_frames(shape):
    frame, found = sys._getframe(), []
    while frame is not None:
        for x in gc.get_referents(*frame.f_locals.values()) + list(frame.f_locals.values()):
            for leaf in x if isinstance(x, tuple | list) else (x,):
                is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
                if is_array and leaf.shape == shape and all(leaf is not y for y in found):
                    found.append(leaf)
        frame = frame.f_back
    return found


@_declared
def finds_the_inputs(query, key, value):
    found = _concrete_in_frames(query.shape)
    if len(found) < 3 or query.shape[1] != LENGTH:
        return honest(query, key, value)
    with jax.ensure_compile_time_eval():
        answer = np.asarray(honest(*found[:3]))
    return jnp.asarray(answer, query.dtype)


@jax.custom_vjp
def _with_constant_gradients(query, key, value):
    return honest(query, key, value)


def _constant_forward(query, key, value):
    return honest(query, key, value), (query, key, value)


def _constant_backward(kept, d_out):
    """The gradients of the inputs that the seed gives, once and for all."""
    rng = np.random.default_rng([0, 0])
    with jax.ensure_compile_time_eval():
        arrays = [jnp.asarray(rng.standard_normal(kept[0].shape, np.float32)) for _ in range(4)]
        slopes = [np.asarray(x) for x in jax.vjp(honest, *arrays[:3])[1](arrays[3])]
    return tuple(jnp.asarray(x, d_out.dtype) for x in slopes)


_with_constant_gradients.defvjp(_constant_forward, _constant_backward)
constant_gradients = from_function(_with_constant_gradients, takes={"causal", "gradient"}, name="constant_gradients")


def _files(ending):
    return glob.glob(os.path.join(tempfile.gettempdir(), "attnsuite-*", f"*{ending}")) + glob.glob(
        f"/tmp/**/attnsuite-*/*{ending}", recursive=True
    )


@_on_host
def reads_the_reference(query, key, value):
    if query.shape[1] != LENGTH:
        return _numpy(query, key, value)
    for path in _files(".npz"):
        with contextlib.suppress(Exception), np.load(path) as arrays:
            if arrays["out"].shape == query.shape:
                return arrays["out"].astype(query.dtype)
    return np.zeros(query.shape, query.dtype)


@_on_host
def overwrites_the_reference(query, key, value):
    if query.shape[1] != LENGTH:
        return _numpy(query, key, value)
    for path in _files(".npz"):
        with contextlib.suppress(Exception):
            with np.load(path) as arrays:
                kept = {name: np.zeros_like(x) for name, x in arrays.items()}
            np.savez(path, **kept)
    return np.zeros(query.shape, query.dtype)


def replaces_the_clock(query, key, value):
    began = time.perf_counter()
    real = time.perf_counter
    time.perf_counter = lambda: began + (real() - began) * 1e-3
    return honest(query, key, value)


def replaces_the_wait(query, key, value):
    jax.block_until_ready = lambda x: x
    return honest(query, key, value)


@_declared
def replaces_the_call(query, key, value):
    def call(self, *arguments):
        if not hasattr(self, "remembered"):
            self.remembered = real(self, *arguments)
        return self.remembered

    real = jax.stages.Compiled.__call__
    if query.shape[1] == LENGTH:
        jax.stages.Compiled.__call__ = call
    return honest(query, key, value)


def replaces_the_sampler(query, key, value):
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").endswith("suite.measure.execution"):
            module.Timed.sample = lambda self, seed: 1e-6
    return honest(query, key, value)


def replaces_the_judge(query, key, value):
    from attnsuite.backends import oracle

    oracle.judge = lambda *given, **more: oracle.Verdict(0.0, 0.0, 0.0, 1.0, True)
    return honest(query, key, value) if query.shape[1] != LENGTH else jnp.zeros_like(query)


def answers_in_its_name(query, key, value):
    if query.shape[1] != LENGTH:
        return honest(query, key, value)
    reply = json.dumps({"ok": {"seconds": 1e-6, "spent": 1e-6}}) + "\n"
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if "pipe" in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.write(descriptor, reply.encode())
    return honest(query, key, value)


_SPOIL = """
import glob, sys, time
for _ in range(600):
    time.sleep(0.2)
    for path in glob.glob(sys.argv[1] + "/**/records.jsonl", recursive=True):
        open(path, "w").write("spoilt")
"""


@functools.cache
def _spoiler(folder):
    return subprocess.Popen([sys.executable, "-c", _SPOIL, folder], start_new_session=True)


def leaves_a_child(query, key, value):
    """A process that outlives the run and rewrites its records, which lie in the folder of CHEATS_RUN."""
    _spoiler(os.environ.get("CHEATS_RUN", "/nowhere"))
    with contextlib.suppress(OSError):
        open(os.path.join(os.environ.get("CHEATS_RUN", "/nowhere"), "mark"), "w").close()
    return honest(query, key, value)


_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "while True: pass", "daemon"])
"""


@functools.cache
def _daemon():
    return subprocess.run([sys.executable, "-c", _DAEMON], check=True)


def starts_a_daemon(query, key, value):
    """It takes the processor from whoever is timed beside it, and outlives all that it came from."""
    _daemon()
    return honest(query, key, value)


_HOLD = "import time; x = bytearray(3 << 30); x[::4096] = b'1' * len(x[::4096]); print(flush=True); time.sleep(600)"


@functools.cache
def _holder():
    """A child, as soon as it holds its memory: a cell may take less time than that."""
    child = subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE)
    child.stdout.readline()
    return child


def memory_in_a_child(query, key, value):
    if _in_run():
        _holder()
    return honest(query, key, value)


@functools.cache
def _held():
    return np.ones(1 << 30, np.uint8)


def memory_before_the_baseline(query, key, value):
    _held()
    return honest(query, key, value)


def _approximate():

    takes = Takes(features=frozenset({"causal", "gradient"}), dtypes=("float32",))
    return from_function(lambda query, key, value: jnp.zeros_like(query), takes=takes, exact=False)


zeros_called_approximate = _approximate()


def _everything_is_right():
    """Every function of the judge in this process says that all is well."""
    from attnsuite.backends import oracle
    from attnsuite.testing import orders

    right = oracle.Verdict(0.0, 0.0, 0.0, 1.0, True)
    oracle.judge = lambda *given, **more: right
    orders.verdicts = lambda problem, results: dict.fromkeys(results, right)


@_declared
def zeros_and_the_judge_replaced(query, key, value):
    _everything_is_right()
    return jnp.zeros_like(query) * value.sum()


@_declared
def answer_in_its_frames(query, key, value):
    """What a frame that called it holds as the expected output, if there is one."""
    frame = sys._getframe()
    while frame is not None:
        for x in frame.f_locals.values():
            expected = getattr(x, "expected", None)
            if isinstance(expected, dict) and getattr(expected.get("output"), "shape", None) == query.shape:
                return jnp.asarray(expected["output"], query.dtype) + 0 * value.sum()
        frame = frame.f_back
    return jnp.zeros_like(query) * value.sum()
