"""What a change is held to before it lands (``.ci/run``), of what ``.ci/run --all`` holds it to."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Cases of the conformance suite: every backend with the oldest JAX too.
CORE = (
    *("causal", "causal-bfloat16", "gqa-8", "window-asymmetric", "segments-causal", "padding-both-ends"),
    *("ragged-causal", "combination", "decode-4"),
)
# Every backend with the newest JAX: each feature, most of them beside others.
BREADTH = (
    *CORE,
    *("plain", "head-dim-80", "value-dim-wider", "length-129", "more-queries-causal", "decode-1", "chunk-of-prefill"),
    *("chunk-causal", "segments-returning", "ragged-beyond-all-keys", "positions-shuffled"),
    *("mask-dead-rows", "mask-and-bias", "bias-of-minus-infinity", "log-sum-exp-of-nothing", "function-positions"),
    *("score-soft-cap", "sinks-of-nothing", "pages", "kv-int8-pages-hnd", "values-in-keys-bfloat16"),
    *("combination-float16", "causal-1000-bfloat16", "big-logits-bfloat16"),
)

# Of these tests, cases of BREADTH that have no other way through it than those left. Other tests run them: traced,
# vmapped or forward alone.
ONCE_MORE = {
    # A problem that is causal alone has gqa-8; a decode step decode-4; a mask with dead rows mask-and-bias; padding
    # combination; segments segments-returning.
    "test_matches_the_oracle": (
        *("causal", "decode-1", "mask-dead-rows", "padding-both-ends", "segments-causal"),
        *("length-129",),  # 160 is no multiple of a block either
    ),
    "test_eager_agrees_with_jit": ("causal", "window-asymmetric", "padding-both-ends"),
    "test_forward_alone_matches_the_oracle": ("causal", "gqa-8", "padding-both-ends", "decode-4"),
    "test_layout_may_be_traced": (
        *("segments-causal", "positions-shuffled", "score-soft-cap"),
        *("log-sum-exp-of-nothing", "function-positions"),  # ids are in padding-both-ends, positions in pages
    ),
}
# Further ones of kernels in an interpreter, and of chunked, whose programs take long to compile.
SLOW = {
    "test_matches_the_oracle": ("plain", "chunk-of-prefill", "ragged-beyond-all-keys"),
    "test_layout_may_be_traced": ("decode-4",),
}


def is_landing() -> bool:
    """Whether what is marked thorough is left out: .ci/run without --all."""
    return os.environ.get("ATTNSUITE_LANDING") == "1"


def swept(values: Iterable[Any], first: Collection[Any]) -> list:
    """``values`` as parameters of a test; those that are not among the ``first`` are marked thorough.

    A tuple holds the values of several parameters.
    """

    def waiting(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough)

    return [value if value in first else waiting(value) for value in values]
