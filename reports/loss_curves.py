"""Loss curves -> a page in Markdown with a verdict per backend, and a picture (extra ``plot``).

A pure function of what ``attnsuite curves`` wrote: the same curves give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnsuite.suite.files import write_text
from attnsuite.suite.loss_curves import FACTOR, Curve, Setting, Training, Verdict, judge, read_training

from .formatting import DASH
from .load import ReportError
from .plot import is_available

PAGE, PICTURE = "report.md", "loss-curves.svg"
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


def render_curves(directory: Path) -> Path:
    """Write the page and, where matplotlib is installed, the picture; returns the page's path.

    Raises ReportError, and InputError where they cannot be written.
    """
    try:
        training, curves = read_training(directory)
    except ValueError as error:
        raise ReportError(str(error)) from error
    path, picture = directory / PAGE, directory / PICTURE
    drawn = draw(curves) if is_available() else None
    write_text(path, page(training, curves, picture=is_available() or picture.is_file()))
    if drawn is not None:
        write_text(picture, drawn)
    return path


def page(training: Training, curves: Sequence[Curve], *, picture: bool) -> str:
    """The page as Markdown; ``curves`` as :func:`attnsuite.suite.loss_curves.read_training` gives them."""
    environment = training.environment
    versions = environment.get("versions", {})
    lines = [
        "# Loss curves per backend",
        "",
        _SETUP.format(
            **{name: getattr(training, name) for name in ("preset", "optimizer", "learning_rate", "date")},
            **{name: environment.get(name, DASH) for name in ("cpu", "git_revision")},
            **{name: versions.get(name, DASH) for name in ("python", "jax", "optax")},
        ),
        "",
        _RULE.format(factor=FACTOR),
        "",
    ]
    if picture:
        lines += [f"![loss, and distance from the standard backend's, per step]({PICTURE})", ""]
    for setting in training.settings:
        members = [curve for curve in curves if curve.setting == setting.name]
        lines += _section(setting, members)
    lines += [
        _CONTROLS,
        "",
    ]
    return "\n".join(lines)


def verdicts(curves: Sequence[Curve]) -> list[tuple[Curve, Verdict]]:
    """Every run of one setting but the standard's, held to the noise (a noise run: to the noise of the others)."""
    standard, noise = _standard(curves), [curve for curve in curves if curve.role == "noise"]
    return [
        (curve, judge(curve.values, standard.values, [other.values for other in noise if other is not curve]))
        for curve in curves
        if curve.role not in ("standard", "refused")
    ]


def draw(curves: Sequence[Curve]) -> str:
    """The picture as SVG text: per setting the losses, and their distances from the standard's; needs matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 (an optional package)  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    settings = list(dict.fromkeys(curve.setting for curve in curves))
    with mpl.rc_context({"svg.hashsalt": PICTURE, "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(11.6, 3.8 * len(settings)), layout="constrained")
        axes = figure.subplots(len(settings), 2, squeeze=False)
        for (left, right), setting in zip(axes, settings, strict=True):
            members = [curve for curve in curves if curve.setting == setting]
            _draw_losses(left, members)
            _draw_distances(right, members)
            left.set_title(f"{setting}: loss")
            right.set_title(f"{setting}: distance from standard")
            left.set_ylabel("nats")
            left.legend(frameon=False, fontsize=7)
            right.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))  # no line under it
            for axis in (left, right):
                axis.set_xlabel("step")
                axis.grid(visible=True, linewidth=0.3)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _section(setting: Setting, curves: Sequence[Curve]) -> list[str]:
    steps, batch, length = setting.steps, setting.batch, setting.length
    standard = _standard(curves)
    noise = np.abs(np.asarray([c.values for c in curves if c.role == "noise"]) - standard.values).max()
    lines = [
        f"## {setting.name}",
        "",
        f"{steps} steps of {batch} x {length} tokens; standard: {_ends(standard)}; its widest noise: {noise:.2g} nats.",
        "",
        "| run | mode | last loss | furthest from standard, nats | ratio to noise (at step) | verdict |",
        "|---|---|---|---|---|---|",
    ]
    found = verdicts(curves)
    for role in ("backend", "control", "batches", "noise"):
        for curve, verdict in found:
            if curve.role == role:
                lines.append(_row(curve, verdict, standard))
    lines += [
        f"| {curve.name} | refused | | | | {' '.join(curve.reasons)} |" for curve in curves if curve.role == "refused"
    ]
    return [*lines, ""]


def _row(curve: Curve, verdict: Verdict, standard: Curve) -> str:
    last = curve.values[-1]
    furthest = np.abs(curve.values - standard.values).max()
    # To the last bit of every step the same: most likely the very same sums, and so nothing is shown.
    is_copy = len(curve.losses) > 1 and list(curve.losses) == list(standard.losses)
    said = {
        "backend": _COPY if is_copy else "ready" if verdict.is_ready else "**not ready**",
        "control": "**passes: the test is blind**" if verdict.is_ready else "found out",
        "noise": "within" if verdict.is_ready else "false alarm",
        "batches": "for scale",
    }[curve.role]
    name = f"`{curve.name}`" if curve.role == "backend" else curve.name
    ratio = f"{verdict.ratio:.2f}" if verdict.ratio < 100 else f"{verdict.ratio:.0f}"
    return f"| {name} | {curve.mode} | {last:.6f} | {furthest:.2g} | {ratio} ({verdict.step}) | {said} |"


def _ends(curve: Curve) -> str:
    return f"{curve.values[0]:.4f} -> {curve.values[-1]:.4f} nats"


def _standard(curves: Sequence[Curve]) -> Curve:
    return next(curve for curve in curves if curve.role == "standard")


def _draw_losses(axis: Any, curves: Sequence[Curve]) -> None:
    for curve in curves:
        if curve.role in ("standard", "backend", "batches"):
            is_other = curve.role == "batches"
            label = "_" if is_other else curve.name if curve.mode == "native" else f"{curve.name} ({curve.mode})"
            style = {"color": "0.8", "linewidth": 0.8} if is_other else {"linewidth": 1.2}
            axis.plot(_steps(curve), curve.values, label=label, **style)


def _draw_distances(axis: Any, curves: Sequence[Curve]) -> None:
    reference = _standard(curves).values
    noise = np.abs(np.asarray([curve.values for curve in curves if curve.role == "noise"]) - reference).max(0)
    allowed = FACTOR * (np.maximum.accumulate(noise) + np.finfo(np.float32).eps * reference)
    axis.plot(np.arange(1, len(allowed) + 1), allowed, color="black", linestyle="--", label="allowed")
    axis.fill_between(np.arange(1, len(allowed) + 1), 1e-8, allowed, color="0.9")
    for curve in curves:
        if curve.role in ("backend", "control", "batches"):
            distance = np.maximum(np.abs(curve.values - reference), 1e-8)
            look = {"backend": "-", "control": ":", "batches": "-."}[curve.role]
            color = {"color": "0.6"} if curve.role == "batches" else {}
            axis.plot(_steps(curve), distance, linestyle=look, linewidth=1.2, label=curve.name, **color)
    axis.set_yscale("log")


def _steps(curve: Curve) -> np.ndarray:
    return np.arange(1, len(curve.losses) + 1)
