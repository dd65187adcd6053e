"""lm-evaluation-harness runs a made-up task of each kind on the shipped checkpoint, dense and sparse, offline."""

import importlib
import json
import os
import warnings

import numpy as np
import pytest

from attnsuite.backends import BackendUnavailableError
from attnsuite.models import calibration, generate, load_shipped
from attnsuite.suite.errors import InputError

pytestmark = [pytest.mark.llama, pytest.mark.filterwarnings("default")]  # the harness and its libraries warn

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when the libraries are imported
with warnings.catch_warnings():
    warnings.simplefilter("default")
    if os.environ.get("ATTNSUITE_REQUIRE_TRANSFORMERS"):  # set by tox -e llama
        importlib.import_module("lm_eval")
    else:
        pytest.importorskip("lm_eval", reason="the harness is not installed; tox -e llama")
    adapter = importlib.import_module("attnsuite.suite.harness")
    evaluator = importlib.import_module("lm_eval.evaluator")
    registry = importlib.import_module("lm_eval.api.registry")
    tasks = importlib.import_module("lm_eval.tasks")
    Instance = importlib.import_module("lm_eval.api.instance").Instance

SPARSE = "top_k=0.1;min_keys=8;tile_size=8;query_tile=8;granularity=tile"
# Of two lengths, so that a batch is padded and few programs are compiled.
CHOICES = [
    ("The class state", ["ment", "xqzj"], 0),
    ("of the class ex", ["QQQQ", "pres"], 1),
    ("a name is not def", ["!!!!", "ined"], 0),  # the wrong answer on purpose
]


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in arguments]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A calibration of the shipped model, measured with SPARSE's settings."""
    path = tmp_path_factory.mktemp("calibration") / "c.safetensors"
    prompt = np.frombuffer(b"The class statement is an executable statement which binds a name to it. " * 2, np.uint8)
    settings = {"top_k": 0.1, "min_keys": 8, "tile_size": 8, "query_tile": 8, "granularity": "tile"}
    calibration.calibrate(load_shipped(), [prompt.astype(np.int32)], settings).save(path)
    return path


@pytest.fixture(scope="module")
def dense():
    return adapter.SuiteLM(backend="standard", batch_size=3)


