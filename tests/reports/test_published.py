"""The published pages are what their records say."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tyro

from attnsuite import reports
from attnsuite.backends.devices import KNOWN_KINDS
from attnsuite.reports.pages import curves
from attnsuite.suite.compile import compilation, topologies
from attnsuite.suite.compile_run import SEARCH_LENGTHS
from attnsuite.suite.kinds import make_case
from attnsuite.suite.kinds.loss_curve_case import role_of, settings_of
from attnsuite.suite.store import RECORDS, parse_records
from attnsuite.suite.verbs import compile as compile_verb
from attnsuite.suite.verbs import run as run_verb
from attnsuite.suite.verbs.flags import extended
from landing import swept

pytestmark = pytest.mark.report

PUBLISHED = Path(__file__).parents[2] / "reports" / "published"
if not PUBLISHED.is_dir():
    pytest.skip("a source distribution has no published pages; the repository has", allow_module_level=True)
TRAINING = PUBLISHED / "training-cpu-intel-xeon"
TRAINING_SHARDED = PUBLISHED / "training-sharded"
FOLDERS = sorted(path.parent.name for path in PUBLISHED.glob("*/records.jsonl"))
VERDICTS = tuple(name for name in FOLDERS if name.startswith("verdicts-"))
DEVICES = ("-device-h100", "-device-v5e", "-device-v6e")
ALONE = ("sharded", TRAINING.name, TRAINING_SHARDED.name, *VERDICTS)
PAGES = {
    "gpu-nvidia-h200": (),
    "gpu-nvidia-h200-16384": (),
    "gpu-nvidia-h200-decode": (),
    "gpu-nvidia-h200-kascade": (),
    "cpu-amd-epyc": (),
    "cpu-amd-epyc-speed": (),
    "cpu-intel-xeon": (),
    "cpu-intel-xeon-speed": (),
    "cpu-intel-xeon-decode": (),
    "cpu-amd-epyc-caller": (),
    "cpu-intel-xeon-caller": (),
    "cpu-amd-epyc-llama-1b": (),
    "cpu-intel-xeon-amx": (),
    "cpu-intel-xeon-amx-speed": (),
    "cpu-intel-xeon-invariant": (),
    "cpu-intel-xeon-kascade": ("compiled-kascade",),
    "cpu-amd-epyc-speed-8192": (),
    "cpu-amd-epyc-avx2-speed": (),
    "cpu-amd-epyc-zen4-speed": (),
    "cpu-amd-epyc-kascade-flash-cpu": (),
    "cpu-amd-epyc-kascade-finetune": (),
    "cpu-intel-xeon-kascade-flash-cpu": (),
    "cpu-intel-xeon-kascade-guide": (),
    "cpu-intel-xeon-kascade-guide-1b": (),
}


# Of the pages of so many cases one does not wait.
LONG = {"cpu-intel-xeon-speed", "cpu-intel-xeon-amx-speed", "cpu-amd-epyc-speed"}


@pytest.mark.parametrize("name", swept(FOLDERS, {*FOLDERS} - LONG))
def test_page_is_rendered_again_the_same(name, tmp_path):
    reports.render(PUBLISHED / name, *(PUBLISHED / other for other in PAGES.get(name, ())), out=tmp_path)
    for page in ("report.md", "details.md") if name in PAGES else ("report.md",):
        fresh = (tmp_path / page).read_text(encoding="utf-8")
        assert fresh == (PUBLISHED / name / page).read_text(encoding="utf-8")
    assert {p.name for p in tmp_path.glob("*.svg")} == {p.name for p in (PUBLISHED / name).glob("*.svg")}


@pytest.mark.parametrize("name", ["cpu-amd-epyc", "cpu-intel-xeon"])
def test_page_of_quick_is_short(name):
    assert (PUBLISHED / name / "report.md").stat().st_size <= 15_000


def test_every_folder_with_records_has_its_page():
    compiled = {f"compiled{suffix}" for suffix in ("", "-kascade", "-kernels", "-tax", "-v5e", "-v5e-4x4", *DEVICES)}
    assert set(FOLDERS) == {*PAGES, *ALONE, *compiled}


def test_every_reproduce_line_is_what_the_command_line_takes():
    verbs = {"run": run_verb.Run, "compile": compile_verb.Compile}
    found = {}
    for page in PUBLISHED.glob("*/report.md"):
        for line in re.findall(r"^    (attnsuite .*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            _, verb, *words = shlex.split(line)
            found.setdefault(page.parent.name, []).append(tyro.cli(extended(verbs[verb], verb, words), args=words))
    assert set(found) == {path.parent.name for path in PUBLISHED.glob("*/report.md")} - {*ALONE}
    for name in PAGES:
        asked = found[name][0]
        cases = {record.case for record in parse_records(PUBLISHED / name / RECORDS)[0]}
        assert cases <= set(asked.cases.split(","))
        assert (asked.suite == "kascade-guide") == any(case.startswith("guide-") for case in cases)


def test_training_on_eight_devices_follows_one_device_and_controls_are_found_out():
    native = settings_of(parse_records(TRAINING_SHARDED / RECORDS)[0])[0]
    found = {r.requested: (role_of(r), verdict.is_ready) for r, verdict in curves.verdicts(native[1])}
    sharded = {name: ready for name, (_, ready) in found.items() if "@" in name}
    assert sharded == {f"{name}@fsdp=2,heads=2,context=2": True for name in ("standard", "chunked")}
    assert not any(ready for role, ready in found.values() if role == "control")


def test_backends_are_ready_to_train_with_and_controls_are_found_out():
    for case, records in settings_of(parse_records(TRAINING / RECORDS)[0]):
        found = curves.verdicts(records)
        ready = {r.requested for r, verdict in found if role_of(r) == "backend" and verdict.is_ready}
        assert ready == ({"chunked"} if case.setting == "native" else {"chunked", "splash", "kvax"})
        controls = [verdict for record, verdict in found if role_of(record) == "control"]
        assert len(controls) == 3
        assert not any(verdict.is_ready for verdict in controls)


@pytest.mark.parametrize("name", ["", "-kascade", *DEVICES])
def test_compiled_page_has_its_command_and_every_cell_that_it_asks_for(name):
    folder = PUBLISHED / f"compiled{name}"
    records = parse_records(folder / RECORDS)[0]
    manifest = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    names = [
        row
        for case in map(make_case, manifest["cases"])
        for backend in manifest["backends"]
        for row in compilation.in_roles(case, backend)
    ]
    assert len(records) == len({record.key for record in records}) == len(manifest["targets"]) * len(names)
    assert all(record.samples == () for record in records)
    assert all(record.mode == "compile" or record.status == "unsupported" for record in records)
    assert shlex.join(manifest["command"]) in (folder / "report.md").read_text(encoding="utf-8")
    if not name:
        assert {record.target.partition(":")[2] for record in records} == set(topologies.KINDS) == set(KNOWN_KINDS)


def test_published_search_found_for_each_backend_what_fits_beside_what_does_not():
    records = parse_records(PUBLISHED / "compiled-v5e" / RECORDS)[0]
    for backend in ("standard", "chunked", "splash", "kascade"):
        tried = [r for r in records if r.requested == backend and r.kind == "model_prefill"]
        fits = max(r.problem["sequence"] for r in tried if r.status == "ok")
        too_long = min(r.problem["sequence"] for r in tried if r.status == "oom")
        assert SEARCH_LENGTHS.index(too_long) == SEARCH_LENGTHS.index(fits) + 1
