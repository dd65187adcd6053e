"""`attnsuite compile` without a compiler for other devices: what is asked, judged and searched."""

from __future__ import annotations

import dataclasses
from importlib import util

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

from attnsuite.backends import FEATURES, Takes, Target, registry
from attnsuite.backends.tunable import KernelBuild
from attnsuite.suite import compile_run
from attnsuite.suite.cell import Outcome
from attnsuite.suite.compile import compilation as compile_cell
from attnsuite.suite.compile import slices, topologies
from attnsuite.suite.compile.programs import (
    attention_specs,
    model_program,
    op_program,
    resolutions,
    role_program,
)
from attnsuite.suite.compile_run import SEARCH_BATCHES, SEARCH_LENGTHS, SEARCH_STEPS, CompileGrid, longest
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.kinds.attention_call import op_program as measured_program
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.measure.program import Program
from landing import swept

V5E, H100 = Target("tpu", "v5e"), Target("cuda", "h100")
OP = OpCase(kind="op_forward", sequence=64)
MODEL = ModelCase(kind="model_prefill", model="debug", dtype="bfloat16", new_tokens=1)
SMALL = dataclasses.replace(MODEL, sequence=64, name="")
ONE_CHIP = Target.named("v5e:1x1")


@dataclasses.dataclass(frozen=True)
class OutsideXla:
    """A backend that compiles its own kernels, and cannot put them into XLA's program."""

    error: str | None = None
    name: str = "outside"
    exact: bool = True

    def takes(self, target, mode):
        return Takes(features=frozenset(FEATURES))

    def plan(self, spec, layout, **_):
        raise ImportError("outside needs\nwhat launches its kernels.")

    def compile_kernels(self, spec, target, options=None):
        sizes = {} if self.error else {"registers": 208, "spilled_bytes": 0, "shared_bytes": 98304, "blocks": 1000}
        blocks = {"block_q": 128, "num_warps": 8}
        return (
            KernelBuild(name="forward", configuration=blocks, error=self.error, shared_limit_bytes=232448, **sizes),
        )


@pytest.fixture
def outside(monkeypatch):
    """Registered beside the others."""
    get = registry.get
    monkeypatch.setattr(registry, "get", lambda name: OutsideXla() if name == "outside" else get(name))


# What is asked


def test_function_of_a_file_is_compiled_on_the_machine_that_has_the_file(tmp_path):
    assert compile_cell.in_roles(OP, "my.py:fn") == ("my.py:fn",)
    request = CompileGrid(cases=(OP,), searches=(), backends=("my.py:fn",), targets=(V5E,), out=tmp_path,
                             limits=None, cache=tmp_path, command=())  # fmt: skip
    with pytest.raises(InputError, match=r"my\.py:fn is a file of this machine alone; leave out --executor"):
        compile_run.compile_all(request, None, fleet=object())


# What is compiled


@pytest.mark.parametrize(
    "case",
    [
        OP,
        OpCase(kind="op_forward_backward", sequence=64, kv_heads=2, value_head_dim=32, documents=3),
        OpCase(kind="op_decode", sequence=64, kv_heads=2, batch=2),
        OpCase(kind="op_decode", sequence=64, causal=False),
    ],
    ids=lambda case: case.name,
)
def test_shapes_are_those_of_the_program_that_is_measured(case):
    backend, here = registry.get("standard"), Target.here()
    abstract, measured = op_program(case, backend, here), measured_program(case, backend, "native", here)
    given = jax.eval_shape(lambda *x: x, *measured.arguments)
    assert abstract.arguments == given
    results = [jax.tree.leaves(jax.eval_shape(program.function, *given)) for program in (abstract, measured)]
    assert results[0] == results[1]


@pytest.mark.parametrize("target", [V5E, H100], ids=str)
@pytest.mark.parametrize("kind", ["op_forward", "op_decode"])
def test_layer_that_reuses_takes_the_selection_as_an_argument_and_hands_it_on(kind, target):
    case, backend = OpCase(kind=kind, sequence=1024, kv_heads=2, dtype="bfloat16"), registry.get("kascade")
    assert compile_cell.in_roles(case, "kascade") == ("kascade:anchor", "kascade:reuse")
    assert compile_cell.in_roles(case, "splash") == ("splash",)
    assert compile_cell.in_roles(SMALL, "kascade") == ("kascade",)
    anchor, reuse = (role_program(case, backend, target, role) for role in ("anchor", "reuse"))
    assert reuse.arguments[:-1] == anchor.arguments
    out, selection = jax.eval_shape(anchor.function, *anchor.arguments)
    assert (out.shape, selection) == ((1, case.query_length, 8, 64), reuse.arguments[-1])
    kernels = [str(jax.make_jaxpr(program.function)(*program.arguments)) for program in (anchor, reuse)]
    assert ["kascade_pooled_mass" in text for text in kernels] == [True, False]
    assert all("kascade_attend" in text for text in kernels)


