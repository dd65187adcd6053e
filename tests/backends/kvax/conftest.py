"""Tests marked ``needs_kvax`` run Kvax's kernels: without the packages they skip, or fail where they must run."""

import os

import pytest

from attnsuite.backends.kvax import availability


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_kvax: runs Kvax's own kernels (extra 'kvax'; tox -e kvax)")


def pytest_runtest_setup(item):
    if item.get_closest_marker("needs_kvax") is None:
        return
    if reasons := availability.missing("interpret"):
        must = os.environ.get("ATTNSUITE_REQUIRE_KVAX")  # set by tox -e kvax
        (pytest.fail if must else pytest.skip)(" ".join(reasons))
