"""The published pages of what was compiled: as their records say, and with every cell that their command asks for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from attnsuite import reports
from attnsuite.backends.devices import KNOWN_KINDS
from attnsuite.suite.compile import compilation, topologies
from attnsuite.suite.compile_run import SEARCH_LENGTHS
from attnsuite.suite.kinds import make_case
from attnsuite.suite.store import RECORDS, parse_records

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "compiled"
KASCADE, LONGEST, SLICE = (PUBLISHED.with_name(f"compiled-{name}") for name in ("kascade", "v5e", "v5e-4x4"))
DEVICES = tuple(PUBLISHED.with_name(f"compiled-device-{kind}") for kind in ("h100", "v5e", "v6e"))


@pytest.mark.parametrize("folder", [PUBLISHED, KASCADE, LONGEST, SLICE, *DEVICES], ids=lambda folder: folder.name)
def test_published_page_is_what_its_records_say(folder, tmp_path):
    fresh = reports.render(folder, out=tmp_path).read_text(encoding="utf-8")
    assert fresh == (folder / "report.md").read_text(encoding="utf-8")


def cells_of(folder):
    """The records of a published page, one for every cell that its command asks for, and the command."""
    records = parse_records(folder / RECORDS)[0]
    manifest = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    names = [
        name
        for case in map(make_case, manifest["cases"])
        for backend in manifest["backends"]
        for name in compilation.in_roles(case, backend)
    ]
    assert len(records) == len({record.key for record in records}) == len(manifest["targets"]) * len(names)
    assert all(record.samples == () for record in records)
    assert all(record.mode == "compile" or record.status == "unsupported" for record in records)
    return records, shlex.join(manifest["command"])


def test_published_page_has_every_device_both_levels_and_its_command():
    records, command = cells_of(PUBLISHED)
    assert {record.target.partition(":")[2] for record in records} == set(topologies.KINDS) == set(KNOWN_KINDS)
    assert {record.kind.partition("_")[0] for record in records} == {"op", "model"}
    assert command in (PUBLISHED / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_published_rehearsal_has_no_cell_that_crashed_and_its_command(folder):
    records, command = cells_of(folder)
    assert {record.status for record in records} <= {"ok", "unsupported", "oom"}
    assert {(r.requested, r.case) for r in records if r.status == "oom"} <= {
        ("standard", "forward-backward-s16384-h8k2-d128-bf16")
    }
    assert command in (folder / "report.md").read_text(encoding="utf-8")


def test_published_search_found_for_each_backend_what_fits_beside_what_does_not():
    records = parse_records(LONGEST / RECORDS)[0]
    for backend in ("standard", "chunked", "splash", "kascade"):
        tried = [r for r in records if r.requested == backend and r.kind == "model_prefill"]
        fits = max(r.problem["sequence"] for r in tried if r.status == "ok")
        too_long = min(r.problem["sequence"] for r in tried if r.status == "oom")
        assert SEARCH_LENGTHS.index(too_long) == SEARCH_LENGTHS.index(fits) + 1


def test_published_page_of_kascade_has_both_roles_from_8k_to_131k_and_its_command():
    records, command = cells_of(KASCADE)
    assert {record.target.partition(":")[2] for record in records} == {"v5e", "v6e", "v5p", "h100", "a100"}
    assert {record.requested for record in records} == {"kascade:anchor", "kascade:reuse"}
    assert {r.problem["sequence"] for r in records if r.kind == "op_forward"} == {8192, 32768, 131072}
    assert {(record.status, record.exact) for record in records} == {("ok", False)}
    assert command in (KASCADE / "report.md").read_text(encoding="utf-8")
