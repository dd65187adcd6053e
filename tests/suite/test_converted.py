"""What earlier versions wrote becomes records."""

import json
from pathlib import Path

from attnsuite.suite.converted import curve_records
from attnsuite.suite.store import parse_records

TRAINING = Path(__file__).parents[2] / "reports" / "published" / "training-cpu-intel-xeon"
SETUP = {
    "date": "2026-11-21",
    "preset": "tiny",
    "seed": 3,
    "learning_rate": 0.002,
    "optimizer": "adamw",
    "settings": [{"name": "native", "steps": 2, "batch": 1, "length": 8}],
    "environment": {"target": "cpu:a CPU", "cpu": "a CPU"},
}
CURVES = [
    {"setting": "native", "role": "noise", "name": "standard, order 1", "mode": "native", "losses": [2.0, None]},
    {"setting": "native", "role": "refused", "name": "kvax", "mode": "native", "losses": [], "reasons": ["no."]},
]


def test_curves_become_records():
    noise, refused = curve_records(SETUP, CURVES)
    assert noise.key == "train-tiny-native-b1-s8-n2/standard, order 1/cpu:a CPU/native"
    assert (noise.problem["seed"], noise.problem["steps"], noise.started) == (3, 2, "2026-11-21")
    assert (noise.resolved, noise.facts.role, noise.facts.losses) == ("standard", "noise", (2.0, None))
    assert (refused.status, refused.reasons, refused.mode, refused.facts) == ("unsupported", ("no.",), None, None)


def test_published_records_are_what_was_published():
    training = json.loads((TRAINING / "curves.json").read_text())
    curves = [json.loads(line) for line in (TRAINING / "curves.jsonl").read_text().splitlines()]
    assert parse_records(TRAINING / "records.jsonl")[0] == tuple(curve_records(training, curves))
