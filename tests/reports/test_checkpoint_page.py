"""The table of a checkpoint: a row per backend from several cases, INVALID and WITHHELD where figures mean nothing."""

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

        records = []
        for backend, shift in (("standard", 0.0), ("chunked", 1e-7)):
            series = {"nll": tuple(x + shift * (1 + i % 3) for i, x in enumerate(DENSE)), "standard_nll": DENSE}
            figures = {"perplexity": 4.2 + shift, "kl_mean": shift, "top1_agreement": 1.0, "bits_per_byte": 2.1}
            figures["unigram_bits_per_byte"] = unigram
            records.append(cell(TEXT, backend, quality=figures, series=series, samples=()))
        for backend, seconds in (("standard", 0.4), ("chunked", 0.2), ("kascade", 0.1)):
            for kind, steps in (("model_prefill", 1), ("model_decode", 32)):
                case = ModelCase(kind=kind, model=TEXT.model, sequence=64)
                samples = tuple(seconds + 0.001 * i for i in range(7))
                facts = {"samples": samples, "steps": steps, "tokens": 64 if steps == 1 else 32}
                facts |= {"figures": {"kv_bytes_per_token": 1024}, "exact": backend != "kascade"}
                records.append(cell(case, backend, **facts))
        for name in ("dense", *lost):
            series = {"nll": tuple(x + lost.get(name, 0.0) * (1 + 0.1 * (i % 3)) for i, x in enumerate(DENSE))}
            figures = {"perplexity": 4.3, "kl_mean": 0.01, "kl_p99": 0.1, "top1_agreement": 0.9, "kept_pairs": 0.2}
            fields = {"quality": figures, "series": series | {"standard_nll": DENSE}, "samples": ()}
            exact = name == "dense"
            records.append(cell(CHOSEN, name, exact=exact, resolved="standard" if exact else name, **fields))
        return {row["backend"]: row for row in model_table(group(records)).rows}

    return make


def test_a_row_has_what_a_backend_loses_and_what_it_costs(rows):
    found = rows()
    assert list(found) == ["standard", "chunked", "kascade"]
    chunked, kascade = found["chunked"], found["kascade"]
    assert (chunked["perplexity"], chunked["top1"]) == (4.2 + 1e-7, 100.0)
    assert chunked["lost"].value == pytest.approx(2e-7)
    assert chunked["ttft"] == pytest.approx(203.0)
    assert chunked["tpot"] == pytest.approx(203.0 / 32)
    assert chunked["prefill"] == pytest.approx(64 / 0.203)
    assert chunked["decode"] == pytest.approx(32 / 0.203)
    assert (chunked["kv_bytes_per_token"], chunked["memory"]) == (1024, 1024.0)
    assert kascade["lost"].value == pytest.approx(0.02 * 1.1)
    assert kascade["ttft"] == pytest.approx(103.0)
    assert kascade["reading"] is None


def test_no_row_says_anything_where_the_dense_model_is_no_better_than_unigrams(rows):
    found = rows(unigram=2.1)
    assert {name: row["reading"].split(":")[0] for name, row in found.items()} == dict.fromkeys(found, "INVALID")


@pytest.mark.parametrize("lost", [{"kascade": 0.02, "random_tiles": 0.0}, {"kascade": 0.02}], ids=["blind", "missing"])
def test_kascades_row_is_withheld_where_its_control_does_not_fail(rows, lost):
    row = rows(lost=lost)["kascade"]
    assert row["reading"].startswith("WITHHELD")
    assert row["perplexity"] is None
    assert row["ttft"] > 0
