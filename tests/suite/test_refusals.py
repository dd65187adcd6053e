"""What a command line can get wrong: exit code 2, the sentence, no traceback, and nothing written. One row each."""

from __future__ import annotations

import shutil
import sys
from importlib import resources

import pytest

NINES = "9" * 5000
CURVES, KASCADE = ["--suite", "curves", "--out", "out"], ["--suite", "kascade", "--out", "out"]
TRAIN = ["--model", "debug", "--save-every", "0", "--out", "out"]
TEXT = ["--model", "text", "--seq-len", "128", "--sequences", "2", "--out", "out"]
SPARSE = [*TEXT, "--backend", "kascade"]
UNKNOWN = "model 'gigantic' is not known; use text,"
NO_CHECKPOINT = "--model 'nowhere' is not known; use text, or a checkpoint's directory"

# Files in a folder ``given``, which rows name.
MINE = b"""
import jax

def layers_of(prompt):
    for layer in range(4):
        yield jax.numpy.ones((256, 1, 8)), jax.numpy.full((256, 1, 8), float("nan"))

def nothing(prompt):
    return None

def bare():
    return bare

def failing():
    return (lambda x: x.nowhere), (1.0,)

seven = 7
"""
GIVEN = {
    "mine.py": MINE,
    "broken.py": b"import no_such_chip",
    "locked.py": b"raise PermissionError('cache')",
    "list.toml": b"case = 3",
    "bytes.toml": b"name = '\xff'",
    "gigantic.toml": b'[[case]]\nkind = "model_prefill"\nmodel = "gigantic"\n',
    "windows.toml": b'[[case]]\nkind = "perplexity"\nmodel = "debug"\n',
    "short.txt": b"too short " * 200,
    "empty.txt": b"",
    "blank.txt": b" \n\n",
    "bytes.txt": b"\xff\xfe",
    "lines.jsonl": b'{"id": "1", "body": "words"}\n',
    "old/run.json": b'{"suite": "tiny"}',
    "done/records.jsonl": b"",
    "weightless/config.json": (resources.files("attnsuite.models") / "checkpoints/tiny-bytes/config.json").read_bytes(),
}
OF_A_FIELD = (["--text-field", "body"], "--text-field body is about a file of JSON lines")
CALIBRATED = ["--out", "c", "--prompts", "1", "--length", "256"]
LOOP = "loop: Too many levels of symbolic links; give another path."

