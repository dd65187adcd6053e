"""Any records that can be read have a page, and can be compared: every field holds whatever its type allows."""

import dataclasses
import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnsuite import reports
from attnsuite.suite.kinds import kind_of, names
from attnsuite.suite.record import Record, TensorError
from attnsuite.suite.typed import Real

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from([
    "standard", "chunked", "kvax", "auto", "a|b", "`", "sequence", "heads", "head_dim", "dtype", "causal", "float32",
    "out", "dq", "recall", "bits_per_byte", "nll", "standard_nll", "hit", "compiled_temp", "kv_bytes_per_token", "jax",
])  # fmt: skip
FLOATS = st.floats(-1e30, 1e30)
SIMPLE = {str: WORDS, bool: st.booleans(), types.NoneType: st.none(), float: FLOATS, int: st.integers(0, 2**40)}
SIMPLE[Any] = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | WORDS


def values(kind):  # noqa: PLR0911 (a form of type each)
    """What a field of this type may hold."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return st.integers(inner[1].ge, inner[1].le) if inner[0] is int else values(inner[0])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of(map(values, inner))
    if origin is tuple:
        several = st.lists(values(inner[0]), max_size=2).map(tuple)
        return several | st.just((0.3, 0.1, 0.2, 0.1, 0.4, 0.2)) if inner[0] == Real else several
    if origin is dict:
        return st.dictionaries(*map(values, inner), max_size=2)
    if is_typeddict(kind):
        return st.fixed_dictionaries({}, optional=fields(kind))
    return st.builds(kind, **fields(kind)) if dataclasses.is_dataclass(kind) else SIMPLE[kind]


def fields(kind, *without):
    return {name: values(of) for name, of in get_type_hints(kind, include_extras=True).items() if name not in without}


def agrees(error):
    return not error.passed or (error.max_error is not None and error.max_error <= error.allowed)


RECORDS = st.fixed_dictionaries(fields(Record, "schema", "key", "facts") | {
    "kind": st.sampled_from([name for name in names() if kind_of(name).facts is None]),
    "accuracy": st.dictionaries(WORDS, values(TensorError).filter(agrees), max_size=2),
    "started": st.sampled_from(["2026-11-20T12:00:00+00:00", "2026-11-21T12:00:00", "yesterday"]),
})  # fmt: skip


def agrees(fields):
    """Whether a line may say so: what is ``ok`` and exact has no tensor outside its bound."""
    return not (fields["status"] == "ok" and fields["exact"]) or all(e.passed for e in fields["accuracy"].values())


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(RECORDS.filter(agrees), min_size=1, max_size=5))
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