@pytest.mark.parametrize("role", ["anchor", "reuse"])
def test_layer_in_a_role_has_the_gradients_that_its_case_asks_for(role):
    case = OpCase(kind="op_forward_backward", sequence=256, kv_heads=2, dtype="bfloat16")
    program = role_program(case, registry.get("kascade"), H100, role)
    _, query, key, value, d_out, *_ = program.arguments
    found, _ = jax.eval_shape(program.function, *program.arguments)
    assert [array.shape for array in found] == [array.shape for array in (d_out, query, key, value)]


@pytest.mark.parametrize("kind", swept(["model_prefill", "model_train", "model_decode"], ["model_decode"]))
def test_whole_model_is_made_of_shapes_alone(kind):
    case = ModelCase(kind=kind, model="llama-3.1-8b", sequence=8192, dtype="bfloat16", new_tokens=1)
    program = model_program(case, resolutions(case, "standard", H100))
    leaves = jax.tree.leaves(program.arguments)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) > 16 * 10**9  # no test machine holds this by chance
    outputs = jax.eval_shape(program.function, *program.arguments)
    donated = jax.tree.leaves([program.arguments[place] for place in program.donated])
    assert {leaf.shape for leaf in donated} <= {leaf.shape for leaf in jax.tree.leaves(outputs)}


def test_cache_of_a_model_for_another_device_is_in_the_dtype_of_that_device():
    case = dataclasses.replace(MODEL, kind="model_decode", name="")
    assert {spec.dtype for spec in attention_specs(case)} == {"bfloat16"}  # on a CPU it would be float32


@pytest.mark.parametrize("kind", ["model_prefill", "model_train"])
def test_a_model_is_compiled_with_the_options_of_its_case(kind):
    case = ModelCase(kind=kind, model="tiny", sequence=512, top_k=0.05, tile_size=64)
    (_, found), *_ = resolutions(case, "kascade", H100)
    assert {name: dict(found.options)[name] for name in ("top_k", "tile_size")} == {"top_k": 0.05, "tile_size": 64}


@pytest.mark.parametrize("case", [OP, SMALL], ids=lambda case: case.name)
def test_sizes_are_the_compilers(case):
    """On the device that is here, where the same sizes can be had another way."""
    here = Target.here()
    if isinstance(case, OpCase):
        program = op_program(case, registry.get("standard"), here)
    else:
        program = model_program(case, resolutions(case, "standard", here))
    facts = compile_cell.compile_program(program, jax.devices()[0])
    direct = jax.jit(program.function, donate_argnums=program.donated).lower(*program.arguments).compile()
    analysis = direct.memory_analysis()
    assert facts.memory["compiled_argument"] == analysis.argument_size_in_bytes > 0
    assert facts.memory["compiled_temp"] == analysis.temp_size_in_bytes
    assert facts.memory["compiled_alias"] == analysis.alias_size_in_bytes
    assert facts.compile_seconds > 0


# How it is judged


def judge(monkeypatch, target, error=None, memory=None, backend="standard"):
    def compiler(program, device, spec=None):
        assert isinstance(program, Program)
        if error is not None:
            raise error
        return Outcome(lower_seconds=0.1, compile_seconds=1.0, memory=memory)

    monkeypatch.setattr(topologies, "missing", lambda _: None)
    monkeypatch.setattr(topologies, "device", lambda _: None)
    monkeypatch.setattr(compile_cell, "compile_program", compiler)
    return compile_cell.compile_cell(OP, backend, target)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: memory required exceeds available HBM (15.75G).", "oom"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G of 15.48G hbm.", "oom"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17.20M of 16.00M vmem.", "crashed"),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 328192, available: 232448", "crashed"),
        ("INTERNAL: Mosaic failed to compile TPU kernel:\n\n  Bad lhs type", "crashed"),
    ],
)
@pytest.mark.parametrize("backend", ["standard", "outside"])
def test_running_out_of_the_devices_memory_is_told_from_a_kernel_that_does_not_compile(
    monkeypatch, outside, backend, message, status
):
    found = judge(monkeypatch, H100, error=RuntimeError(message), backend=backend)
    assert found.status == status
    assert "\n" not in found.error
    assert found.error.startswith("RuntimeError: ")
    assert len(found.kernels) == (backend == "outside")


@pytest.mark.parametrize("before", [" at location: ", " "])
def test_words_of_a_compiler_end_before_the_location_in_its_source(before):
    location = 'loc("dot_general"(callsite("attend"("/home/me/site-packages/kernel.py":7:0))))'
    found = compile_cell.rejected(RuntimeError(f"INTERNAL: Mosaic failed:\n  Bad lhs type{before}{location}"))
    assert found.error == "RuntimeError: INTERNAL: Mosaic failed: Bad lhs type"
    assert compile_cell.rejected(RuntimeError("Cannot alloc(8)")).error == "RuntimeError: Cannot alloc(8)"


