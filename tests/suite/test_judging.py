"""``attnsuite judge``: what is right, wrong and refused, of a backend and of a user's own function."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import textwrap
from functools import partial
from xml.etree import ElementTree as ET

import jax
import pytest

from attnsuite.backends import Target, registry, support
from attnsuite.reports import render
from attnsuite.reports.pages import conformance as conformance_page
from attnsuite.suite import compile_run, judgement, user_function
from attnsuite.suite.cell import Request
from attnsuite.suite.compile.compilation import rejected
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid import work
from attnsuite.suite.grid.run_grid import resumed_request
from attnsuite.suite.grid.running import Limits, record_of
from attnsuite.suite.kinds import conformance_case as conformance_kind
from attnsuite.suite.kinds.attention_call import OpCase, spec_of
from attnsuite.suite.kinds.conformance_case import TAKES, ConformanceCase
from attnsuite.suite.store import MANIFEST, RECORDS, parse_records
from attnsuite.testing import random_specs
from command import code_of

LIMITS = Limits(120.0, 2**33)
KERNELS = """
import os

import jax
from attnsuite.backends import from_function

def right(q, k, v, is_causal=False):
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)

def off(q, k, v):
    return 1.001 * right(q, k, v)

def leaking(q, k, v, key_value_seq_lengths):
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=key_value_seq_lengths) + 1e-33 * v.sum()

def averaging(q, k, v, key_value_seq_lengths):
    out = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=key_value_seq_lengths)
    return jax.numpy.where((key_value_seq_lengths > 0)[:, None, None, None], out, 0)

def plain(q, k, v):
    return right(q, k, v)

def transposed(q, k, v):
    return right(q, k, v).swapaxes(1, 2)

def wide(q, k, v):
    return right(q, k, v).astype("float32")

def pair(q, k, v):
    return right(q, k, v), None

def threaded(q, k, v):
    return right(q, k, v) * (1.0 if "PJRT_NPROC" not in os.environ else 1.01)

def dying(q, k, v):
    raise MemoryError("no room on the chip")

def locked_out(q, k, v):
    raise PermissionError("cache")

def aborting(q, k, v):
    if q.dtype == "float32":
        os.abort()
    return right(q, k, v)

aborts_in_float32 = from_function(aborting, takes={"bidirectional", "grouped_queries"})
forward = from_function(right, takes={"bidirectional"})
leaks = from_function(leaking, takes={"bidirectional", "lengths", "grouped_queries"})
lets_nan_in = from_function(averaging, takes={"bidirectional", "lengths", "grouped_queries"})
mine = from_function(right, takes={"bidirectional", "causal", "grouped_queries", "gradient"})
"""


@pytest.fixture(autouse=True)
def registry_of_its_own(monkeypatch):
    """Functions that are registered here are in no other test's registry."""
    monkeypatch.setattr(registry, "DEFAULT", registry.Registry())


@pytest.fixture
def kernels(tmp_path):
    """A user's file."""
    path = tmp_path / "my.py"
    path.write_text(KERNELS)
    return path


def judged(path, name, case="heads-equal", number=None):
    row, asked = f"{path}:{name}", ConformanceCase(name=case, number=number, seed=number and 0)
    user_function.register_functions([row])
    return conformance_kind.judged(row, asked, start=partial(work.subprocess, row))


def test_function_that_is_right_is_within_the_bound_with_its_gradients(kernels):
    found = judged(kernels, "right")
    assert found.status == "ok"
    assert found.facts.gradients
    assert 0 < found.facts.share <= 1
    assert found.facts.isolates is None  # nothing is hidden there
    assert set(judged(kernels, "forward").accuracy) == {"output"}  # it has no gradients


@pytest.mark.parametrize(
    ("name", "problem", "status", "said"),
    [
        ("off", "heads-equal", "wrong", "output is off by 0.001 of its largest value (allowed "),
        ("right", "window-int", "unsupported", "local_window_size=(16, 16) is not supported by"),
        ("dying", "heads-equal", "crashed", "MemoryError: no room on the chip"),
        ("leaks", "ragged", "wrong", "output change with numbers that no query may see"),
        (
            "transposed",
            "heads-equal",
            "wrong",
            (
                "has the shape [2, 4, 160, 32], and the contract says [2, 160, 4, 32] ([batch, length, heads, "
                "head_dim]): length and heads are swapped; return output.swapaxes(1, 2)."
            ),
        ),
        ("wide", "heads-equal-bfloat16", "wrong", "float32 for a bfloat16 query; return it in the dtype of the query."),
        ("pair", "heads-equal", "wrong", "it returns a tuple, and the contract says one array "),
    ],
)
def test_what_is_wrong_refused_or_raised_is_said(kernels, name, problem, status, said):
    found = judged(kernels, name, problem)
    assert found.status == status
    assert said in f"{found.error} {found.reasons}"


def test_random_problems_ask_only_for_what_a_function_takes(kernels, monkeypatch):
    monkeypatch.setattr(random_specs, "_TRIES", 5)  # of another dtype: XLA has no such float16 product for CPUs
    found = judged(kernels, "right", "random 3 of seed 0", 3)
    assert found.status == "ok", found
    for number in range(10):
        random_specs.draw(number, 0, registry.get(f"{kernels}:right"), Target.here(), "native")


