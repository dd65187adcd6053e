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

from .elements import exp2, narrow, pairs, tanh
from .emit import Function, Value, f32, i32, i64, ptr, vector
from .isa import Isa
from .masking import Lanes
from .softmax import CAP_INNER, CAP_OUTER, GRADIENT_SCALE, HIDDEN, LOG_2, SCALE, Modify, in_powers

ALONE = 1.0 - 2.0**-21  # a probability above this is one
LARGE_TOP = 92.0  # in powers of two: logits of 64
NEVER = 2.0  # no probability is above it

# Per query, float32 then int32, each a row of the tile's numbers.
TOP, INVERSE, DELTA, LIMIT, D_LSE, FIRST, LAST, QUERY_ID = range(8)


def _score(
    e: Function, isa: Isa, raw: Value, factors: list[Value], *, soft_cap: bool
) -> tuple[Value, Value, Value | None]:
    """A score, its factor to a power of two, and its derivative by the raw score over that factor (None: 1).

    A capped score is rounded as in the forward pass, whose maximum is one of them.
    """
    scale, inner, outer, _ = factors
    if not soft_cap:
        return raw, scale, None
    x = tanh(e, isa, raw * inner)
    return x * outer, e.const(x.type, 1.0), e.const(x.type, 1.0) - x * x


def slopes(
    module: ir.Module,
    isa: Isa,
    queries: int,
    *,
    mixed: bool,
    soft_cap: bool,
    pack: int = 1,
    added: bool = False,
    modify: Modify | None = None,
) -> ir.Function:
    """A function over one group: ``(scores, d_probs, by_key, per_query, position, key_id, numbers, start, stop)``.

    ``scores[k, q]`` become ``P``, ``d_probs[k, q]`` become ``dS`` (row strides ``queries``); ``per_query`` holds rows
    of ``queries`` numbers: :data:`TOP`, :data:`INVERSE` (1 / l), :data:`DELTA`,
    :data:`LIMIT`, :data:`D_LSE` (the cotangent of the log-sum-exp), intervals and ids. What a query does not see comes
    out as exactly zero, whatever it holds.

    With a ``pack`` of 2 both become bfloat16: row ``k`` holds pairs of queries in its first half, in which two last
    pointers are to the group's place; and row ``n`` of ``by_key`` has ``dS`` of keys ``2 n`` and ``2 n + 1``. With 1,
    ``by_key`` is not written.

    Where ``added``, another pointer after ``numbers`` is to what is added to each score (``added.py``). The slope of
    the sum, float32, takes its place. With ``modify``, a score function, another is to the rows that it reads.
    """
    lanes, vectors, type_ = isa.lanes, range(isa.score_vectors), vector(f32, isa.lanes)
    pointers = 7 + added + (modify is not None) + 2 * (pack == 2)
    with Function(module, "slopes_mixed" if mixed else "slopes", [ptr] * pointers + [i64] * 2) as (e, arguments):
        scores, d_probs, by_key, per_query, position, key_id, numbers, *more, start, stop = arguments
        to_add, of_rows, targets = more[:added], more[added:], more[-2:] if pack == 2 else (scores, d_probs)

        def row(n: int) -> list:
            return [per_query.at(n * queries + v * lanes, 4).load(type_) for v in vectors]

        top, inverse, delta, limit, d_lse = (row(n) for n in (TOP, INVERSE, DELTA, LIMIT, D_LSE))
        negative = [e.const(type_, 0.0) - x for x in top]
        factors = [e.splat(numbers.at(n).load(f32), lanes) for n in (SCALE, CAP_INNER, CAP_OUTER, GRADIENT_SCALE)]
        fused = not (soft_cap or added or modify is not None)
        factors[0] = in_powers(e, isa, scores, queries, top, factors[0], start, stop, fused=fused)
        bounds = (per_query.at(n * queries, 4) for n in (FIRST, LAST, QUERY_ID))
        see = Lanes.of(isa, *bounds) if mixed else None
        zero = e.const(type_, 0.0)

        def at_key(k: Value, v: int) -> tuple[Value, Value]:
            """P and dS of one key and one vector of queries."""
            found = scores.at(k * queries + v * lanes, 4).load(type_)
            raw, factor, bend = _score(e, isa, found, factors, soft_cap=soft_cap)
            if modify is not None:
                natural = (raw, LOG_2 if soft_cap else factors[3])
                raw, turn = modify(e, *natural, of_rows[0], v, position.at(k, 4).load(i32))
                factor, bend = e.const(type_, 1.0), turn if bend is None else turn * bend
            seen, terms = None, to_add[0].at(k * queries + v * lanes, 4) if added else None
            if terms is None:
                p = exp2(e, isa, e.fma(raw, factor, negative[v]), pack=pack) * inverse[v]
            else:
                x = e.fma(raw, factor, terms.load(type_))
                p, seen = exp2(e, isa, x + negative[v], pack=pack) * inverse[v], x > HIDDEN / 2
            slope = p * (d_probs.at(k * queries + v * lanes, 4).load(type_) - delta[v])
            slope = e.fma(p, d_lse[v], e.select(p > limit[v], zero, slope))
            if see is not None:
                visible = see.see(e, isa, v, position.at(k, 4).load(i32), key_id.at(k, 4).load(i32))
                seen = visible if seen is None else seen & visible
            bent = slope if bend is None else slope * bend
            if terms is not None and seen is not None:
                terms.store(e.select(seen, slope, zero))
            return (p, bent) if seen is None else (e.select(seen, p, zero), e.select(seen, bent, zero))

        with e.loop(start, stop, pack) as k:
            for v in vectors:
                of_keys = [at_key(k + n, v) for n in range(pack)]
                for n, numbers_ in enumerate(of_keys):
                    for target, x in zip(targets, numbers_, strict=True):
                        row_ = target.at((k + n) * queries, 4)
                        if pack == 1:
                            row_.at(v * lanes, 4).store(x)
                        else:
                            row_.at(v * lanes, 2).store(narrow(e, x))
                if pack == 2:
                    term = pairs(e, *(slope for _, slope in of_keys))
                    by_key.at(k // 2 * queries + v * lanes, 4).store(term)
    return e.function
