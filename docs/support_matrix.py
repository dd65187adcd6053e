"""The support matrix: which backend takes which problem on which kind of device, answered by the backends themselves.

``python docs/support_matrix.py`` prints the Markdown table of ``docs/reference/backends.md``, which a test
holds to it, the same by type of a model's layers, and the reasons of what is unsupported there.
"""

from __future__ import annotations

import dataclasses

from tabulate import tabulate

from attnsuite.backends import AttentionSpec, Target, registry, support
from attnsuite.backends.masks import Causal, Prefix
from attnsuite.backends.operands import OPERANDS
from attnsuite.models import ModelConfig
from attnsuite.models.planning import attention_spec
from attnsuite.testing import checks

BASE = AttentionSpec(
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
    "decode step": {"query_length": 1, "needs_grad": False, "has_positions": True},
    "window": {"local_window_size": (255, 0)},
    "chunks": {"chunk_size": 256},
    "soft cap": {"logits_soft_cap": 30.0},
    "packed segments": {"has_segment_ids": True},
    "positions": {"has_positions": True},
    "key lengths": {"has_seq_lengths": True},
    "mask array": {"has_mask": True},
    "values in the keys (latents)": {"values_in_keys": True, "value_head_dim": 48},
    "log-sum-exp": {"return_log_sum_exp": True},
    **{operand.title: {f"has_{operand.name}": True} for operand in OPERANDS},
    "paged cache, decode step, head dim 128": {
        "query_length": 1,
        "needs_grad": False,
        "page_size": 16,
        "num_pages": 80,
        "head_dim": 128,
        "value_head_dim": 128,
    },
    "int8 keys and values, decode step": {"query_length": 1, "needs_grad": False, "kv_dtype": "int8"},
    "mask function": {"mask_function": Causal() | Prefix(16), "is_causal": False},
    "score function": {"score_function": lambda score, *_: score / 2},
}

# A model with layers of every type; the latent ones have the sizes of DeepSeek-V2-Lite.
ALL_TYPES = ModelConfig.from_preset(
    "debug",
    num_layers=5,
    attention=("global", "sliding", "chunked", "full", "latent"),
    hidden_size=2048,
    intermediate_size=5464,
    num_heads=16,
    num_kv_heads=8,
    window_size=4096,
    chunk_size=8192,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    dtype="bfloat16",
)
PHASES: dict[str, dict[str, object]] = {
    "training": {"query_length": 16384},
    "prefill": {"query_length": 16384, "needs_grad": False},
    "prefill behind a cache": {"query_length": 512, "key_value_length": 16384, "needs_grad": False},
    "decode": {"query_length": 1, "key_value_length": 16384, "needs_grad": False},
}
TARGETS = {"cpu": Target("cpu"), "h100": Target("cuda", "h100"), "v5e": Target("tpu", "v5e")}


def support_table(names: tuple[str, ...] | None = None) -> str:
    """Markdown: a row for the problems that the same targets take natively, a column per backend with these targets."""
    names = registry.names() if names is None else names
    alike: dict[tuple[str, ...], list[str]] = {}
    for problem, change in PROBLEMS.items():
        spec = dataclasses.replace(BASE, **change)  # pyright: ignore[reportArgumentType]  (values fit their fields)
        alike.setdefault(tuple(_targets(name, spec) for name in names), []).append(problem)
    rows = [["; ".join(problems), *cells] for cells, problems in alike.items()]
    rows.append(["`isolates`: NaN that nobody should see stays out", *map(_keeps_nan_out, names)])
    for verdict, found in checks.MEASURED.items():
        rows.append([f"`{verdict}` on a CPU", *(found.get(name, "not measured") for name in names)])
    return tabulate(rows, headers=["problem", *names], tablefmt="github")


def _keeps_nan_out(name: str) -> str:
    """Measured, where the kernel can be executed here: behind the lengths, in padding and in other documents."""
    if name in checks.ISOLATING:
        return "cpu" if name in checks.ISOLATING_ON_CPUS else _targets(name, BASE)
    return "no" if name in checks.LETS_NAN_IN else "not measured"


def types_table(names: tuple[str, ...] | None = None) -> str:
    """Markdown: a row per attention type and phase of a model, a column per backend, as in :func:`support_table`."""
    names = registry.names() if names is None else names
    rows = [[kind, phase, *(_targets(name, spec) for name in names)] for (kind, phase), spec in _type_specs().items()]
    return tabulate(rows, headers=["layers", "phase", *names], tablefmt="github")


def refusals_table(names: tuple[str, ...] | None = None) -> str:
    """Markdown: every reason why a backend refuses a type of layer on a target that it is for, with these types."""
    names = registry.names() if names is None else names
    rows = []
    for name in names:
        refused: dict[str, dict[str, list[str]]] = {}  # reason -> type -> phases
        for (kind, phase), spec in _type_specs().items():
            answers = [support(registry.get(name), spec, target) for target in _supported_targets(name)]
            for reason in dict.fromkeys(reason for answer in answers for reason in answer.reasons):
                refused.setdefault(reason, {}).setdefault(kind, []).append(phase)
        for reason, phases_of in refused.items():
            kinds_of: dict[str, list[str]] = {}
            for kind, phases in phases_of.items():
                kinds_of.setdefault(", ".join(phases), []).append(kind)
            what = "; ".join(f"{', '.join(kinds)} ({phases})" for phases, kinds in kinds_of.items())
            rows.append([name, what, reason])
    return tabulate(rows, headers=["backend", "refuses", "because"], tablefmt="github")


def _type_specs() -> dict[tuple[str, str], AttentionSpec]:
    """The attention problem of each type of layer in each phase; under ``full`` attention there is no cache."""
    return {
        (kind, phase): attention_spec(ALL_TYPES, kind, batch=1, **sizes)  # pyright: ignore[reportArgumentType]
        for kind in ALL_TYPES.attention_types
        for phase, sizes in PHASES.items()
        if kind != "full" or "key_value_length" not in sizes
    }


def _supported_targets(name: str) -> list[Target]:
    """The targets of a backend: those on which it takes one of the types of layers."""
    backend, specs = registry.get(name), _type_specs().values()
    return [target for target in TARGETS.values() if any(support(backend, spec, target) for spec in specs)]


def _targets(name: str, spec: AttentionSpec) -> str:
    backend = registry.get(name)
    taken = [label for label, target in TARGETS.items() if support(backend, spec, target)]
    return "everywhere" if len(taken) == len(TARGETS) else ", ".join(taken) or "no"


if __name__ == "__main__":
    print(support_table(), types_table(), refusals_table(), sep="\n\n")  # noqa: T201 (its output)
