"""JAX's and flax's own tests of attention, run with this package's function in place of theirs.

    git clone --depth 1 --branch jax-v0.10.1 https://github.com/jax-ml/jax
    git clone --depth 1 --branch v0.12.8 https://github.com/google/flax
    python tests/peers_own_tests.py --jax jax --flax flax --backend standard

prints what pytest does, and exits with 1 if a test failed. A test is expected to fail (``xfailed``) where it asks for
what this package does not compute, gets a ValueError from it, and that refusal is one of :data:`REFUSED`, which says
why. Everything else that is not a pass or the test's own skip is a failure. Nothing of their code is kept here. The
branches are those of the versions that are installed.

In JAX's tests ``implementation=None`` is the reference, and stays JAX's own function.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_TRACEBACK_FILTERING"] = "off"  # to see whether an error is raised here or inside JAX
os.environ["COLUMNS"] = "300"  # reasons are shown whole in a log too, and under a worker of xdist
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # JAX's tests fail where there is one

import jax
import pytest
from flax import linen, nnx

from attnsuite import backends

JAX_TESTS = ("tests/nn_test.py",)
FLAX_TESTS = ("tests/nnx/nn/attention_test.py", "tests/linen/linen_attention_test.py")

# What a refusal says -> why the test cannot be passed.
REFUSED = {
    r"dtype='float64' is not supported": "float64: the kernels compute in float32, which would lose half of the digits",
    r"dtype='complex64' is not supported": "complex numbers: no backend has them",
    r"does not take module": "sown weights: a fused kernel never forms them",
    r"no dropout on attention weights": "dropout on attention weights: no backend has it",
}


class Refusals:
    """A pytest plugin: a failure is expected where this package raised it, in one of the known sentences."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        refusal = raised_here(call.excinfo.value) if report.failed else None
        reasons = [why for sentence, why in REFUSED.items() if refusal and re.search(sentence, str(refusal))]
        if reasons:
            report.outcome, report.wasxfail = "skipped", reasons[0]
        return report


def raised_here(error: BaseException | None) -> BaseException | None:
    """The ValueError or BackendUnavailableError of this package in a chain of errors, raised by no deeper frame."""
    home = Path(backends.__file__).parent
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        expected = isinstance(error, (ValueError, backends.BackendUnavailableError))
        if expected and frames and Path(frames[-1].filename).is_relative_to(home):
            return error
        error = error.__cause__ or error.__context__
    return None


def put_in_place(backend: str) -> None:
    """This package's functions where users of JAX and flax find theirs: by name, and as the default of a layer."""
    jax.nn.dot_product_attention = in_place_of_jaxs(jax.nn.dot_product_attention, backend)
    for api, layers in (
        (nnx, (nnx.MultiHeadAttention,)),
        (linen, (linen.MultiHeadDotProductAttention, linen.MultiHeadAttention, linen.SelfAttention)),
    ):
        theirs, ours = api.dot_product_attention, backends.attention_fn(backend)
        api.dot_product_attention = ours
        for layer in layers:
            replace_default(inspect.unwrap(layer.__init__), theirs, ours)


def in_place_of_jaxs(theirs: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """``theirs`` for the tests' reference, which is ``implementation=None`` said outright; else this package's."""

    def attend(*args: Any, **options: Any) -> Any:
        if options.get("implementation", "") is None:
            return theirs(*args, **options)
        if options.get("implementation") == "xla" and backend != "standard":
            options = {**options, "implementation": None, "backend": backend}
        return backends.dot_product_attention(*args, **options)

    return attend


def replace_default(function: Any, old: object, new: object) -> None:
    """Raises LookupError where ``old`` is no default of the function: then it would be tested in place of ours."""
    positional, keyword = function.__defaults__ or (), function.__kwdefaults__ or {}
    if not any(value is old for value in (*positional, *keyword.values())):
        raise LookupError(f"{function.__qualname__} has no default {old}; flax has moved it.")
    function.__defaults__ = tuple(new if value is old else value for value in positional) or None
    function.__kwdefaults__ = {name: new if value is old else value for name, value in keyword.items()} or None


def main() -> int:
    """Run the files without their projects' configuration; the exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax", type=Path, help="a checkout of JAX")
    parser.add_argument("--flax", type=Path, help="a checkout of flax")
    parser.add_argument("--backend", default="auto", choices=("auto", *backends.names()), help="whose attention runs")
    asked = parser.parse_args()
    named = ((asked.jax, JAX_TESTS), (asked.flax, FLAX_TESTS))
    files = [(root / name).resolve() for root, names in named if root is not None for name in names]
    absent = [str(file) for file in files if not file.is_file()]
    if absent or not files:
        parser.error(f"no such file: {', '.join(absent)}" if absent else "give --jax, --flax or both")
    put_in_place(asked.backend)
    sys.argv = sys.argv[:1]  # absl, which their tests start, reads flags there
    with tempfile.TemporaryDirectory() as directory:
        settings = Path(directory, "pytest.ini")
        settings.write_text("[pytest]\naddopts =\n")
        flags = ["-c", settings, "--rootdir=/", "--import-mode=importlib", "--noconftest", "-q", "--tb=line", "-rxsfE"]
        flags += ["--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:warnings"]
        only = "DotProductAttention or attention_test"
        return pytest.main([*map(str, flags), "-k", only, *map(str, files)], plugins=[Refusals()])


if __name__ == "__main__":
    raise SystemExit(main())
