"""The support matrix in the docs is what the backends say."""

from pathlib import Path

from backends.registry import BUILT_IN
from suite.support import PROBLEMS, support_table

DOCS = Path(__file__).parents[2] / "docs" / "backends.md"


def test_matrix_in_the_docs_is_what_the_backends_say():
    assert support_table(tuple(BUILT_IN)) in DOCS.read_text(encoding="utf-8")


def test_matrix_has_refusals_and_acceptances():
    table = support_table(("standard", "cudnn"))
    assert "everywhere" in table
    assert "h100" in table
    assert table.count("| no ") > 3
    assert len(table.splitlines()) == len(PROBLEMS) + 2
