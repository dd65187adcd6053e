"""The support matrix: which backend takes which problem on which kind of device, asked of the backends themselves.

``python -m suite.support`` prints the Markdown that stands in ``docs/backends.md``; a test holds the two together.
"""

from __future__ import annotations

import dataclasses

from tabulate import tabulate

from backends import AttentionSpec, Target, registry

_BASE = AttentionSpec(
    batch=1,
    query_length=1024,
    key_value_length=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    dtype="bfloat16",
    is_causal=True,
)
PROBLEMS: dict[str, dict[str, object]] = {
    "causal, bfloat16, forward and backward": {},
    "causal, bfloat16, forward only": {"needs_grad": False},
    "float32": {"dtype": "float32"},
    "not causal": {"is_causal": False},
    "grouped queries (8 heads on 2)": {"num_kv_heads": 2},
    "head dim 128": {"head_dim": 128, "value_head_dim": 128},
    "head dim 72": {"head_dim": 72, "value_head_dim": 72},
    "head dim 256": {"head_dim": 256, "value_head_dim": 256},
    "value head dim unlike the key's": {"value_head_dim": 32},
    "odd length (1000)": {"query_length": 1000, "key_value_length": 1000},
    "queries shorter than keys": {"query_length": 256},
    "decode step": {"query_length": 1, "needs_grad": False, "phase": "decode", "has_positions": True},
    "window": {"local_window_size": (255, 0)},
    "chunks": {"chunk_size": 256},
    "soft cap": {"logits_soft_cap": 30.0},
    "packed segments": {"has_segment_ids": True},
    "positions": {"has_positions": True},
    "key lengths": {"has_seq_lengths": True},
    "mask array": {"has_mask": True},
    "bias array": {"has_bias": True},
}
TARGETS = {"cpu": Target("cpu"), "h100": Target("cuda", "h100"), "v5e": Target("tpu", "v5e")}


def support_table(names: tuple[str, ...] | None = None) -> str:
    """Markdown: a row per problem, a column per backend, in each cell the targets that it runs on natively."""
    names = registry.names() if names is None else names
    rows = []
    for problem, change in PROBLEMS.items():
        spec = dataclasses.replace(_BASE, **change)  # pyright: ignore[reportArgumentType]  (values fit their fields)
        rows.append([problem, *(_targets(name, spec) for name in names)])
    return tabulate(rows, headers=["problem", *names], tablefmt="github")


def _targets(name: str, spec: AttentionSpec) -> str:
    backend = registry.get(name)
    taken = [label for label, target in TARGETS.items() if backend.supports(spec, target)]
    return "everywhere" if len(taken) == len(TARGETS) else ", ".join(taken) or "no"


if __name__ == "__main__":
    print(support_table())  # noqa: T201 (its output)
