"""What a plain function takes is found out by small calls; what was named runs, or is unsupported with the reason."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attnsuite.suite.plain_function import found_out
from attnsuite.suite.store import RECORDS, parse_records
from attnsuite.suite.user_function import load
from command import code_of

SUITE = '[[case]]\nkind = "op_forward"\nsequence = 64\nheads = 2\nkv_heads = 2\nhead_dim = 16\nname = "tiny"\n'


def plain(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def with_keywords(q, k, v, *, is_causal=False, mask=None, bias=None):
    return jax.nn.dot_product_attention(q, k, v, bias, mask, is_causal=is_causal)


def ignores_is_causal(q, k, v, is_causal=False):
    return jax.nn.dot_product_attention(q, k, v)


def ignores_its_mask(q, k, v, mask=None):
    return jax.nn.dot_product_attention(q, k, v)


def with_log_sum_exp(q, k, v, return_log_sum_exp=False):
    return (plain(q, k, v), q.sum(-1)) if return_log_sum_exp else plain(q, k, v)


def ignores_return_log_sum_exp(q, k, v, return_log_sum_exp=False):
    return plain(q, k, v)


def with_blocks_of_keys(q, k, v, chunk_size=128):
    return jax.nn.dot_product_attention(q, k, v)


def one_head_each(q, k, v):
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 8), v)


def off(q, k, v):
    return 1.3 * causal(q, k, v)


def raising(q, k, v):
    raise RuntimeError("no such device")


@pytest.mark.parametrize(
    ("function", "features"),
    [
        (plain, "bidirectional grouped_queries cross_length"),
        (causal, "causal grouped_queries cross_length"),
        (with_keywords, "bidirectional causal grouped_queries cross_length mask bias"),
        (ignores_is_causal, "bidirectional causal grouped_queries cross_length"),  # to be judged, and found wrong
        (ignores_its_mask, "bidirectional grouped_queries cross_length mask"),  # as well
        (with_log_sum_exp, "bidirectional grouped_queries cross_length log_sum_exp"),  # as well
        (ignores_return_log_sum_exp, "bidirectional grouped_queries cross_length"),
        (with_blocks_of_keys, "bidirectional grouped_queries cross_length"),
        (one_head_each, "bidirectional cross_length value_head_dim"),
        (off, "causal grouped_queries cross_length"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_features_are_those_of_the_calls(function, features):
    assert found_out(function).features == {"gradient", *features.split()}


def test_what_runs_and_cannot_be_compiled_is_not_taken():
    assert plain(*jnp.ones((3, 1, 128, 4, 64), jnp.float16)).dtype == jnp.float16
    assert found_out(plain).dtypes == ("float32", "bfloat16")
    found = found_out(lambda q, k, v: plain(q, k, v) if q.sum() > 0 else v)
    assert found.error.startswith("TracerBoolConversionError")


def test_what_it_raises_or_an_output_that_is_not_finite_is_told():
    found = found_out(raising)
    assert found.features == {"bidirectional", "gradient"}
    assert str(found) == "It raised RuntimeError: no such device when called with 3 float32 arrays [1, 128, 4, 64]."
    found = found_out(lambda q, k, v: q * k * v * jnp.nan)
    assert str(found) == "Called with 3 float32 arrays [1, 128, 4, 64]: its output is not finite."


@pytest.fixture
def suite(tmp_path, monkeypatch):
    (tmp_path / "suite.toml").write_text(SUITE)
    (tmp_path / "my.py").write_text("import jax\n\n" + inspect.getsource(plain) + inspect.getsource(causal))
    monkeypatch.chdir(tmp_path)
    return "suite.toml"


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.filterwarnings("ignore::attnsuite.backends.BackendFallbackWarning")  # as in the worker
def test_function_that_can_run_in_no_case_ends_the_run_before_it_starts(suite, new_run, refused):
    said = refused("run", "--suite", suite, "--backends", "standard,my.py:plain", "--out", new_run)
    assert "my.py:plain can run in none of the 1 cases: my.py:plain: is_causal=True is not supported" in said
    assert "it was found to be not causal" in said
    assert not (new_run / RECORDS).exists()


@pytest.mark.usefixtures("in_this_process")
def test_causal_function_is_measured_where_causal_attention_is(suite, new_run):
    assert code_of("run", "--suite", suite, "--backends", "standard,my.py:causal", "--out", new_run) == 0
    records = {record.requested: record for record in parse_records(new_run / RECORDS)[0]}
    assert (records["my.py:causal"].status, records["my.py:causal"].resolved) == ("ok", "my.py:causal")


def test_a_process_that_a_function_ends_before_anything_runs_is_not_laid_on_jax(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import os\n\ndef ends(q, k, v):\n    os.abort()\n")
    reference = f"{tmp_path}/mine.py:ends"
    assert code_of("judge", reference, "--cases", "plain", "--random", "0", "--out", tmp_path / "out") == 2
    assert f"it was not found out what {reference} takes: died by SIGABRT" in capsys.readouterr().err


MOVING = """
import os
from parts import FOLDER

os.chdir("/")

def f(q, k, v):
    return FOLDER
"""


def test_files_of_two_folders_each_import_from_their_own_whatever_directory_they_change_to(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    for folder in ("before", "after"):
        (tmp_path / folder / "parts").mkdir(parents=True)
        (tmp_path / folder / "parts/__init__.py").write_text("from .of import FOLDER\n")
        (tmp_path / folder / "parts/of.py").write_text(f"FOLDER = {folder!r}\n")
        (tmp_path / folder / "mine.py").write_text(MOVING)
    for folder in ("before", "after", "before"):
        assert load(f"{folder}/mine.py:f")[0].function(None, None, None) == folder


READING = """
import os
from pathlib import Path

os.chdir(Path(__file__).parent / "data")

def f(q, k, v):
    return q * float(Path("factor.txt").read_text())
"""


def test_a_function_reads_files_of_the_directory_that_its_file_changed_to(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/factor.txt").write_text("2")
    (tmp_path / "mine.py").write_text(READING)
    backend, found = load("mine.py:f")
    assert "raised" not in found
    assert jax.jit(backend.function)(1.0, None, None) == 2
    assert Path.cwd() == tmp_path
