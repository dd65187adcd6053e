"""Kernels with one fault each: the conformance suite must fail every one of them.

A fault replaces one function of the generator. The kernels that come of it have names and a cache of their own, so that
no other test ever runs them.
"""

import dataclasses

import numpy as np
import pytest

from attnsuite.testing import checks, problems

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Target, registry
from attnsuite.backends.flash_cpu import (
    added,
    backward_buffers,
    backward_rows,
    decode,
    decode_parts,
    decode_slots,
    expression,
    masking,
    products,
    rows,
    running_sums,
    slopes,
)
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.backends.flash_cpu.emit import Function, Value, f32, i32, i64, ptr, vector
from emitted import set_apart

pytestmark = pytest.mark.thorough


def mask_edge(patch):
    """A causal query does not see the key at its own position."""

    def see(self, e, isa, v, position, key_id):
        p, name = e.splat(position, isa.lanes), e.splat(key_id, isa.lanes)
        return (self.first[v] <= p) & (p < self.last[v]) & name.equals(self.query_id[v])

    patch.setattr(masking.Lanes, "see", see)


def ids_ignored(patch):
    """Segments, padding and lengths are not compared."""

    def see(self, e, isa, v, position, _):
        p = e.splat(position, isa.lanes)
        return (self.first[v] <= p) & (p <= self.last[v])

    patch.setattr(masking.Lanes, "see", see)


def mixed_block_taken_for_full(patch):
    """No block is compared at all."""
    live_keys = masking.live_keys

    def never_mixed(e, *arguments):
        live = live_keys(e, *arguments)
        return masking.Live(live.start, live.stop, live.mixed & e.const(live.mixed.type, 0))

    patch.setattr(masking, "live_keys", never_mixed)


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


def head_of_group_dropped(patch):
    """The last head of a group is taken for its first one."""
    query_place = rows.query_place

    def place(e, row, batch, head, group, tokens, heads):
        right = query_place(e, row, batch, head, group, tokens, heads)
        return right - e.select((row % group).equals(group - 1), group - 1, e.const(i64, 0))

    patch.setattr(rows, "query_place", place)


def key_gradient_of_one_head(patch):
    """dk of a KV head is that of the first query head of its group (here one of four) alone."""
    transpose = rows.transpose

    def forgetful(module, isa, name, number, width):
        """Turns the queries, from which scores are made, then clears the rows from which dk is made."""
        right = transpose(module, isa, f"{name}_right", number, width)
        fill = rows.fill(module, isa)
        with Function(module, name, [ptr, ptr]) as (e, (source, target)):
            e.run(right, source, target)
            with e.loop(0, number) as i, e.when((i % 4).compare("!=", 0)):
                e.run(fill, source.at(i * width, 4), width, e.const(f32, 0.0))
        return e.function

    def choose(module, isa, name, number, width):
        wrong = name == "transpose_query" and number == backward_buffers.BLOCK_ROWS
        return (forgetful if wrong else transpose)(module, isa, name, number, width)

    patch.setattr(rows, "transpose", choose)


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


def nothing_added(patch):
    """Mask and bias arrays are not read."""
    patch.setattr(added.Added, "_of_row", lambda self, e, *_: e.const(vector(f32, self.isa.lanes), 0.0))


def bias_has_no_gradient(patch):
    """The slopes are not added to the bias's gradient."""
    patch.setattr(added.Added, "_add_to_bias", lambda *_: None)


def slopes_have_no_gradient(patch):
    """The slopes times the distances are not added up."""
    patch.setattr(added.Added, "_add_distances", lambda *_: None)


def mask_function_not_asked(patch):
    """A mask function shows every pair."""
    emit = expression.emit

    def every(e, isa, code, *arguments):
        found = emit(e, isa, code, *arguments)
        return found if found[0].is_float else [e.const(x.type, 1) for x in found]

    patch.setattr(expression, "emit", every)


def derivative_of_score_missing(patch):
    """The slope of a score goes on as if the score function only added to it."""
    modified = added.Added.modified

    def straight(self, *arguments):
        score, slope = modified(self, *arguments)
        return score, slope * 0.0 + 1.0

    patch.setattr(added.Added, "modified", straight)


def heads_of_score_counted_from_zero(patch):
    """A score function is given the first head for every head."""
    modified = added.Added.modified

    def first(self, e, score, power, group, v, position):
        heads = group.at(self._at["head"]).at(v * self.isa.lanes, 4)
        heads.store(e.const(vector(i32, self.isa.lanes), 0))
        return modified(self, e, score, power, group, v, position)

    patch.setattr(added.Added, "modified", first)


def first_head_for_all(patch):
    """Decode: every KV head reads the keys and values of the first."""
    side = decode_slots.Side.of

    def without_heads(kernel, dims, start, table, head, width):
        first = head // dims["K"] * dims["K"]
        return dataclasses.replace(side(kernel, dims, start, table, first, width), by_head=0)

    patch.setattr(decode_slots.Side, "of", without_heads)


def first_page_for_all(patch):
    """Decode: slots of all pages are those of the first in the sequence's table."""
    place = decode_slots.place

    def in_first(kernel, block, slot, step):
        if not kernel.page:
            return place(kernel, block, slot, step)
        return place(kernel, (*block[:3], block[3] * 0), slot % kernel.page, step)

    patch.setattr(decode_slots, "place", in_first)


def scales_ignored(patch):
    """Decode: numbers of a quantised cache are taken without their scales."""
    patch.setattr(decode_parts, "_factor", lambda _kernel, slot, scales: [slot.e.const(f32, 1.0)] if scales else [])


# fault, the case that shows it, whether only the forward pass is planned (decoding)
FAULTS = [
    (mask_edge, "causal", False),
    (ids_ignored, "segments", False),
    (mixed_block_taken_for_full, "window-asymmetric", False),
    (last_strip_skipped, "causal", False),
    (rescale_missing, "big-logits-float32", False),
    (head_of_group_dropped, "gqa-4", False),
    (key_gradient_of_one_head, "gqa-4", False),
    (last_key_not_weighed, "causal", False),
    (delta_missing, "causal", False),
    (ranges_joined_as_equals, "decode-4", True),
    (mask_function_not_asked, "function-dilated", True),
    (derivative_of_score_missing, "score", False),
    (heads_of_score_counted_from_zero, "score", False),
    (head_of_group_dropped, "decode-4", True),
    (first_head_for_all, "decode-4", True),
    (first_head_for_all, "decode-hnd", True),
    (first_head_for_all, "kv-int8-pages-hnd", True),
    (first_page_for_all, "pages-decode", True),
    (scales_ignored, "kv-int8-pages-hnd", True),
    (nothing_added, "mask-per-head", False),
    (nothing_added, "bias-per-head", False),
    (bias_has_no_gradient, "bias-broadcast", False),
    (slopes_have_no_gradient, "alibi", False),
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


@pytest.mark.parametrize(("case", "forward_alone"), sorted({(case, alone) for _, case, alone in FAULTS}))
def test_kernel_without_one_passes_where_it_fails(planted, case, forward_alone):
    def no_fault(_patch):
        """What the others are compared with, compiled in the same way."""

    no_fault.__name__ = f"none, {case}"
    planted(no_fault)
    _check(*_results(case, forward_alone=forward_alone))


def test_faulty_kernels_stay_in_their_test():
    problem, results = _results("causal", forward_alone=False)
    checks.check_accuracy(results, problem)
    assert np.isfinite(results["output"]).all()
