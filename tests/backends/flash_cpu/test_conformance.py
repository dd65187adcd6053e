"""The flash_cpu backend passes the whole conformance suite, and takes all of the contract but some functions."""

import fnmatch

import pytest

from attnsuite.testing import Conformance, problems, random_specs

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import AttentionSpec, Target, plan, registry, support
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.backends.flash_cpu.isa import KNOWN

ISAS = tuple(isa.name for isa in Processor.here().isas())  # the best first
SPEC = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=1, num_kv_heads=1, head_dim=16)
# What only changes which blocks are computed, and with what group of heads: no kernel has other instructions for it.
BLOCKS = ("gqa-[14]", "heads-equal", "length-12[78]", "length-2100", "more-*", "one-key", "window-*", "chunk-*",
          "segments*", "padding-*", "ragged*", "positions-*", "rows-*")  # fmt: skip
ONE_OF_EACH = ("window-asymmetric", "window-bfloat16", "chunk-causal", "segments-causal", "padding-both-ends",
               "ragged-causal", "positions-shuffled")  # fmt: skip


class TestFlashCpu(Conformance):
    backend = "flash_cpu"


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
    examples = 4
    cases_for_eager = cases_for_vmap = ("causal",)
    cases_for_traced_layouts = ("combination-ragged",)


@pytest.mark.parametrize("name", ["flash_cpu", "chunked"])
def test_every_random_problem_of_the_contract_is_supported(name):
    assert random_specs.unsupported(registry.get(name), 248, 0, Target.here()) == []


def test_unsupported_problem_is_counted_with_its_reason():
    found = random_specs.unsupported(registry.get("splash"), 20, 0, Target("tpu", "v5e"))
    assert found
    assert all("is not supported by splash" in reason for reasons in found for reason in reasons)


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
