"""A bundle: nobody is named in it, it is verified, and what was edited, added, removed or hidden in it is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import stat
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from attnsuite.suite import bundle
from attnsuite.suite.bundle import HEAD, LOG, contradictions, pack, verified
from attnsuite.suite.errors import InputError
from attnsuite.suite.store import CONFORMANCE, MANIFEST, RECORDS, parse_records
from command import code_of

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "cpu-intel-xeon"


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (MANIFEST, RECORDS):
        shutil.copy(PUBLISHED / name, folder / name)
    return folder


@pytest.fixture
def packed(run_dir, tmp_path):
    pack(run_dir, tmp_path / "run.zip")
    return tmp_path / "run.zip"


def texts_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def rewritten(path, texts):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return path


def edited(path, edit, *, hashes=False):
    """The bundle after ``edit`` of its records; with ``hashes`` all hashes are made anew, as a forger would."""
    texts = texts_of(path)
    records = [json.loads(line) for line in texts[RECORDS].splitlines()]
    lines = [json.dumps(record) for record in edit(records) or records]
    texts[RECORDS] = "".join(line + "\n" for line in lines)
    if hashes:
        head, chain = json.loads(texts[HEAD]), ""
        for line in lines:
            chain = hashlib.sha256(f"{chain}\n{line}".encode()).hexdigest()
        head |= {"records": len(lines), "chain": chain}
        head["sha256"] = {name: hashlib.sha256(texts[name].encode()).hexdigest() for name in texts if name != HEAD}
        texts[HEAD] = json.dumps(head)
    return rewritten(path, texts)


def timed(records):
    return next(r for r in records if r["samples"] and r["flops"] and r["exact"] and r["accuracy"])


def out(records):
    return timed(records)["accuracy"]["out"]


def scaled(records, factor):
    record = timed(records)
    record["samples"] = [factor * sample for sample in record["samples"]]


def test_bundle_is_verified_and_the_same_each_time(run_dir, packed, tmp_path):
    found = verified(packed)
    assert len(found.records) == len((run_dir / RECORDS).read_text().splitlines())
    pack(run_dir, tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == packed.read_bytes()
    found.write(tmp_path / "out")
    pack(tmp_path / "out", tmp_path / "third.zip")  # what was unpacked packs to the same bundle
    assert (tmp_path / "third.zip").read_bytes() == packed.read_bytes()
    with pytest.raises(InputError, match="already has records"):
        found.write(tmp_path / "out")


@pytest.mark.parametrize("home", ["/home/ada", None])
def test_no_path_user_or_host_is_in_it(run_dir, tmp_path, monkeypatch, homeless, home):
    monkeypatch.setattr(bundle.getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "engine-1842")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    lines = [json.loads(line) for line in (run_dir / RECORDS).read_text().splitlines()]
    lines[0]["notes"] = ["ada read /data/private/x.bin on engine-1842; see https://example.org/page"]
    lines[0]["environment"] |= {"node": "engine-1842", "source_files": {"/home/ada/my kernels/mine.py:f": "0123"}}
    function = "/home/ada/my kernels/mine.py:f"
    lines[0] |= {
        "requested": function,
        "resolved": function,
        "key": f"{lines[0]['case']}/{function}/{lines[0]['target']}/{lines[0]['mode'] or 'native'}",
    }
    lines[0]["environment"]["flags"] = {"XLA_FLAGS": "--xla_dump_to=/home/ada/dump"}
    (run_dir / RECORDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = json.loads((run_dir / MANIFEST).read_text()) | {"file": "/home/ada/suites/mine.toml"}
    manifest["backends"] = [*manifest["backends"], function]
    (run_dir / MANIFEST).write_text(json.dumps(manifest))
    pack(run_dir, tmp_path / "run.zip")
    texts = texts_of(tmp_path / "run.zip")
    for word in ("/home", "ada ", "engine-1842", "/data", "suites/", "my kernels"):
        assert not any(word in text for text in texts.values()), word
    first = verified(tmp_path / "run.zip").records[0]
    assert first.requested == "mine.py:f"
    assert first.notes == ("<user> read <path> on <host>; see https://example.org/page",)
    assert first.environment["flags"] == {"XLA_FLAGS": "--xla_dump_to=<path>"}
    assert "mine.toml" in texts[MANIFEST]
    assert "/proc/self/clear_refs" in texts[RECORDS]  # names nobody


def test_two_files_of_one_name_are_not_packed(run_dir, tmp_path):
    lines = [json.loads(line) for line in (run_dir / RECORDS).read_text().splitlines()]
    functions = [f"{folder}/mine.py:f" for folder in ("before", "after")]
    for row in functions:
        key = f"{lines[0]['case']}/{row}/{lines[0]['target']}/{lines[0]['mode'] or 'native'}"
        lines.append({**lines[0], "requested": row, "resolved": row, "key": key})
    (run_dir / RECORDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = json.loads((run_dir / MANIFEST).read_text())
    (run_dir / MANIFEST).write_text(json.dumps({**manifest, "backends": [*manifest["backends"], *functions]}))
    with pytest.raises(InputError, match="would be refused as a bundle: two records have one key"):
        pack(run_dir, tmp_path / "run.zip")


def test_machine_name_that_cannot_be_replaced_is_refused(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "forward-s4096")
    with pytest.raises(InputError, match="would still hold 'forward-s4096'"):
        pack(run_dir, tmp_path / "run.zip")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda r: scaled(r, 0.5), "a record was edited, or the records were reordered"),
        (lambda r: r[0].update(status="ok", error=None), "a record was edited"),
        (lambda r: [*r, {**r[0], "key": "new"}], "some were added or removed"),
        (lambda r: r[:-1], "some were added or removed"),
        (lambda r: [*r[:-1], r[0]], "a record was edited"),
        (lambda r: [r[1], r[0], *r[2:]], "reordered"),
    ],
)
def test_edited_records_are_refused(packed, edit, reason):
    with pytest.raises(InputError, match=reason):
        verified(edited(packed, edit))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda r: scaled(r, 1e-4), "this machine needs at least"),
        (lambda r: scaled(r, 1e4), "its samples take"),
        (lambda r: out(r).update(allowed=3 * out(r)["allowed"]), "the bound of out does not follow"),
        (lambda r: out(r).update(max_error=1.0), "a line is no record .out passed with an error of 1, and"),
        (lambda r: out(r).update(passed=False), "a line is no record .status = 'ok' with out outside its bound"),
        (
            lambda r: timed(r).update(status="wrong", error="off.", samples=[], device_seconds=[], cached_seconds=[]),
            "it is wrong with every tensor inside its bound",
        ),
        (lambda r: r[3]["environment"]["versions"].update(jax="9"), "is of other versions"),
        (lambda r: r[3]["environment"].update(source="0" * 16), "is of other versions"),
        (lambda r: [*r, r[0]], "two records have one key"),
        (lambda r: r[0].update(new=1), "a line is no record"),
        (lambda r: r[0].pop("status"), "a line is no record"),
        (lambda r: r[0].update(kind="unheard_of"), "a line is no record"),
    ],
)
def test_record_that_contradicts_itself_is_refused_with_right_hashes(packed, edit, reason):
    with pytest.raises(InputError, match=reason):
        verified(edited(packed, edit, hashes=True))


@pytest.mark.parametrize("manifest", ["garbage", "{}", '{"surprise": 1}'])
def test_manifest_that_could_not_be_read_is_refused_with_right_hashes(packed, tmp_path, manifest):
    forged = edited(rewritten(packed, texts_of(packed) | {MANIFEST: manifest}), lambda records: records, hashes=True)
    with pytest.raises(InputError, match=r"is refused: its run\.json is damaged or of another version"):
        verified(forged)


def test_a_problem_that_is_wrong_by_other_faults_contradicts_nothing():
    """Of the contract: numbers that nobody may see changed a result whose errors are small."""
    records, _, _ = parse_records(PUBLISHED.with_name("verdicts-gpu-nvidia-h200-contract") / RECORDS)
    assert any(r.status == "wrong" and all(x.passed for x in r.accuracy.values()) for r in records)
    assert not list(contradictions(records))


def test_only_invented_whole_records_pass_with_right_hashes(packed):
    """What the hashes cannot show; the docstring and the page say so."""
    assert verified(edited(packed, lambda records: scaled(records, 0.5), hashes=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [(MANIFEST, "run.json was edited"), (LOG, "log.txt was edited"), (HEAD, "bundle.json is damaged")],
)
def test_other_edited_files_are_refused(packed, name, reason):
    texts = texts_of(packed)
    texts[name] = texts[name].replace("{", "{ ", 1) + " " if name != HEAD else "{}"
    with pytest.raises(InputError, match=reason):
        verified(rewritten(packed, texts))


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a\\..\\evil", "records.jsonl/", "RECORDS.JSONL", "x/run.json", None, RECORDS]
)
@pytest.mark.filterwarnings("ignore:Duplicate")
def test_other_missing_or_repeated_names_are_refused_and_nothing_is_extracted(packed, tmp_path, name):
    before, texts = sorted(tmp_path.rglob("*")), texts_of(packed)
    rewritten(packed, {kept: text for kept, text in texts.items() if kept != LOG or name})
    if name:
        with zipfile.ZipFile(packed, "a") as archive:
            archive.writestr(name, "x")
    with pytest.raises(InputError, match="a bundle holds"):
        verified(packed)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFDIR])
def test_links_and_devices_are_refused(packed, kind):
    texts = texts_of(packed)
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in texts.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = ((kind if name == LOG else stat.S_IFREG) | 0o644) << 16
            archive.writestr(info, "/etc/passwd" if name == LOG else text)
    with pytest.raises(InputError, match=r"log\.txt is no plain file"):
        verified(packed)


def test_bomb_is_refused_before_it_fills_the_memory(packed, monkeypatch):
    monkeypatch.setattr(bundle, "_LARGEST", 2**20)
    texts = texts_of(packed) | {LOG: "0" * 2**24}
    with pytest.raises(InputError, match="it holds more than 1 MiB"):
        verified(rewritten(packed, texts))
    data = bytearray(rewritten(packed, texts).read_bytes())
    sizes = (2**24).to_bytes(4, "little")  # a zip that says a smaller size than it has
    while (at := data.find(sizes)) >= 0:
        data[at : at + 4] = (16).to_bytes(4, "little")
    packed.write_bytes(data)
    with pytest.raises(InputError, match="is refused"):
        verified(packed)


@pytest.mark.parametrize("at", [0, 40, 400, -30])
def test_damaged_file_is_one_sentence(packed, at, capsys):
    data = bytearray(packed.read_bytes())
    for i in range(8):
        data[at + i] ^= 0xFF
    packed.write_bytes(data)
    assert code_of("report", packed) == 2
    said = capsys.readouterr().err
    assert "is refused" in said
    assert "Traceback" not in said
    packed.write_bytes(bytes(data[: len(data) // 2]))
    assert code_of("report", packed) == 2
    assert code_of("report", packed.with_name("missing.zip")) == 2


def test_verb_packs_verifies_and_unpacks_only_where_it_is_told_to(run_dir, tmp_path, capsys):
    target = tmp_path / "sent.ZIP"
    assert code_of("report", run_dir, "--bundle", target) == 0
    before = sorted(tmp_path.rglob("*"))
    assert code_of("report", run_dir, "--bundle", target) == 2  # nothing is overwritten
    assert code_of("report", target) == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert "verified: 42 records" in capsys.readouterr().out
    assert code_of("report", target, "--out", tmp_path / "theirs") == 0
    assert (tmp_path / "theirs" / "report.md").is_file()
    for words in ((run_dir, "--bundle", tmp_path / "x.tar"), (target, run_dir), (run_dir, run_dir, "--bundle", target)):
        assert code_of("report", *words) == 2
    capsys.readouterr()
    assert code_of("report", target, "--bundle", tmp_path / "again.zip") == 2
    assert "--bundle takes one run and FILE.zip" in capsys.readouterr().err


def test_conformance_of_a_run_on_a_device_is_part_of_its_bundle(run_dir, tmp_path):
    records = [json.loads(line) for line in (run_dir / RECORDS).read_text().splitlines()]
    held = timed(records) | {"kind": "conformance", "problem": {"kind": "conformance", "name": "causal"}, "samples": []}
    held |= {
        "key": f"causal/{held['requested']}/{held['target']}/{held['mode']}",
        "suite": "judge",
        "case": "causal",
        "facts": {"gradients": True, "share": 0.5},
    }
    folder = run_dir / CONFORMANCE
    folder.mkdir()
    (folder / RECORDS).write_text(json.dumps(held) + "\n")
    shutil.copy(run_dir / MANIFEST, folder / MANIFEST)
    pack(run_dir, tmp_path / "run.zip")
    found = verified(tmp_path / "run.zip")
    assert len(found.records) == len(records)
    assert code_of("report", tmp_path / "run.zip", "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / CONFORMANCE / "report.md").is_file()
    texts = texts_of(tmp_path / "run.zip")
    for name in (f"{CONFORMANCE}/{MANIFEST}", f"{CONFORMANCE}/{RECORDS}"):
        with pytest.raises(InputError, match="is refused"):
            verified(rewritten(tmp_path / "edited.zip", {n: text for n, text in texts.items() if n != name}))
        with pytest.raises(InputError, match="is refused"):
            verified(rewritten(tmp_path / "edited.zip", texts | {name: texts[name].replace("causal", "plain")}))


def test_bundle_that_cannot_be_written_leaves_nothing(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(InputError, match=r"sent\.zip: No space left on device"):
        pack(run_dir, tmp_path / "sent.zip")
    assert not list(tmp_path.glob("*sent*"))


def test_run_that_was_cut_off_is_not_packed(run_dir, tmp_path):
    with (run_dir / RECORDS).open("a") as file:
        file.write('{"schema"')
    with pytest.raises(InputError, match="has no whole run"):
        pack(run_dir, tmp_path / "x.zip")
