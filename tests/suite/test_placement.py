"""The threads of XLA's pool while a cell is timed."""

from __future__ import annotations

import json
import os
import sys

import pytest

from attnsuite.suite.measure import placement
from script import printed

PINNED = """
import json, os, pathlib
import jax
from attnsuite.suite.measure import placement

before = placement.pin_pool()
jax.devices()
pinned = placement.pin_pool()
tasks = pathlib.Path("/proc/self/task").iterdir()
pool = [int(task.name) for task in tasks if (task / "comm").read_text().strip() == "tf_XLAEigen"]
print(json.dumps([before, pinned, sorted(map(list, map(os.sched_getaffinity, pool))), len(os.sched_getaffinity(0))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says where a thread may run")
def test_each_thread_of_the_pool_has_a_processor_of_its_own():
    """The name of the threads is XLA's own: this fails with a jaxlib that calls them otherwise."""
    before, pinned, places, usable = json.loads(printed(PINNED))
    processors = sorted(os.sched_getaffinity(0))
    assert before is None  # JAX had made no pool
    assert pinned == len(processors)
    assert places == [[processor] for processor in processors]
    assert usable == len(processors)  # the caller's own thread may run everywhere


def test_a_system_without_such_a_call_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert placement.pin_pool() is None
