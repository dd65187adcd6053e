"""The page of ``attnsuite run --suite curves``: Markdown with a verdict per backend, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnsuite.suite.kinds.loss_curve_case import FACTOR, TrainingCase, Verdict, judge, losses_of, role_of, settings_of
from attnsuite.suite.record import Record

from ..environment import date_of
from ..formatting import DASH
from ..plot import as_svg
from ..read import ReportError

PICTURE = "loss-curves.svg"
_SETUP = (
    "Model `{preset}` from scratch on CPython's prose, float32, {optimizer} (peak learning rate {learning_rate:g}); "
    "{cpu}, {date}, Python {python}, jax {jax}, optax {optax}, revision {git_revision}. Kernels of other devices ran "
    "in their interpreters."
)
_COPY = "**equals standard in every bit: shows nothing**"
_RULE = (
    "A backend is ready to train with where its loss is at every step no further from the standard backend's than "
    "{factor:g} times the standard's own noise so far. The noise is the furthest that the standard got from itself "
    "when it trained the same model on the same batches with the hidden coordinates stored in another order: the "
    "same mathematics, other float sums. The ratio is the largest distance in units of that noise."
)
_CONTROLS = (
    "Controls are the standard backend with its gradients multiplied, and have to be found out. Each noise run is "
    "held to the other ones: how far the rule is from a false alarm. Runs on other batches show why the spread over "
    "seeds is no measure here: it is far wider, and every control would pass."
)


Settings = Sequence[tuple[TrainingCase, Sequence[Record]]]


def files(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """The page and the picture. Raises ReportError; ``folder`` is their destination."""
    try:
        settings = settings_of(records)
    except ValueError as error:
        raise ReportError(f"{folder}: {error}") from error
    return {"report.md": page(settings), PICTURE: draw(settings)}


def page(settings: Settings) -> str:
    """The page as Markdown: what was trained, where and when; the rule; the picture; a table per setting."""
    records = [record for _, members in settings for record in members]
    case, environment = settings[0][0], records[0].environment
    versions = environment.get("versions", {})
    setup = _SETUP.format(
        **{name: getattr(case, name) for name in ("preset", "optimizer", "learning_rate")},
        **{name: environment.get(name, DASH) for name in ("cpu", "git_revision")},
        **{name: versions.get(name, DASH) for name in ("python", "jax", "optax")},
        date=date_of(records),
    )
    picture = f"![loss, and distance from the standard backend's, per step]({PICTURE})"
    blocks = ["# Loss curves per backend", setup, _RULE.format(factor=FACTOR), picture]
    tables = ("\n".join(_table(case, members)) for case, members in settings)
    return "\n\n".join([*blocks, *tables, _CONTROLS]) + "\n"


def verdicts(records: Sequence[Record]) -> list[tuple[Record, Verdict]]:
    """Every curve of one setting but the standard's, judged by the noise (a noise run: by that of the other runs)."""
    standard, noise = _standard(records), [record for record in records if role_of(record) == "noise"]
    return [
        (record, judge(losses_of(record), losses_of(standard), [losses_of(o) for o in noise if o is not record]))
        for record in records
        if role_of(record) not in ("standard", None)
    ]


def draw(settings: Settings) -> str:
    """The picture as SVG text: per setting the losses, and their distances from the standard's."""
    import matplotlib as mpl  # noqa: PLC0415 (half a second that only pictures need)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": PICTURE, "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(11.6, 3.8 * len(settings)), layout="constrained")
        axes = figure.subplots(len(settings), 2, squeeze=False)
        for (left, right), (case, records) in zip(axes, settings, strict=True):
            _draw_losses(left, records)
            _draw_distances(right, records)
            left.set_title(f"{case.setting}: loss")
            right.set_title(f"{case.setting}: distance from standard")
            left.set_ylabel("nats")
            left.legend(frameon=False, fontsize=7)
            right.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))  # no line under it
            for axis in (left, right):
                axis.set_xlabel("step")
                axis.grid(visible=True, linewidth=0.3)
        return as_svg(figure)


