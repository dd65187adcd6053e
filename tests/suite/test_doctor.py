from __future__ import annotations

import json

from suite.doctor import describe


def test_doctor_lists_every_backend_with_its_mode_or_every_reason(foreign, faulty_names, attnsuite):
    code, out, err = attnsuite.finish(attnsuite.start("doctor", "--json", path=foreign))
    assert code == 0, err
    found = json.loads(out)
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert {"standard", "chunked", "cudnn", *faulty_names} <= set(backends)
    for backend in backends.values():
        for support in backend["problems"].values():
            assert (support["mode"] == "native") != bool(support["reasons"])
    assert len(backends["refusing"]["problems"]["forward"]["reasons"]) == 2
    kascade = backends["kascade"]
    assert kascade["exact"] is False
    assert [kascade["problems"][name]["mode"] for name in ("forward", "decode step")] == ["native", "native"]
    assert "needs_grad=True is not supported by kascade" in kascade["problems"]["forward+backward"]["reasons"][0]
    assert found["environment"]["versions"]["jax"]
    assert describe(found)
