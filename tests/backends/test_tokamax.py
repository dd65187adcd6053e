"""tokamax's kernels through Pallas' interpreter: what they round and refuse, and the package that they come from."""

import dataclasses
import importlib
import os
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attnsuite.backends import Layout, Target, make_spec, plan, support, tokamax_package, tokamax_splash, tokamax_triton
from attnsuite.backends.splash import SPLASH
from attnsuite.backends.tokamax_package import INSTALL, VERSION
from attnsuite.backends.tokamax_splash import TOKAMAX_SPLASH, missing
from attnsuite.backends.tokamax_triton import TOKAMAX_TRITON
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy, check_quantity, compiled
from declared import sized

pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]  # tokamax promotes dtypes and ranks by itself


def needed(absent):
    return pytest.mark.skipif(bool(absent) and "ATTNSUITE_REQUIRE_TOKAMAX" not in os.environ, reason="; ".join(absent))


needs_splash, needs_triton = needed(missing()), needed(tokamax_triton.missing())

V5E, H100 = Target("tpu", "v5e"), Target("cuda", "h100")


@pytest.fixture
def installed(monkeypatch):
    """As if the package were there: what the mask refuses is asked in every environment."""
    monkeypatch.setattr(tokamax_package, "missing", lambda *_: ())


@pytest.fixture
def kernels_made_anew():
    """Kernels of before and of after the test are not its own."""
    tokamax_splash._kernel_of.cache_clear()
    yield
    tokamax_splash._kernel_of.cache_clear()


@pytest.mark.thorough
@needs_splash
@pytest.mark.usefixtures("kernels_made_anew")
def test_why_exponentials_are_in_base_e(monkeypatch):
    """In base 2, tokamax's default, the kernel multiplies a bfloat16 query by log2(e) and rounds it once more."""
    problem = problems.problem("big-logits-bfloat16")

    def check():
        check_accuracy(compiled(TOKAMAX_SPLASH, problem, Target.here(), "interpret")(*problem.inputs), problem)

    check()
    package = tokamax_splash._MOVED.get(metadata.version("tokamax"), tokamax_splash._PACKAGE)
    kernel = importlib.import_module(f"{package}.splash_attention_kernel")
    in_base_e = kernel.SplashConfig
    monkeypatch.setattr(kernel, "SplashConfig", lambda **given: in_base_e(**(given | {"use_base2_exp": True})))
    tokamax_splash._kernel_of.cache_clear()
    with pytest.raises(AssertionError, match=r"output: .*passed=False"):
        check()


@pytest.fixture(scope="module")
def specs():
    """Problems that splash takes, and one for each reason why it refuses."""
    names = ("combination", "decode-1", "sinks", "function-prefix", "value-dim-wider")
    names += ("big-logits-float16", "decode-4", "positions-shuffled", "rows-before-every-key", "mask-per-head")
    names += ("bias-per-head", "log-sum-exp", "alibi", "sinks-decode", "function-positions")
    found = []
    for name in names:
        case = problems.CASES[name]
        layout, terms, inputs = problems.arrays(case, name, None)
        found.append(make_spec(*inputs[:3], layout, terms, **case.options))
    return found


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("target", "mode"), [(V5E, "native"), (V5E, "compile"), (Target("cpu"), "interpret"), (Target("cpu"), "native")]
)
def test_takes_the_problems_that_splash_takes(specs, target, mode):
    for spec in specs:
        answers = [support(backend, spec, target, mode).reasons for backend in (TOKAMAX_SPLASH, SPLASH)]
        ours, theirs = ([reason.partition(" is not supported by ")[0] for reason in each] for each in answers)
        assert [reason.replace("tokamax_splash", "splash") for reason in ours] == theirs


@pytest.mark.parametrize(("backend", "target"), [(TOKAMAX_SPLASH, V5E), (TOKAMAX_TRITON, H100)])
def test_missing_package_is_a_reason_where_it_would_run(monkeypatch, backend, target):
    def nowhere(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nowhere)
    spec = sized(256, K=1, H=128, dtype="bfloat16", is_causal=True)
    reason = f"{backend.name} needs the package tokamax {VERSION}, which is not installed; {INSTALL}."
    for place, mode in ((target, "compile"), (Target.here(), "interpret")):
        assert support(backend, spec, place, mode).reasons == (reason,)
    assert support(backend, spec, target, "native")
    with pytest.raises(ImportError, match="which is not installed"):
        plan(backend, spec, Layout(), target=target)


