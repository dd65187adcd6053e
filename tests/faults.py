"""What may happen to a run, what is promised then, and the tests that hold it: runs them, and prints the table.

python tests/faults.py --trials 200

docs/dev/faults.md sums the table up.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What happens, what is promised, and the tests: a file, ``::``, and how the names begin (``[`` of parameters)."""

    happens: str
    promised: str
    tests: tuple[str, ...]

    def holds(self, nodeid: str) -> bool:
        """Whether a test is one of this fault's."""
        return any(nodeid.endswith(test) or f"{test}[" in nodeid for test in self.tests)


_RECORD = "test_faults.py::test_fault_becomes_a_record_without_samples"
_KEPT = "what is done is kept, and `--resume` runs each other cell once"
FAULTS = (
    Fault("SIGKILL at a random moment", _KEPT,
          ("test_interruption.py::test_run_that_ends_at_a_random_moment_loses_no_cell_and_doubles_none[SIGKILL]",
           "test_interruption.py::test_killed_run_leaves_no_orphans_and_resumes_with_each_cell_once")),
    Fault("Ctrl-C at a random moment", f"{_KEPT}; no temporary file is left",
          ("test_interruption.py::test_run_that_ends_at_a_random_moment_loses_no_cell_and_doubles_none[SIGINT]",)),
    Fault("Ctrl-C, SIGTERM, SIGHUP between cells", f"{_KEPT}; workers end; exit code 128 plus the signal",
          ("test_interruption.py::test_signal_keeps_what_is_done_and_leaves_nothing_behind",)),
    Fault("a signal during the imports", "the command ends at once and prints nothing",
          ("test_interruption.py::test_signal_during_the_imports_ends_at_once_without_a_traceback",)),
    Fault("a signal that Python would drop or remember", "the command ends by it once",
          ("test_interruption.py::test_signal_is_not_lost_where_python_drops_or_remembers_it",)),
    Fault("nohup", "a signal that is ignored stays ignored",
          ("test_interruption.py::test_a_signal_that_is_ignored_stays_ignored",)),
    Fault("a plug-in hangs in `plan`", "its cell is a record with status `timeout`",
          ("test_faults.py::test_cell_that_hangs_is_ended_and_becomes_a_record_without_samples",)),
    Fault("a plug-in hangs when it is asked what it takes", "one sentence; nothing was begun",
          ("test_faults.py::test_backend_that_hangs_when_it_is_asked_ends_the_run_with_a_sentence",)),
    Fault("a plug-in takes more memory than the limit", "status `oom`", (f"{_RECORD}[hungry-oom-1.00 GiB]",)),
    Fault("a plug-in dies by SIGSEGV", "status `crashed`, with the signal", (f"{_RECORD}[dying-crashed-SIGSEGV]",)),
    Fault("a plug-in raises when it runs", "status `crashed`, with what it raised",
          (f"{_RECORD}[raising-crashed-RuntimeError: raising raised]",
           f"{_RECORD}[surrogate-crashed-RuntimeError: half a character: ?]")),
    Fault("a plug-in raises on import, or in `supports`", "it is refused with what it raised; the others run",
          ("test_faults.py::test_backend_that_cannot_be_asked_is_refused_with_what_it_raised_and_stops_no_other",)),
    Fault("a plug-in computes nonsense or NaN", "status `wrong`, and no speed",
          (f"{_RECORD}[wrong-wrong-out is off by]", f"{_RECORD}[nan-wrong-NaN or infinity]")),
    Fault("any of these", "the other cells are measured",
          ("test_faults.py::test_the_other_cells_are_measured_all_the_same",)),
    Fault("the disk is full when a file is written", "one sentence; the old file is there",
          ("test_writing.py::test_file_that_cannot_be_written_whole_is_left_as_it_was",
           "test_writing.py::test_report_that_cannot_be_written_leaves_the_old_one")),
    Fault("the disk is full when a record is written", "one sentence; earlier records are there",
          ("test_writing.py::test_record_that_cannot_be_written_is_a_sentence_and_the_others_are_kept",)),
    Fault("the disk is full behind stdout, or its reader went away", "one sentence, exit code 2",
          ("test_writing.py::test_full_disk_behind_stdout_is_a_sentence",
           "test_writing.py::test_reader_that_went_away_is_a_sentence")),
    Fault("the directory is removed", "one sentence", ("test_writing.py::test_directory_that_is_gone_is_a_sentence",)),
    Fault("--out cannot be written", "one sentence before any work",
          ("test_writing.py::test_long_work_finds_out_at_the_start_that_it_cannot_write",)),
    Fault("the last record is cut off", "it is dropped with a warning, and its cell runs again",
          ("test_store.py::test_truncated_last_line_is_dropped_with_a_warning",)),
    Fault("a record in the middle is damaged, or a cell has two", "the file is refused",
          ("test_store.py::test_damaged_last_line_is_dropped_and_a_damaged_middle_is_refused",
           "test_store.py::test_records_that_contradict_each_other_are_refused")),
    Fault("two runs write to one directory", "the second is refused",
          ("test_store.py::test_second_run_into_one_directory_is_refused_until_the_first_ends",)),
    Fault("a manifest of another version, of another run", "`--resume` is refused and says what differs",
          ("test_store.py::test_a_resumed_run_has_to_be_the_one_that_was_begun",)),
    Fault("the run is stopped and goes on (Ctrl-Z, a suspended job)",
          "the time counts toward no limit; a sample that holds the stop is taken again",
          ("test_process.py::test_time_for_which_the_run_was_stopped_counts_toward_no_limit",
           "test_process.py::test_sample_that_holds_a_stop_is_taken_again")),
    Fault("a device disappears, and JAX would compute on the CPU", "status `crashed`; nothing is computed",
          ("test_process.py::test_cell_of_a_device_that_is_gone_is_not_computed_on_the_cpu",)),
    Fault("a plug-in forks, and prints to stdout", "its copies answer nothing and end with it",
          ("test_process.py::test_what_a_plug_in_forks_does_not_answer_and_ends_with_its_worker_and_reads_nothing",
           "test_process.py::test_end_of_a_worker_is_seen_although_what_it_forked_holds_its_pipe")),
    Fault("an address space of 512 MiB (`ulimit -v`)", "status `crashed` or `oom`; one sentence if no worker starts",
          ("test_process.py::test_address_space_that_is_too_small_for_jax_is_a_failure_and_no_hang",)),
    Fault("no HOME, no TMPDIR, 64 file handles", "the run is whole",
          ("test_interruption.py::test_run_without_home_and_tmpdir_and_with_few_file_handles_is_whole",)),
    Fault("the clock goes backwards", "durations do not change",
          ("test_interruption.py::test_clock_that_goes_backwards_changes_no_duration",)),
    Fault("a node of a fleet dies in the middle of a case",
          "its case runs again elsewhere, nothing of the first attempt is kept",
          ("test_fleet.py::test_case_whose_node_died_runs_again_elsewhere_and_leaves_no_half",)),
    Fault("a case kills three nodes", "its cells have status `crashed`; nodes that come later do the others",
          ("test_fleet.py::test_case_that_kills_three_nodes_is_a_record_and_late_nodes_do_the_rest",)),
    Fault("a node cannot write", "it gets no more cases, and the reason is told",
          ("test_fleet.py::test_node_that_cannot_write_gets_no_more_cases",)),
    Fault("a node comes late, or has other versions, or is of another kind",
          "the first is used, the others are not, with the reason",
          ("test_fleet.py::test_late_node_is_used_and_node_of_other_versions_or_kind_is_not",
           "test_fleet.py::test_nodes_of_other_versions_alone_are_refused_and_taken_when_asked_for")),
    Fault("the object store of every node is full",
          "each cell has one record; a case above 100 KB needs a disk with room",
          ("test_fleet.py::test_full_object_store_loses_no_cell_and_changes_no_record",)),
    Fault("a version that `--packages` asks for cannot be installed", "the node is not used, with the reason",
          ("test_fleet.py::test_package_that_cannot_be_installed_is_told_with_the_reason",)),
    Fault("the driver of a fleet gets Ctrl-C or SIGKILL", _KEPT,
          ("test_fleet.py::test_driver_that_was_ended_is_resumed_with_each_cell_once",)),
    Fault("the driver of a fleet gets Ctrl-C, SIGTERM, SIGHUP",
          "what is done is kept; workers on nodes end; exit code 128 plus the signal",
          ("test_fleet.py::test_interrupted_command_leaves_no_worker_on_a_node",
           "test_fleet.py::test_signal_ends_the_fleet_and_keeps_what_is_done_although_ray_has_handlers_of_its_own")),
    Fault("no cluster answers", "one sentence", ("test_fleet.py::test_no_cluster_is_one_sentence",)),
)  # fmt: skip
FILES = tuple(sorted({test.partition("::")[0] for fault in FAULTS for test in fault.tests}))


