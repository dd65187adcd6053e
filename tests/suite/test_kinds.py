"""A new kind of case is one file and one line: measured by the command, recorded, shown in the report."""

from __future__ import annotations

import ast
import contextlib
import csv
import importlib
import json
import re
from pathlib import Path

import pytest

import command
from attnsuite.reports import cases
from attnsuite.suite import kinds
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds.kind import Kind
from attnsuite.suite.store import CONFORMANCE, RECORDS, parse_records
from attnsuite.suite.suites import SUITES
from attnsuite.suite.verbs import VERBS
from command import code_of

PRODUCT = '''
"""Matrix products: the smallest kind of case that is judged and timed."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from attnsuite.suite.cell import Prepared
from attnsuite.suite.kinds.kind import Kind, cell, check_fields, name_case, refused
from attnsuite.suite.measure import execution, tensor_errors
from attnsuite.suite.measure.tensor_errors import as_model_error
from attnsuite.suite.measure.program import Program
from attnsuite.suite.typed import Count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductCase:
    size: Count
    kind: str = "product"
    name: str = ""

    def __post_init__(self):
        check_fields(self)
        name_case(self, f"product-{self.size}")


class Product(Kind):
    titles = {"product": "matrix product"}
    case = ProductCase
    figures = {"sums": "sums of products"}

    def rows(self, case):
        return "matmul", "doubled", "absent"

    def cells(self, case, asked):
        for row in self.rows(case):
            if row in asked.rows:
                if row == "absent":
                    yield refused(case, row, ["absent: this row runs nowhere."])
                else:
                    yield cell(case, row, resolved=row, mode="native", exact=True)

    def write_reference(self, case, path, text, draw):
        square = np.arange(case.size**2).reshape(case.size, -1) / case.size**2
        np.savez(path, square=square, product=square @ square)

    def prepare(self, cell, case, means):
        with np.load(means.reference) as arrays:
            square, product = jnp.asarray(arrays["square"], jnp.float32), arrays["product"]
        factor = 2 if cell.row == "doubled" else 1
        out, sample, facts = execution.execute(Program(lambda a, b: factor * (a @ b), (square, square)), means)
        errors = {"product": as_model_error(out, product, None, "float32")}
        figures = {"sums": case.size**2, "cells_read": 2 * case.size**2}
        facts = dataclasses.replace(facts, flops=2.0 * case.size**3, accuracy=errors, figures=figures)
        return Prepared(tensor_errors.judged(facts, exact=True), sample)


class Contradicting(Product):
    titles = {"contradicting": "matrix product"}
    judges_in_subprocess = shares_process = True


PRODUCT, CONTRADICTING = Product(), Contradicting()
NO_KIND = "a string"
'''
ENTRIES = """[attnsuite.kinds]
product = product_kind:PRODUCT
misnamed = product_kind:PRODUCT
no_kind = product_kind:NO_KIND
contradicting = product_kind:CONTRADICTING
unloadable = product_kind:NOTHING
op_forward = product_kind:PRODUCT
"""
FIGURES = {"sums": 64**2, "cells_read": 2 * 64**2}
SUITE = """
[[case]]
kind = "{}"
size = {}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A directory with an installed package that brings a kind by entry point, and entries that bring none."""
    return command.installed(tmp_path_factory.mktemp("package"), ENTRIES, product_kind=PRODUCT)


@contextlib.contextmanager
def importable(package):
    """The package in this process, where what was looked up before is forgotten."""
    forget = (kinds.kind_of, kinds._entry_points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(package))
        for function in forget:
            function.cache_clear()
        yield patch
    for function in forget:
        function.cache_clear()


@pytest.fixture
def installed(package):
    with importable(package):
        yield


