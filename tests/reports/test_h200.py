"""The first device (docs/how-to/device.md): what its page says, what interpreters give, what compilers had said."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from attnsuite.suite.statistics import median
from attnsuite.suite.store import RECORDS, parse_records

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reports" / "published"
PAGE = (ROOT / "docs" / "how-to" / "device.md").read_text(encoding="utf-8")
COLUMNS = ("cudnn", "kvax", "tokamax_triton", "pallas_flash", "chunked", "standard")


def records(*folders):
    """Those that have a result, by backend and case."""
    found = itertools.chain(*(parse_records(PUBLISHED / folder / RECORDS)[0] for folder in folders))
    return {(record.requested, record.case): record for record in found if record.status in ("ok", "wrong")}


TIMED = records("gpu-nvidia-h200", "gpu-nvidia-h200-16384")
JUDGED = records("verdicts-gpu-nvidia-h200", "verdicts-gpu-nvidia-h200-bfloat16")


def test_times_of_the_page_are_those_of_the_records():
    shown = re.findall(r"^\| \[forward.*", PAGE, re.MULTILINE)
    cases = ("forward-s1024-h8k2-d64-bf16", "forward-backward-s1024-h8k2-d64-bf16", "forward-s16384-h8k2-d128-bf16")
    assert len(shown) == len(cases)
    for line, case in zip(shown, cases, strict=True):
        cells = [TIMED.get((name, case)) for name in COLUMNS]
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
    row = "Kvax took {} of the time of `standard`, cuDNN {} |".format(*spans)
    assert row in (ROOT / "docs" / "how-to" / "coming-from.md").read_text(encoding="utf-8")


def test_one_problem_is_wrong_and_in_the_interpreter_too():
    wrong = {key for key, record in JUDGED.items() if record.status == "wrong"}
    assert wrong == {("kvax", "big-logits-bfloat16")}
    assert JUDGED[wrong.pop()].accuracy["dq"].max_error == pytest.approx(378, abs=0.5)
    counts = [sum(key[0] == name for key in JUDGED) for name in ("standard", "kvax")]
    assert counts == [16, 17]
    again = records("verdicts-gpu-nvidia-h200-bfloat16")
    assert (len(again), len({case for _, case in again})) == (72, 16)


def test_largest_errors_in_the_interpreter_are_those_of_the_device():
    said = records("verdicts-interpreted")
    native = {key: record for key, record in JUDGED.items() if key[0] in ("kvax", "pallas_flash", "tokamax_triton")}
    count = 0
    for key, found in native.items():
        record = said[key]
        assert (record.status, set(record.accuracy)) == (found.status, set(found.accuracy))
        for name, error in record.accuracy.items():
            count += 1
            assert error.max_error == pytest.approx(found.accuracy[name].max_error, rel=1e-12), (key, name)
            assert error.rms_error == pytest.approx(found.accuracy[name].rms_error, rel=0.031), (key, name)
    assert count == 157


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
