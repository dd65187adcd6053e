"""docs/explanation/one-kernel.md shows what the generator writes, and what LLVM makes of it."""

import inspect
import re
import textwrap
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from attnsuite.backends.flash_cpu import products
from attnsuite.backends.flash_cpu.compiler import Processor, new_module, optimised
from attnsuite.backends.flash_cpu.isa import AVX2
from attnsuite.backends.flash_cpu.tiles import Tile

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "one-kernel.md"
if not PAGE.is_file():
    pytest.skip("a source distribution has no docs; the repository has", allow_module_level=True)
HASWELL = Processor("x86_64-unknown-linux-gnu", "haswell", (("avx2", True), ("f16c", True), ("fma", True)))


def listing(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]


@pytest.fixture(scope="module")
def compiled():
    """The assembly of a tile of 2 keys by 8 queries, 64 numbers in a key and 96 in a row of queries."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = new_module(HASWELL)
    products.product(module, AVX2, "score", Tile(2, 1, 64, 1, 96, 96, accumulate=False, pack=1)).linkage = ""
    parsed, machine = optimised(module, HASWELL, AVX2, jit=False)
    return machine.emit_assembly(parsed)


def test_page_shows_the_generator():
    _, block = listing("python").split("\n", 1)
    assert textwrap.indent(block, " " * 8) in inspect.getsource(products.product)


def test_page_shows_what_llvm_makes_of_it(compiled):
    assert listing("asm") in compiled
