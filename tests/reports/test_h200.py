"""The first device (docs/how-to/device.md): what its page says, what interpreters give, what compilers had said."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from attnsuite.backends import Target, registry, support
from attnsuite.suite.statistics import median
from attnsuite.suite.store import RECORDS, parse_records
from attnsuite.testing import problems
from attnsuite.testing.verdicts import VERDICTS

H200 = Target("cuda", "h200")

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reports" / "published"
PAGE = (ROOT / "docs" / "how-to" / "device.md").read_text(encoding="utf-8")
COLUMNS = ("cudnn", "kvax", "tokamax_triton", "pallas_flash", "chunked", "standard")


def records(*folders):
    """Those that have a result, by backend and case."""
    found = itertools.chain(*(parse_records(PUBLISHED / folder / RECORDS)[0] for folder in folders))
    return {(record.requested, record.case): record for record in found if record.status in ("ok", "wrong")}


TIMED = records("gpu-nvidia-h200", "gpu-nvidia-h200-16384")
DECODED = records("gpu-nvidia-h200-decode")
JUDGED = records("verdicts-gpu-nvidia-h200", "verdicts-gpu-nvidia-h200-bfloat16")
MORE = records("verdicts-gpu-nvidia-h200-contract")


def test_times_of_the_page_are_those_of_the_records():
    shown = re.findall(r"^\| \[(?:forward|decode).*", PAGE, re.MULTILINE)
    cases = (
        *("forward-s1024-h8k2-d64-bf16", "forward-backward-s1024-h8k2-d64-bf16", "forward-s16384-h8k2-d128-bf16"),
        "decode-s32768-h32k8-d128-bf16",
    )
    assert len(shown) == len(cases)
    for line, case in zip(shown, cases, strict=True):
        cells = [(TIMED | DECODED).get((name, case)) for name in COLUMNS]
        standard = cells[-1]
        for cell, text in zip(cells, line.split("|")[2:], strict=False):
            if cell is None:
                assert not text.strip()
                continue
            time, *ratio = text.strip().split(", ")
            seconds = median(cell.device_seconds).value
            assert time == f"{1e6 * seconds:.{1 if seconds < 9.95e-5 else 0}f} µs"
            assert ratio == ([] if cell is standard else [f"{seconds / median(standard.device_seconds).value:.2f}"])


def test_other_pages_say_what_ran():
    """None says that a backend never ran on a GPU which did; the guide of those who come from Kvax has its times."""
    reference = ROOT / "docs" / "reference" / "backends"
    ran = {name for name, _ in TIMED | JUDGED}
    assert not [name for name in ran if "Never run on a GPU" in (reference / f"{name}.md").read_text(encoding="utf-8")]
    seconds = {key: median(record.device_seconds).value for key, record in TIMED.items()}
    spans = []
    for name in ("kvax", "cudnn"):
        ratios = [time / seconds["standard", case] for (other, case), time in seconds.items() if other == name]
        spans.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
    decode = [
        median(DECODED[name, "decode-s32768-h32k8-d128-bf16"].device_seconds).value for name in ("kvax", "standard")
    ]
    times = round(decode[0] / decode[1])
    row = f"Kvax took {spans[0]} of the time of `standard`, cuDNN {spans[1]}; a decode step took Kvax {times} times |"
    assert row in (ROOT / "docs" / "how-to" / "coming-from.md").read_text(encoding="utf-8")


def test_one_problem_is_wrong_and_in_the_interpreter_too():
    wrong = {key for key, record in JUDGED.items() if record.status == "wrong"}
    assert wrong == {("kvax", "big-logits-bfloat16")}
    assert JUDGED[wrong.pop()].accuracy["dq"].max_error == pytest.approx(378, abs=0.5)
    counts = [sum(key[0] == name for key in JUDGED) for name in ("standard", "kvax")]
    assert counts == [16, 17]
    again = records("verdicts-gpu-nvidia-h200-bfloat16")
    assert (len(again), len({case for _, case in again})) == (72, 16)


def test_more_problems_by_backend():
    """Without verdicts: a problem has errors."""
    counts = Counter((name, record.status) for (name, _), record in MORE.items() if record.accuracy)
    assert counts == {
        ("kvax", "ok"): 33,
        ("kvax", "wrong"): 2,
        ("tokamax_triton", "ok"): 25,
        ("pallas_flash", "ok"): 7,
        ("cudnn", "ok"): 17,
        ("cudnn", "wrong"): 4,
    }
    wrong = {case for (name, case), record in MORE.items() if (name, record.status) == ("kvax", "wrong")}
    assert wrong == {"big-logits-bfloat16", "big-logits-float32 in bfloat16"}
    every = parse_records(PUBLISHED / "verdicts-gpu-nvidia-h200-contract" / RECORDS)[0]
    judged = {record.case for record in every if record.status in ("ok", "wrong")} - set(VERDICTS)
    assert f"[{len(judged)}\n  more](../../reports/published/verdicts-gpu-nvidia-h200-contract/report.md)" in PAGE
    taken = [record for record in every if record.requested == "cudnn" and record.case not in VERDICTS]
    taken = [record for record in taken if record.status != "unsupported"]
    assert f"wrong in 4 of the {len(taken)} that it took, and JAX refused 2" in PAGE
    off = [record.accuracy["dbias"].max_error for record in taken if "dbias" in record.accuracy]
    assert (min(off), max(off)) == pytest.approx((0.003, 0.01), abs=5e-4)  # as the refusal says
    crashed = [record for record in every if record.status == "crashed"]
    assert {record.requested for record in crashed} == {"cudnn"}
    assert all("NotImplementedError: Unsupported sequence length" in record.error for record in crashed)
    assert len(crashed) == 2
    overview = (PUBLISHED / "verdicts-gpu-nvidia-h200-contract" / "report.md").read_text(encoding="utf-8")
    assert re.search(r"^\| `kascade` +\| native +\| +0 \| +0 \| +84 \|", overview, re.MULTILINE)  # a verdict timed out


@pytest.mark.parametrize(
    ("verdict", "denied", "missing"),
    [
        ("deterministic", set(), set()),
        ("batch_invariant", set(), {"kascade"}),
        ("symmetric", set(), {"kascade"}),
        ("isolates", {"kvax", "tokamax_triton", "kascade"}, set()),
    ],
)
def test_verdicts_of_five_backends(verdict, denied, missing):
    names = {"kvax", "cudnn", "kascade", "tokamax_triton", "pallas_flash"}
    answers = {name: record.facts.answer for (name, case), record in MORE.items() if case == verdict}
    assert answers == {name: "no" if name in denied else "yes" for name in names - missing}


def test_what_cudnn_got_wrong_is_refused_or_prevented_since():
    """The fourth is a mask: ``pytest tests/backends/test_cudnn.py -k do_not_matter``."""
    asked = {case for (name, case), record in MORE.items() if (name, record.status) == ("cudnn", "wrong")}
    asked |= {"length-129 in bfloat16", "few-queries-17 in bfloat16"}
    taken = {case for case in asked if support(registry.get("cudnn"), spec_of(case.removesuffix(" in bfloat16")), H200)}
    assert taken == {"mask-broadcast in bfloat16"}


def spec_of(name):
    return problems.problem(name, "bfloat16").spec


def test_largest_errors_in_the_interpreter_are_those_of_the_device():
    said = records("verdicts-interpreted")
    more = records("verdicts-interpreted-contract")
    compared = [(record, said[key]) for key, record in JUDGED.items() if key in said]
    compared += [(record, more[key]) for key, record in MORE.items() if key in more]
    backends = ("kvax", "pallas_flash", "tokamax_triton")
    native = [*JUDGED.items(), *((key, record) for key, record in MORE.items() if record.accuracy)]
    assert len(compared) == sum(name in backends for (name, _), _ in native)
    count, zero = 0, []
    for found, record in compared:
        assert (record.status, set(record.accuracy)) == (found.status, set(found.accuracy))
        for name, error in record.accuracy.items():
            count += 1
            if error.max_error == 0.0:
                zero.append(found.accuracy[name].max_error)
                continue
            assert error.max_error == pytest.approx(found.accuracy[name].max_error, rel=1e-12), (found.key, name)
            assert error.rms_error == pytest.approx(found.accuracy[name].rms_error, rel=0.031), (found.key, name)
    there = [error for error in zero if error]
    assert (count, len(there)) == (377, 4)
    assert max(there) < 1.3e-6


def test_kascade_was_slower_than_dense_attention():
    times = {
        name: median(record.device_seconds).value for (name, _), record in records("gpu-nvidia-h200-kascade").items()
    }
    assert times["kascade"] / times["dense"] == pytest.approx(6.8, abs=0.05)


def test_temporary_memory_is_what_the_compiler_had_said_on_a_cpu():
    compiled = records("compiled-device-h100")
    more = {
        key: record.memory["compiled_temp"] / compiled[key].memory["compiled_temp"] - 1
        for key, record in TIMED.items()
        if key in compiled
    }
    same = {key for key, share in more.items() if abs(share) < 1e-3}
    assert (len(more), len(same)) == (14, 10)
    assert {name for name, _ in set(more) - same} == {"standard", "chunked"}
    assert more["chunked", "forward-backward-s1024-h8k2-d64-bf16"] == pytest.approx(0.065, abs=5e-4)
    of_standard = [share for (name, _), share in more.items() if name == "standard"]
    assert (min(of_standard), max(of_standard)) == pytest.approx((0.02, 0.33), abs=5e-3)


def test_calls_in_flight_are_slower_than_the_device_where_calls_are_short():
    ratios = {key: median(record.samples).value / median(record.device_seconds).value for key, record in TIMED.items()}
    short = sorted(ratio for (_, case), ratio in ratios.items() if "s1024" in case)
    assert short[0] < 1.02
    assert (short[1], short[-1]) == pytest.approx((1.6, 5.8), abs=0.05)
    long = {name: ratio for (name, case), ratio in ratios.items() if "s16384" in case}
    assert long.pop("chunked") == pytest.approx(1.5, abs=0.05)
    assert all(abs(ratio - 1) < 0.02 for ratio in long.values())


def test_cells_of_a_case_take_half_a_minute_or_more_about_half_of_it_to_be_compiled():
    cases = {case for _, case in TIMED}
    cells = [[record for (_, name), record in TIMED.items() if name == case] for case in cases]
    whole = [sum(cell.wall_seconds for cell in each) for each in cells]
    assert (min(whole), max(whole)) == pytest.approx((33, 53), abs=0.5)
    compiled = sum(cell.lower_seconds + cell.compile_seconds for each in cells for cell in each)
    assert compiled / sum(whole) == pytest.approx(0.5, abs=0.05)


def test_a_cell_takes_longer_where_sixteen_processes_share_the_contract():
    """The first run had one process, the one in bfloat16 sixteen; the median over problems of each backend."""
    alone, shared = records("verdicts-gpu-nvidia-h200"), records("verdicts-gpu-nvidia-h200-bfloat16")

    def seconds(found, backend):
        return median([record.wall_seconds for (name, _), record in found.items() if name == backend]).value

    ratios = [seconds(shared, name) / seconds(alone, name) for name in sorted({name for name, _ in shared})]
    assert (min(ratios), max(ratios)) == pytest.approx((2.6, 7.6), abs=0.05)