def _table(case: TrainingCase, records: Sequence[Record]) -> Iterator[str]:
    standard = _standard(records)
    noise = np.abs(np.asarray([losses_of(r) for r in records if role_of(r) == "noise"]) - losses_of(standard)).max()
    sizes = f"{case.steps} steps of {case.batch} x {case.length} tokens; standard: {_ends(standard)}"
    yield from (f"## {case.setting}", "", f"{sizes}; its widest noise: {noise:.2g} nats.", "")
    yield "| run | mode | last loss | furthest from standard, nats | ratio to noise (at step) | verdict |"
    yield "|---|---|---|---|---|---|"
    found = verdicts(records)
    for role in ("backend", "control", "batches", "noise"):
        yield from (_row(record, verdict, standard) for record, verdict in found if role_of(record) == role)
    for record in records:
        if record.facts is None:
            status = "refused" if record.status == "unsupported" else record.status
            reason = " ".join(record.reasons) if record.status == "unsupported" else record.error or ""
            yield f"| {record.requested} | {status} | | | | {reason} |"


def _row(record: Record, verdict: Verdict, standard: Record) -> str:
    losses, role = record.facts.losses, role_of(record)
    furthest = np.abs(losses_of(record) - losses_of(standard)).max()
    # Equal to the last bit in every step: most likely the same sums, so the row proves nothing.
    is_copy = len(losses) > 1 and losses == standard.facts.losses
    outcome = {
        "backend": _COPY if is_copy else "ready" if verdict.is_ready else "**not ready**",
        "control": "**passes: the test is blind**" if verdict.is_ready else "found out",
        "noise": "within" if verdict.is_ready else "false alarm",
        "batches": "for scale",
    }[str(role)]
    name = f"`{record.requested}`" if role == "backend" else record.requested
    ratio = f"{verdict.ratio:.2f}" if verdict.ratio < 100 else f"{verdict.ratio:.0f}"
    last = losses_of(record)[-1]
    return f"| {name} | {record.mode} | {last:.6f} | {furthest:.2g} | {ratio} ({verdict.step}) | {outcome} |"


def _ends(record: Record) -> str:
    losses = losses_of(record)
    return f"{losses[0]:.4f} -> {losses[-1]:.4f} nats"


def _standard(records: Sequence[Record]) -> Record:
    return next(record for record in records if role_of(record) == "standard")


def _draw_losses(axis: Any, records: Sequence[Record]) -> None:
    for record in records:
        role, name = role_of(record), record.requested
        if role in ("standard", "backend", "batches"):
            is_other = role == "batches"
            label = "_" if is_other else name if record.mode == "native" else f"{name} ({record.mode})"
            style = {"color": "0.8", "linewidth": 0.8} if is_other else {"linewidth": 1.2}
            axis.plot(_steps(record), losses_of(record), label=label, **style)


def _draw_distances(axis: Any, records: Sequence[Record]) -> None:
    reference = losses_of(_standard(records))
    noise = np.abs(np.asarray([losses_of(r) for r in records if role_of(r) == "noise"]) - reference).max(0)
    allowed = FACTOR * (np.maximum.accumulate(noise) + np.finfo(np.float32).eps * reference)
    axis.plot(np.arange(1, len(allowed) + 1), allowed, color="black", linestyle="--", label="allowed")
    axis.fill_between(np.arange(1, len(allowed) + 1), 1e-8, allowed, color="0.9")
    for record in records:
        if (role := role_of(record)) in ("backend", "control", "batches"):
            distance = np.maximum(np.abs(losses_of(record) - reference), 1e-8)
            look = {"backend": "-", "control": ":", "batches": "-."}[str(role)]
            color = {"color": "0.6"} if role == "batches" else {}
            axis.plot(_steps(record), distance, linestyle=look, linewidth=1.2, label=record.requested, **color)
    axis.set_yscale("log")


def _steps(record: Record) -> np.ndarray:
    return np.arange(1, len(record.facts.losses) + 1)
