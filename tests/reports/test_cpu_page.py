"""The CPU page: ratios to peers, and the pictures."""

import dataclasses

import pytest

from attnsuite import reports
from attnsuite.reports import figures, plot
from attnsuite.reports.cells import group

pytestmark = pytest.mark.report

TIMES = tuple(0.1 + 0.001 * i for i in range(10))


@pytest.fixture
def cells(record):
    """One forward case at S 2048, float32: the baseline and what is compared with it, as times relative to 0.1 s."""

    def make(*, sequence=2048, dtype="float32", kind="op_forward", **factors):
        made = []
        for name, factor in factors.items():
            backend, _, devices = name.partition("_on_")
            base = record(backend)
            made.append(
                dataclasses.replace(
                    base,
                    suite="cpu-speed",
                    kind=kind,
                    case=f"{kind}-{sequence}-{dtype}",
                    key=f"{kind}-{sequence}-{dtype}/{name}",
                    problem={**base.problem, "sequence": sequence, "dtype": dtype, "kind": kind},
                    devices=int(devices or 1),
                    samples=tuple(factor * t for t in TIMES),
                )
            )
        return made

    return make


def test_ratio_to_a_peer_is_paired_and_a_peer_is_nobodys_fastest_backend(cells, write_run):
    records = cells(standard=1.0, chunked=0.4, torch=0.2)
    (made,) = figures.against_peers(group(records))
    assert [(row["backend"], round(row["torch"].value, 6)) for row in made.rows] == [
        ("standard", 5.0),
        ("chunked", 2.0),
    ]
    reports.render(folder := write_run(*records))
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "`chunked` is the fastest exact backend in 1 of 1 timed case" in text
    assert "relative to torch" in text


def test_cells_on_two_devices_have_their_own_row_and_label(cells, write_run):
    reports.render(folder := write_run(*cells(standard=1.0, chunked=0.4, chunked_on_2=0.3)))
    assert "chunked, 2 devices" in (folder / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def over_lengths(cells):
    return [r for s in (512, 1024, 2048) for r in cells(sequence=s, standard=1.0, chunked=0.4, jax_nn=1.2)]


def test_picture_holds_a_line_per_backend_and_the_roof(over_lengths):
    (picture,) = plot.pictures(group(over_lengths))
    (panel,) = picture.panels
    assert [name for name, _ in panel.lines] == ["standard", "chunked", "jax_nn"]
    assert [length for length, _ in panel.lines[0][1]] == [512, 1024, 2048]
    assert panel.roof == 400.0
    assert picture.file == "speed-h8k8-d64.svg"


def test_growth_of_memory_is_the_exponent_of_the_length(cells):
    def at(length):
        sizes = {"standard": length**2, "chunked": 64 * length}
        records = cells(sequence=length, standard=1.0, chunked=0.4)
        return [dataclasses.replace(r, memory={"compiled_temp": sizes[r.requested]}) for r in records]

    made = figures.growth(group([record for length in (512, 1024, 2048, 4096) for record in at(length)]))
    assert [(row["backend"], round(row["exponent"], 6)) for row in made.rows] == [("standard", 2.0), ("chunked", 1.0)]
    assert {row["lengths"] for row in made.rows} == {"1024 to 4096"}
    assert made.rows[1]["per_token"] == 64


def test_two_lengths_are_no_line(over_lengths):
    assert plot.pictures(group([r for r in over_lengths if r.problem["sequence"] > 512])) == ()


def test_picture_is_drawn_the_same_each_time_and_shown_in_both_pages(over_lengths, write_run):
    reports.render(folder := write_run(*over_lengths))
    drawn = (folder / "speed-h8k8-d64.svg").read_bytes()
    reports.render(folder)
    assert (folder / "speed-h8k8-d64.svg").read_bytes() == drawn
    assert b"measured matmul rate" in drawn
    assert "![heads 8/8, D 64, causal](speed-h8k8-d64.svg)" in (folder / "report.md").read_text(encoding="utf-8")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert 'src="data:image/svg+xml;base64,' in page
    assert "speed-h8k8-d64.svg" not in page


def test_what_ran_says_on_how_many_devices(cells):
    table = figures.requested_and_run(group(cells(standard=1.0, chunked=0.4, chunked_on_2=0.3)), {})
    assert [row["ran"] for row in table.rows] == ["standard", "chunked", "chunked, 2 devices"]