@pytest.mark.parametrize(("gib", "status"), [(79, "ok"), (81, "oom")])
@pytest.mark.parametrize("backend", ["standard", "outside"])
def test_peak_is_held_against_the_memory_of_the_target(monkeypatch, outside, backend, gib, status):
    found = judge(monkeypatch, H100, memory={"compiled_peak": gib * 2**30}, backend=backend)
    assert (found.status, found.notes, found.error is None) == (status, (), status == "ok")
    assert (found.memory, len(found.kernels)) == ({"compiled_peak": gib * 2**30}, backend == "outside")


@pytest.mark.parametrize(("target", "extra"), [(V5E, "tpu"), (H100, "compile-cuda")])
def test_missing_compiler_names_the_line_that_installs_it(monkeypatch, target, extra):
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    found = compile_cell.compile_cell(OP, "standard", target)
    assert found.status == "unsupported"
    assert f"pip install '.[{extra}]'" in found.reasons[0]


@pytest.mark.parametrize("case", [OP, SMALL], ids=lambda case: case.name)
@pytest.mark.parametrize("error", [None, "shared memory: 459776 of 232448 bytes"])
def test_kernels_outside_xla_show_registers_spills_and_shared_memory(monkeypatch, case, error):
    monkeypatch.setattr(registry, "get", lambda _: OutsideXla(error))
    monkeypatch.setattr(topologies, "missing", lambda _: "no compiler for it.")
    found = compile_cell.compile_cell(case, "outside", H100)
    assert found.status == ("ok" if error is None else "crashed")
    assert found.error == (None if error is None else f"forward: {error}")
    (kernel,) = found.kernels
    assert kernel.registers == (208 if error is None else None)
    assert kernel.configuration == {"block_q": 128, "num_warps": 8}
    assert found.memory == {}


@pytest.mark.parametrize(
    ("absent", "note"),
    [("no compiler for it.", "no compiler for it."), (None, "outside needs what launches its kernels.")],
)
def test_kernels_without_their_program_say_why_its_size_is_not_known(monkeypatch, outside, absent, note):
    monkeypatch.setattr(topologies, "missing", lambda _: absent)
    monkeypatch.setattr(topologies, "device", lambda _: jax.devices()[0])
    found = compile_cell.compile_cell(OP, "outside", H100)
    assert (found.status, found.notes) == ("ok", (note,))


# How the longest length is searched


@pytest.mark.parametrize(("sizes", "largest"), [(SEARCH_LENGTHS, 131072), (SEARCH_BATCHES, 448)], ids=str)
def test_sizes_of_a_search_take_five_answers(sizes, largest):
    assert list(sizes) == sorted(set(sizes))
    assert (len(sizes), sizes[-1]) == (2**SEARCH_STEPS - 1, largest)


@hypothesis.given(st.integers(0, 200_000))
def test_search_finds_the_longest_that_fits(limit):
    asked = []

    def fits(length):
        asked.append(length)
        return length <= limit

    found = longest(fits, SEARCH_LENGTHS)
    assert found == max((length for length in SEARCH_LENGTHS if length <= limit), default=None)
    assert len(asked) == len(set(asked)) == SEARCH_STEPS


# How the chips of a slice share a case


@pytest.fixture
def chips(monkeypatch):
    """This machine's first device in the place of the only chip."""
    monkeypatch.setattr(topologies, "missing", lambda _: None)
    monkeypatch.setattr(topologies, "devices", lambda _: tuple(jax.devices()[:1]))


def test_chips_that_nothing_is_left_for_are_refused_with_the_numbers():
    decode = ModelCase(kind="model_decode", model="llama-3.1-8b", sequence=2048, new_tokens=1)
    reason = slices.shard(decode, Target.named("v5e:4x4"))
    assert reason == (
        "of the 16 chips of tpu:v5e:4x4 8 share num_kv_heads=8, and 2 are left, which batch=1 cannot be dealt to; give "
        "a batch that 2 divides, or a smaller slice."
    )


@pytest.mark.parametrize(
    "case",
    swept(
        [
            SMALL,
            dataclasses.replace(SMALL, kind="model_train", name=""),
            dataclasses.replace(SMALL, kind="model_decode", name=""),
            OpCase(kind="op_forward_backward", sequence=64, documents=2),
            OpCase(kind="op_decode", sequence=64),
        ],
        [SMALL, OpCase(kind="op_forward_backward", sequence=64, documents=2)],
    ),
    ids=lambda case: case.name,
)
def test_every_kind_of_program_is_dealt_and_compiled(chips, case):
    found = compile_cell.compile_cell(case, "standard", ONE_CHIP)
    assert (found.status, found.error) == ("ok", None)
    assert found.memory["compiled_argument"] > 0
    assert found.notes == ("Sizes are of one chip; every chip has all of it.",)


def test_what_a_share_is_refused_for_is_not_compiled(chips):
    found = compile_cell.compile_cell(OpCase(kind="op_forward", sequence=64), "kascade", ONE_CHIP)
    assert found.status == "unsupported"
    assert "kascade selects in one layer what the next ones attend to" in found.reasons[0]


def test_compiler_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setattr(topologies, "missing", lambda _: "no compiler for it.")
    assert compile_cell.compile_cell(SMALL, "standard", ONE_CHIP).reasons == ("no compiler for it.",)
