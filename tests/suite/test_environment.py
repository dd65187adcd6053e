from __future__ import annotations

import hashlib

from attnsuite.suite.measure.environment import source_digest


def test_source_that_is_digested_is_this_projects_and_no_users(tmp_path, monkeypatch):
    found = source_digest()
    assert found != hashlib.sha256().hexdigest()[:16]  # of no file at all
    for room in ("backends", "models", "suite"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("ours = False\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert source_digest() == found
