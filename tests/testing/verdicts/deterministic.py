"""Verdict ``deterministic``: the same bits on every run, in another process, and with another number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from attnsuite.backends import AttentionSpec

from .finding import Finding, Trial, concluded
from .subject import Arrays, Subject, difference

RUNS = 5
# Results of :func:`results` by label, computed in another process; the argument is its number of threads.
InSubprocess = Callable[[int | None], Mapping[str, Arrays]]


def deterministic(subject: Subject, elsewhere: InSubprocess | None = None) -> Finding:
    """Compare runs of a training step, of a forward pass alone, and of a decode step.

    ``elsewhere`` is None where no second process can have the device.
    """
    found = {label: [subject.run(spec, subject.drawn(spec)) for _ in range(RUNS)] for label, spec in _problems(subject)}
    return concluded(_trials(found, elsewhere), f"{subject.backend.name} takes no problem of this verdict.")


def results(subject: Subject) -> dict[str, Arrays]:
    """What each problem gives, by its label."""
    return {label: subject.run(spec, subject.drawn(spec)) for label, spec in _problems(subject)}


def _problems(subject: Subject) -> Iterator[tuple[str, AttentionSpec]]:
    steps = {"forward and backward": {"needs_grad": True}, "forward": {"needs_grad": False}}
    for step, fields in {**steps, "decode step": {"query_length": 1, "needs_grad": False, "is_causal": False}}.items():
        for dtype, spec in subject.dtypes(**{"batch": 1, **subject.few_heads, **fields}):
            yield f"{step}, {dtype}", spec


def _trials(found: Mapping[str, list[Arrays]], elsewhere: InSubprocess | None) -> Iterator[Trial]:
    for label, runs in found.items():
        step, _, dtype = label.rpartition(", ")
        broken = next(filter(None, (difference(runs[0], again) for again in runs[1:])), "")
        yield Trial(f"{RUNS} runs", step, dtype, broken)
    if elsewhere is None or not found:
        return
    for change, threads in (("another process", None), ("one processor core", 1)):
        other = elsewhere(threads)
        for label, runs in found.items():
            step, _, dtype = label.rpartition(", ")
            yield Trial(change, step, dtype, difference(runs[0], other[label]))