def test_what_stands_against_every_random_problem_is_found_soon(monkeypatch):
    monkeypatch.setattr(random_specs, "_ALIKE", 3)
    found = conformance_kind.judged("splash", ConformanceCase(number=0, seed=0))
    assert found.status == "unsupported"
    assert found.error.startswith("splash is a kernel for TPUs, not for cpu")


def test_backend_that_is_approximate_is_not_judged_by_the_bound_of_exact_ones():
    found = conformance_kind.judged("kascade", ConformanceCase(name="plain"))
    assert found.status == "unsupported"
    assert "kascade is approximate by design" in found.reasons[0]


def test_nan_that_reaches_rows_is_a_verdict_beside_a_right_result(kernels):
    found = judged(kernels, "lets_nan_in", "ragged")
    assert found.status == "ok", found
    assert found.facts.isolates is False
    assert conformance_kind.judged("standard", ConformanceCase(name="ragged")).facts.isolates is True


@pytest.mark.usefixtures("in_this_process")
def test_command_says_what_is_right_wrong_and_refused_and_keeps_the_records(kernels, tmp_path, capsys):
    out, words = tmp_path / "judged", ["--cases", "heads-equal,window-int", "--random", "0"]
    code = code_of("judge", f"{kernels}:off", *words, "--out", out)
    told = capsys.readouterr().out
    assert code == 1
    assert "right      no        1 of the 1 problems that it takes are wrong; 1 ask for more" in told
    assert not [mark for mark in ("# ", "`", "|") if mark in told]
    assert "- heads-equal: wrong: output is off by 0.001 of its largest value" in told
    assert "- local_window_size=(16, 16) (accepted: None only): window-int" in told
    records, _, warning = parse_records(out / RECORDS)
    assert [record.status for record in records] == ["ok", "wrong", "unsupported"]  # first, what it takes
    assert warning is None
    page = render(out).read_text()
    assert re.search(r"^\| right +\| no +\| 1 of the 1 problems", page, re.MULTILINE)
    assert f"## `{kernels}:off`: wrong" in page
    assert f"\n{kernels}:off: wrong\n" in told


@pytest.mark.thorough
def test_lines_of_the_worst_failure_show_it_again(kernels, tmp_path, capsys):
    words = ["--cases", "heads-equal", "--random", "0", "--out", str(tmp_path / "judged")]
    code_of("judge", f"{kernels}:off", *words)
    told = capsys.readouterr().out
    assert told.index("it was found to be not causal") < told.index("The worst: heads-equal: output is off by 0.001")
    shell = textwrap.dedent(told[told.index("  python - <<'END'") : told.index("  END\n") + len("  END\n")])
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True)
    assert "status='wrong'" in done.stdout
    assert "output is off by 0.001 of its largest value" in done.stdout


@pytest.mark.usefixtures("in_this_process")
def test_plain_function_is_right_for_what_it_takes(kernels, tmp_path, capsys):
    words = ["--cases", "heads-equal,window-int,causal", "--random", "0", "--out", str(tmp_path / "judged")]
    code = code_of("judge", f"{kernels}:plain", *words)
    told = capsys.readouterr().out
    assert code == 0
    asked = r"all of 1 problems \(up to T 160, S 160, heads 4, D 32\); 2 ask for more; nearest"
    assert re.search(rf"^right +yes +for what it takes: {asked}", told, re.MULTILINE)
    assert "what more problems would need\n\n- " in told
    assert "The worst" not in told


def test_what_jax_itself_cannot_do_here_is_no_fault_of_a_function(kernels, monkeypatch):
    def failing(*arrays, **keywords):
        raise ValueError("no such unit on this chip")

    monkeypatch.setattr(jax.nn, "dot_product_attention", failing)
    found = judged(kernels, "right")
    assert found.status == "unsupported"
    assert found.reasons == (
        "JAX's own attention fails on this platform in float32: ValueError: no such unit on this chip.",
    )
    assert judged(kernels, "dying").status == "crashed"  # its own fault


def test_verdict_is_a_record_and_a_gate(kernels, tmp_path, capsys):
    out = tmp_path / "judged"
    words = ["--cases", "heads-equal", "--random", "0", "--require", "deterministic,isolates", "--badge"]
    code = code_of("judge", f"{kernels}:forward", *words, "--out", out)
    written = capsys.readouterr()
    assert code == 1
    assert f"{kernels}:forward is not isolates: not applicable." in written.err
    assert "is not deterministic" not in written.err
    assert re.search(r"^deterministic +yes +5 runs; another process; one processor core", written.out, re.MULTILINE)
    badge = json.loads(next(out.glob("badge-*.json")).read_text())
    assert badge["verdicts"] == {"deterministic": "yes", "isolates": "not applicable"}
    assert (badge["right"], badge["judged"]) == (1, 1)
    assert badge["code"] == user_function.digests([f"{kernels}:forward"])[f"{kernels}:forward"]
    picture = next(out.glob("badge-*.svg")).read_text()
    assert ">right 1/1<" in picture
    assert ET.fromstring(picture).tag.endswith("svg")  # noqa: S314 (written above)
    assert ">deterministic</text>" in picture
    assert ">isolates</text>" not in picture


