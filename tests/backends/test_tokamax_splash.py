"""tokamax's splash kernel through Pallas' interpreter: judged with every feature, and refused as JAX's splash is."""

import importlib
import os
from importlib import metadata
from pathlib import Path

import pytest

from attnsuite.backends import (
    Layout,
    Target,
    make_spec,
    plan,
    support,
    tokamax_package,
    tokamax_splash,
)
from attnsuite.backends.splash import SPLASH
from attnsuite.backends.tokamax_package import INSTALL, VERSION
from attnsuite.backends.tokamax_splash import TOKAMAX_SPLASH, missing
from attnsuite.backends.tokamax_triton import TOKAMAX_TRITON
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy, compiled
from declared import sized

pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]  # tokamax promotes dtypes and ranks by itself
needs_tokamax = pytest.mark.skipif(
    bool(missing()) and "ATTNSUITE_REQUIRE_TOKAMAX" not in os.environ, reason="; ".join(missing())
)

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
@needs_tokamax
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


def test_asking_about_other_devices_imports_nothing(loaded_by):
    code = (
        "from attnsuite import backends; t = backends.Target('tpu', 'v5e'); "
        "spec = backends.AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=1, num_kv_heads=1, "
        "head_dim=8); assert backends.support(backends.get('tokamax_splash'), spec, t)"
    )
    assert "tokamax" not in loaded_by(code)[1]
