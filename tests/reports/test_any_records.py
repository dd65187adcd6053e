import dataclasses
import json
from typing import get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnsuite import reports
from attnsuite.suite.kinds import kind_of, names
from attnsuite.suite.record import ProgramText, Status, TensorError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NAMES = st.sampled_from(["standard", "chunked", "kvax", "a|b", "`", "", "auto"])
FLOATS = st.floats(-1e30, 1e30)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
SERIES = st.lists(FLOATS, max_size=2).map(tuple) | st.just((0.3, 0.1, 0.2, 0.1, 0.4, 0.2))
ERRORS = st.builds(
    lambda max_error, allowed, passed, **rest: TensorError(
        max_error=max_error,
        allowed=allowed,
        passed=passed and max_error is not None and max_error <= allowed,
        **rest,
    ),
    max_error=st.none() | FLOATS,
    rms_error=st.none() | FLOATS,
    standard_error=st.none() | FLOATS,
    allowed=FLOATS,
    passed=st.booleans(),
)
SIZES = st.none() | st.integers(0, 2**40)
PROGRAMS = st.builds(
    ProgramText,
    products=st.dictionaries(TEXT, st.integers(1, 2**20), max_size=2),
    score_arrays=SIZES,
    copies=SIZES,
)
FIELDS = st.fixed_dictionaries({
    "suite": st.just("cpu-speed") | TEXT,
    "case": TEXT,
    "kind": st.sampled_from([name for name in names() if kind_of(name).facts is None]),
    "facts": st.none(),
    "problem": st.dictionaries(
        st.sampled_from(["sequence", "heads", "kv_heads", "head_dim", "dtype", "causal", "documents", "odd|name"]),
        st.none() | INTEGERS | st.booleans() | TEXT,
    ),
    "requested": NAMES,
    "resolved": st.none() | NAMES,
    "mode": st.sampled_from([None, "native", "interpret", "compile", "fallback"]),
    "devices": st.integers(1, 64),
    "exact": st.sampled_from([None, True, False]),
    "target": st.sampled_from(["cpu", "tpu/v5e"]),
    "reasons": st.lists(TEXT, max_size=2).map(tuple),
    "status": st.sampled_from(get_args(Status)),
    "error": st.none() | TEXT,
    "notes": st.lists(TEXT, max_size=1).map(tuple),
    "samples": SERIES,
    "device_seconds": SERIES,
    "cached_seconds": SERIES,
    "compile_seconds": st.none() | FLOATS,
    "flops": st.none() | FLOATS,
    "tokens": st.none() | st.integers(0, 2**40),
    "steps": st.none() | st.integers(0, 2**20),
    "figures": st.dictionaries(st.sampled_from(["kv_bytes_per_token", "odd"]), st.integers(0, 2**40) | FLOATS),
    "memory": st.dictionaries(st.sampled_from(["compiled_temp", "odd"]), st.none() | st.integers(0, 2**60)),
    "program": st.none() | PROGRAMS,
    "repeats": st.none() | st.booleans(),
    "accuracy": st.dictionaries(st.sampled_from(["out", "dq", "a|b"]), ERRORS),
    "quality": st.dictionaries(st.sampled_from(["recall", "bits_per_byte", "unigram_bits_per_byte"]), FLOATS),
    "series": st.dictionaries(st.sampled_from(["nll", "standard_nll", "hit"]), SERIES),
    "environment": st.fixed_dictionaries(
        {},
        optional={
            "versions": st.dictionaries(TEXT, TEXT, max_size=2),
            "git_revision": st.none() | TEXT,
            "cpu": TEXT,
            "cores": st.integers(1, 2**31 - 1),
            "device_kind": TEXT,
            "device_count": st.integers(1, 2**31 - 1),
            "machine_memory": st.integers(0, 2**63 - 1),
            "machine": st.fixed_dictionaries({}, optional={
                "matmul_flops": st.dictionaries(st.sampled_from(["float32", "odd"]), FLOATS),
                "read_bytes_per_second": FLOATS,
            }),
            "flags": st.dictionaries(TEXT, TEXT, max_size=2),
            "clock": st.dictionaries(TEXT, st.none() | TEXT | INTEGERS | FLOATS, max_size=2),
            "session": TEXT,
        },
    ),
    "started": st.sampled_from(["2026-11-20T12:00:00+00:00", "2026-11-21T12:00:00", "yesterday"]),
    "wall_seconds": st.none() | FLOATS,
})  # fmt: skip


def agrees(fields):
    """Whether a line may say so: what is ``ok`` and exact has no tensor outside its bound."""
    return not (fields["status"] == "ok" and fields["exact"]) or all(e.passed for e in fields["accuracy"].values())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(FIELDS.filter(agrees), min_size=1, max_size=5))
def test_any_records_render_and_compare(record, tmp_path, drawn):
    records = [record(**fields | {"case": f"{fields['case']}-{i}"}) for i, fields in enumerate(drawn)]
    folders = tmp_path / "a", tmp_path / "b"
    for folder, kept in zip(folders, (records, records[:1]), strict=True):
        folder.mkdir(exist_ok=True)
        (folder / "records.jsonl").write_text("".join(r.to_json() + "\n" for r in kept), encoding="utf-8")
    text = reports.render(folders[0]).read_text(encoding="utf-8")
    assert text.startswith("# Attention on ")
    json.loads((folders[0] / "report.json").read_text(encoding="utf-8"), parse_constant=_no_constant)
    assert reports.compare(*folders).text.startswith("# Run B against run A")


def _no_constant(name):
    raise AssertionError(f"{name} is no JSON")


@settings(max_examples=1, suppress_health_check=list(HealthCheck))
@given(FIELDS)
def test_every_field_of_a_record_is_drawn(record, drawn):
    assert set(drawn) | {"schema", "key", "lower_seconds", "bytes_moved", "kernels", "schedules"} == {
        field.name for field in dataclasses.fields(record())
    }
