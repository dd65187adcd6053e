"""The pictures of README and of the first page are what docs/pictures.py draws from the published runs."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = runpy.run_path(str(DOCS / "pictures.py"))
pytestmark = pytest.mark.skipif(
    not PICTURES["PUBLISHED"].is_dir(), reason="a source distribution has no published records; the repository has"
)


def words_and_marks(svg):
    """What a picture says, and how much it shows; coordinates may differ from one Matplotlib to the next."""
    return re.findall(r">([^<>]*\S[^<>]*)</t", svg), svg.count("<use")


def test_pictures_are_drawn_from_the_published_runs():
    for name, text in PICTURES["drawn"]():
        kept = (DOCS / name).read_text(encoding="utf-8")
        assert words_and_marks(kept) == words_and_marks(text), f"{name} is old; run python docs/pictures.py"
        assert len(kept.encode()) < 100_000
        assert "<script" not in kept
        assert "prefers-color-scheme: dark" in kept or name.startswith("answer-")


def test_a_picture_of_fewer_points_is_another_one():
    kept = (DOCS / "roofline.svg").read_text(encoding="utf-8")
    assert words_and_marks(kept) != words_and_marks(re.sub("<use[^>]*>", "", kept, count=1))
