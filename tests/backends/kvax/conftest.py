"""Tests marked ``kvax`` run Kvax's kernels: skipped where the packages are missing, failed where they must be here."""

import os

import pytest

from attnsuite.backends.kvax import probe


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kvax: runs Kvax's own kernels (extra 'kvax'; tox -e kvax)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kvax") is None:
        return
    if reasons := probe.missing("interpret"):
        must = os.environ.get("ATTNSUITE_REQUIRE_KVAX")  # set by tox -e kvax
        (pytest.fail if must else pytest.skip)(" ".join(reasons))
