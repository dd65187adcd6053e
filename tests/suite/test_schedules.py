"""What is read of a TPU compiler's dump: an excerpt in its format, damaged in every way that the reader can meet."""

from __future__ import annotations

import time

import pytest

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


def dump(folder, **changed):
    for name, text in (FILES | changed).items():
        if text is not None:
            (folder / name).write_text(text)
    return schedules.read(folder)


def test_schedule_of_a_kernel_counts_the_bundles_of_a_step(tmp_path):
    assert dump(tmp_path) == ((SCHEDULE,), ())


def test_grid_of_one_step_is_no_loop(tmp_path):
    (found,), _ = dump(tmp_path, **{MOSAIC_FILE: MOSAIC.replace("2, 1, 3", "1")})
    assert (found.step_bundles, found.grid_steps, found.mxu_bundles) == (7, 1, 3)


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


def test_cell_that_was_rejected_has_no_schedule_and_no_note(tmp_path):
    outcome = Outcome(status="crashed", error="Bad lhs type")
    assert schedules.scheduled(tmp_path, lambda: outcome) == outcome


def test_arguments_of_the_user_for_the_compiler_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_own=1")
    (value,) = schedules.variables(tmp_path).values()
    assert value.startswith(f"--xla_own=1 --xla_mosaic_dump_to={tmp_path} ")