@pytest.mark.thorough
def test_verdict_finds_what_another_number_of_threads_changes(kernels):
    found = judged(kernels, "threaded", "deterministic")
    assert found.facts.answer == "no"
    assert found.facts.message.startswith("one processor core (")


def test_interpret_is_for_kernels_that_have_an_interpreter():
    case = ConformanceCase(name="symmetric", interpret=True)
    cells = conformance_kind.CONFORMANCE.cells(case, Request(rows=("standard", "splash"), cases=(case,)))
    assert {cell.row: cell.mode for cell in cells} == {"standard": "native", "splash": "interpret"}


def test_process_that_dies_is_a_result_and_the_next_problem_is_judged(kernels, tmp_path, capsys):
    words = ["--cases", "heads-equal,heads-equal-bfloat16", "--random", "0", "--out", str(tmp_path / "out")]
    assert code_of("judge", f"{kernels}:aborts_in_float32", *words) == 1
    (_, died, *others), _, _ = parse_records(tmp_path / "out" / RECORDS)  # first, what it takes
    assert died.status == "crashed", capsys.readouterr()
    assert died.error.startswith("died by SIGABRT")
    assert {record.status for record in others} == {"ok"}


@pytest.mark.usefixtures("in_this_process")
def test_judgement_is_resumed_as_it_was_begun(tmp_path, capsys):
    def command(*words):
        return code_of(*words, "--out", tmp_path / "out"), "".join(capsys.readouterr())

    assert command("judge", "standard", "chunked", "--cases", "heads-equal", "--random", "0")[0] == 0
    before = (tmp_path / "out" / RECORDS).read_bytes()
    (tmp_path / "out" / RECORDS).write_bytes(before.splitlines(keepends=True)[0])
    assert command("judge", "--resume")[0] == 0
    assert [record.requested for record in parse_records(tmp_path / "out" / RECORDS)[0]] == ["standard", "chunked"]
    code, told = command("judge", "standard", "--resume")
    assert (code, "backends cannot change a run that was begun" in told) == (2, True)


def test_what_a_function_raised_breaks_no_table_of_the_page(example_record):
    asked = dataclasses.replace(example_record, problem={"name": "plain"}, status="crashed", error="<b>|`x`")
    rows = [dataclasses.replace(asked, case=name) for name in ("plain", "isolates")]
    page = conformance_page.files(rows, None)["report.md"]
    assert "| isolates  | crashed  | \\<b\\>\\|\\`x\\` " in page
    assert "- plain: crashed: \\<b\\>\\|\\`x\\`\n" in page


def test_all_right_needs_something_right_and_nothing_wrong(example_record):
    refused, wrong = (dataclasses.replace(example_record, status=status) for status in ("unsupported", "wrong"))
    assert judgement.all_right([example_record, refused])
    assert not judgement.all_right([refused])
    assert not judgement.all_right([example_record, wrong])
    assert judgement.all_right([example_record], [example_record.requested])
    assert not judgement.all_right([example_record], [example_record.requested, "mine.py:f"])
    assert not judgement.all_right([dataclasses.replace(example_record, case=TAKES), refused])


def test_what_a_function_raised_is_its_reason_and_names_the_confinement(kernels):
    row, case, target = f"{kernels}:locked_out", OpCase(kind="op_forward", sequence=64), Target("tpu", "v5e")
    user_function.register_functions([row])
    why = "PermissionError: cache (a function of yours runs confined: it can write into its TMPDIR"
    assert f"{row}, which raised {why}" in support(registry.get(row), spec_of(case), target, "compile").reasons[0]
    with pytest.raises(PermissionError) as raised:
        registry.get(row).function(1, 2, 3)
    cell = compile_run.cell_of(case, row, target)
    rest = {"suite": "", "environment": {}, "started": "", "wall_seconds": 0.0, "samples": ()}
    assert record_of(cell, rejected(raised.value), **rest).error.startswith(f"the function raised {why}")


def test_digest_of_a_function_is_that_of_its_file(kernels):
    row = f"{kernels}:mine"
    before = user_function.digests([row, "standard"])
    assert list(before) == [row]
    kernels.write_text(kernels.read_text() + "# changed\n")
    assert user_function.digests([row]) != before


def test_run_of_a_function_is_not_resumed_since_its_file_may_have_changed(tmp_path):
    kept = {name: {} for name in ("kascade", "versions", "flags")}
    kept |= {"suite": "s", "cases": [], "backends": ["my.py:fn"], "all_cores": False, "source": "", "target": "cpu"}
    kept |= dict.fromkeys(("checkpoint", "text", "file", "git_revision"))
    (tmp_path / MANIFEST).write_text(json.dumps(kept))
    with pytest.raises(InputError, match=r"timed code of yours \(my.py:fn\), which may have changed since"):
        resumed_request(None, None, None, None, tmp_path, LIMITS)
