"""Problems of the conformance suite that a slow backend leaves out, and the problem that makes the same claim.

They differ in sizes or ids alone, of which random problems have more; ``standard`` and ``flash_cpu`` have them all.
And the problems by which a backend of this machine shows that it may be mapped, and that a layout may be traced.
"""

from attnsuite.testing import Conformance, problems

HELD_BY = {
    "gqa-1": "causal",
    "gqa-4": "gqa-8",
    "mqa": "combination",
    "head-dim-64": "head-dim-128",
    "head-dim-72": "head-dim-33",
    "head-dim-80": "head-dim-33",
    "head-dim-96": "head-dim-33",
    "head-dim-192": "head-dim-128",
    "head-dim-256": "head-dim-128",
    "value-dim-narrower": "value-dim-wider",
    "length-127": "length-129",
    "length-1000": "length-2100",
    "more-queries": "window-more-queries",
    "more-queries-causal": "more-keys-causal",
    "more-keys": "segments-more-keys",
    "window-int": "window-asymmetric",
    "window-int-causal": "window-causal",
    "window-right-only": "window-asymmetric",
    "soft-cap": "combination",
    "soft-cap-tight": "combination-bidirectional",
    "segments": "segments-more-keys",
    "padding-right": "padding-left",
    "ragged-empty": "ragged",
    "positions-shifted": "positions-reversed",
    "mask-dead-rows": "log-sum-exp-and-bias",
    "bias-of-minus-infinity": "bias-of-minus-infinity-and-mask",
    "heads-equal-bfloat16": "window-bfloat16",
    "causal-float16": "combination-float16",
}
CASES = tuple(case for case in problems.CASES if case not in HELD_BY)
MAPPED = ("combination", "decode-1")
# Segments are traced in padding, and lengths in decode-4.
TRACED = tuple(x for x in Conformance.cases_for_traced_layouts if not x.startswith(("segments", "ragged")))
