import dataclasses
import warnings

import pytest

from attnsuite.backends import (
    AttentionSpec,
    BackendFallbackWarning,
    BackendUnavailableError,
    Layout,
    Target,
    UnknownBackendError,
    registry,
    resolve,
    support,
)
from attnsuite.backends.devices import KNOWN_KINDS
from attnsuite.backends.resolve import PRIORITY

pytestmark = pytest.mark.newest

SPEC = AttentionSpec(batch=1, query_length=64, key_value_length=64, num_heads=2, num_kv_heads=1, head_dim=32)
CPU = Target("cpu")
# What a refused kernel falls back to on a CPU: depends on whether llvmlite is installed.
FIRST = resolve("auto", SPEC, CPU).backend.name
PLATFORMS = (CPU, Target("rocm"), *(Target.named(kind) for kind in KNOWN_KINDS))


def varied(**changes):
    return dataclasses.replace(SPEC, **changes)


@pytest.mark.parametrize("target", PLATFORMS, ids=str)
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "is_causal": True}, {"has_mask": True}], ids=str)
def test_auto_takes_the_first_that_supports_it_names_all_before_and_never_warns(target, changes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolution = resolve("auto", varied(**changes), target)
    assert resolution.mode == "native"
    asked = [rejection.backend for rejection in resolution.rejections]
    registered = [name for name in PRIORITY[target.platform] if name in registry.names()]
    assert [*asked, resolution.backend.name] == registered[: len(asked) + 1]
    assert all(rejection.reasons for rejection in resolution.rejections)


def test_fallback_warns_exactly_once_with_every_reason():
    spec = varied(chunk_size=8, logits_soft_cap=5.0)
    with pytest.warns(BackendFallbackWarning) as caught:
        resolution = resolve("cudnn", spec, CPU)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    reasons = support(registry.get("cudnn"), spec, CPU).reasons
    assert len(reasons) == 4
    for reason in reasons:
        assert reason in message
    assert message.startswith(f"cudnn cannot run this on cpu; {FIRST} runs instead.")
    assert (resolution.mode, resolution.requested, resolution.backend.name) == ("fallback", "cudnn", FIRST)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("cudnn", {}, BackendUnavailableError, r"cudnn cannot run this on cpu: .*NVIDIA.*dtype=float32"),
        *(
            (name, {"mode": "interpret"}, BackendUnavailableError, "interpret")
            for name in ("standard", "chunked", "cudnn")
        ),
        ("flash", {}, UnknownBackendError, "'flash' is not registered; registered are: standard, chunked"),
        ("standard", {"on_unavailable": "ignore"}, ValueError, "='ignore' must be 'fallback' or 'raise'"),
        ("standard", {"mode": "fast"}, ValueError, "mode='fast' must be one of 'native', 'interpret', 'compile'"),
        ("auto", {"mode": "interpret"}, ValueError, "mode='interpret' is for a backend by name"),
    ],
)
def test_what_cannot_be_resolved_is_an_error(name, options, error, words):
    with pytest.raises(error, match=words):
        resolve(name, SPEC, CPU, **{"on_unavailable": "raise"} | options)


def test_backend_without_an_interpreter_falls_back_to_itself_where_it_runs_natively():
    with pytest.warns(BackendFallbackWarning, match=f"in mode 'interpret' .* {FIRST} runs natively instead"):
        resolution = resolve(FIRST, SPEC, CPU, mode="interpret")
    assert (resolution.backend.name, resolution.mode) == (FIRST, "fallback")


@pytest.mark.parametrize("name", [name for name in ("standard", "chunked", "cudnn") if name in registry.names()])
@pytest.mark.parametrize("target", PLATFORMS, ids=str)
@pytest.mark.parametrize("mode", ["native", "interpret", "compile"])
def test_nothing_falls_back_silently(name, target, mode):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolution = resolve(name, SPEC, target, mode=mode)
    assert resolution.requested == name
    swapped = resolution.backend.name != name or resolution.mode != mode
    assert len([w for w in caught if issubclass(w.category, BackendFallbackWarning)]) == swapped
    assert bool(resolution.rejections) == swapped


def test_options_belong_to_the_backend_that_was_asked_for():
    with pytest.raises(ValueError, match="no_such_option"):
        resolve("chunked", SPEC, CPU).plan(Layout(), {"no_such_option": 1})
    for name in ("chunked", "auto"):
        with pytest.raises(ValueError, match="no_such_option"):  # what it was asked with is what it plans with
            resolve(name, SPEC, CPU, options={"no_such_option": 1}).plan()
    with pytest.warns(BackendFallbackWarning):
        fallback = resolve("cudnn", SPEC, CPU)
    fallback.plan(Layout(), {"no_such_option": 1})
