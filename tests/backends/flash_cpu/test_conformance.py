"""The flash_cpu backend passes the whole conformance suite, and takes all of the contract but some functions."""

import fnmatch
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import left_out
from attnsuite.testing import Conformance, problems, random_specs

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import AttentionSpec, Target, attention, plan, registry, support
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.backends.flash_cpu.isa import KNOWN

ISAS = tuple(isa.name for isa in Processor.here().isas())  # the best first
SPEC = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=1, num_kv_heads=1, head_dim=16)
# What only changes which blocks are computed, and with what group of heads: no kernel has other instructions for it.
BLOCKS = ("gqa-[14]", "heads-equal", "length-12[78]", "length-2100", "more-*", "few-*", "one-key", "window-*",
          "chunk-*", "segments*", "padding-*", "ragged*", "positions-*", "rows-*")  # fmt: skip
ONE_OF_EACH = ("window-asymmetric", "window-bfloat16", "chunk-causal", "segments-causal", "padding-both-ends",
               "ragged-causal", "positions-shuffled")  # fmt: skip


class TestFlashCpu(Conformance):
    backend = "flash_cpu"
    cases_for_traced_layouts = left_out.TRACED
    cases_for_vmap = left_out.MAPPED
    # Gradients in half precision, wrong where the output's rounding error is left in rowsum(dO * O).
    random_problems = (*Conformance.random_problems, 36, 496)


@pytest.mark.thorough
@pytest.mark.skipif("avx2" not in ISAS, reason="this processor has no AVX2")
@pytest.mark.skipif(ISAS[:1] == ("avx2",), reason="TestFlashCpu has these kernels on this processor")
class TestFlashCpuWithAvx2(Conformance):
    """The kernels that a processor without AVX-512 gets. How JAX calls them does not depend on what is in them."""

    backend = "flash_cpu"
    options = {"isa": "avx2"}  # noqa: RUF012 (no test changes it)
    cases = tuple(
        case
        for case in problems.CASES
        if case in ONE_OF_EACH or not any(fnmatch.fnmatchcase(case, pattern) for pattern in BLOCKS)
    )
    random_problems = (6, 1, 4, 5)
    cases_for_eager = cases_for_vmap = ("causal",)
    cases_for_traced_layouts = ("combination-ragged",)


@pytest.mark.parametrize(("case", "plain"), [("few-queries-16", True), ("few-queries-17", False), ("one-key", True)])
def test_a_plan_says_where_its_gradients_are_those_of_the_plain_formula(case, plain):
    """The conformance suite has a case on each side of the switch."""
    problem = problems.problem(case, None)
    notes = plan(registry.get("flash_cpu"), problem.spec, problem.layout, target=Target.here()).notes
    assert any("plain formula" in note for note in notes) is plain


def of_bias(shape, wanted):
    """The compiled gradients of these operands (query, key, value, bias) by a backend, and their arguments."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.standard_normal(x), jnp.float32) for x in ((2, 130, 4, 16), *[(2, 150, 2, 16)] * 2, shape)
    ]

    def run(backend):
        def loss(query, key, value, bias):
            return (attention(query, key, value, bias=bias, backend=backend, on_unavailable="raise") ** 2).sum()

        return jax.jit(jax.grad(loss, wanted)).lower(*arrays).compile()

    return run, arrays


FORMS = {"whole": (2, 4, 130, 150), "of keys": (1, 1, 1, 150)}


@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_a_bias_begins_at_zero_whatever_lay_there(form):
    shape = FORMS[form]
    run, arrays = of_bias(shape, 3)
    own, right = run("flash_cpu"), run("standard")(*arrays)
    for _ in range(3):
        jnp.full(shape, jnp.nan).block_until_ready().delete()  # its memory is given to the gradient
        np.testing.assert_allclose(own(*arrays), right, atol=2e-6 * float(jnp.abs(right).max()))


def test_gradient_of_a_bias_that_nobody_asks_for_is_not_computed():
    def size(wanted):
        found = of_bias(FORMS["whole"], wanted)[0]("flash_cpu").memory_analysis()
        return found.output_size_in_bytes + found.temp_size_in_bytes

    assert size((0, 1, 2, 3)) - size((0, 1, 2)) >= 4 * math.prod(FORMS["whole"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flash_cpu", "chunked"])
def test_every_random_problem_of_the_contract_is_supported(name):
    assert random_specs.unsupported(registry.get(name), 248, 0, Target.here()) == []


@pytest.mark.parametrize("name", [isa.name for isa in KNOWN if isa.name not in ISAS])
def test_instruction_set_that_the_processor_does_not_have_is_refused(name):
    found = support(registry.get("flash_cpu"), SPEC, Target.here(), options={"isa": name})
    assert not found
    assert f"isa={name!r} is not supported by flash_cpu on {Processor.here().cpu} (accepted: " in found.reasons[0]
    assert found.reasons[0].endswith("leave isa out.")
    with pytest.raises(ValueError, match=f"isa='{name}' is not supported"):
        plan(registry.get("flash_cpu"), SPEC, target=Target.here(), options={"isa": name})


@pytest.mark.parametrize("options", [{"isa": "sse"}, {"isa": 2}], ids=str)
def test_value_that_no_option_has_is_refused(options):
    with pytest.raises(ValueError, match=r"is not accepted; .* is "):
        plan(registry.get("flash_cpu"), SPEC, target=Target.here(), options=options)