@pytest.fixture(scope="module")
def ran(package, tmp_path_factory):
    """The directory of a run of the package's kind, whose workers were this process."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "sizes.toml").write_text(SUITE.format("product", 64))
    out = command.known_machine(folder / "run")
    with importable(package) as patch:
        command.bring_workers_here(patch, tmp_path_factory.mktemp("worker"))
        assert code_of("run", "--suite", folder / "sizes.toml", "--out", out) == 0
    return out


def test_kind_of_another_package_is_measured_recorded_and_reported(installed, ran):
    records, _, warning = parse_records(ran / RECORDS)
    found = {record.requested: record for record in records}
    assert warning is None
    assert found["matmul"].status == "ok"
    assert found["matmul"].samples
    assert found["matmul"].flops == 2 * 64**3
    assert (found["doubled"].status, found["doubled"].samples) == ("wrong", ())
    assert (found["absent"].status, found["absent"].reasons) == ("unsupported", ("absent: this row runs nowhere.",))
    page = (ran / "details.md").read_text()
    assert "### Matrix product" in page
    assert "`absent` in the only case: this row runs nowhere." in page
    assert "product is off by 1" in page


def test_new_figure_of_a_kind_is_on_the_page_in_the_csv_file_and_in_the_json(ran):
    (further,) = re.findall(r"## Further figures\n\n(.*?)\n## ", (ran / "details.md").read_text(), re.DOTALL)
    assert re.findall(r"^\|.*\|$", further, re.MULTILINE)[::2] == [
        "| case | backend | mode | sums of products | cells read |",
        "| size 64 | matmul | native | 4096 | 8192 |",  # wrong results show no figure
    ]
    assert "sums of products" in (ran / "report.html").read_text()
    rows = {row["requested"]: row for row in csv.DictReader((ran / "records.csv").read_text().splitlines())}
    assert (rows["matmul"]["figure_sums"], rows["doubled"]["figure_sums"]) == ("4096", "")
    sections = json.loads((ran / "report.json").read_text())["pages"][0]["sections"]
    (found,) = [table for section in sections if section["key"] == "figures" for table in section["tables"]]
    assert found["rows"][0] == {"case": "size 64", "backend": "matmul", "mode": "native"} | FIGURES


def test_case_of_another_package_checks_itself(installed, tmp_path, capsys):
    (tmp_path / "sizes.toml").write_text(SUITE.format("product", -1))
    assert code_of("run", "--suite", tmp_path / "sizes.toml", "--out", tmp_path / "run") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "size = -1 must be an integer from 1" in err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("misnamed", "makes no records of that kind; its titles are for product"),
        ("no_kind", "is not a kind; it needs to be an instance of"),
        ("contradicting", "sets both judges_in_subprocess and shares_process; set one of them"),
        ("unloadable", "failed to load: AttributeError"),
    ],
)
def test_entry_point_that_brings_no_kind_is_a_sentence_and_no_other_kind_suffers(installed, name, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        kinds.make_case({"kind": name, "size": 8})
    assert "entry point product_kind:" in str(raised.value)
    assert kinds.make_case({"kind": "product", "size": 8}).name == "product-8"
    assert kinds.make_case({"kind": "op_forward", "sequence": 8}).name == "forward-s8-h8k8-d64-f32"
    assert any(sentence in fault for fault in kinds.faults())
    assert len(kinds.faults()) == 4


def test_kind_that_ships_here_cannot_be_taken_by_a_package(installed):
    assert kinds.title_of("op_forward") == "forward"
    assert kinds.names().count("op_forward") == 1


@pytest.mark.usefixtures("in_this_process")
def test_doctor_says_which_kinds_of_other_packages_cannot_be_used(installed, capsys):
    assert code_of("doctor") == 0
    assert "failed to load: AttributeError" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", kinds.names())
def test_every_kind_says_what_its_tables_are_called_and_reads_its_own_records(name):
    kind = kinds.kind_of(name)
    assert isinstance(kind, Kind)
    assert list(cases.titles([name])) == [(name, kind.titles[name])]


CURVE = {"kind": "loss_curve", "preset": "debug", "setting": "native", "steps": 1, "batch": 1, "length": 8}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "tuning"}, "kind = 'tuning' is of records alone; no suite has such a case"),
        ({"kind": "sharded", "problem": "hard", "mesh": "data 2"}, "problem = 'hard' is not known; use one of causal"),
        ({"kind": "sharded", "problem": "causal", "mesh": "data 2 x data 4"}, "is not a mesh; give axes among data"),
        ({"kind": "sharded", "problem": "causal", "mesh": "rows 2"}, "is not a mesh"),
        (
            {"kind": "sharded", "problem": "causal", "mesh": "context 2"},
            "exchange = nothing does not fit mesh context 2",
        ),
        (
            {"kind": "sharded", "problem": "causal", "mesh": "data 2", "processes": 3},
            "processes = 3 do not share the 2",
        ),
        ({"kind": "loss_curve", "preset": "debug"}, "it lacks the key setting"),
        (CURVE | {"steps": 0}, "steps = 0 must be an integer from 1"),
        (CURVE | {"mesh": "rows=2"}, "mesh 'rows=2' must be AXIS=DEVICES separated by commas"),
        (CURVE | {"mesh": f"data={'9' * 30}"}, "must be AXIS=DEVICES"),
    ],
)
def test_case_of_these_fields_is_refused_in_a_sentence(fields, sentence):
    with pytest.raises(InputError, match=sentence):
        kinds.make_case(fields)


def test_no_file_outside_names_a_kind():
    """But where a suite, a verb or a folder has the same name; a backend's extension has a page of its own kinds."""
    folders = (Path(kinds.__file__).parents[1], Path(cases.__file__).parent)
    others = {*VERBS, *SUITES, CONFORMANCE}
    named = [
        f"{path}:{node.lineno}: {node.value}"
        for folder in folders
        for path in folder.rglob("*.py")
        if not {"kinds", "kascade"} & set(path.relative_to(folder).parts)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in kinds.built_in().keys() - others
    ]
    assert named == []


def test_no_two_kinds_make_records_of_one_name():
    modules = [reference.partition(":") for reference in kinds.BUILT_IN]
    shipped = [getattr(importlib.import_module(f"attnsuite.suite.kinds.{name}"), kind) for name, _, kind in modules]
    made = [name for kind in shipped for name in kind.titles]
    assert made == list(dict.fromkeys(made))
    assert tuple(made) == kinds.names()[: len(made)]


def test_the_peak_of_the_machine_is_measured_for_kinds_with_times():
    untimed = {name for name, kind in kinds.built_in().items() if not kind.needs_ceilings}
    assert {"perplexity", "cache_text", "retrieval", "kascade_text", "kascade_retrieval", "kascade_gate"} <= untimed
    assert not {"op_forward", "model_decode", "serving"} & untimed
