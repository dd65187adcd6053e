"""Kernels with one fault of their own algorithm each: the conformance suite must fail every one of them.

Broken rules of the contract are in ``backends/test_negative_controls.py``, shown to the same judge. A fault replaces
one function of the generator. The kernels that come of it have names and a cache of their own, so that no other test
ever runs them.
"""

import dataclasses

import numpy as np
import pytest

from attnsuite.testing import checks, problems

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Target, registry
from attnsuite.backends.flash_cpu import backward_rows, decode, masking, products, rows, running_sums, slopes
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.backends.flash_cpu.emit import Function, Value, f32, i64, ptr, vector
from emitted import set_apart

pytestmark = pytest.mark.thorough


def last_strip_skipped(patch):
    """Of a block that is cut to what is visible, the last strip is cut too."""
    live_keys = masking.live_keys

    def short(e, queries, records, keys, strip):
        live = live_keys(e, queries, records, keys, strip)
        return masking.Live(live.start, e.select(live.mixed, live.stop - strip, live.stop), live.mixed)

    patch.setattr(masking, "live_keys", short)


def rescale_missing(patch):
    """The output so far is not multiplied where the maximum was raised."""

    def nothing(self, module):
        with Function(module, "rescale", [ptr, ptr]) as (e, _):
            return e.function

    patch.setattr(running_sums.RunningSums, "_emit_rescale", nothing)


def last_key_not_weighed(patch):
    """The value product leaves out the last of its terms."""
    emit = products.Weighted.emit

    def short(self, e, a, b, c, of_rows, terms):
        stop = terms[1] if isinstance(terms[1], Value) else e.const(i64, terms[1])
        emit(self, e, a, b, c, of_rows, (terms[0], stop - 1))

    patch.setattr(products.Weighted, "emit", short)


def delta_missing(patch):
    """The backward pass does not subtract rowsum(dO * O)."""
    patch.setattr(backward_rows, "DELTA", backward_rows.LIMIT)


def ranges_joined_as_equals(patch):
    """Decode: ranges of keys are added up without regard to their maxima."""
    patch.setattr(decode, "exp2_scalar", lambda e, _isa, _x: e.const(f32, 1.0))


def neighbours_exchanged(patch):
    """A pair of bfloat16 numbers is joined in the wrong order: each weight meets the value of the next key."""
    join = rows.join

    def exchanged(module, isa, name, width):
        right, stride = join(module, isa, f"{name}_right", width), rows.padded(width, isa, 2) * 4
        with Function(module, name, [ptr, ptr, i64]) as (e, (source, target, count)):
            copy = e.stack(vector(f32, 2 * stride // 4))
            with e.loop(0, count, 2) as r, e.loop(0, stride, 4) as i:
                first, second = (source.at((r + n) * stride).at(i) for n in (0, 1))
                copy.at(i).store(second.load(f32))
                copy.at(i + stride).store(first.load(f32))
                with e.when(i.equals(stride - 4)):
                    e.run(right, copy, target.at(r // 2 * (width * 4)), 2)
        return e.function

    patch.setattr(rows, "join", exchanged)


def slopes_of_neighbours_exchanged(patch):
    """dq takes the slope of the next key."""
    pairs = slopes.pairs
    patch.setattr(slopes, "pairs", lambda e, low, high: pairs(e, high, low))


# fault, the case that shows it, whether only the forward pass is planned (decoding)
FAULTS = [
    (last_strip_skipped, "causal", False),
    (rescale_missing, "big-logits-float32", False),
    (last_key_not_weighed, "causal", False),
    (delta_missing, "causal", False),
    (ranges_joined_as_equals, "decode-4", True),
]


if Processor.here().isas()[:1] and Processor.here().isas()[0].multiplies_bfloat16:
    FAULTS += [
        (neighbours_exchanged, "heads-equal-bfloat16", False),
        (slopes_of_neighbours_exchanged, "heads-equal-bfloat16", False),
        (last_key_not_weighed, "causal-1000-bfloat16", False),
    ]


def _results(case, *, forward_alone):
    problem = problems.problem(case)
    backend, here = registry.get("flash_cpu"), Target.here()
    if not forward_alone:
        return problem, checks.compiled(backend, problem, here)(*problem.inputs)
    spec = dataclasses.replace(problem.spec, needs_grad=False)
    planned = problems.planned(backend, dataclasses.replace(problem, spec=spec), here)
    return problem, {"output": planned(*problem.inputs[:3], problem.terms)}


def _check(problem, results):
    for name, result in results.items():
        checks.check_quantity(name, result, problem)


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Plants a fault: kernels of this test are compiled here, under names that its digest makes."""

    def plant(fault):
        set_apart(monkeypatch, tmp_path, f"fault: {fault.__name__}")
        fault(monkeypatch)

    registry.get("flash_cpu").refuses(problems.problem("causal").spec, Target.here(), "native", None)  # self-test first
    return plant


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # what nobody wrote is anything
@pytest.mark.parametrize(("fault", "case", "forward_alone"), FAULTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_kernel_with_a_fault_fails(planted, fault, case, forward_alone):
    planted(fault)
    problem, results = _results(case, forward_alone=forward_alone)
    with pytest.raises(AssertionError, match="passed=False"):
        _check(problem, results)


def test_faulty_kernels_stay_in_their_test():
    problem, results = _results("causal", forward_alone=False)
    checks.check_accuracy(results, problem)
    assert np.isfinite(results["output"]).all()