@pytest.mark.parametrize("version", ["0.0.16", "0.0.18", "0.0.17.dev1", "nightly"])
def test_another_version_is_refused_before_anything_is_imported(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    wanted = " or ".join((VERSION, *tokamax_splash._MOVED))
    reason = f"tokamax_splash needs tokamax {wanted}, whose private kernel it is, and found {version}; {INSTALL}."
    assert missing() == (reason,)


@pytest.mark.parametrize("version", [VERSION, *tokamax_splash._MOVED])
def test_kernel_is_imported_from_where_the_version_has_it(monkeypatch, version):
    imported = []
    monkeypatch.setattr(metadata, "version", lambda _: version)
    monkeypatch.setattr(importlib, "import_module", imported.append)
    monkeypatch.setattr(tokamax_package, "_import_error", tokamax_package._import_error.__wrapped__)
    assert missing() == ()
    moved = "_src.ops.splash_attention" if version != VERSION else "_src.ops.experimental.tpu.splash_attention"
    assert imported == [f"tokamax.{moved}.splash_attention_kernel"]


def test_whatever_the_import_raises_is_the_reason(monkeypatch):
    def broken(name):
        raise AttributeError(f"{name} is broken\nand more")

    monkeypatch.setattr(metadata, "version", lambda _: VERSION)
    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(tokamax_package, "_import_error", tokamax_package._import_error.__wrapped__)
    (reason,) = missing()
    assert reason.startswith(f"tokamax {VERSION} does not import here (AttributeError: tokamax.")
    assert reason.endswith(f"splash_attention_kernel is broken); {INSTALL}.")


def test_extra_and_probe_ask_for_the_same_version():
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert f'tokamax = ["tokamax=={VERSION};' in pyproject.read_text(encoding="utf-8")


SPEC = sized(64, N=4, K=2, dtype="bfloat16")


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_import_of_tokamax_leaves_tritons_cache_as_it_was(before, monkeypatch, tmp_path):
    """jax-triton, which tokamax imports where it is there, empties the variable: Kvax could not compile any more."""
    (tmp_path / "empties.py").write_text("import os\nos.environ['TRITON_CACHE_DIR'] = ''\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    monkeypatch.delitem(sys.modules, "empties", raising=False)
    assert tokamax_package._import_error.__wrapped__("empties") == ()
    assert os.environ.get("TRITON_CACHE_DIR") == before


@needs_triton
@pytest.mark.parametrize(("scale", "words"), [(None, ()), (0.3, ("The scale 0.3 is no power of two",))])
def test_notes_say_where_the_scale_rounds_the_query(scale, words):
    made = plan(TOKAMAX_TRITON, dataclasses.replace(SPEC, scale=scale), target=Target.here(), mode="interpret")
    assert tuple(note[: len(word)] for note, word in zip(made.notes, words, strict=True)) == words


@needs_triton
def test_output_of_a_window_passes_the_judge():
    problem = problems.problem("window-more-queries", "bfloat16")
    problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, needs_grad=False))
    run = jax.jit(problems.planned(TOKAMAX_TRITON, problem, Target.here(), "interpret", None))
    check_quantity("output", run(*problem.inputs[:3]), problem)


@pytest.mark.thorough
@needs_triton
def test_why_the_backward_pass_is_padded(monkeypatch):
    """At 48 tokens, causal, its kernel reads rows behind the last one, and checks no bounds."""
    sizes = {"query_length": 48, "key_value_length": 48, "num_heads": 1, "num_kv_heads": 1}
    spec = dataclasses.replace(SPEC, **sizes, is_causal=True)
    query = jnp.ones((1, 48, 1, 64), jnp.bfloat16)
    monkeypatch.setattr(tokamax_triton, "_whole_blocks", lambda x, *_, **__: x)
    monkeypatch.setattr(tokamax_triton, "_mask", lambda *_: None)
    made = plan(TOKAMAX_TRITON, spec, Layout(), target=Target.here(), mode="interpret")
    gradient = jax.jit(jax.grad(lambda q: made.run(q, query, query)[0].astype(jnp.float32).sum()))(query)
    assert not jnp.isfinite(gradient).all()
