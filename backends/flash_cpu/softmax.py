"""The online softmax down the columns of a block of transposed scores, one lane per query.

For every query of a group, with ``m`` the maximum so far in powers of two and ``l`` the sum so far::

    m' = max(m, max_k s[k]);   l = l 2**(m - m') + sum_k 2**(s[k] - m');   P[k] = 2**(s[k] - m')

``m`` is raised only if the new maximum is more than 2**8 times larger (lazy rescaling, FlashAttention-4). The output is
then rarely multiplied again; ``l`` and the output are always relative to the present ``m``. One multiplication turns
scores into powers of two, ``s = raw * scale``; it is fused into the subtraction of the maximum.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

from llvmlite import ir

from .elements import exp2, pairs, tanh
from .emit import Function, Value, f32, i1, i32, i64, ptr, vector
from .isa import Isa
from .masking import Lanes

HIDDEN = -1e30  # score of what a query does not see, and the maximum of a query that has seen nothing
# Maximum of a row that sees nothing, float32's largest number: its probabilities come out as zero in the backward pass.
UNSEEN_TOP = 3.4028234663852886e38
_LAZY = 8.0
_LARGE = 4096.0  # of a maximum, in powers of two

LOG_2, LOG2_E = math.log(2.0), math.log2(math.e)
# (function, score, factor to it, the group's rows, vector, key position) -> score in powers of two, derivative
Modify = Callable[[Function, Value, Value | float, Value, int, Value], tuple[Value, Value]]

# Numbers that every kernel is given, float32: from a raw product to a power of two, and the soft cap's two factors.
SCALE, CAP_INNER, CAP_OUTER, GRADIENT_SCALE = range(0, 16, 4)


def capped(e: Function, isa: Isa, raw: Value, numbers: Value) -> Value:
    """``cap * tanh(raw * scale / cap)`` in powers of two."""
    inner, outer = (e.splat(numbers.at(n).load(f32), isa.lanes) for n in (CAP_INNER, CAP_OUTER))
    return tanh(e, isa, raw * inner) * outer


def _raise(e: Function, isa: Isa, new: list[Value], top: Value, total: Value, decay: Value) -> Value:
    """Raise the maxima of a group to ``new`` where that is far above them; whether any was."""
    vectors, type_ = range(isa.score_vectors), vector(f32, isa.lanes)
    tops, totals, decays = ([x.at(v * isa.lanes, 4) for v in vectors] for x in (top, total, decay))
    old = [place.load(type_) for place in tops]
    raised = [new[v] > old[v] + _LAZY for v in vectors]
    some = e.any(raised[0])
    for v in vectors[1:]:
        some = some | e.any(raised[v])
    with e.when(some):
        for v in vectors:
            raise_to = e.select(raised[v], new[v], old[v])
            factor = e.select(old[v] > HIDDEN / 2, exp2(e, isa, old[v] - raise_to), 0.0)
            decays[v].store(factor)
            totals[v].store(totals[v].load(type_) * factor)
            tops[v].store(raise_to)
    return some


def in_powers(
    e: Function,
    isa: Isa,
    scores: Value,
    queries: int,
    tops: list[Value],
    scale: Value,
    start: Value,
    stop: Value,
    *,
    fused: bool,
) -> Value:
    """The factor from a block's scores to powers of two; 1 where a maximum is large, of scores that then are such.

    A maximum is a rounded product, and a ``fused`` product is not rounded. For a large maximum the two differ by more
    than :func:`exp2` holds.
    """
    if not fused:
        return scale
    factor = e.variable(scale)
    large = [(e.max(x, e.const(x.type, 0.0) - x) > _LARGE) & (x > HIDDEN) & (x < UNSEEN_TOP) for x in tops]
    with e.when(e.any(functools.reduce(operator.or_, large))):
        factor.set(e.const(scale.type, 1.0))
        with e.loop(start, stop) as k:
            for v in range(isa.score_vectors):
                place = scores.at(k * queries + v * isa.lanes, 4)
                x = place.load(scale.type)
                place.store(e.select(x <= HIDDEN / 2, x, x * scale))
    return factor()


def softmax(
    module: ir.Module,
    isa: Isa,
    queries: int,
    *,
    mixed: bool,
    soft_cap: bool,
    pack: int = 1,
    pooled: bool = False,
    added: bool = False,
    modify: Modify | None = None,
) -> ir.Function:
    """A function over one group: ``(scores, places..., position, key_id, numbers, start, stop) -> raised``.

    ``scores[k, q]`` (row stride ``queries``) become probabilities, as terms of the value product over the keys: with a
    ``pack`` of 2 keys ``2 n`` and ``2 n + 1`` go into row ``n``. Where ``raised``, the group's output must be
    multiplied by ``decay``. Where ``added``, another pointer after ``numbers`` is to what is added to each score
    (``added.py``), in powers of two; with ``modify``, a score function, a second one is to the rows of the group that
    it reads. Where ``pooled``, another one is to the sums of this block alone, relative to the
    present maximum. A mixed block compares positions and ids; what is hidden comes out as exactly zero.
    """
    lanes, vectors, type_ = isa.lanes, range(isa.score_vectors), vector(f32, isa.lanes)
    name, hides, modifies = "softmax_mixed" if mixed else "softmax", mixed or added, modify is not None
    with Function(module, name, [ptr] * (10 + added + modifies + pooled) + [i64] * 2, i1) as (e, arguments):
        scores, top, total, decay, first, last, query_id, position, key_id, numbers, *more, start, stop = arguments
        to_add, of_rows, of_block = more[:added], more[added : added + modifies], more[added + modifies :]

        def of(place: Value, v: int) -> Value:
            return place.at(v * lanes, 4)

        factor = LOG_2 if soft_cap else e.splat(numbers.at(GRADIENT_SCALE).load(f32), lanes)
        scale = e.const(type_, 1.0) if soft_cap or modifies else e.splat(numbers.at(SCALE).load(f32), lanes)
        see = Lanes.of(isa, first, last, query_id) if mixed else None
        highest = [e.variable(e.const(type_, HIDDEN)) for _ in vectors]
        with e.loop(start, stop) as k:
            for v in vectors:
                place = of(scores.at(k * queries, 4), v)
                x = place.load(type_)
                x = capped(e, isa, x, numbers) if soft_cap else x
                term = of(to_add[0].at(k * queries, 4), v).load(type_) if added else None
                if modify is not None and term is not None:
                    x, _ = modify(e, x, factor, of_rows[0], v, position.at(k, 4).load(i32))
                    x = e.select(term <= HIDDEN / 2, e.const(type_, 0.0), x)  # it may be anything where it is hidden
                if term is not None:  # what it hides is HIDDEN, and a NaN stays
                    x = e.fma(x, scale, term)
                    x = e.select(x <= HIDDEN / 2, e.const(x.type, HIDDEN), x)
                if see is not None:
                    seen = see.see(e, isa, v, position.at(k, 4).load(i32), key_id.at(k, 4).load(i32))
                    x = e.select(seen, x, HIDDEN)
                if soft_cap or hides:
                    place.store(x)
                highest[v].set(e.max(x, highest[v]()))
        if added:  # scores are powers of two from here on
            scale = e.const(type_, 1.0)
        found = [x() for x in highest]
        new = [e.select(x > HIDDEN / 2, x * scale, HIDDEN) if hides else x * scale for x in found]
        some = _raise(e, isa, new, top, total, decay)
        tops = [of(top, v).load(type_) for v in vectors]
        fused = not (soft_cap or modifies or added)
        scale = in_powers(e, isa, scores, queries, tops, scale, start, stop, fused=fused)
        negative = [e.const(type_, 0.0) - x for x in tops]
        sums = [e.variable(e.const(type_, 0.0)) for _ in vectors]

        def weight(k: Value, v: int) -> Value:
            """Of one key for a vector of queries, and added to their sums."""
            x = of(scores.at(k * queries, 4), v).load(type_)
            p = exp2(e, isa, e.fma(x, scale, negative[v]), pack=pack)
            p = e.select(x <= HIDDEN / 2, e.const(type_, 0.0), p) if hides else p
            sums[v].set(sums[v]() + p)
            return p

        with e.loop(start, stop, pack) as k:
            for v in vectors:
                of_keys = [weight(k + n, v) for n in range(pack)]
                of(scores.at(k // pack * queries, 4), v).store(of_keys[0] if pack == 1 else pairs(e, *of_keys))
        for v in vectors:
            of(total, v).add(sums[v]())
            for block_sums in of_block:
                of(block_sums, v).store(sums[v]())
        e.ret(some)
    return e.function
