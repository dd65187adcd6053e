"""The support matrix in the docs is what the backends say."""

import importlib.util
import re
import runpy
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from attnsuite.backends import Target, registry
from attnsuite.backends.devices import usable_cores
from attnsuite.backends.registry import BUILT_IN
from attnsuite.models.config import AttentionType, ModelConfig
from attnsuite.models.planning import attention_spec
from attnsuite.suite.grid.work import subprocess
from attnsuite.suite.kinds.conformance_case import in_subprocess
from attnsuite.testing import checks, verdicts
from support_matrix import ALL_TYPES, refusals_table, support_table, types_table

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"
PAGES = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "backend_pages.py"))

# The documents show flash_cpu where it can run, which takes llvmlite.
with_every_cpu_kernel = pytest.mark.skipif(
    importlib.util.find_spec("llvmlite") is None, reason="what flash_cpu takes is asked where llvmlite is installed"
)


MODE = "with `batch_invariant=True`"


@with_every_cpu_kernel
def test_matrix_in_the_docs_is_what_the_backends_say():
    assert support_table(tuple(BUILT_IN)) in DOCS.read_text(encoding="utf-8")


@with_every_cpu_kernel
def test_pages_of_backends_are_what_backends_say():
    made = {path: PAGES["page"](path) for path in PAGES["PAGES"].glob("*.md")}
    assert sorted(re.findall("^## (.*)$", "\n".join(made.values()), re.MULTILINE)) == sorted(BUILT_IN)
    for path, text in made.items():
        assert text == path.read_text(encoding="utf-8"), f"{path} is old; run python docs/backend_pages.py"


@pytest.mark.thorough
@with_every_cpu_kernel
@pytest.mark.parametrize("verdict", ["deterministic", "isolates", "symmetric"])
@pytest.mark.parametrize("name", ["standard", "chunked", "flash_cpu"])
def test_verdicts_in_the_matrix_are_what_is_found(name, verdict):
    here = Target.here()
    subject = verdicts.Subject(registry.get(name), here)
    elsewhere = in_subprocess(name, subject, partial(subprocess, name)) if verdict == "deterministic" else None
    found = verdicts.ask(verdict, subject, elsewhere)
    said = "yes" if verdict == "isolates" and name in checks.ISOLATING else checks.MEASURED[verdict][name]
    if said == MODE:  # with the option; without it another number of cores shows that it is no
        said = "no" if usable_cores() > 1 else "yes"
    assert found.answer == said, found


@with_every_cpu_kernel
def test_every_type_is_taken_by_the_three_backends_that_the_page_names():
    rows = types_table(("standard", "chunked", "flash_cpu")).splitlines()[2:]
    taken = {tuple(cell.strip() for cell in row.split("|")[3:6]) for row in rows}
    assert taken == {("everywhere", "everywhere", "cpu")}


def test_every_refused_type_has_its_reason():
    for name in BUILT_IN:
        if name == "flash_cpu" and importlib.util.find_spec("llvmlite") is None:
            continue  # refused everywhere for want of it
        refused = {
            (kind.strip(), phase.strip())
            for row in types_table((name,)).splitlines()[2:]
            for _, kind, phase, taken, _ in [row.split("|")]
            if taken.strip() == "no"
        }
        reasons = refusals_table((name,))
        for kind, phase in refused:
            assert any(kind in row and phase in row for row in reasons.splitlines()[2:]), (name, kind, phase)
    types = {row.split("|")[1].strip() for row in types_table(("kvax",)).splitlines()[2:]}
    assert types == set(ALL_TYPES.attention_types) == set(get_args(AttentionType)) - {"nope"}


def test_layers_without_rope_ask_for_what_global_ones_ask_for():
    config = ModelConfig.from_preset("debug", attention=("global", "nope"))
    for length in (None, 32):
        asked = {"batch": 2, "query_length": 8, "key_value_length": length}
        assert attention_spec(config, "nope", **asked) == attention_spec(config, "global", **asked)
