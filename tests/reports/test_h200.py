"""The first device (docs/how-to/device.md): what its page says, what interpreters give, what compilers had said."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

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
    assert not [page for page in reference.glob("*.md") if "Never run on a GPU" in page.read_text(encoding="utf-8")]
    _, claimed, sections = (reference / "nvidia.md").read_text(encoding="utf-8").partition("All have run on [an H200]")
    assert claimed
    assert set(re.findall("^## (.*)$", sections, re.MULTILINE)) <= ran
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


def test_counts_of_the_page_are_those_of_the_records():
    every = parse_records(PUBLISHED / "verdicts-gpu-nvidia-h200-contract" / RECORDS)[0]
    words = " ".join(PAGE.split())
    judged = {record.case for record in every if record.status in ("ok", "wrong")} - set(VERDICTS)
    assert f"[{len(judged)}](../../reports/published/verdicts-gpu-nvidia-h200-contract/report.md)" in words
    taken = [record for record in every if record.requested == "cudnn" and record.case not in VERDICTS]
    taken = [record for record in taken if record.status != "unsupported"]
    assert f"`cudnn` in 4 of the {len(taken)} problems that it took" in words


def test_what_cudnn_got_wrong_is_refused_or_prevented_since():
    """The fourth is a mask: ``pytest tests/backends/test_cudnn.py -k do_not_matter``."""
    asked = {case for (name, case), record in MORE.items() if (name, record.status) == ("cudnn", "wrong")}
    asked |= {"length-129 in bfloat16", "few-queries-17 in bfloat16"}
    taken = {case for case in asked if support(registry.get("cudnn"), spec_of(case.removesuffix(" in bfloat16")), H200)}
    assert taken == {"mask-broadcast in bfloat16"}


def spec_of(name):
    """The spec alone: results of the oracle and a compiled baseline are not asked for."""
    case = problems.CASES[name]
    return problems.spec_of(case, *problems.arrays(case, name, "bfloat16"))
