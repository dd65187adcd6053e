"""lm-evaluation-harness runs a made-up task of each kind on the shipped checkpoint, dense and sparse, offline.

LongBench and AIME are the harness's own tasks, prompts and scores, on items that are made up.
"""

import importlib
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest

from attnsuite.backends import BackendUnavailableError
from attnsuite.models import generate, load_shipped
from attnsuite.models.kascade import calibration
from attnsuite.suite.errors import InputError
from landing import is_landing, swept

pytestmark = [pytest.mark.llama, pytest.mark.filterwarnings("default")]  # the harness and its libraries warn

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when the libraries are imported
with warnings.catch_warnings():
    warnings.simplefilter("default")
    for name in ("lm_eval", "fuzzywuzzy", "jieba", "rouge"):  # the last three are of LongBench's scores
        if os.environ.get("ATTNSUITE_REQUIRE_TRANSFORMERS"):  # set by tox -e llama
            importlib.import_module(name)
        else:
            pytest.importorskip(name, reason="the harness is not installed; tox -e llama")
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
def decode_only(calibrated):
    return adapter.SuiteLM(
        backend="kascade", calibration=str(calibrated), anchors=2, options="when=decode", batch_size=3
    )


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """Tasks in the harness's own format, on files."""
    root = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"text": text, "choices": choices, "answer": answer}) for text, choices, answer in CHOICES]
    (root / "docs.jsonl").write_text("\n".join(lines))
    task = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(root / "docs.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    task |= {"task": "made_up_choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    task |= {"doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    (root / "made_up_choice.yaml").write_text(json.dumps(task))
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


@pytest.mark.parametrize("which", swept(["dense", "sparse"], ["dense"]))
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
    sparse._log_selected(128)
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


def test_generation_is_greedy_in_batches_of_any_length_and_ends_before_the_first_stop_sequence(dense, monkeypatch):
    contexts = ("a name is not def", "The class state", "The class state is")
    tokens, lengths = adapter._padded([list(context.encode()) for context in contexts])
    alone = [tokens[1:2, : lengths[1]]] * 3  # without padding
    made = bytes(generate(load_shipped(), np.concatenate(alone), 5, backend="standard")[0].tolist()).decode()

    def texts(*until):
        return dense.generate_until(
            requests("generate_until", *((context, {"max_gen_toks": 5, "until": [*until]}) for context in contexts))
        )

    first, second, third = texts()
    assert second == made
    assert len({first, second, third}) == 3
    assert texts(made[4], made[2])[1] == made[: min(made.index(made[4]), made.index(made[2]))]
    assert texts("")[1] == made
    monkeypatch.setattr(dense, "_ends", frozenset({ord(made[3]), 0}))
    assert texts()[1] == made[: made.index(made[3])]


def test_generation_passes_on_what_was_asked_for(monkeypatch):
    calls = []

    def made(model, tokens, count, **given):
        calls.append(given)
        return np.full((len(tokens), count), ord("x"))

    monkeypatch.setattr(adapter, "generate", made)
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_gen_toks": 3}
    greedy = {"do_sample": False, "temperature": 1, "max_gen_toks": 3}  # as LongBench's tasks have it
    seeds = []
    for seed in (3, 3, 4):
        model = adapter.SuiteLM(backend="standard", batch_size=2, seed=seed)
        monkeypatch.setattr(model, "_ends", frozenset({7, 9}))
        assert model.generate_until(requests("generate_until", *[("a", sampled)] * 4, ("a", greedy))) == ["xxx"] * 5
        assert [call["lengths"].tolist() for call in calls[-3:]] == [[1, 1], [1, 1], [1]]
        assert [(call["temperature"], call["top_p"]) for call in calls[-3:]] == [(0.6, 0.95)] * 2 + [(0.0, 1.0)]
        assert all(call["stop_token"] == {7, 9} for call in calls)
        seeds.append([call["seed"] for call in calls[-3:]])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 6


def test_prompt_that_is_too_long_loses_its_beginning_or_as_in_longbench_its_middle(caplog):
    text = "".join(map(chr, range(32, 112)))
    for side, left in (("left", text[-64:]), ("middle", text[:32] + text[-32:])):
        model = adapter.SuiteLM(backend="standard", truncation_side=side)
        assert bytes(model._prompt(text, 64)).decode() == left
        assert f"a prompt of 80 tokens is cut to 64 (truncation_side={side})" in caplog.text
        assert bytes(model._prompt(text, 80)).decode() == text


def test_prompts_are_padded_to_few_lengths():
    lengths = {adapter._padded([[0] * length])[0].shape[1] for length in range(4097, 8193, 7)}
    assert lengths == set(range(4608, 8193, 512))
    assert adapter._padded([[0] * 65, [0]])[0].shape == (2, 128)


def test_end_tokens_are_those_of_the_generation_config_before_the_config(tmp_path):
    assert adapter._end_tokens(tmp_path) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert adapter._end_tokens(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert adapter._end_tokens(tmp_path) == {7, 9}


def test_tasks_of_the_harness_run_offline(dense, manager):
    chosen = manager.load(["made_up_choice"])["tasks"]
    result = evaluator.evaluate(lm=dense, task_dict=chosen, bootstrap_iters=0)["results"]
    # By hand: the likeliest continuation of each text.
    scores = iter(likelihoods(dense, *PAIRS))
    right = [int(np.argmax([next(scores)[0] for _ in choices])) == answer for _, choices, answer in CHOICES]
    assert result["made_up_choice"]["acc,none"] == np.mean(right)
    assert 0 < np.mean(right) < 1


def longbench(dataset, question, context, answers, all_classes=None):
    """A line of LongBench's files."""
    fields = {"input": question, "context": context, "answers": answers, "length": len(context.split())}
    return fields | {"dataset": dataset, "language": "en", "all_classes": all_classes, "_id": "0"}


def aime(text, answer):
    """A line of the copy of AIME 2024 that the harness reads."""
    return {"ID": "2024-I-0", "Problem": text, "Solution": "By counting.", "Answer": answer}


def task_of(root, file, *items):
    """The harness's own task ``file`` on lines of its benchmark, as docs/how-to/llama.md says."""
    name = Path(file).stem
    lines = [json.dumps(item).replace('"input":', '"question":', 1) for item in items]
    (root / f"{name}.jsonl").write_text("\n".join(lines))
    files = dict.fromkeys(("test", "train"), str(root / f"{name}.jsonl"))
    own = {"include": str(Path(tasks.__file__).parent / file), "task": name, "dataset_path": "json"}
    own |= {"dataset_name": None, "dataset_kwargs": {"data_files": files}}
    (root / f"{name}.yaml").write_text(json.dumps(own))
    return tasks.TaskManager(include_path=str(root), include_defaults=False).load([name])["tasks"][name]


def test_longbench_and_aime_run_with_dense_attention_and_kascade_in_both_phases_or_in_decoding_only(
    dense, sparse, decode_only, tmp_path, monkeypatch
):
    models = {"dense": dense, "decoding": decode_only} | ({} if is_landing() else {"both": sparse})
    question = "Where is a function defi"
    long = longbench("trec", question, "A function definition. " * 9, ["none"], ["none"])
    prompt = task_of(tmp_path, "longbench/trec.yaml", long).doc_to_text(long | {"question": question})
    cut = list((prompt[:32] + prompt[-32:]).encode())
    found = {
        kind: bytes(generate(load_shipped(), [cut] * len(models), 5, **model._attention)[0].tolist()).decode()
        for kind, model in models.items()
    }
    assert len(set(found.values())) == len(models)  # what follows tells which attention ran
    lines = [long | {"answers": [text], "all_classes": [*found.values()]} for text in found.values()]
    chosen = {
        "trec": task_of(tmp_path, "longbench/trec.yaml", *lines),
        "aime24": task_of(
            tmp_path, "aime/aime24.yaml", *(aime("Add seven. " * 9 + str(n), "0") for n in range(len(models)))
        ),
    }
    for task in chosen.values():
        task.config.generation_kwargs["max_gen_toks"] = 5  # the rest is theirs
    for place, model in enumerate(models.values()):
        monkeypatch.setattr(model, "max_length", 64 + 5)
        monkeypatch.setattr(model, "_side", "middle")
        result = evaluator.evaluate(lm=model, task_dict=chosen, bootstrap_iters=0)
        samples = {sample["doc_id"]: sample["score"] for sample in result["samples"]["trec"]}
        assert samples == {i: float(i == place) for i in range(len(models))}
        assert result["results"]["trec"]["score,none"] == pytest.approx(1 / len(models))
        assert result["results"]["aime24"]["exact_match,none"] == 0.0


def test_generation_says_what_is_kept_of_the_prompt_and_in_decoding(decode_only, caplog):
    decode_only._logged = 0
    decode_only._log_selected(640, decoding=True)
    assert "in a text of 640 tokens, the longest so far: DENSE" in caplog.text
    assert "in a step of decoding behind 640 tokens: kept: 0." in caplog.text


def test_chat_template_of_the_checkpoint_is_used_and_its_first_token_stands_once(dense, tmp_path, monkeypatch):
    words = {word: i for i, word in enumerate(["<s>", "user", "assistant", "Hello"])}
    front = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}
    front["single"].append({"Sequence": {"id": "A", "type_id": 0}})
    front |= {"pair": front["single"], "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}
    added = {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {"version": "1.0", "added_tokens": [added | {"special": True}], "post_processor": front}
    content |= {"pre_tokenizer": {"type": "Whitespace"}, "normalizer": None, "truncation": None, "padding": None}
    content |= {"decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "user"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    template = "<s>{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}"
    template += "{{ 'assistant' if enable_thinking is false else 'user' }}{% endif %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="model 'text' has no chat template"):
        dense.apply_chat_template([{"role": "user", "content": "Hello"}])
    model = adapter.SuiteLM(backend="standard", enable_thinking=False)
    monkeypatch.setattr(model, "_name", str(tmp_path))
    monkeypatch.setattr(model, "_reader", adapter.reader_of(str(tmp_path), model._model.config))
    assert model.chat_template() == template
    text = model.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert text == "<s>user Hello assistant"
    assert model.tok_encode(text) == [0, 1, 3, 2]
    assert model.tok_encode("Hello") == [0, 3]
    with pytest.raises(InputError, match="--apply_chat_template other is not taken"):
        model.chat_template("other")


def test_command_of_the_harness_makes_the_model_from_its_words(monkeypatch, capsys):
    # The command itself reads 200 folders of tasks first; docs/how-to/llama.md shows it.
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
        ({"truncation_side": "right"}, "truncation_side='right' must be left or middle"),
        ({"backend": "kascade", "anchors": 2}, "add --schedule NAME"),
        ({"backend": "standard", "anchors": "0;2"}, "--backend standard does not take --anchors; leave"),
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