REFUSED: dict[str, list[tuple[list[str], str]]] = {
    "run": [
        (["--speed"], "Unrecognized options: --speed"),
        (["--suite", "slow"], "not known; use quick, "),
        (["--suite", "nowhere.toml"], "cannot be read"),
        (["--suite", "x" * 300 + ".toml"], "File name too long"),
        (["--backends", "standard,fastest"], "'fastest' is not registered; use standard"),
        (["--backends", ","], "--backends is empty"),
        (["--cases", "nothing-*"], "no case matches 'nothing-*'; the cases are"),
        (["--suite", "cpu-speed", "--cases", "fwd-s512-h8k8-d64-f32"], "nearest are forward-s512-h8k8-d64-f32, "),
        (["--text", "nowhere.txt"], "cannot be read"),
        (["--text", "given/empty.txt"], "is empty"),
        (["--text", "given/blank.txt"], "is empty"),
        (["--text", "given/bytes.txt"], "not UTF-8"),
        (["--text", "given/lines.jsonl"], "fields id, body; name the one"),
        (["--text", "given/lines.jsonl", "--text-field", "text"], "no text in a field 'text'"),
        OF_A_FIELD,
        (["--suite", "given/list.toml"], "case = 3 must be a list"),
        (["--suite", "given/bytes.toml"], "is not UTF-8 (byte 8); save it as UTF-8."),
        (["--suite", "given/gigantic.toml", "--text", "given/short.txt", "--out", "out"], "model 'gigantic' is not"),
        (["--suite", "given/windows.toml", "--text", "given/short.txt", "--out", "out"], "windows of 512 bytes"),
        (["--backends", "standard", "--backends=chunked"], "--backends is given twice; give it once, with commas"),
        (["--cell-timeout", "long"], "Error parsing --cell-timeout"),
        (["--cell-timeout", "0"], "above 0"),
        (["--cell-timeout", "nan"], "above 0"),
        (["--cell-timeout", "1e300"], "at most 31536000, a year"),
        (["--sample-seconds", "0"], "above 0 and at most the --cell-timeout of 120"),
        (["--sample-seconds", "nan"], "above 0 and at most"),
        (["--sample-seconds", "200"], "above 0 and at most"),
        (["--cell-memory", "much"], "not a size"),
        (["--cell-memory", "-1GiB"], "not a size"),
        (["--shard", "3/2"], "must be i/n with i from 1 to n"),
        (["--shard", "1/900"], "cases; use at most"),
        (["--address", "a:1", "--nodes-with", "GPU"], "--address, --nodes-with is about a Ray cluster"),
        (["--executor", "ray", "--profile", "traces"], "--profile is for one machine"),
        (["--executor", "ray", "--nodes-with", ","], "--nodes-with is empty"),
        (["--executor", "dask"], "invalid choice 'dask' for argument '--executor'. Expected one of ('ray',)."),
        (["--packages", "jax==0.10.1"], "--packages is about a Ray cluster"),
        (["--executor", "ray", "--packages", ","], "--packages is empty"),
        (["--executor", "ray", "--packages", "jax>=0.10"], "--packages 'jax>=0.10' must be NAME==VERSION"),
        (["--executor", "ray", "--packages", "jax==0.10.*"], "--packages 'jax==0.10.*' must be NAME==VERSION"),
        (["--executor", "ray", "--packages", "requests==2.0"], "records hold the versions of jax, jaxlib"),
        (["--executor", "ray", "--packages", "jax==0.10.0,jax==0.10.1"], "each name once"),
        (["--executor", "ray", "--out", "run"], "needs the package ray: pip install '.[ray]'"),
        (["--resume"], "needs --out"),
        (["--resume", "--out", "nowhere"], "no run to resume"),
        (["--resume", "--out", "given/old"], "another version"),
        (["--suite", "device", "--resume", "--out", "out"], "holds no run of --suite device"),
        (["--suite", "device", "--resume", "--out", "out", "--backends", "kvax"], "--backends cannot change"),
        (["--out", ""], "is given an empty value; give one, or leave it out."),
        (["--out="], "is given an empty value; give one, or leave it out."),
        (["--out=~/runs"], "--out=~/runs: the shell left ~ as it is; write $HOME/runs instead."),
        (["--out", "/dev/null"], "/dev/null is no directory; give the path of one, which may be new."),
        (["--weights_dir", "DIR"], "--weights_dir is a flag of the guides; here it is --model DIR"),
        (["--device=gpu"], "--device is a flag of the guides; here it is JAX_PLATFORMS"),
        # of a checkpoint
        (["--model", "gigantic"], UNKNOWN),
        (["--model", "nowhere"], NO_CHECKPOINT),
        (["--model", "tiny"], "use text, or a checkpoint's directory (a preset has no trained weights)."),
        (["--model", "."], "config.json' cannot be read"),
        (["--model", "given/loop"], LOOP),
        (["--model", "given/weightless", "--out", "out"], "holds neither model.safetensors"),
        (["--model", ".", "--suite", "quick"], "--model brings its own cases; leave out --suite"),
        (["--seq-len", "64"], "--seq-len is about a checkpoint; add --model"),
        (["--resume", "--out", "x", "--model", "."], "--model cannot change a run that was begun"),
        # of Kascade
        ([*KASCADE, "--top-k", "0"], "top_k = 0.0 must be a number above 0"),
        ([*KASCADE, "--top-k", "12"], "12 tiles of 128 keys are top_k=0.375 of 4096 keys"),
        ([*KASCADE, "--tile-size", "0"], "tile_size = 0 must be an integer from 1"),
        ([*KASCADE, "--schedule", "best"], "must be one of dp, greedy, greedy-guide"),
        ([*KASCADE, "--schedule", "manual"], "needs anchors, such as 0,2"),
        ([*KASCADE, "--schedule", "greedy", "--anchors", "2"], "no place in a greedy schedule"),
        ([*KASCADE, "--anchors", "one"], "must be one number of layers for schedule dp"),
        ([*KASCADE, "--anchors", NINES], "must be"),
        ([*KASCADE, "--schedule", "manual", "--anchors", NINES], "must be"),
        ([*KASCADE, "--threshold", "1.5"], "threshold = 1.5 must be a number from 0 to 1"),
        (
            [*KASCADE, "--schedule", "dp", "--threshold", "0.5"],
            "--threshold is about a greedy rule, and no case has one",
        ),
        ([*KASCADE, "--threshold", "0.5,0.7"], "several values of --threshold are a sweep of a greedy rule; add"),
        ([*KASCADE, "--max-reuse-dist", "2,4.5"], "--max-reuse-dist '2,4.5' must be whole numbers separated by"),
        ([*KASCADE, "--max-reuse-dist", "0"], "max_reuse_dist = 0 must be an integer from 1"),
        ([*KASCADE, "--granularity", "block"], "granularity = 'block' must be one of tile, token"),
        ([*KASCADE, "--backends", "oracle"], "'oracle' is not registered"),
        (["--suite", "quick", "--top-k", "0.5"], "no case of this suite is about Kascade"),
        (["--suite", "kascade", "--resume", "--out", "nowhere", "--top-k", "0.5"], "cannot change a run that was"),
        # of loss curves and sharding
        ([*CURVES, "--backends", "flash"], "'flash' is not registered; use"),
    ],
    "compile": [
        (["--targets", "h300"], "target 'h300' cannot be compiled for; use v4, v5e, v5p, v6e, tpu7x, a100"),
        (["--targets", "cpu"], "target 'cpu' cannot be compiled for"),
        (["--targets", "v5e:4"], "target 'v5e:4' is not a TPU slice"),
        (["--targets", "h100:2x2"], "target 'h100:2x2' is not a TPU slice"),
        (["--targets", ","], "--targets is empty"),
        (["--backends", "fastest"], "backend 'fastest' is not registered"),
        (["--suite", "slow"], "not known"),
        (["--cases", "nothing-*"], "no case matches 'nothing-*'"),
        (["--out", "given/done"], "already has records; choose another --out"),
        (["--suite", "quick", "--cases", "retrieval*"], "no case that can be compiled without data"),
        (["--model", "gigantic"], UNKNOWN + " debug, tiny"),
        (["--model", "."], "cannot be loaded"),
        (["--model", "debug", "--phases", "sleep"], "phase 'sleep' is not known; use prefill, train, decode"),
        (["--model", "debug", "--seq-lens", "64,long"], "'long' is not a length"),
        (["--model", "debug", "--seq-lens", "0"], "'0' is not a length"),
        (["--model", "debug", "--seq-lens", NINES], "is not a length"),
        (["--model", "debug", "--dtype", "int8"], "int8"),
        (["--model", "debug", "--batch", "0"], "batch"),
        (["--longest", "prefill"], "--longest is about models; add --model"),
        (["--seq-lens", "64"], "--seq-lens is about models"),
        (["--dtype", "float32"], "--dtype is about models"),
        (["--batch", "4"], "--batch is about models"),
        (["--schedule", "--model", "debug"], "--schedule is about attention calls; leave out --model"),
        (["--cell-timeout", "0"], "above 0"),
        (["--cell-memory", "much"], "not a size"),
    ],
    "tune": [
        (["--minutes", "0"], "--minutes 0 must be above 0"),
        (["--minutes", "nan"], "--minutes nan must be above 0"),
        (["--target", "h1000"], "target 'h1000' is not known"),
        (["--backends", "chunked", "--target", "h100"], "'chunked' has nothing to tune for cuda:h100, which is not"),
        (["--backends", "standard"], "'standard' has nothing to tune"),
        (["--cases", "nothing*"], "no case matches"),
        (["--out", "/no/such/folder/t.json"], "t.json names a file; give a directory"),
    ],
    "train": [
        (["--model", "gigantic"], UNKNOWN + " debug, tiny"),
        ([*TRAIN, "--steps", "1" + "0" * 21], "--steps an integer of 70 bits must be at most 2147483647"),
        ([*TRAIN, "--steps", "0"], "--steps 0 must be at least 1"),
        ([*TRAIN, "--batch", "2000000000"], "--batch 2000000000 of --length 256 needs 5722.05 GiB beside the model"),
        ([*TRAIN, "--batch", "3", "--accumulate", "2"], "--batch 3 is not a multiple of --accumulate 2"),
        (["--model", "debug", "--save-every", "-1"], "--save-every -1 must be at least 0"),
        ([*TRAIN, "--learning-rate", "0"], "learning_rate=0.0 must be a finite number above 0"),
        ([*TRAIN, "--text", "/nothing"], "cannot be read"),
        OF_A_FIELD,
        ([*TRAIN, "--length", "10000000"], "windows of 10000000 need at least as many"),
        ([*TRAIN, "--backend", "flash"], "flash"),
        ([*TRAIN, "--backend", "splash"], "interpret"),
        ([*TRAIN, "--lora-rank", "0"], "--lora-rank=0 must be an integer of at least 1"),
        ([*TRAIN, "--lora-rank", "2", "--lora-targets", "q"], "--lora-targets=('q',) must name one or more of q_proj"),
        ([*TRAIN, "--mesh", "rows=2"], "--mesh 'rows=2' must be AXIS=DEVICES separated by commas, each of data, fsdp"),
        ([*TRAIN, "--mesh", "data=2,data=2"], "must be AXIS=DEVICES"),
        ([*TRAIN, "--mesh", "data=0"], "must be AXIS=DEVICES"),
        ([*TRAIN, "--lora-alpha", "32"], "--lora-alpha is about adapters; add --lora-rank"),
        ([*TRAIN, "--lora-targets", "k_proj"], "--lora-targets is about adapters; add --lora-rank"),
        ([*TRAIN, "--lora-rank", "2", "--optimizer", "muon"], "--optimizer muon is for the matrices of layers"),
        (["--use-lora"], "--use-lora is a flag of the guides; here it is --lora-rank N"),
        (["--model", "debug", "--save-every", "0", "--resume"], "--resume needs --out"),
    ],
    "perplexity": [
        (["--model", "gigantic"], UNKNOWN),
        (["--model", "nowhere"], NO_CHECKPOINT),
        (["--model", "."], "config.json' cannot be read"),
        (["--model", ".", "--seq-len", "1"], "--seq-len 1 must be at least 2"),
        (["--model", ".", "--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--model", "text", *OF_A_FIELD[0]], OF_A_FIELD[1]),
        ([*SPARSE, "--options", "tile=16"], "kascade has no option 'tile'; its options are"),
        ([*SPARSE, "--options", "top_k=2"], "top_k=2 is not accepted"),
        ([*SPARSE, "--options", "top_k"], "--options 'top_k' must be NAME=VALUE"),
        ([*TEXT, "--options", "a=1,a=2"], "--options 'a=2' must be NAME=VALUE, and each name once"),
        ([*SPARSE, "--schedule", "dp"], "--schedule dp is made from a calibration; give --calibration"),
        ([*SPARSE, "--schedule", "best"], "--schedule 'best' must be one of dp, greedy, greedy-guide"),
        ([*SPARSE, "--schedule", "manual", "--anchors", "1"], "layer 0 must be one of them"),
        ([*TEXT, "--backend", "chunked", "--schedule", "manual"], "--backend chunked does not take --schedule; leave"),
        ([*SPARSE, "--anchors", "0,2"], "are about a schedule; add --schedule"),
        ([*SPARSE, "--calibration", "nowhere"], "cannot be read as a calibration"),
        ([*TEXT, "--backend", "nobody"], "backend 'nobody' is not registered"),
        ([*TEXT, "--batch", "0"], "batch=0"),
        ([*TEXT, "--random-tokens", "--text", "t.txt"], "--random-tokens takes the place of --text"),
        ([*TEXT, "--against", "cudnn"], "cuDNN runs on NVIDIA GPUs"),
        (["--use_splash_kernel"], "--use_splash_kernel is a flag of the guides; here it is --backend"),
    ],
    "calibrate": [
        (["--out", "."], "--out . must end in .safetensors"),
        (["--model", "gigantic"], UNKNOWN),
        (["--model", "nowhere"], NO_CHECKPOINT),
        (["--model", "tiny"], "a preset has no trained weights"),
        (["--text", "nowhere.txt"], "cannot be read"),
        OF_A_FIELD,
        (["--model", "given/mine.py:absent", *CALIBRATED], "absent in"),
        (["--model", "given/mine.py:layers_of", *CALIBRATED], "layer 0 gave numbers that are not finite"),
        (["--model", "given/mine.py:layers_of", *CALIBRATED, "--schedule", "greedy-loss"], "a model that can be run"),
        (["--model", "given/mine.py:nothing", *CALIBRATED], "TypeError: 'NoneType' object is not iterable"),
        (["--prompts", "0"], "--prompts 0 must be at least 1"),
        (["--prompts", "100000"], "fewer than the 100000 asked for"),
        (["--length", "1"], "--length 1 must be at least 2"),
        (["--top-k", "2"], "top_k=2.0 is not accepted"),
        (["--length", "32", "--prompts", "1"], "leaves no choice"),
        (["--schedule", "best"], "must be one of dp, greedy, greedy-guide"),
        (["--anchors", "9"], "must be one number from 1 to 4 for schedule dp"),
        (["--schedule", "greedy-loss", "--anchors", "9"], "must be one number from 1 to 4 for schedule greedy-loss"),
        (["--anchors", "0,x"], "must be a number of layers"),
        (["--schedule", "manual", "--anchors", "1"], "layer 0 must be one of them"),
        (["--threshold", "0.9"], "--threshold has no place in schedule dp; leave it out, or give --schedule greedy"),
        (["--schedule", "manual", "--anchors", "0,2", "--max-reuse-dist", "2"], "--max-reuse-dist has no place in"),
        (["--schedule", "greedy", "--threshold", "2"], "--threshold 2 must be from 0 to 1"),
        (["--out", "nowhere/c.safetensors"], "does not exist; make it first"),
        (["--out", "c.npz"], "must end in .safetensors"),
        (["--random-tokens", "--text", "t.txt"], "--random-tokens takes the place of --text"),
    ],
    "judge": [
        (["nowhere.py:fn"], "nowhere.py does not exist; give PATH.py:NAME"),
        (["nobody"], "backend 'nobody' is not registered"),
        (["given/mine.py:no-name"], "names no function"),
        (["given/mine.py:missing"], "missing in given/mine.py is no function"),
        (["given/mine.py:seven"], "seven in given/mine.py is no function"),
        (["given/broken.py:fn"], "broken.py does not load: ModuleNotFoundError: No module named 'no_such_chip'"),
        (["given/locked.py:fn"], "PermissionError: cache (a function of yours runs confined"),
        (["--random", "-1"], "--random -1 must be 0 or more"),
        (["standard", "--require", "fast"], "--require fast is no verdict; they are deterministic, batch_invariant"),
        (["--cell-timeout", "inf"], "at most 31536000, a year"),
        (["standard", "--seed", "4294967296"], "--seed 4294967296 must be at most 4294967295"),
        (["--random", "9" * 9], "must be at most 100000; --first begins at a later one"),
    ],
    "convert": [
        (["--input", "/"], "--input / has no name that -converted could stand behind; give --output."),
        (["--input", "nowhere"], "cannot be read"),
        (["--input", "given/loop"], LOOP),
        (["--input", "in", "--output", "in"], "already exists and is not empty"),
        (["--input", "in", "--preset", "gigantic"], "preset 'gigantic' is not known; use one of"),
        (["--input", "in", "--quantize", "int8"], "invalid choice 'int8'"),
        (["--input", "in", "--dtype", "float64"], "invalid choice 'float64'"),
    ],
    "choose": [
        ([], "needs the directory of at least one run"),
        (["nowhere"], "nowhere holds no records.jsonl"),
        (["run", "--check", "./run"], "--check run is a run that the policy is made of; give a run of other problems."),
    ],
    "report": [
        ([""], "is given an empty value; give one, or leave it out."),
        (["."], "no records.jsonl"),
        (["given/loop"], LOOP),
        (["run", "other", "./run"], "run other run names a run twice; give each once"),
    ],
    "compare": [
        (["run", "nowhere"], "holds no records.jsonl"),
        (["run", "other", "third"], "compare takes two runs, not 3; with --trend any number."),
        (["run", "other", "--share", "3"], "--share is about a trend; add --trend."),
        (["run", "other", "--trend", "--share", "0"], "--share 0 must be above 0"),
        (["run", "other", "--trend", "--fail-on", "wrong"], "--fail-on compares two runs; leave out --trend."),
        (["run", "./run", "--fail-on", "wrong"], "run run names a run twice; give each once"),
        (["--trend", "run", "other", "./run"], "run other run names a run twice; give each once"),
    ],
    "harvest": [
        (["given/mine.py:bare"], "returned function, not (step, args)"),
        (["given/mine.py:failing"], "the step of given/mine.py:failing raised AttributeError"),
        (["given/mine.py:nothing"], "no function nothing that takes nothing"),
        (["given/mine.py:absent"], "no function absent that takes nothing"),
        (["given/mine.py"], "names no function"),
        (["nowhere.py:fn"], "does not exist"),
        (["given/mine.py:bare", "--out", "train.py"], "give a name that ends in .toml"),
    ],
    "compare-runs": [([], "compare")],
    "walk": [([], "walk")],
}


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [([verb, *words], sentence) for verb, rows in REFUSED.items() for words, sentence in rows],
    ids=lambda given: " ".join(given)[:60] if isinstance(given, list) else "",
)
def test_command_is_refused_with_a_sentence_and_writes_nothing(
    words, sentence, tmp_path, monkeypatch, refused, request
):
    for name, content in GIVEN.items():
        path = tmp_path / "given" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "given/loop").symlink_to(tmp_path / "given/loop")
    if "in" in words:
        shutil.copytree(request.getfixturevalue("shipped"), tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert sentence in refused(*words)
    written = [path.relative_to(tmp_path).parts for path in tmp_path.rglob("*") if path.is_file()]
    assert not [parts for parts in written if parts[0] not in ("given", "in") and parts[-1] != "lock"]
