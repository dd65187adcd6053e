import pytest

from attnsuite.backends import Target
from attnsuite.backends.devices import GIB, KNOWN_KINDS, _short_kind, cpu_name

pytestmark = pytest.mark.newest


def test_here_is_present_and_names_its_processor():
    here, cpu = Target.here(), Target.named("cpu")
    assert here.present
    assert here.kind
    assert here.count >= 1
    assert (cpu.platform, cpu.kind) == ("cpu", cpu_name())
    assert cpu.memory_bytes > GIB // 4


@pytest.mark.parametrize("kind", KNOWN_KINDS)
def test_named_target_is_complete_and_absent(kind):
    target = Target.named(kind)
    assert str(target) == f"{KNOWN_KINDS[kind].platform}:{kind}"
    assert target.memory_bytes == KNOWN_KINDS[kind].memory_bytes
    assert (target.compute_capability is not None) == (target.platform == "cuda")
    assert not target.present


def test_what_is_given_wins_over_the_table_and_an_unknown_kind_is_taken_as_it_is():
    assert Target("cuda", "h100", memory_bytes=94 * GIB).memory_bytes == 94 * GIB
    unknown = Target("cuda", "RTX 9999")
    assert (unknown.memory_bytes, unknown.compute_capability) == (None, None)


def test_a_device_is_of_the_kind_whose_name_it_has():
    for described, kind in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 480GB"),
        ("NVIDIA GB200", "NVIDIA GB200"),
        ("TPU v5 lite", "v5e"),
        ("TPU7x", "tpu7x"),
    ):
        assert _short_kind(described) == kind


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Target("metal"), "platform='metal' is not known; use one of cpu, cuda, tpu, rocm"),
        (lambda: Target("cuda", "v5e"), "v5e is a tpu device, not a cuda device"),
        (lambda: Target.named("h300"), "target 'h300' is not known; use here, cpu, or one of a100, h100"),
        *(
            (lambda name=name: Target.named(name), f"target '{name}' is not a TPU slice; give .* such as v5e:4x4")
            for name in ("v5e:", "v5e:4", "v5e:4x", "v5e:0x4", "v5e:four", "h100:2x2")
        ),
    ],
)
def test_what_is_no_target_is_refused_with_those_that_are(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_slice_has_the_chips_of_its_sides_and_the_memory_of_one():
    target = Target.named("v5p:2x2x4")
    assert (target.kind, target.count, target.memory_bytes) == ("v5p", 16, KNOWN_KINDS["v5p"].memory_bytes)
    assert (str(target), Target.named(target.name)) == ("tpu:v5p:2x2x4", target)


def test_naming_a_target_initialises_no_device_and_asking_for_the_present_one_does(loaded_by):
    name = "from attnsuite.backends import Target\nTarget.named('cpu'), Target.named('v5e'), Target('cuda', 'h100')"
    assert loaded_by(name)[0] is False
    assert loaded_by("from attnsuite.backends import Target\nTarget.here()")[0] is True
