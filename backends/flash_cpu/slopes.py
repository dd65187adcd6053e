"""Probabilities and their slopes from transposed scores, one lane per query: the middle of the backward pass.

With ``m`` and ``l`` of the forward pass and ``delta[q] = sum_d O[q, d] dO[q, d]`` (FlashAttention-2, arXiv
2307.08691)::

    P[k] = 2**(s[k] - m) / l;   dS[k] = P[k] (dP[k] - delta + dLSE);   under a soft cap times 1 - tanh**2

The log-sum-exp is kept as two numbers, ``m`` and ``l``. Their float32 sum would lose the low bits of ``log l`` when the
logits are large. If a key has the whole row, ``dP`` and ``delta`` are equal but for rounding, and ``dS`` is set to
zero; but not for logits so large that their rounding hides which key has the whole row.
"""

from __future__ import annotations

from llvmlite import ir

from .elements import exp2, tanh
from .emit import Function, f32, i32, i64, ptr, vector
from .isa import Isa
from .masking import Lanes
from .softmax import CAP_INNER, CAP_OUTER, SCALE

ALONE = 1.0 - 2.0**-21  # a probability above this is one
LARGE_TOP = 92.0  # in powers of two: logits of 64
NEVER = 2.0  # no probability is above it

# Per query, float32 then int32, each a row of the tile's numbers.
TOP, INVERSE, DELTA, LIMIT, D_LSE, FIRST, LAST, QUERY_ID = range(8)


def slopes(module: ir.Module, isa: Isa, queries: int, *, mixed: bool, soft_cap: bool) -> ir.Function:
    """A function over one group: ``(scores, d_probs, per_query, position, key_id, numbers, start, stop)``.

    ``scores[k, q]`` become ``P``, ``d_probs[k, q]`` become ``dS`` (row strides ``queries``); ``per_query`` holds rows
    of ``queries`` numbers: :data:`TOP`, :data:`INVERSE` (1 / l), :data:`DELTA`,
    :data:`LIMIT`, :data:`D_LSE` (the cotangent of the log-sum-exp), intervals and ids. What a query does not see comes
    out as exactly zero, whatever it holds.
    """
    lanes, vectors, type_ = isa.lanes, range(isa.score_vectors), vector(f32, isa.lanes)
    with Function(module, "slopes_mixed" if mixed else "slopes", [ptr] * 6 + [i64] * 2) as (e, arguments):
        scores, d_probs, per_query, position, key_id, numbers, start, stop = arguments

        def row(n: int) -> list:
            return [per_query.at(n * queries + v * lanes, 4).load(type_) for v in vectors]

        top, inverse, delta, limit, d_lse = (row(n) for n in (TOP, INVERSE, DELTA, LIMIT, D_LSE))
        negative = [e.const(type_, 0.0) - x for x in top]
        scale, inner, outer = (e.splat(numbers.at(n).load(f32), lanes) for n in (SCALE, CAP_INNER, CAP_OUTER))
        places = (per_query.at(n * queries, 4) for n in (FIRST, LAST, QUERY_ID))
        see = Lanes.of(isa, *places) if mixed else None
        zero = e.const(type_, 0.0)
        with e.loop(start, stop) as k:
            for v in vectors:
                at = scores.at(k * queries + v * lanes, 4)
                slope_at = d_probs.at(k * queries + v * lanes, 4)
                raw, factor = at.load(type_), scale
                bend = None
                if soft_cap:
                    raw, factor = tanh(e, isa, raw * inner), outer
                    bend = e.const(type_, 1.0) - raw * raw
                p = exp2(e, isa, e.fma(raw, factor, negative[v])) * inverse[v]
                slope = p * (slope_at.load(type_) - delta[v])
                slope = e.fma(p, d_lse[v], e.select(p > limit[v], zero, slope))
                if bend is not None:
                    slope = slope * bend
                if see is not None:
                    seen = see.see(e, isa, v, position.at(k, 4).load(i32), key_id.at(k, 4).load(i32))
                    p, slope = e.select(seen, p, zero), e.select(seen, slope, zero)
                at.store(p)
                slope_at.store(slope)
        e.ret()
    return e.function
