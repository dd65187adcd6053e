"""The suites of Kascade: the cases of each, and the fields of its ``Suite``."""

from __future__ import annotations

from typing import Any

from .selection import SelectionCase
from .stack import StackCase

# Whether Kascade works, what it loses and what it costs: about 20 minutes of CPU time on 2 quiet cores.
_ALL = (
    *(
        SelectionCase(kind="kascade_gate", phase=phase, sequence=1024, sequences=16, tile_size=32, top_k=0.25)
        for phase in ("prefill", "decode")
    ),
    *(
        SelectionCase(kind="kascade_retrieval", phase=phase, sequence=512, sequences=16, tile_size=16, top_k=top_k)
        for phase in ("prefill", "decode")
        for top_k in (0.0625, 0.125, 0.25)
    ),
    *(
        SelectionCase(kind="kascade_text", phase=phase, top_k=top_k)
        for phase in ("prefill", "decode")
        for top_k in (0.0625, 0.125, 0.25, 0.5)
    ),
    # 8/2 heads: a quarter of Llama-3.2-1B's, so that whole stacks of 16 layers fit the time.
    *(
        StackCase(kind="kascade_prefill", sequence=sequence, layers=1, anchors=1, heads=8, kv_heads=2, top_k=top_k)
        for sequence in (4096, 8192)
        for top_k in (0.125, 0.25)
    ),
    StackCase(kind="kascade_decode", sequence=32768, layers=1, anchors=1, top_k=0.1),
    StackCase(kind="kascade_decode", sequence=32768, top_k=0.1),
    StackCase(kind="kascade_decode", sequence=32768, top_k=0.1, anchors=2, by_token=False),
    *(StackCase(kind="kascade_prefill", sequence=4096, heads=8, kv_heads=2, top_k=top_k) for top_k in (0.125, 0.25)),
    *(
        StackCase(
            kind="kascade_prefill", sequence=8192, heads=8, kv_heads=2, top_k=top_k, by_token=False, anchors=anchors
        )
        for anchors, top_k in ((2, 0.125), (5, 0.125), (5, 0.25))
    ),
    StackCase(
        kind="kascade_prefill", sequence=1024, layers=4, anchors=2, heads=8, kv_heads=2, top_k=0.75, by_token=False
    ),
)

# At which kept fraction does a model that is trained with sparse attention reach the loss of dense.
_FINETUNE = tuple(
    SelectionCase(kind="kascade_text", top_k=top_k, training_steps=60) for top_k in (0.03125, 0.0625, 0.125, 0.25)
)

SUITES: dict[str, dict[str, Any]] = {
    "kascade": {"cases": _ALL, "all_cores": True},
    "kascade-finetune": {"cases": _FINETUNE},
}