@pytest.fixture(scope="module")
def sparse(calibrated):
    return adapter.SuiteLM(backend="kascade", calibration=str(calibrated), anchors=2, batch_size=3)


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """Tasks in the harness's own format, on files."""
    root = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"text": text, "choices": choices, "answer": answer}) for text, choices, answer in CHOICES]
    (root / "docs.jsonl").write_text("\n".join(lines))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(root / "docs.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choice = {"task": "made_up_choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choice |= {"doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    exact = {"task": "made_up_exact", "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    exact |= {"doc_to_target": "{{choices[answer]}}", "target_delimiter": ""}
    exact |= {"generation_kwargs": {"until": [" "], "max_gen_toks": 5}}
    for task in (choice, exact):
        (root / f"{task['task']}.yaml").write_text(json.dumps(common | task))
    return tasks.TaskManager(include_path=str(root), include_defaults=False)


def log_probabilities(text, **attention):
    """Log-probabilities of each byte of a text behind its first, without padding."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    logits = np.asarray(load_shipped()(tokens[None, :-1], needs_grad=False, **attention)[0], np.float64)
    logits -= np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(
        -1, keepdims=True
    )
    return logits[np.arange(len(tokens) - 1), tokens[1:]], logits.argmax(-1) == tokens[1:]


PAIRS = [(text, choice) for text, choices, _ in CHOICES for choice in choices]


def likelihoods(model, *pairs):
    return model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)


@pytest.mark.parametrize("which", ["dense", "sparse"])
def test_loglikelihood_is_that_of_the_unpadded_text_in_batches_of_any_size(which, request):
    model = request.getfixturevalue(which)
    attention = {name: value for name, value in model._attention.items() if name != "on_unavailable"}
    found = likelihoods(model, *PAIRS)
    for (context, continuation), (score, greedy) in zip(PAIRS, found, strict=True):
        expected, likeliest = log_probabilities(context + continuation, **attention)
        assert score == pytest.approx(expected[-len(continuation) :].sum(), abs=2e-3)
        assert greedy == likeliest[-len(continuation) :].all()


def test_sparse_attention_is_what_runs(dense, sparse):
    long = "An assignment statement evaluates the expression list. " * 2, "It is"
    ((exact, _),), ((kept, _),) = (likelihoods(model, long) for model in (dense, sparse))
    assert abs(exact - kept) > 1e-3
    assert len(sparse._attention["backend_options"]["schedule"].anchors) == 2


def test_evaluation_says_what_is_kept_and_that_every_pair_of_a_short_text_is(sparse, caplog):
    caplog.set_level("WARNING", adapter.__name__)
    sparse._logged = 0
    sparse._log_kept(128)
    assert "of the causal pairs" in caplog.text
    assert "DENSE" not in caplog.text
    caplog.clear()
    likelihoods(adapter.SuiteLM(backend="kascade"), PAIRS[0])  # min_keys is 128
    assert "in a text of 18 tokens, the longest so far: DENSE: every pair was kept" in caplog.text


def test_text_without_a_context_stands_behind_a_new_line_and_rolling_predicts_each_token_once(dense):
    text = "A function definition defines a user-defined"
    ((score, _),) = likelihoods(dense, ("", text))
    assert score == pytest.approx(log_probabilities("\n" + text)[0].sum(), abs=2e-3)
    assert dense.loglikelihood_rolling(requests("loglikelihood_rolling", (text,))) == [pytest.approx(score, abs=2e-3)]
    short = adapter.SuiteLM(backend="standard", max_length=16)
    assert len(text) == 44  # two windows of 16, and one whose last 12 tokens are new
    expected = sum(log_probabilities(window)[0].sum() for window in ("\n" + text[:16], text[15:32]))
    expected += log_probabilities(text[-17:])[0][-12:].sum()
    (found,) = short.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert found == pytest.approx(expected, abs=2e-3)


def test_generation_is_greedy_and_ends_before_the_first_stop_sequence(dense, monkeypatch):
    context = "The class state"
    made = bytes(generate(load_shipped(), [list(context.encode())], 12, backend="standard")[0].tolist()).decode()
    asked = requests(
        "generate_until",
        (context, {"max_gen_toks": 12, "until": []}),
        (context, {"max_gen_toks": 12, "until": [made[6], made[4]]}),
    )
    whole, cut = dense.generate_until(asked)
    assert whole == made
    assert cut == made[: min(made.index(made[6]), made.index(made[4]))]
    monkeypatch.setattr(dense, "_ends", frozenset({ord(made[5]), 0}))
    assert dense.generate_until(asked[:1]) == [made[: made.index(made[5])]]


def test_end_tokens_are_those_of_the_generation_config_before_the_config(tmp_path):
    assert adapter._end_tokens(tmp_path) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert adapter._end_tokens(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert adapter._end_tokens(tmp_path) == {7, 9}


@pytest.mark.parametrize("which", ["dense", "sparse"])
def test_tasks_of_the_harness_run_offline(which, manager, request):
    model = request.getfixturevalue(which)
    chosen = tasks.get_task_dict(["made_up_choice", "made_up_exact"], manager)
    result = evaluator.evaluate(lm=model, task_dict=chosen, bootstrap_iters=0)["results"]
    # By hand: the likeliest continuation of each text, and what is generated before a space.
    scores = iter(likelihoods(model, *PAIRS))
    right = [int(np.argmax([next(scores)[0] for _ in choices])) == answer for _, choices, answer in CHOICES]
    assert result["made_up_choice"]["acc,none"] == np.mean(right)
    assert 0 < np.mean(right) < 1
    asked = [(text, {"until": [" "], "max_gen_toks": 5}) for text, *_ in CHOICES]
    made = model.generate_until(requests("generate_until", *asked))
    exact = [text == choices[answer] for text, (_, choices, answer) in zip(made, CHOICES, strict=True)]
    assert result["made_up_exact"]["exact_match,none"] == np.mean(exact)


def test_command_of_the_harness_makes_the_model_from_its_words(monkeypatch, capsys):
    # The command itself reads 200 folders of tasks first; docs/llama.md shows it.
    made = registry.get_model("attnsuite").create_from_arg_string(
        f"model=text,backend=kascade,schedule=manual,anchors=0;2,options={SPARSE}",
        {"batch_size": "4", "max_batch_size": None, "device": "cuda:0"},
    )
    assert type(made) is adapter.SuiteLM
    assert made._attention["backend_options"]["schedule"].anchors == (0, 2)
    assert made._attention["backend_options"]["top_k"] == 0.1

    def refuse():
        raise InputError("no such thing.")

    monkeypatch.setattr(adapter, "cli_evaluate", refuse)
    with pytest.raises(SystemExit, match="2"):
        adapter.main()
    assert capsys.readouterr().err == "no such thing.\n"


def test_backend_that_cannot_run_ends_the_evaluation():
    model = adapter.SuiteLM(backend="cudnn")
    with pytest.raises(BackendUnavailableError, match="cudnn"):
        likelihoods(model, ("a", "b"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "llama-3.2-1b"}, "a preset has no trained weights"),
        ({"max_batch_size": 64}, "max_batch_size=64 is not taken"),
        ({"batch_size": "auto"}, "batch_size='auto' must be a number"),
        ({"anchors": 2}, "add schedule=NAME"),
        ({"backend": "standard", "schedule": "manual", "anchors": "0;2"}, "are for --backend kascade, not standard"),
        ({"options": "top_k"}, "must be NAME=VALUE"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        adapter.SuiteLM(**arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "generation_kwargs num_beams are not taken"),
        ({"temperature": 0.7}, "temperature=0.7 without do_sample"),
        ({"max_gen_toks": 10**6}, "leaves no room for a context"),
    ],
    ids=str,
)
def test_generation_that_means_something_else_is_refused(dense, given, message):
    with pytest.raises(InputError, match=message):
        dense.generate_until(requests("generate_until", ("a", given)))


def test_continuation_longer_than_the_model_is_refused(dense):
    with pytest.raises(InputError, match="more than max_length"):
        likelihoods(dense, ("a", "b" * (dense.max_length + 1)))
