"""The published pages of what was compiled have every cell that their command asks for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from attnsuite.backends.devices import KNOWN_KINDS
from attnsuite.suite.compile import compilation, topologies
from attnsuite.suite.compile_run import SEARCH_LENGTHS
from attnsuite.suite.kinds import make_case
from attnsuite.suite.store import RECORDS, parse_records

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "compiled"
KASCADE, LONGEST = (PUBLISHED.with_name(f"compiled-{name}") for name in ("kascade", "v5e"))
DEVICES = tuple(PUBLISHED.with_name(f"compiled-device-{kind}") for kind in ("h100", "v5e", "v6e"))


@pytest.mark.parametrize("folder", [PUBLISHED, KASCADE, *DEVICES], ids=lambda folder: folder.name)
def test_published_page_has_its_command_and_every_cell_that_it_asks_for(folder):
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
    assert shlex.join(manifest["command"]) in (folder / "report.md").read_text(encoding="utf-8")
    if folder == PUBLISHED:
        assert {record.target.partition(":")[2] for record in records} == set(topologies.KINDS) == set(KNOWN_KINDS)


def test_published_search_found_for_each_backend_what_fits_beside_what_does_not():
    records = parse_records(LONGEST / RECORDS)[0]
    for backend in ("standard", "chunked", "splash", "kascade"):
        tried = [r for r in records if r.requested == backend and r.kind == "model_prefill"]
        fits = max(r.problem["sequence"] for r in tried if r.status == "ok")
        too_long = min(r.problem["sequence"] for r in tried if r.status == "oom")
        assert SEARCH_LENGTHS.index(too_long) == SEARCH_LENGTHS.index(fits) + 1
