"""What is read of what compilers write: excerpts of a TPU's dump and of XLA's for a GPU, damaged in every way."""

from __future__ import annotations

import sys
import time
import types

import pytest

from attnsuite.backends import kvax
from attnsuite.backends.tunable import KernelBuild
from attnsuite.suite.cell import Outcome
from attnsuite.suite.compile import schedules
from attnsuite.suite.record import Schedule

# Seven bundles, of which the middle four are in the loop over the grid; one of these is empty.
BUNDLES = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 /* copy: for cssa */  ;;  %s2 = inlined_call_operand.hbm [shape: f32[8,128], index: 0] }
   0x1   :  { %3 = vsyncpa [#allocation2], 0 }
   0x2 LB: > { %v4 = vld [vmem:[%s1] sm:$0xff] }
   0x3   : > { %p5 = scmp.lt.s32.totalorder %s1, 4
base_bounds: (64, 1) */ }
   0x4   :  {} /* End region 3 */
   0x5 PF: > { %6 = vst [vmem:[%s1] sm:$0xff] /*vst_source=*/%v4 }
   0x6   :  { %7 = vsyncpa [#allocation2], 1 }
"""
UNITS = """== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
2 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 0
1 0 0 0 0 2 1 0 0 2
0 0 3 0 0 1 1 0 0 1
0 0 0 0 0 0 0 0 0 0
3 0 0 0 0 0 0 1 1 0
0 0 0 0 0 1 0 0 0 0
"""
ANALYSIS = """Schedule analysis:
\ttotal scheduled bundles:    7
\t6.00 scheduled bundles (100.00%): %attend.1 = bf16[8,128]{1,0:T(8,128)} custom-call(%q), custom_call_target="tpu_custom_call", x={
"""  # noqa: E501 (one line in the dump)
MOSAIC = """module attributes {stable_mosaic.version = 13 : i64} {
  func.func @attend(%arg0: i32, %arg1: memref<8x128xbf16, #tpu.memory_space<vmem>>) attributes {iteration_bounds = array<i64: 2, 1, 3>, scalar_prefetch = 0 : i64} {
"""  # noqa: E501
FILES = {
    "11-TLP-01-schedule-analysis_final_bundles.txt": ANALYSIS,  # of the program around the kernel, which calls it
    "12-attend.1-00-final_hlo-static-per-bundle-utilization.txt": UNITS,
    "12-attend.1-01-schedule-analysis_final_bundles.txt": ANALYSIS,
    "12-attend.1-02-final_bundles.txt": BUNDLES,
    "10-0000-mosaic-dump-attend-post-deserialization.txt": MOSAIC,
}
UNITS_FILE, ANALYSIS_FILE, BUNDLES_FILE, MOSAIC_FILE = list(FILES)[1:]
SCHEDULE = Schedule(
    kernel="attend.1", bundles=7, step_bundles=4, grid_steps=6, mxu_bundles=2, fills=2, spills=1, vector_bytes=4 * 4096
)


def written(folder, files):
    for name, text in files.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def dump(folder, **changed):
    return schedules.read(written(folder, FILES | changed))


def test_schedule_of_a_kernel_counts_the_bundles_of_a_step(tmp_path):
    assert dump(tmp_path) == ((SCHEDULE,), ())
    (found,), _ = dump(tmp_path, **{MOSAIC_FILE: MOSAIC.replace("2, 1, 3", "1")})  # a grid of one step is no loop
    assert (found.step_bundles, found.grid_steps, found.mxu_bundles) == (7, 1, 3)
    rejected = Outcome(status="crashed", error="Bad lhs type")
    assert schedules.scheduled(tmp_path, lambda: rejected) == rejected


@pytest.mark.parametrize(
    "text",
    [
        None,
        MOSAIC.replace("2, 1, 3", "2, -9223372036854775808"),  # known at run time only
        MOSAIC + MOSAIC.replace("2, 1, 3", "9"),
        MOSAIC.replace("@attend", "@other"),
    ],
)
def test_grid_that_the_dump_does_not_say_is_not_known(tmp_path, text):
    (found,), notes = dump(tmp_path, **{MOSAIC_FILE: text})
    assert (found.step_bundles, found.grid_steps, notes) == (4, None, ())


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (ANALYSIS_FILE, None, "the compiler's dump has no file schedule-analysis_final_bundles."),
        (UNITS_FILE, None, "the compiler's dump has no file final_hlo-static-per-bundle-utilization."),
        (BUNDLES_FILE, None, "the compiler's dump has no file final_bundles."),
        (UNITS_FILE, "", "the units of its bundles are not named in the compiler's dump."),
        (UNITS_FILE, UNITS.replace("MXU", "TENSOR"), "the units of its bundles are not named in the compiler's dump."),
        (UNITS_FILE, UNITS[:-8], "the units of its bundles are cut off or damaged in the compiler's dump."),
        (UNITS_FILE, UNITS.replace("2 1 0", "2 x 0"), "the units of its bundles are cut off or damaged in the"),
        (UNITS_FILE, UNITS[: UNITS.index("N:\n") + 3], "the units of its bundles are cut off or damaged in the"),
        (BUNDLES_FILE, BUNDLES[:-60], "its bundles are 6 in one file of the dump and 7 in another."),
        (BUNDLES_FILE, "", "its bundles are 0 in one file of the dump and 7 in another."),
    ],
)
def test_damaged_dump_is_a_sentence(tmp_path, name, text, sentence):
    found, (note,) = dump(tmp_path, **{name: text, "11-TLP-01-schedule-analysis_final_bundles.txt": None})
    assert found == ()
    assert note.startswith(f"no schedule of attend.1: {sentence}")


def test_program_without_a_kernel_and_compiler_that_writes_nothing_are_sentences(tmp_path):
    assert dump(tmp_path, **{ANALYSIS_FILE: ANALYSIS.replace("tpu_custom_call", "Sharding")}) == (
        (),
        ("no schedule: the program has no Pallas kernel.",),
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert schedules.read(empty) == ((), (schedules.NOTHING_WRITTEN,))


def test_dump_is_removed_and_one_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    def work():
        assert list(tmp_path.iterdir()) == []  # what a process that was killed left behind is not read
        dump(tmp_path)
        return Outcome(notes=("a note",))

    (tmp_path / "12-old.1-02-final_bundles.txt").write_text("left behind")
    assert schedules.scheduled(tmp_path, work) == Outcome(schedules=(SCHEDULE,), notes=("a note",))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(schedules, "LIMIT", 1000)
    found = schedules.scheduled(tmp_path, work)
    assert (found.schedules, found.notes) == ((), ("a note", schedules.TOO_LARGE))
    assert list(tmp_path.iterdir()) == []


def test_dump_that_becomes_too_large_is_removed_while_the_compiler_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(schedules, "LIMIT", 1000)

    def work():
        dump(tmp_path)
        end = time.monotonic() + 20
        while list(tmp_path.iterdir()):
            assert time.monotonic() < end
            time.sleep(0.05)
        return Outcome()

    assert schedules.scheduled(tmp_path, work).notes == (schedules.TOO_LARGE,)


def test_arguments_of_the_user_for_the_compiler_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_own=1")
    (value,) = schedules.variables(tmp_path).values()
    assert value.startswith(f"--xla_own=1 --xla_mosaic_dump_to={tmp_path} ")


# The launches that XLA writes for a GPU

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
GPU_FILES = {
    "module_1.jit_f.sm_10.0a_gpu_after_optimizations.txt": HLO,
    "module_1.jit_f.thunk_sequence.txt": THUNKS,
    "module_1.jit_f.9.ptx": PTX,
    "module_1.jit_f.11.ptx": PTX.replace("attend", "attend_1"),
}
HLO_FILE, THUNKS_FILE, CODE_FILE, _ = GPU_FILES


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


def launched(folder, **changed):
    return schedules.read_launches(written(folder, GPU_FILES | changed))


def test_launches_of_pallas_kernels_have_blocks_warps_registers_and_memory(tmp_path, assembler):
    (first, second), notes = launched(tmp_path)
    assert (first, notes) == (ATTEND, ())
    assert (second.name, second.blocks, second.configuration, second.shared_bytes) == (
        "attend_1",
        24,
        {"num_warps": 8},
        16,
    )
    (found,), _ = launched(tmp_path, **{HLO_FILE: HLO.replace('"attend"', '"attend_1"')})
    assert found.name == "attend_1"  # its own name, though it ends in a number


def test_older_xla_does_not_write_shared_memory(tmp_path, assembler):
    (found,), notes = launched(tmp_path, **{THUNKS_FILE: OLDER})
    assert (found.blocks, found.configuration, found.registers) == (128, {"num_warps": 4}, 169)
    assert (found.shared_bytes, notes) == (None, (schedules.NO_SHARED,))


def test_without_triton_the_launch_is_known_and_the_note_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delattr(kvax, "build", raising=False)
    monkeypatch.setitem(sys.modules, "attnsuite.backends.kvax.build", None)
    (first, _), notes = launched(tmp_path)
    assert (first.blocks, first.shared_bytes, first.registers) == (128, 81920, None)
    assert notes == (schedules.NO_ASSEMBLER,)


@pytest.mark.parametrize("text", [None, "", PTX.replace(".target", ".other"), PTX.replace("attend", "other")])
def test_code_that_the_dump_does_not_have_is_a_sentence(tmp_path, assembler, text):
    (first, _), notes = launched(tmp_path, **{CODE_FILE: text})
    assert (first.blocks, first.registers) == (128, None)
    assert notes == ("no registers of attend: the compiler's dump does not have its code.",)


def test_code_that_the_assembler_refuses_is_a_sentence(tmp_path, assembler):
    def refuse(*_):
        raise RuntimeError("Unsupported .version 9.9;\ncurrent version is '9.1'")

    assembler.assemble = refuse
    _, notes = launched(tmp_path, **{THUNKS_FILE: OLDER.replace("}, c", "}  shared_memory: 0 bytes")})
    assert notes == ("no registers of attend: Unsupported .version 9.9; current version is '9.1'",)


def test_dump_of_a_gpu_is_read_where_its_flags_are_set(tmp_path, monkeypatch, assembler):
    monkeypatch.setenv("XLA_FLAGS", "--xla_own=1")
    (flags,) = schedules.variables(tmp_path, "cuda").values()
    assert flags == f"--xla_own=1 --xla_dump_to={tmp_path} --xla_dump_emitter_re=ptx"
    monkeypatch.setenv("XLA_FLAGS", flags)

    def work():
        launched(tmp_path)
        return Outcome(kernels=(ATTEND,), notes=("a note",))

    found = schedules.scheduled(tmp_path, work)
    assert (found.kernels[:2], len(found.kernels), found.notes) == ((ATTEND, ATTEND), 3, ("a note",))
    assert schedules.scheduled(tmp_path, Outcome).notes == (schedules.NO_KERNEL,)
    assert schedules.scheduled(tmp_path, lambda: Outcome(kernels=(ATTEND,))) == Outcome(kernels=(ATTEND,))
