"""Problems of the conformance suite that a slow backend leaves out, and the problem that makes the same claim.

They differ in sizes or ids alone, of which ``test_any_shape`` draws more; ``standard`` and ``flash_cpu`` have them all.
"""

from attnsuite.testing import problems

HELD_BY = {
    "gqa-1": "causal",
    "gqa-4": "gqa-8",
    "mqa": "combination",
    "head-dim-64": "head-dim-128",
    "head-dim-72": "head-dim-33",
    "head-dim-80": "head-dim-33",
    "value-dim-narrower": "value-dim-wider",
    "length-127": "length-129",
    "length-1000": "length-2100",
    "more-queries": "window-more-queries",
    "more-keys": "segments-more-keys",
    "window-int": "window-asymmetric",
    "window-int-causal": "window-causal",
    "soft-cap": "combination",
    "padding-right": "padding-left",
    "ragged-empty": "ragged",
    "positions-shifted": "positions-reversed",
    "bias-of-minus-infinity": "bias-of-minus-infinity-and-mask",
    "heads-equal-bfloat16": "window-bfloat16",
}
CASES = tuple(case for case in problems.CASES if case not in HELD_BY)
