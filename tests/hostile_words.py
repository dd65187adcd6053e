"""Hostile command lines: for every verb values that fit, values that do not, and paths that cannot be."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from pathlib import Path

from hypothesis import strategies as st

from attnsuite.suite.verbs import VERBS
from attnsuite.suite.verbs.flags import extended
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
_VALUES = (
    (SIZES, "seq-len seq-lens batch sequences prompts length steps accumulate learning-rate seed"),
    (SIZES, "weight-decay lora-rank lora-alpha save-every cell-timeout tile-size top-k min-keys threshold share"),
    (SIZES, "max-reuse-dist random first"),
    (WORDS, "text-field address granularity dtype preset"),
    (NAMES, "backends backend nodes-with lora-targets"),
    (PATHS, "text out output cache calibration check"),
    (MODELS, "model input"),
    (SUITES, "suite"),
    (PACKAGES, "packages"),
    (CASE_NAMES, "cases"),
    (MEMORY, "cell-memory"),
    (SCHEDULES, "schedule"),
    (ANCHORS, "anchors"),
    (OPTIONS, "options"),
    (WORDS | st.sampled_from(["1/2", "0/2", "3/2", "9/9", "1/", "1/1e9"]), "shard"),
    (WORDS | st.sampled_from(["xla,pallas"]), "kernel"),
    (WORDS | st.sampled_from(["h100", "v5e:4x4", "here", "v5e:x"]), "target"),
    (WORDS | st.sampled_from(["v5e", "h100,v5e", "v5e:4x4", "v5e:0x0", "v5e:999x999", ","]), "targets"),
    (WORDS | st.sampled_from(["train", "train,prefill", "prefill,decode"]), "phases longest"),
    (WORDS | st.sampled_from(["wrong,slower:10%", "slower:1e9%", "memory", ",", "failed,"]), "fail-on"),
)
_OF_NAME = {f"--{name}": values for values, names in _VALUES for name in names.split()}


def _flags(verb: str) -> dict[str, st.SearchStrategy[str]]:
    """What the flags of a verb are drawn from."""
    kind = getattr(importlib.import_module(f"attnsuite.suite.verbs.{verb}"), verb.capitalize())
    names = (f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(extended(kind, verb)))
    return {name: _OF_NAME[name] for name in names if name in _OF_NAME}


FLAGS = {verb: _flags(verb) for verb in VERBS if verb != "doctor"}
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
