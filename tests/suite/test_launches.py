"""What is read of the launches that XLA writes for a GPU: excerpts in its format, and what is missing from them."""

from __future__ import annotations

import sys
import types

import pytest

from attnsuite.backends import kvax
from attnsuite.backends.tunable import KernelBuild
from attnsuite.suite.cell import Outcome
from attnsuite.suite.compile import schedules

HLO = """  %fusion.1 = bf16[8]{0} fusion(%p), calls=%fused
  %a.1 = bf16[8]{0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 8 : i32, ir = "ML\\EF, name = \\"no\\"", name = "attend", num_stages = 2 : i32, num_warps = 4 : i32}
"""  # noqa: E501 (one line in the dump)
THUNKS = """021: kCustomKernel [source       | next=022 (1)] loop_fusion_1 grid: [1024, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
022: kCustomKernel [prev=021 (1) | next=023 (1)] attend grid: [8, 1, 16] threads: [128, 1, 1]  shared_memory: 81920 bytes
023: kCustomKernel [prev=022 (1) | sink        ] attend_1 grid: [2, 3, 4] threads: [256, 1, 1]  shared_memory: 0 bytes
"""  # noqa: E501
OLDER = "022: kKernel [source | sink] kernel=attend, profile_annotation=pallas_call.0, launch dimensions=blocks: {8, 1, 16}, threads/block: {128, 1, 1}, cluster_dim=nullopt\n"  # noqa: E501
PTX = """.version 9.0
.target sm_100a
.visible .entry attend(
.param .u64 .ptr .global .align 1 attend_param_0
)
ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1];
@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], 128;
"""
REPORT = "0 bytes stack frame, 8 bytes spill stores\nptxas info : Used 169 registers, used 1 barriers, 16 bytes smem\n"
SIZES = {"registers": 169, "spilled_bytes": 8, "shared_limit_bytes": 232448, "vector_loads": 1, "scalar_loads": 0}
ATTEND = KernelBuild(
    name="attend", configuration={"num_warps": 4}, blocks=128, shared_bytes=81936, tensor_columns=128, **SIZES
)
FILES = {
    "module_1.jit_f.sm_10.0a_gpu_after_optimizations.txt": HLO,
    "module_1.jit_f.thunk_sequence.txt": THUNKS,
    "module_1.jit_f.9.ptx": PTX,
    "module_1.jit_f.11.ptx": PTX.replace("attend", "attend_1"),
}
HLO_FILE, THUNKS_FILE, CODE_FILE, _ = FILES


@pytest.fixture
def assembler(monkeypatch):
    """Takes the place of the module that asks Triton's assembler."""
    asked = []

    def assemble(ptx, architecture, assembler):
        asked.append((architecture, assembler))
        return REPORT

    fake = types.SimpleNamespace(
        assemble=assemble,
        count_loads=lambda ptx: {"vector": ptx.count(".v4."), "scalar": 0},
        SHARED_LIMITS={(10, 0): 232448},
    )
    monkeypatch.setattr(kvax, "build", fake, raising=False)
    yield fake
    assert set(asked) <= {(100, 100)}


def dump(folder, **changed):
    for name, text in (FILES | changed).items():
        if text is not None:
            (folder / name).write_text(text)
    return schedules.read_launches(folder)


def test_launches_of_pallas_kernels_have_blocks_warps_registers_and_memory(tmp_path, assembler):
    (first, second), notes = dump(tmp_path)
    assert (first, notes) == (ATTEND, ())
    assert (second.name, second.blocks, second.configuration, second.shared_bytes) == (
        "attend_1",
        24,
        {"num_warps": 8},
        16,
    )


def test_kernel_whose_own_name_ends_in_a_number_is_found(tmp_path, assembler):
    (found,), _ = dump(tmp_path, **{HLO_FILE: HLO.replace('"attend"', '"attend_1"')})
    assert found.name == "attend_1"


def test_older_xla_does_not_write_shared_memory(tmp_path, assembler):
    (found,), notes = dump(tmp_path, **{THUNKS_FILE: OLDER})
    assert (found.blocks, found.configuration, found.registers) == (128, {"num_warps": 4}, 169)
    assert (found.shared_bytes, notes) == (None, (schedules.NO_SHARED,))


def test_without_triton_the_launch_is_known_and_the_note_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delattr(kvax, "build", raising=False)
    monkeypatch.setitem(sys.modules, "attnsuite.backends.kvax.build", None)
    (first, _), notes = dump(tmp_path)
    assert (first.blocks, first.shared_bytes, first.registers) == (128, 81920, None)
    assert notes == (schedules.NO_ASSEMBLER,)


@pytest.mark.parametrize("text", [None, "", PTX.replace(".target", ".other"), PTX.replace("attend", "other")])
def test_code_that_the_dump_does_not_have_is_a_sentence(tmp_path, assembler, text):
    (first, _), notes = dump(tmp_path, **{CODE_FILE: text})
    assert (first.blocks, first.registers) == (128, None)
    assert notes == ("no registers of attend: the compiler's dump does not have its code.",)


def test_code_that_the_assembler_refuses_is_a_sentence(tmp_path, assembler):
    def refuse(*_):
        raise RuntimeError("Unsupported .version 9.9;\ncurrent version is '9.1'")

    assembler.assemble = refuse
    _, notes = dump(tmp_path, **{THUNKS_FILE: OLDER.replace("}, c", "}  shared_memory: 0 bytes")})
    assert notes == ("no registers of attend: Unsupported .version 9.9; current version is '9.1'",)


def test_dump_of_a_gpu_is_read_where_its_flags_are_set(tmp_path, monkeypatch, assembler):
    monkeypatch.setenv("XLA_FLAGS", "--xla_own=1")
    (flags,) = schedules.variables(tmp_path, "cuda").values()
    assert flags == f"--xla_own=1 --xla_dump_to={tmp_path} --xla_dump_emitter_re=ptx"
    monkeypatch.setenv("XLA_FLAGS", flags)

    def work():
        dump(tmp_path)
        return Outcome(kernels=(ATTEND,), notes=("a note",))

    found = schedules.scheduled(tmp_path, work)
    assert (found.kernels[:2], len(found.kernels), found.notes) == ((ATTEND, ATTEND), 3, ("a note",))
    assert schedules.scheduled(tmp_path, Outcome).notes == (schedules.NO_KERNEL,)
    assert schedules.scheduled(tmp_path, lambda: Outcome(kernels=(ATTEND,))) == Outcome(kernels=(ATTEND,))
