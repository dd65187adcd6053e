"""Pictures of pages, and those of README and of the first page: what docs/pictures.py draws from the published runs."""

import re
import runpy
import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from attnsuite import reports
from attnsuite.reports import plot
from attnsuite.reports.cells import group
from attnsuite.reports.plot import as_svg, draw, winners

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = runpy.run_path(str(DOCS / "pictures.py"))
FAST, SLOW = ([scale * (1 + 0.001 * i) for i in range(10)] for scale in (0.01, 0.1))
NOISE = (1.02, 0.97, 1.01, 0.99, 1.03, 0.98, 1.0, 0.985, 1.015, 0.995)
of_the_repository = pytest.mark.skipif(
    not PICTURES["PUBLISHED"].is_dir(), reason="a source distribution has no published records; the repository has"
)


def words_and_marks(svg):
    """What a picture says, and how much it shows; coordinates may differ from one Matplotlib to the next."""
    return re.findall(r">([^<>]*\S[^<>]*)</t", svg), svg.count("<use")


@of_the_repository
def test_pictures_are_drawn_from_the_published_runs():
    for name, text in PICTURES["drawn"]():
        kept = (DOCS / name).read_text(encoding="utf-8")
        assert words_and_marks(kept) == words_and_marks(text), f"{name} is old; run python docs/pictures.py"
        assert len(kept.encode()) < 100_000
        assert "<script" not in kept
        assert "prefers-color-scheme: dark" in kept or name.startswith("answer-")


@of_the_repository
def test_a_picture_of_fewer_points_is_another_one():
    kept = (DOCS / "roofline.svg").read_text(encoding="utf-8")
    assert words_and_marks(kept) != words_and_marks(re.sub("<use[^>]*>", "", kept, count=1))


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


@pytest.fixture
def over_lengths(record):
    """Forward cases of the suite of CPUs at three lengths."""
    return [
        record(
            name,
            suite="cpu-speed",
            case=f"s{length}",
            problem=record().problem | {"sequence": length},
            samples=tuple(factor * t for t in SLOW),
        )
        for length in (512, 1024, 2048)
        for name, factor in {"standard": 1.0, "chunked": 0.4, "jax_nn": 1.2}.items()
    ]


def test_two_lengths_are_no_line(over_lengths):
    assert plot.pictures(group([r for r in over_lengths if r.problem["sequence"] > 512])) == ()


@pytest.mark.parametrize(
    ("cells", "file", "title"),
    [
        ("over_lengths", "speed-h8k8-d64.svg", "heads 8/8, D 64, causal"),
        ("grid", "winners.svg", "Fastest exact backend"),
    ],
)
def test_picture_is_drawn_the_same_each_time_and_shown_in_both_pages(cells, file, title, write_run, request):
    reports.render(folder := write_run(*request.getfixturevalue(cells)))
    drawn = (folder / file).read_bytes()
    reports.render(folder)
    assert (folder / file).read_bytes() == drawn
    assert re.search(rf"!\[{title}.*\]\({file}\)", (folder / "report.md").read_text(encoding="utf-8"))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert re.search(f'<img[^>]*alt="{title}', page)
    assert 'src="data:image/svg+xml;base64,' in page
    assert file not in page


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


def test_character_that_the_font_lacks_stands_in_the_picture_without_a_warning():
    figure = Figure(layout="constrained")
    figure.suptitle("half \U000e8941 drawn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "half " in as_svg(figure)