@dataclasses.dataclass
class Outcomes:
    """Plugin: what became of each test, and what it recorded (``trials``, ``told``)."""

    found: dict[str, tuple[str, dict[str, object]]] = dataclasses.field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of setup, call and teardown."""
        before = self.found.get(report.nodeid, ("passed", {}))[0]
        worst = report.outcome if before == "passed" else before
        self.found[report.nodeid] = worst, dict(report.user_properties)


def row(fault: Fault, outcomes: Outcomes) -> tuple[str, int, int]:
    """The line of a fault, its trials, and its losses."""
    mine = [outcome for nodeid, outcome in outcomes.found.items() if fault.holds(nodeid)]
    run = [(outcome, told) for outcome, told in mine if outcome != "skipped"]
    trials = sum(int(str(told.get("trials", 1))) for _, told in run)
    losses = sum(outcome == "failed" for outcome, _ in run)
    said = "; ".join(str(told["told"]) for _, told in run if "told" in told)
    count = f"{trials} ({said})" if said else str(trials) if run else "not run here"
    return f"| {fault.happens} | {fault.promised} | {count} | {losses if run else ''} |", trials, losses


def page(outcomes: Outcomes) -> str:
    """The table as Markdown. A trial is one test, or one try at a random moment; a loss is a test that failed."""
    rows = [row(fault, outcomes)[0] for fault in FAULTS]
    return "\n".join(["| what happens | what is promised | trials | losses |", "|---|---|---|---|", *rows])


def main(words: Sequence[str] | None = None) -> int:
    """Run the tests of all faults and print the table; the exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="tries at a random moment (200)")
    asked = parser.parse_args(words)
    os.environ["ATTNSUITE_FAULT_TRIALS"] = str(asked.trials)
    outcomes = Outcomes()
    names = {test.partition("::")[2].partition("[")[0] for fault in FAULTS for test in fault.tests}
    files = [str(TESTS / "suite" / file) for file in FILES]
    code = pytest.main([*files, "-k", " or ".join(sorted(names))], [outcomes])
    print(page(outcomes))  # noqa: T201 (this is a command)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
