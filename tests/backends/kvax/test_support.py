"""What Kvax takes and refuses, judged for any target on any machine, and the options of its plan."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from attnsuite.backends import BackendFallbackWarning, Layout, MeshAxes, Target, resolve, support
from attnsuite.backends.choices import Choice, Source, problem_of, to_json
from attnsuite.backends.kvax import KVAX, availability, backend, block_sizes
from declared import sized
from script import python

A100, H100, B200 = (Target("cuda", kind) for kind in ("a100", "h100", "b200"))


def spec(**changes):
    plain = sized(1024, B=2, N=8, K=2, dtype="bfloat16", is_causal=True)
    return dataclasses.replace(plain, value_head_dim=changes.pop("value_head_dim", changes.get("head_dim")), **changes)


@pytest.mark.parametrize("target", [A100, H100, B200])
def test_takes_values_narrower_than_keys_on_a_gpu_that_is_not_here(target):
    assert support(KVAX, spec(head_dim=192, value_head_dim=128, has_segment_ids=True, has_seq_lengths=True), target)


def test_interprets_on_a_cpu_only():
    assert "JAX_PLATFORMS=cpu" in support(KVAX, spec(), H100, "interpret").reasons[0]


@pytest.mark.parametrize(
    ("target", "mode"),
    [(Target("cpu"), "interpret"), (H100, "compile"), (dataclasses.replace(H100, present=True), "native")],
)
def test_missing_packages_are_the_reason(target, mode):
    bare = dataclasses.replace(KVAX, missing=lambda mode: (f"nothing here to {mode} with.",))
    assert support(bare, spec(), target, mode).reasons == (f"nothing here to {mode} with.",)
    with pytest.raises(ImportError, match=f"nothing here to {mode}"):
        bare.plan(spec(), Layout(), target=target, mode=mode)
    assert support(bare, spec(), H100)  # natively, packages matter only where the device is


@pytest.mark.needs_kvax
def test_a_plan_for_xla_to_compile_needs_what_a_native_one_does(monkeypatch):
    monkeypatch.setattr(availability, "missing", lambda mode: ("no jax-triton.",) if mode == "native" else ())
    assert support(KVAX, spec(), H100, "compile")
    with pytest.raises(ImportError, match="no jax-triton"):
        KVAX.plan(spec(), Layout(), target=H100, mode="compile")


def test_is_asked_for_by_name_on_a_gpu_and_auto_says_that_nothing_was_measured():
    found = resolve("auto", spec(has_segment_ids=True), H100)
    assert found.backend.name == "chunked"
    assert found.policy.startswith("nothing was measured on this device")
    assert resolve("kvax", spec(has_segment_ids=True), H100).backend is KVAX
    with pytest.warns(BackendFallbackWarning, match="kvax cannot run this"):
        fallback = resolve("kvax", spec(), Target("cpu")).backend
    assert fallback is resolve("auto", spec(), Target("cpu")).backend


@pytest.mark.needs_kvax
def test_asking_whether_it_can_be_interpreted_imports_its_packages_and_touches_no_device(loaded_by):
    initialised, packages = loaded_by("""
from attnsuite.backends import AttentionSpec, Target, registry, support
spec = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=1, num_kv_heads=1, head_dim=16,
                     dtype="bfloat16")
