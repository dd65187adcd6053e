"""What earlier versions wrote becomes records, and the page is the same."""

import json
from pathlib import Path

from attnsuite.suite.converted import sharded_records
from attnsuite.suite.store import parse_records

PUBLISHED = Path(__file__).parents[2] / "reports" / "published"

SHARDED = {
    "parts": [
        {
            "title": "one process, 8 devices",
            "rows": [
                {
                    "backend": "chunked",
                    "shape": {"heads": 2, "context": 4},
                    "problem": "causal",
                    "exchange": "ring",
                    "mode": "native",
                    "status": "ok",
                    "devices": 8,
                    "share": [2, 80, 2, 32],
                    "errors": {"dk": 1e-7, "output": 2e-7},
                    "allowed": {"dk": 2e-7, "output": 3e-7},
                    "errors_of_one_device": {"dk": 3e-8, "output": None},
                }
            ],
        },
        {
            "title": "two processes, 2 devices each",
            "rows": [
                {
                    "backend": "kascade",
                    "shape": {"data": 2, "heads": 2},
                    "problem": "causal",
                    "exchange": "gather",
                    "mode": "native",
                    "status": "refused",
                    "reasons": ["no."],
                }
            ],
        },
    ],
    "versions": {"jax": "1", "numpy": "2", "scipy": "3"},
    "git_revision": "abc",
    "cpu": "a CPU",
    "date": "2026-11-21",
}


def test_sharded_rows_become_records():
    computed, refused = sharded_records(SHARDED)
    assert computed.key == "causal, heads 2 x context 4, ring/chunked@8/cpu:a CPU/native"
    assert (computed.status, computed.devices, computed.started) == ("ok", 8, "2026-11-21")
    assert (computed.accuracy["out"].max_error, computed.accuracy["out"].allowed) == (2e-7, 3e-7)
    assert (computed.facts.shape, computed.facts.one_device) == ((2, 80, 2, 32), {"dk": 3e-8, "out": None})
    assert refused.key == "causal, data 2 x heads 2/kascade@4/cpu:a CPU/native"
    assert (refused.status, refused.reasons, refused.mode, refused.facts) == ("unsupported", ("no.",), None, None)


def test_published_records_are_what_was_published():
    facts = json.loads((PUBLISHED / "sharded" / "sharded.json").read_text())
    assert parse_records(PUBLISHED / "sharded" / "records.jsonl")[0] == tuple(sharded_records(facts))
