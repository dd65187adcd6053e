"""How much of a step is attention, and how long the step takes with ``auto``: the step itself is run both ways.

Without attention, each call returns its queries with the mean of keys and values added, so that what makes them and
what follows from them is still computed, forward and backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attnsuite.backends import BackendUnavailableError, Target, attention, resolve

from .statistics import Interval, median, paired_ratio
from .summary import format_seconds
from .traced_calls import Call, Harvest, harvest

_ROUNDS, _LONGEST = 9, 60.0  # rounds, and seconds after which no further round begins
_SAME = ("bias", "mask", "scale", "is_causal", "key_value_seq_lengths", "local_window_size")  # in both interfaces


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the step as it is; its time without attention, and with ``auto``, relative to that.

    ``unchanged`` are places whose calls ``auto`` could not take over, each with the reason.
    """

    seconds: Interval
    without: Interval | None
    with_auto: Interval | None
    unchanged: dict[str, str]


def measure(step: Callable[..., Any], args: Sequence[Any]) -> StepTimes | None:
    """Run the step as it is, without attention and with ``auto``, in turns. Raises what ``step`` raises.

    None where an argument has a shape and no numbers. Each run gets its own copy of the arrays, because a step may
    donate them.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        return None
    unchanged: dict[str, str] = {}

    def with_auto(call: Call, arrays: Sequence[Any], arguments: dict[str, Any]) -> Any:
        return _with_auto(call, arrays, arguments, unchanged)

    ways = (None, Harvest(_without), Harvest(with_auto))
    samples: tuple[list[float], ...] = ([], [], [])
    for way in ways:
        _run(step, args, way)
    begin = time.perf_counter()
    for number in itertools.count():
        if number == _ROUNDS or (number and time.perf_counter() - begin > _LONGEST):
            break
        for taken, way in zip(samples, ways, strict=True):
            taken.append(_run(step, args, way))
    as_it_is = samples[0]
    without, replaced = (paired_ratio(taken, as_it_is) for taken in samples[1:])
    return StepTimes(median(as_it_is), without, replaced, unchanged)


def sentences(found: Harvest, times: StepTimes) -> Iterator[str]:
    """The times in words, then for each place what runs there today, what ``auto`` takes, and the line to write."""
    yield f"the step takes {format_seconds(times.seconds)} on this machine."
    if times.without is not None:
        yield f"attention is {_range(1 - times.without.value, times.without)} of it."
    if times.with_auto is not None:
        no_gain = ", which is no gain" if (times.with_auto.high or times.with_auto.value) >= 1 else ""
        yield f"with auto it takes {times.with_auto.value:.2f} of that time{_interval(times.with_auto)}{no_gain}."
    lines: dict[str, None] = {}  # a place may have calls of several problems
    for mark in sorted(found.found(), key=lambda mark: mark.index):
        call = found.calls[mark.index]
        if call.spec is not None and call.place in times.unchanged:
            lines[f"{call.place} stays as it is: {times.unchanged[call.place]}"] = None
        elif call.spec is not None:
            spec = dataclasses.replace(call.spec, needs_grad=mark.differentiated)
            taken = resolve("auto", spec, Target.here()).backend.name
            today = _TODAY.get(call.function, "a plan of this package")
            lines[f"{call.place} runs {today}; auto takes {taken}{_line(call)}."] = None
    yield from lines


_TODAY = {
    "jax.nn.dot_product_attention": "XLA's formula of jax.nn",
    "flax.nnx.dot_product_attention": "XLA's formula of flax",
    "flax.linen.dot_product_attention": "XLA's formula of flax",
}


def _line(call: Call) -> str:
    if call.function == "jax.nn.dot_product_attention":
        return ": write attnsuite.backends.attention for jax.nn.dot_product_attention"
    if call.function.startswith("flax"):
        return ': give the layer attention_fn=attnsuite.backends.attention_fn("auto")'
    return ""


def _run(step: Callable[..., Any], args: Sequence[Any], way: Harvest | None) -> float:
    """Seconds of one run; the first of a way compiles."""
    copied = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, tuple(args))
    jax.block_until_ready(copied)
    if way is None:
        return _seconds(step, copied)
    with harvest(way):
        return _seconds(step, copied)


def _seconds(step: Callable[..., Any], args: Sequence[Any]) -> float:
    """Until the results are there, and what the step wrote into its arguments: an nnx step may return nothing."""
    start = time.perf_counter()
    written = jax.tree.leaves((step(*args), args))
    jax.block_until_ready([x for x in written if isinstance(x, jax.Array) and not x.is_deleted()])
    return time.perf_counter() - start


def _without(call: Call, arrays: Sequence[Any], arguments: dict[str, Any]) -> Any:
    if call.spec is None or arguments.get("return_residual") or len(arrays) < 3 or "self" in arguments:
        return NotImplemented
    query, key, value = arrays
    means = [x.mean(axis=(-3, -2), keepdims=True) for x in (key, value)]
    same = query.shape[-1] == value.shape[-1]
    return (query if same else query[..., :1]) + means[0][..., :1] + means[1]


def _with_auto(call: Call, arrays: Sequence[Any], arguments: dict[str, Any], unchanged: dict[str, str]) -> Any:
    if "self" in arguments:
        return NotImplemented
    if call.spec is None or call.unsaid or arguments.get("return_residual"):
        unchanged[call.place] = f"it asks for {', '.join(call.unsaid) or 'what the contract does not have'}."
        return NotImplemented
    if arrays[0].ndim != 4:
        unchanged[call.place] = f"its arrays have {arrays[0].ndim} axes; auto takes 4."
        return NotImplemented
    keywords = {name: arguments[name] for name in _SAME if arguments.get(name) is not None}
    if "mask" in keywords:
        mask = keywords["mask"].astype(bool)
        keywords["mask"] = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)  # flax takes fewer axes
    if call.dtype is not None:
        arrays = [x.astype(call.dtype) for x in arrays]
    try:
        return attention(*arrays, **keywords)
    except (BackendUnavailableError, ValueError, TypeError) as error:
        unchanged[call.place] = " ".join(str(error).split())
        return NotImplemented


def _range(share: float, ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{share:.0%}"
    return f"{share:.0%} ({1 - ratio.high:.0%} to {1 - ratio.low:.0%})"


def _interval(ratio: Interval) -> str:
    return "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
