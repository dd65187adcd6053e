"""The CPU page: goals judged on the figures, ratios to peers, and the pictures."""

import dataclasses

import pytest

from attnsuite import reports
from attnsuite.reports import figures, goals, growth, peers, plot
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


def goal_rows(records):
    made = goals.goals(group(records))
    return {} if made is None else {row["goal"]: row for row in made.rows}


def test_goal_is_met_or_missed_by_the_figure(cells):
    goal = "chunked, forward: a fifth of jax.nn's time or less, float32, S 2048"
    met = goal_rows(cells(standard=1.0, chunked=0.3, chunked_on_2=0.19, jax_nn=1.0))[goal]
    assert (met["met"], met["worst"], met["missed"]) == ("1 of 1", "0.190\u00d7", None)
    missed = goal_rows(cells(standard=1.0, chunked=0.3, chunked_on_2=0.21, jax_nn=1.0))[goal]
    assert missed["met"] == "0 of 1"
    assert missed["missed"].endswith(": 0.210\u00d7")


def test_goal_for_one_device_is_not_judged_on_two(cells):
    goal = "chunked, forward and forward and backward: never slower than jax.nn"
    rows = goal_rows(cells(standard=1.0, chunked=1.1, chunked_on_2=0.5, jax_nn=1.0))
    assert rows[goal]["met"] == "0 of 1"


def test_torch_as_installed_is_the_peer_only_where_it_was_not_unthrottled(cells):
    goal = "chunked, forward: at most 1.10 of torch, float32, S from 1024"
    plain = goal_rows(cells(standard=1.0, chunked=0.3, torch=0.2))[goal]
    assert (plain["met"], plain["worst"]) == ("0 of 1", "1.50\u00d7")
    both = goal_rows(cells(standard=1.0, chunked=0.3, torch=0.4, torch_unthrottled=0.2))[goal]
    assert (both["met"], both["worst"]) == ("0 of 1", "1.50\u00d7")


def test_share_of_the_roof_is_a_lower_bound(cells):
    goal = "chunked, forward and forward and backward: 45% of the measured matmul rate, float32, S from 2048"
    # 3.4e10 FLOP in 0.1045 s are 325 GFLOP/s of 400.
    assert goal_rows(cells(standard=1.0, chunked=1.0))[goal]["met"] == "1 of 1"
    assert goal_rows(cells(standard=1.0, chunked=2.0))[goal]["missed"].endswith("40.7%")


def test_wrong_cell_meets_no_goal(cells):
    records = [
        dataclasses.replace(r, status="wrong", error="off") if r.requested == "chunked" else r
        for r in cells(standard=1.0, chunked=0.1, jax_nn=1.0)
    ]
    assert goal_rows(records) == {}


def outside(records, name):
    return [dataclasses.replace(r, status="wrong", error="off") if r.requested == name else r for r in records]


def test_native_kernel_is_held_to_the_fastest_torch_case_by_case_and_by_the_median(cells):
    each, middle = (
        f"flash_cpu, forward: {text} of torch, S 512 to 8192" for text in ("below 0.95", "median below 0.75")
    )
    factors = {512: 0.96, 1024: 0.5, 2048: 0.6}
    rows = goal_rows([r for s, x in factors.items() for r in cells(sequence=s, standard=9.0, flash_cpu=x, torch=1.0)])
    assert (rows[each]["met"], rows[each]["worst"]) == ("2 of 3", "0.960\u00d7")
    assert (rows[middle]["met"], rows[middle]["worst"]) == ("1 of 1", "0.600\u00d7")
    slower = goal_rows(cells(standard=9.0, flash_cpu=0.8, torch=1.0))[middle]
    assert (slower["met"], slower["missed"]) == ("0 of 1", "median: 0.800\u00d7")


def test_goal_is_not_met_by_leaving_a_rival_out_whose_numbers_are_wrong(cells, write_run):
    goal = "flash_cpu, forward: below 0.95 of torch, S 512 to 8192"
    records = outside(cells(standard=9.0, flash_cpu=1.0, torch=0.5), "torch")
    assert goal_rows(records)[goal]["met"] == "0 of 1"
    reports.render(folder := write_run(*records))
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "torch (numbers outside the bound)" in text


def test_masked_goal_counts_the_pairs_that_torch_computes_for_nothing(cells):
    goal = (
        "flash_cpu, forward: masked, at most 1.3 of the share of visible pairs in the time of torch with an equal mask"
    )
    problem = {"window_size": 205, "heads": 8, "head_dim": 64, "sequence": 2048}
    pairs = 4 * 8 * 64 * 2048**2
    made = cells(standard=9.0, flash_cpu=0.2, torch=1.0)
    records = [dataclasses.replace(r, problem={**r.problem, **problem}, flops=pairs // 10) for r in made]
    assert goal_rows(records)[goal]["worst"] == "2.00\u00d7"


def test_temporary_memory_is_held_to_chunked(cells):
    goal = "flash_cpu, forward and forward and backward: no more temporary memory than chunked"
    sizes = {"standard": 9000, "chunked": 100, "flash_cpu": 150}
    made = cells(standard=9.0, chunked=2.0, flash_cpu=1.0)
    records = [dataclasses.replace(r, memory={"compiled_temp": sizes[r.requested]}) for r in made]
    assert goal_rows(records)[goal]["worst"] == "1.50\u00d7"


def test_other_suites_have_no_goals(record):
    assert goals.goals(group([record()])) is None


def test_ratio_to_a_peer_is_paired_and_a_peer_is_nobodys_fastest_backend(cells, write_run):
    records = cells(standard=1.0, chunked=0.4, torch=0.2)
    (made,) = peers.against(group(records))
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

    made = growth.growth(group([record for length in (512, 1024, 2048, 4096) for record in at(length)]))
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
