"""The guides of Kascade, where a figure is missing or a control does better; the rest is on published pages."""

import pytest

from attnsuite.models import ModelConfig
from attnsuite.reports.cells import group
from attnsuite.reports.kascade.guide import figures
from attnsuite.suite.kinds import problem_of
from attnsuite.suite.kinds.kascade.extension import MODEL_SUITE, model_cases

SHARED = {"model": "text", "sequence": 512, "sequences": 12}
CASES = {case.name: case for case in model_cases(ModelConfig.from_preset("tiny"), SHARED, MODEL_SUITE)}
DENSE = tuple(1.4 + 0.01 * i for i in range(12))


@pytest.fixture
def rows(record):
    """The table's rows by figure, for the given loss of Kascade and of its control."""

    def make(lost=0.02, control=0.1, without=None):
        case, records = CASES["guide-1b-prefill"], []
        for row, shift in (("dense", 0.0), ("kascade", lost), ("sinks_window", control), ("random_tiles", 0.5)):
            nll = tuple(x + shift * (1 + 0.01 * (i % 3)) for i, x in enumerate(DENSE))
            quality = {"perplexity": 4.0 + shift, "kept_pairs": 0.423, "flops": 0.692, "reuse_layers": 0.625}
            quality.pop(without, None)
            fields = {"exact": row == "dense", "quality": quality, "series": {"nll": nll, "standard_nll": DENSE}}
            fields |= {"suite": MODEL_SUITE, "case": case.name, "kind": case.kind, "problem": problem_of(case)}
            records.append(record(row, samples=(), **fields))
        return {row["figure"]: row["here"] for row in figures(group(records)).rows}

    return make


@pytest.mark.parametrize("name", ["perplexity", "kept_pairs", "flops", "reuse_layers"])
def test_a_figure_that_a_record_lacks_is_a_dash(rows, name):
    found = rows(without=name)
    assert "\u2013" in (found["perplexity 752,570.5"] if name == "perplexity" else found["63% sparsity"])


def test_a_control_that_loses_less_is_named(rows):
    assert "loses less" not in rows()["0% degradation"]
    assert rows(lost=0.2, control=0.1)["0% degradation"].endswith("sinks_window loses less at the same share")


def test_other_suites_have_no_such_table(record):
    assert figures(group([record()])) is None
