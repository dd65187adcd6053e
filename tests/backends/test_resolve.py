from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp
import pytest

from attnsuite.backends import (
    AttentionSpec,
    BackendFallbackWarning,
    BackendUnavailableError,
    Layout,
    Target,
    UnknownBackendError,
    attention,
    masks,
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


def varied(**changes: Any) -> AttentionSpec:
    return dataclasses.replace(SPEC, **changes)


@pytest.mark.parametrize("target", PLATFORMS, ids=str)
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "is_causal": True}, {"has_mask": True}], ids=str)
def test_auto_takes_the_first_that_supports_it_names_all_before_and_never_warns(
    target: Target, changes: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolution = resolve("auto", varied(**changes), target)
    assert resolution.mode == "native"
    asked = [rejection.backend for rejection in resolution.rejections]
    registered = [name for name in PRIORITY[target.platform] if name in registry.names()]
    assert [*asked, resolution.backend.name] == registered[: len(asked) + 1]
    assert all(rejection.reasons for rejection in resolution.rejections)


@pytest.mark.parametrize("name", ["standard", "chunked"])
def test_named_backend_that_supports_it_runs_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolution = resolve(name, SPEC, CPU)
    assert (resolution.requested, resolution.backend.name, resolution.mode) == (name, name, "native")
    assert resolution.rejections == ()


def test_fallback_warns_exactly_once_with_every_reason() -> None:
    spec = varied(chunk_size=8, logits_soft_cap=5.0)
    with pytest.warns(BackendFallbackWarning) as caught:
        resolution = resolve("cudnn", spec, CPU)
    assert len(caught) == 1
    message = str(caught[0].message)
    reasons = support(registry.get("cudnn"), spec, CPU).reasons
    assert len(reasons) == 4
    for reason in reasons:
        assert reason in message
    assert message.startswith(f"cudnn cannot run this on cpu; {FIRST} runs instead.")
    assert (resolution.mode, resolution.requested, resolution.backend.name) == ("fallback", "cudnn", FIRST)


def test_fallback_warning_names_those_that_were_refused_on_the_way() -> None:
    kinds = jnp.arange(256) % 3
    looked_up = masks.Where(lambda q, k: jnp.take(kinds, q) == jnp.take(kinds, k))
    with pytest.warns(BackendFallbackWarning, match=r"cudnn: .* flash_cpu: ") as caught:
        resolution = resolve("cudnn", varied(mask_function=looked_up), CPU)
    assert len(caught) == 1
    assert [rejection.backend for rejection in resolution.rejections] == ["cudnn", "flash_cpu"]
    assert resolution.backend.name == "chunked"


def test_fallback_warning_points_at_the_caller() -> None:
    with pytest.warns(BackendFallbackWarning) as caught:
        resolve("cudnn", SPEC, CPU)
    assert caught[0].filename == __file__


def test_caller_may_ask_for_an_error_instead() -> None:
    with pytest.raises(BackendUnavailableError, match=r"cudnn cannot run this on cpu: .*NVIDIA.*dtype=float32"):
        resolve("cudnn", SPEC, CPU, on_unavailable="raise")


def test_unknown_name_lists_the_registered_ones() -> None:
    with pytest.raises(UnknownBackendError, match="'flash' is not registered; registered are: standard, chunked"):
        resolve("flash", SPEC, CPU)


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="on_unavailable='ignore' must be 'fallback' or 'raise'"):
        resolve("standard", SPEC, CPU, on_unavailable="ignore")


@pytest.mark.parametrize("name", ["standard", "chunked", "cudnn"])
def test_interpreting_what_has_no_kernel_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match="interpret"):
        resolve(name, SPEC, CPU, mode="interpret", on_unavailable="raise")


def test_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="mode='fast' must be one of 'native', 'interpret', 'compile'"):
        resolve("standard", SPEC, CPU, mode="fast")


def test_auto_does_not_quietly_ignore_a_mode() -> None:
    with pytest.raises(ValueError, match="mode='interpret' is for a backend by name"):
        resolve("auto", SPEC, CPU, mode="interpret")


def test_backend_without_an_interpreter_falls_back_to_itself_where_it_runs_natively() -> None:
    with pytest.warns(BackendFallbackWarning, match=f"in mode 'interpret' .* {FIRST} runs natively instead"):
        resolution = resolve(FIRST, SPEC, CPU, mode="interpret")
    assert (resolution.backend.name, resolution.mode) == (FIRST, "fallback")


@pytest.mark.parametrize("name", [name for name in ("standard", "chunked", "cudnn") if name in registry.names()])
@pytest.mark.parametrize("target", PLATFORMS, ids=str)
@pytest.mark.parametrize("mode", ["native", "interpret", "compile"])
def test_nothing_falls_back_silently(name: str, target: Target, mode: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolution = resolve(name, SPEC, target, mode=mode)
    swapped = resolution.backend.name != name or resolution.mode != mode
    assert len([w for w in caught if issubclass(w.category, BackendFallbackWarning)]) == swapped
    assert bool(resolution.rejections) == swapped


def test_options_belong_to_the_backend_that_was_asked_for() -> None:
    with pytest.raises(ValueError, match="no_such_option"):
        resolve("chunked", SPEC, CPU).plan(Layout(), {"no_such_option": 1})
    for name in ("chunked", "auto"):
        with pytest.raises(ValueError, match="no_such_option"):  # what it was asked with is what it plans with
            resolve(name, SPEC, CPU, options={"no_such_option": 1}).plan()
    with pytest.warns(BackendFallbackWarning):
        fallback = resolve("cudnn", SPEC, CPU)
    fallback.plan(Layout(), {"no_such_option": 1})


def test_one_call_warns_once_too() -> None:
    x = jnp.ones((1, 8, 2, 8))
    with pytest.warns(BackendFallbackWarning) as caught:
        attention(x, x, x, backend="cudnn")
    assert len(caught) == 1
