"""Hostile command lines: for every verb values that fit, values that do not, and paths that cannot be."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import strategies as st

from hostile_inputs import CASES, Commands, Hand, Valid
from hostile_values import WORDS, as_toml

NAMES = WORDS | st.sampled_from(
    ["standard", "chunked,standard", "kascade", "torch", "nobody", ",", "standard,,", "auto"]
)
SIZES = st.sampled_from(["0", "1", "-1", "2", "64", "1e3", "1e400", "nan", "inf", "9" * 5000, "x", ""])
MEMORY = SIZES | st.sampled_from(["1GiB", "1e999", "-4GB", "4 G"])
PATHS = st.sampled_from(["{folder}", "{folder}/none", "{folder}/file", "{folder}/file/x", "{folder}/" + "y" * 300, "",
                         "/dev/null", "/dev/full", "{folder}/\udcff", "{folder}/new line\n"])  # fmt: skip
MODELS = PATHS | st.sampled_from(["text", "tiny", "debug", "llama-3.2-1b", "huge"])
SCHEDULES = WORDS | st.sampled_from(["dp", "greedy", "greedy-guide", "greedy-dynamic", "greedy-benchmark", "manual"])
ANCHORS = SIZES | st.sampled_from(["0,2", "0,,2", "0,-2", "99999999999999999999"])
OPTIONS = WORDS | st.sampled_from(["top_k=0.5", "top_k=2", "tile_size=16,top_k=1e400", "a=", "=", "mesh=1",
                                   "schedule=dp", "top_k=[[[", "tile_size=true"])  # fmt: skip
KERNELS = NAMES | PATHS | st.sampled_from(["{folder}/my.py:fn", "{folder}/none.py:fn", "{folder}/my.py:", "my.py:a b"])
SUITES = st.sampled_from(["quick", "kascade", "full", "compile", "{folder}/suite.toml", "none"]) | PATHS
PACKAGES = NAMES | st.sampled_from(["jax==0.10.1", "jax==", "==1", "jax==0.1 --index-url x", "jax==1,jax==2"])
CASE_NAMES = st.sampled_from(["*", "op-*", "forward*", "[", "nothing"]) | WORDS
FLAGS: dict[str, dict[str, st.SearchStrategy[str]]] = {
    "run": {"--suite": SUITES, "--model": MODELS, "--backends": NAMES, "--cases": CASE_NAMES, "--text": PATHS,
            "--text-field": WORDS, "--nodes-with": NAMES, "--address": WORDS, "--packages": PACKAGES,
            "--shard": WORDS | st.sampled_from(["1/2", "0/2", "3/2", "9/9", "1/", "1/1e9"]),
            "--seq-len": SIZES, "--batch": SIZES, "--cell-timeout": SIZES, "--cell-memory": MEMORY,
            "--tile-size": SIZES, "--top-k": SIZES, "--threshold": SIZES, "--schedule": SCHEDULES, "--anchors": ANCHORS,
            "--max-reuse-dist": SIZES, "--granularity": WORDS, "--kernel": WORDS, "--out": PATHS, "--steps": SIZES,
            "--interpreted-steps": SIZES},
    "calibrate": {"--model": MODELS, "--text": PATHS,
                  "--text-field": WORDS, "--prompts": SIZES, "--length": SIZES, "--tile-size": SIZES,
                  "--top-k": SIZES, "--min-keys": SIZES, "--schedule": SCHEDULES, "--anchors": ANCHORS,
                  "--threshold": SIZES, "--max-reuse-dist": SIZES, "--out": PATHS},
    "tune": {"--backends": NAMES, "--target": WORDS | st.sampled_from(["h100", "v5e:4x4", "here", "v5e:x"]),
             "--cases": CASE_NAMES, "--options": OPTIONS, "--out": PATHS, "--cell-timeout": SIZES},
    "compile": {"--backends": NAMES, "--suite": SUITES, "--cases": CASE_NAMES, "--model": MODELS, "--seq-lens": SIZES,
                "--targets": WORDS | st.sampled_from(["v5e", "h100,v5e", "v5e:4x4", "v5e:0x0", "v5e:999x999", ","]),
                "--phases": WORDS | st.sampled_from(["train", "prefill,decode"]), "--batch": SIZES,
                "--longest": WORDS | st.sampled_from(["train"]), "--kernel": WORDS | st.sampled_from(["xla,pallas"]),
                "--dtype": WORDS, "--cache": PATHS,
                "--cell-timeout": SIZES, "--cell-memory": MEMORY, "--out": PATHS},
    "convert": {"--input": MODELS, "--output": PATHS, "--preset": WORDS},
    "train": {"--model": MODELS, "--text": PATHS,
              "--text-field": WORDS, "--steps": SIZES, "--batch": SIZES, "--length": SIZES,
              "--accumulate": SIZES, "--learning-rate": SIZES, "--weight-decay": SIZES, "--lora-rank": SIZES,
              "--lora-alpha": SIZES, "--lora-targets": NAMES, "--backend": NAMES, "--save-every": SIZES,
              "--seed": SIZES, "--out": PATHS},
    "perplexity": {"--model": MODELS, "--text": PATHS,
                   "--text-field": WORDS, "--seq-len": SIZES, "--sequences": SIZES, "--batch": SIZES,
                   "--backend": NAMES, "--calibration": PATHS, "--schedule": SCHEDULES, "--anchors": ANCHORS,
                   "--options": OPTIONS,
                   "--threshold": SIZES, "--max-reuse-dist": SIZES, "--out": PATHS},
    "judge": {"--cases": CASE_NAMES, "--random": SIZES, "--first": SIZES, "--seed": SIZES, "--cell-timeout": SIZES,
              "--out": PATHS},
    "harvest": {"--out": PATHS},
    "report": {"--out": PATHS},
    "choose": {"--check": PATHS, "--out": PATHS},
    "compare": {"--fail-on": WORDS | st.sampled_from(["wrong,slower:10%", "slower:1e9%", "memory", ",", "failed,"]),
                "--share": SIZES},
}  # fmt: skip
NEEDED = {"perplexity": {"--model": "text"}, "convert": {"--input": "debug", "--output": "{folder}/out"}}
FAST = {"run": {"--suite": "{folder}/suite.toml"}}  # the control's: nothing else is drawn


def flags(hand: Hand, folder: Path, valid: Valid) -> Commands:
    """A command line of any verb, with up to four flags."""
    verb = hand.one_of([*FLAGS]) if hand.spoils else "run"
    (folder / "file").write_text("not empty")
    (folder / "my.py").write_text("def fn(q, k, v): return q")
    (folder / "suite.toml").write_text(as_toml({"case": CASES[:2]}))
    if verb in ("report", "compare", "choose"):
        words = [verb, *(hand.draw(PATHS) for _ in range(hand.one_of((1, 2, 3))))]
        words += itertools.chain.from_iterable((name, hand.draw(values)) for name, values in FLAGS[verb].items())
    else:
        known, given = FLAGS[verb], dict(NEEDED.get(verb, {})) if hand.spoils else dict(FAST[verb])
        names = hand.draw(st.lists(st.sampled_from([*known]), max_size=4, unique=True)) if hand.spoils else []
        given |= {name: hand.draw(known[name]) for name in names}
        given |= {} if "--out" in given or verb == "convert" else {"--out": "{folder}/out"}
        positional = {"judge": KERNELS, "harvest": KERNELS}
        words = [verb, *([hand.draw(positional[verb])] if verb in positional else [])]
        words += itertools.chain.from_iterable(given.items())
    # A shell cannot hand over a null character.
    yield [word.replace("{folder}", str(folder)).replace("\0", "") for word in words]
