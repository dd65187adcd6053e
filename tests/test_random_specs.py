"""Some random problems per exact backend; ``attnsuite judge`` draws any number."""

from __future__ import annotations

import importlib.util

import pytest

from attnsuite.backends import Target, registry
from attnsuite.testing import random_specs

SEED = 0
# flash_cpu is compiled by llvmlite
NATIVE = {"flash_cpu": [pytest.mark.flash_cpu]} if importlib.util.find_spec("llvmlite") else {}
BACKENDS = {"standard": [], "chunked": [], **NATIVE}

# The last two have logits of 44 and 140: their gradients are wrong where the passes round scores differently.
EVERYWHERE = (0, 1, 53, 193)
# Gradients in half precision: wrong where the output is rounded before the sink takes its share (311), and where its
# rounding error is left in rowsum(dO * O), with sinks (36) and without (496).
ROUNDED = {"chunked": (311,), "flash_cpu": (36, 496)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "number"),
    [
        pytest.param(name, number, marks=marks, id=f"{name}-{number}")
        for name, marks in BACKENDS.items()
        for number in (*EVERYWHERE, *ROUNDED.get(name, ()))
    ],
)
def test_random_problem_is_within_what_the_judge_allows(backend, number):
    found, here = registry.get(backend), Target.here()
    drawn = random_specs.draw(number, SEED, found, here, "native")
    used = random_specs.shares(drawn, found, here, "native")
    assert max(used.values()) <= 1, f"{used}: {drawn}"


def test_features_of_the_contract_are_all_drawn():
    backend, here = registry.get("standard"), Target.here()
    drawn = [random_specs.draw(number, SEED, backend, here, "native") for number in range(60)]
    asked = set().union(*(each.spec.features() for each in drawn))
    # Slopes are not drawn: where all visible keys are equally far, their gradient is exactly zero, without a bound.
    assert asked == set(backend.takes(here, "native").features) - {"alibi"}
