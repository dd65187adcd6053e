"""The page of the guides of Kascade: their figures beside measured ones, and nothing where nothing was measured."""

import pytest

from attnsuite.models import ModelConfig
from attnsuite.reports.cells import group
from attnsuite.reports.kascade.page import figures
from attnsuite.suite.kinds import problem_of
from attnsuite.suite.kinds.kascade.extension import MODEL_SUITE, model_cases
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.record import TensorError

SHARED = {"model": "text", "sequence": 512, "sequences": 12}
CASES = {case.name: case for case in model_cases(ModelConfig.from_preset("tiny"), SHARED, MODEL_SUITE)}
DENSE = tuple(1.4 + 0.01 * i for i in range(12))


@pytest.fixture
def rows(record):
    """The table's rows by figure, for the given loss of Kascade and of its control, and seconds of a sparse stack."""

    def make(lost=0.02, control=0.1, seconds=0.05, random=0.5, without=None):
        def cell(case, row, **fields):
            exact = row == "dense"
            return record(row, resolved="chunked" if exact else "kascade", suite=MODEL_SUITE, case=case, exact=exact,
                          kind=CASES[case].kind, problem=problem_of(CASES[case]), **fields)  # fmt: skip

        records = []
        for row, shift in (("dense", 0.0), ("kascade", lost), ("sinks_window", control), ("random_tiles", random)):
            series = {
                "nll": tuple(x + shift * (1 + 0.01 * (i % 3)) for i, x in enumerate(DENSE)),
                "standard_nll": DENSE,
            }
            quality = {"perplexity": 4.0 + shift, "kept_pairs": 0.423, "flops": 0.692, "reuse_layers": 0.625}
            quality.pop(without, None)
            records.append(
                cell("guide-1b-prefill", row, quality=quality, series=series, samples=(), notes=("schedule",))
            )
        error = TensorError(max_error=2e-7, rms_error=1e-8, standard_error=0.0, allowed=1.5e-5, passed=True)
        for row, time in (("dense", 0.1), ("kascade_flash_cpu", seconds)):
            records.append(cell("guide-stack-512", row, samples=(time,) * 7, accuracy={"out": error}))
        blocks = {"samples": (), "notes": ("block_q=16, in tiles of 16 keys.",), "mode": "interpret"}
        records.append(cell("guide-stack-512", "kascade_pallas", accuracy={"out": error}, **blocks))
        case = ModelCase(kind="model_prefill", model="text", sequence=512)
        for row, time in (("standard", 0.2), ("flash_cpu", 0.1), ("kascade", 0.3)):
            records.append(record(row, suite=MODEL_SUITE, case="prefill", kind=case.kind, problem=problem_of(case),
                                  exact=row != "kascade", samples=(time,) * 7))  # fmt: skip
        found = figures(group(records))
        return {row["figure"]: row["here"] for row in found.rows}

    return make


def test_each_figure_stands_beside_the_measured_one(rows):
    found = rows()
    assert found["perplexity 752,570.5"] == "dense 4.00, Kascade 4.02, per token"
    assert found["0% degradation"].startswith("0.0202 [0.0201, 0.0203] nats per byte lost")
    assert found["63% sparsity"] == "62.5% of the layers reuse; 42.3% of the pairs kept, 69.2% of the FLOPs"
    assert found["its schedule"] == "schedule"
    assert found["max diff < 1e-03 at 512 tokens"].startswith("kascade_flash_cpu 2.00e-07 (allowed 1.50e-05)")
    assert found["blocks of 512 queries, 256 and 128 keys"] == "block_q=16, in tiles of 16 keys."
    prefill = found["its dense baseline"]
    assert prefill.startswith("the model's prefill relative to flash_cpu's: standard 2.00")
    assert "kascade 3.00" in prefill
    assert found["max diff < 1e-03 at 128 tokens"] == "no kernel here"


@pytest.mark.parametrize("name", ["perplexity", "kept_pairs", "flops", "reuse_layers"])
def test_a_figure_that_a_record_lacks_is_a_dash(rows, name):
    found = rows(without=name)
    assert "\u2013" in (found["perplexity 752,570.5"] if name == "perplexity" else found["63% sparsity"])


def test_a_control_that_loses_less_is_named(rows):
    assert "loses less" not in rows()["0% degradation"]
    assert rows(lost=0.2, control=0.1)["0% degradation"].endswith("sinks_window loses less at the same share")


def test_no_loss_is_shown_where_random_tiles_lose_nothing(rows):
    """As on random weights, whose perplexity Kascade may even lower."""
    found = rows(lost=-0.02, random=0.0)
    assert found["0% degradation"] == "WITHHELD: random_tiles does not fail visibly"
    assert found["perplexity 752,570.5"] == "dense 4.00, Kascade WITHHELD: random_tiles does not fail visibly"


def test_time_is_that_of_the_fastest_sparse_stack(rows):
    here = "1.8 to 2.2 times as fast on a CPU"
    assert rows()[here].startswith("kascade_flash_cpu takes 0.50")
    assert rows(seconds=0.2)[here].startswith("kascade_flash_cpu takes 2.00")


def test_other_suites_have_no_such_table(record):
    assert figures(group([record()])) is None
