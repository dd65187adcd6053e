"""The map of winners: which cases it has, what it says of each, and where there is none."""

import pytest

from attnsuite import reports
from attnsuite.reports.cells import group
from attnsuite.reports.plot import Square, draw, winners

FAST, SLOW = ([scale * (1 + 0.001 * i) for i in range(10)] for scale in (0.01, 0.1))
NOISE = (1.02, 0.97, 1.01, 0.99, 1.03, 0.98, 1.0, 0.985, 1.015, 0.995)


@pytest.fixture
def case(record):
    """The records of standard and chunked, with these samples, in one case."""

    def make(chunked, **problem):
        fields = {"case": str(problem), "problem": record().problem | problem}
        return [record(samples=tuple(SLOW), **fields), record("chunked", samples=tuple(chunked), **fields)]

    return make


@pytest.fixture
def grid(case):
    """Two lengths by two head layouts: chunked is faster, slower, as fast within noise, and faster."""
    return [
        *case(FAST, sequence=1024, kv_heads=2),
        *case([10 * x for x in SLOW], sequence=2048, kv_heads=2),
        *case([0.1 * x for x in NOISE], sequence=1024),
        *case(FAST, sequence=2048),
    ]


def test_map_has_the_fastest_of_each_case_and_names_both_where_they_are_not_told_apart(grid):
    (picture,) = winners(group(grid))
    (found,) = picture.panels
    assert (found.columns, found.rows) == (("1024", "2048"), ("heads 8/2", "heads 8/8"))
    assert [square for square in found.squares if square.rival is None] == [
        Square(0, 0, "chunked", None),
        Square(1, 0, "standard", None),
        Square(1, 1, "chunked", None),
    ]
    (unclear,) = [square for square in found.squares if square.rival is not None]
    assert (unclear.column, unclear.row) == (0, 1)
    assert {unclear.winner, unclear.rival} == {"standard", "chunked"}


def test_squares_of_two_that_are_not_told_apart_are_hatched(grid):
    (picture,) = winners(group(grid))
    assert "<pattern" in draw(picture)
    (clear,) = winners(
        group(
            [r for r in grid if r.problem["sequence"] == 2048 or r.problem["kv_heads"] == 2]
            + [r for r in grid if r.requested == "standard"]
        )
    )
    assert "<pattern" not in draw(clear)


def test_one_dimension_is_no_map(case):
    assert winners(group([r for s in (512, 1024, 2048) for r in case(FAST, sequence=s)])) == ()
    lone = [*case(FAST, sequence=512), *case(FAST, sequence=1024), *case(FAST, sequence=1024, documents=4)]
    assert winners(group(lone)) == ()


def test_where_the_length_does_not_vary_the_columns_are_the_field_that_varies_most(case):
    records = [
        record
        for size in (128, 256, 512)
        for dtype in ("float32", "bfloat16")
        for record in case(FAST, window_size=size, dtype=dtype)
    ]
    (found,) = winners(group(records))[0].panels
    assert (found.x_label, found.columns) == ("window size", ("128", "256", "512"))
    assert found.rows == ("bfloat16", "float32")


def test_cell_with_wrong_numbers_wins_nothing(case, record):
    grid = [r for s in (512, 1024) for k in (2, 8) for r in case(SLOW, sequence=s, kv_heads=k)]
    wrong = [record("cudnn", status="wrong", samples=tuple(FAST), case=r.case, problem=r.problem) for r in grid]
    (found,) = winners(group([*grid, *wrong]))[0].panels
    assert "cudnn" not in {name for square in found.squares for name in (square.winner, square.rival)}


def test_map_is_on_both_pages_and_drawn_the_same_each_time(grid, write_run):
    reports.render(folder := write_run(*grid))
    drawn = (folder / "winners.svg").read_bytes()
    reports.render(folder)
    assert (folder / "winners.svg").read_bytes() == drawn
    assert "](winners.svg)" in (folder / "report.md").read_text(encoding="utf-8")
    assert 'alt="Fastest exact backend of each case"' in (folder / "report.html").read_text(encoding="utf-8")