assert support(registry.get("kvax"), spec, Target("cpu"), "interpret")
""")
    assert initialised is False
    assert "triton" in packages  # only what imports can be trusted
    assert "kvax" not in packages  # a private copy


def test_block_parameters_are_those_given_and_the_generations_own():
    chosen = block_sizes.choose(spec(), H100, {"kv_block_size": 64, "backward_num_stages": 2})
    assert chosen.forward == block_sizes.FlashAttentionParamsConfig(128, 64, 8, 3)
    assert chosen.backward == block_sizes.FlashAttentionParamsConfig(64, 128, 8, 2)


def test_h200_has_the_blocks_of_an_h100_and_not_the_small_ones():
    assert block_sizes.choose(spec(), Target("cuda", "h200"), {}) == block_sizes.choose(spec(), H100, {})
    assert block_sizes.choose(spec(), H100, {}) != block_sizes.choose(spec(), A100, {})


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def test_kvax_deals_the_length_itself_and_nothing_else():
    (devices,) = KVAX.sharded(MESH, MeshAxes(context="data", heads="model")).make.args
    assert devices.context_size == 2
    assert KVAX.sharded(MESH, MeshAxes(data="data", heads="model")) is None
    assert KVAX.sharded(MESH, MeshAxes(context="data", exchange="ring")) is None


def test_policy_of_tuned_options_comes_between_the_generation_and_the_caller(tmp_path):
    problem = spec(num_kv_heads=8, head_dim=64)
    passes = {False: {"kv_block_size": 32, "num_stages": 2}, True: {"backward_num_warps": 4}}
    problems = {each: problem_of(dataclasses.replace(problem, needs_grad=each)) for each in passes}
    choices = tuple(Choice(case="", problem=problems[i], backend="kvax", options=passes[i]) for i in passes)
    path = tmp_path / "policy.json"
    path.write_text(to_json([Source(name="", device="cuda:h100", choices=choices)]))
    chosen = backend._blocks(problem, H100, {"tuned": str(path), "num_stages": 4})
    assert dataclasses.astuple(chosen.forward) == (128, 32, 8, 4)  # the generation's, the table's, the caller's
    assert dataclasses.astuple(chosen.backward) == (64, 128, 4, 3)
    with pytest.raises(ValueError, match="has no options for kvax on cuda:a100"):
        backend._blocks(problem, A100, {"tuned": str(path)})


@pytest.mark.parametrize("needs_grad", [False, True])
def test_candidates_for_tuning_are_accepted_options_and_hold_the_generations_own(needs_grad):
    candidates = KVAX.candidates(spec(needs_grad=needs_grad), H100, {})
    assert KVAX.defaults(spec(needs_grad=needs_grad), H100, {}) in candidates
    assert all(block_sizes.choose(spec(), H100, options) for options in candidates)


# Probing never raises: every way in which an environment can be wrong is a reason with the line that mends it.

GOOD = {"kvax": "0.1.0", "triton": "3.7.1", "chex": "0.1.92", "jax-triton": "0.3.1"}
INSTALL = "pip install '.[kvax]'"


@pytest.fixture
def reasons(monkeypatch):
    """Why Kvax cannot be used beside packages of these versions."""

    def ask(versions, mode="interpret"):
        monkeypatch.setattr(availability.metadata, "version", versions.__getitem__)
        return availability.missing.__wrapped__(mode)

    return ask


@pytest.mark.parametrize(
    ("package", "version", "accepted"),
    [
        ("kvax", "0.2.0", "0.1.0 or newer, older than 0.1.1"),
        ("triton", "3.5.1", "3.6 or newer, older than 3.8"),
        ("triton", "3.8.0", "3.6 or newer, older than 3.8"),
        ("triton", "3.9.0+git123", "3.6 or newer, older than 3.8"),
        ("triton", "nightly", "3.6 or newer, older than 3.8"),
        ("chex", "0.1.7", "0.1.85 or newer, older than 0.2"),
        ("jax-triton", "0.4.1", "0.3.1 or newer, older than 0.3.2"),
    ],
)
def test_wrong_version_is_named_with_the_right_ones(reasons, package, version, accepted):
    (found,) = reasons(GOOD | {package: version}, "native" if package == "jax-triton" else "interpret")
    assert found == f"kvax needs {package} {accepted}, and found {version}; {INSTALL}."


def test_every_missing_package_is_named(reasons):
    """Damaged metadata too: its error is a KeyError here."""
    found = reasons({}, "native")
    assert len(found) == len(availability.NATIVE_VERSIONS)
    for reason, package in zip(found, availability.NATIVE_VERSIONS, strict=True):
        assert f"the package {package} (" in reason
        assert f"not installed; {INSTALL}" in reason


@pytest.mark.parametrize(
    ("mode", "package", "source", "what"),
    [
        ("native", "jax_triton", "raise ImportError('no GPU.\\nSee there.')", "ImportError: no GPU.; found kvax 0.1.0"),
        pytest.param(
            "native", "jax_triton", "raise RuntimeError", "RuntimeError: no message", marks=pytest.mark.thorough
        ),
        pytest.param(
            *("interpret", "triton", "import types; types.no_name"),
            "AttributeError: module 'types' has no attribute",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["ImportError", "no message", "AttributeError"],
)
def test_whatever_the_import_raises_is_the_reason(tmp_path, mode, package, source, what):
    """In a process that finds such packages, metadata and all, before any other."""
    for name, version in GOOD.items():
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / f"{package}.py").write_text(source)
    code = f"from attnsuite.backends.kvax import availability; print('\\n'.join(availability.missing({mode!r})))"
    found = python("-c", code, folder=tmp_path, first=tmp_path).stdout.strip()
    assert found.startswith("kvax does not import here (")
    assert what in found
    assert "found kvax 0.1.0, triton 3.7.1" in found
    assert INSTALL in found
    assert ("jax[cuda12]" in found) == (mode == "native")


@pytest.mark.needs_kvax
def test_nothing_is_missing_where_the_extra_is_installed():
    assert availability.missing("interpret") == ()
    assert availability.missing("compile") == ()


def test_extra_and_probe_ask_for_the_same():
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    if not pyproject.is_file():
        pytest.skip("the checkout is not here")
    import tomllib

    extra = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]["kvax"]
    ranges = {"triton>=3.6,<3.8", "chex>=0.1.85,<0.2", "kvax==0.1.0", "jax-triton==0.3.1"}
    assert set(extra) == ranges
    assert availability.NATIVE_VERSIONS == {
        "kvax": ((0, 1, 0), (0, 1, 1)),
        "triton": ((3, 6), (3, 8)),
        "chex": ((0, 1, 85), (0, 2)),
        "jax-triton": ((0, 3, 1), (0, 3, 2)),
    }
