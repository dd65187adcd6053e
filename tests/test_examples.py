"""The scripts in examples/ run, and do what they say."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments)


def test_every_example_has_a_test():
    ours = {test.removeprefix("test_example_") for test in globals() if test.startswith("test_example_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == ours


def test_example_own_transformer():
    first, last = run("own_transformer")
    assert first > 4  # ln 64 = 4.16: chance
    assert last < 0.3


def test_example_flax_layer():
    output, gradients = run("flax_layer")
    assert output < 2e-6
    assert gradients < 2e-6


def test_example_decode_with_a_cache():
    difference, text = run("decode_with_a_cache")
    assert difference < 2e-6
    assert len(text) == 24


def test_example_judge_a_kernel():
    right, wrong, refused = run("judge_a_kernel")
    assert right.passed
    assert not wrong.passed
    assert not refused
    assert "local_window_size=(8, 8)" in refused.reasons[0]
