"""The table of a checkpoint: INVALID and WITHHELD where figures mean nothing. The others are on published pages."""

import pytest

from attnsuite.reports.cells import group
from attnsuite.reports.quality import model_table
from attnsuite.suite.kinds import problem_of
from attnsuite.suite.kinds.kascade.selection_case import SelectionCase
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.kinds.quality_case import TextCase

DENSE = tuple(1.4 + 0.01 * i for i in range(12))
TEXT = TextCase(model="/somewhere/Llama", sequence=64)
CHOSEN = SelectionCase(kind="kascade_text", model="/somewhere/Llama", sequence=64)
LOST = {"kascade": 0.02, "random_tiles": 0.3}


@pytest.fixture
def rows(record):
    """The rows of the table by backend, with the given bits per byte of a unigram model and losses of methods."""

    def make(unigram=4.6, lost=LOST):
        def cell(case, backend, **fields):
            problem = problem_of(case)
            return record(backend, suite="checkpoint", case=case.name, kind=case.kind, problem=problem, **fields)

        prefill = ModelCase(kind="model_prefill", model=TEXT.model, sequence=64)
        figures = {"perplexity": 4.2, "bits_per_byte": 2.1, "unigram_bits_per_byte": unigram}
        series = {"nll": DENSE, "standard_nll": DENSE}
        records = [cell(TEXT, name, quality=figures, series=series, samples=()) for name in ("standard", "chunked")]
        records += [
            cell(prefill, name, samples=(0.1,) * 7, steps=1, tokens=64, exact=name != "kascade")
            for name in ("standard", "chunked", "kascade")
        ]
        for name in ("dense", *lost):
            nll = tuple(x + lost.get(name, 0.0) * (1 + 0.1 * (i % 3)) for i, x in enumerate(DENSE))
            figures = {"perplexity": 4.3, "kl_mean": 0.01, "kl_p99": 0.1, "top1_agreement": 0.9, "kept_pairs": 0.2}
            fields = {"quality": figures, "series": {"nll": nll, "standard_nll": DENSE}, "samples": ()}
            exact = name == "dense"
            records.append(cell(CHOSEN, name, exact=exact, resolved="standard" if exact else name, **fields))
        return {row["backend"]: row for row in model_table(group(records)).rows}

    return make


def test_no_row_says_anything_where_the_dense_model_is_no_better_than_unigrams(rows):
    found = rows(unigram=2.1)
    assert {name: row["reading"].split(":")[0] for name, row in found.items()} == dict.fromkeys(found, "INVALID")


@pytest.mark.parametrize("lost", [{"kascade": 0.02, "random_tiles": 0.0}, {"kascade": 0.02}], ids=["blind", "missing"])
def test_kascades_row_is_withheld_where_its_control_does_not_fail(rows, lost):
    row = rows(lost=lost)["kascade"]
    assert row["reading"].startswith("WITHHELD")
    assert row["perplexity"] is None
    assert row["ttft"] > 0
