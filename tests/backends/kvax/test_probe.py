"""Probing never raises: every way in which an environment can be wrong is a reason with the line that mends it."""

from pathlib import Path

import pytest

from attnsuite.backends.kvax import availability
from script import python

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
    ],
)
def test_wrong_version_is_named_with_the_right_ones(reasons, package, version, accepted):
    (found,) = reasons(GOOD | {package: version})
    assert found == f"kvax needs {package} {accepted}, and found {version}; {INSTALL}."


def test_jax_triton_matters_natively_only(reasons):
    (found,) = reasons(GOOD | {"jax-triton": "0.4.1"}, "native")
    assert found == f"kvax needs jax-triton 0.3.1 or newer, older than 0.3.2, and found 0.4.1; {INSTALL}."


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
        ("native", "jax_triton", "raise RuntimeError", "RuntimeError: no message"),
        ("interpret", "triton", "import types; types.no_name", "AttributeError: module 'types' has no attribute"),
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
