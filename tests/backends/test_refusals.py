"""What a vendor's kernel refuses beyond its allow-list (``test_features.py``): one row each, with the value given."""

import dataclasses
from importlib import util

import pytest

from attnsuite.backends import Layout, Target, registry, support
from declared import sized

pytestmark = pytest.mark.newest

A100, H100, B200, V5E = (Target.named(kind) for kind in ("a100", "h100", "b200", "v5e"))
T4 = Target("cuda", compute_capability=(7, 5))
PLAIN = sized(64, B=2, N=4, K=2, dtype="bfloat16")
FORWARD = dataclasses.replace(PLAIN, needs_grad=False)
CAUSAL = dataclasses.replace(PLAIN, is_causal=True)
SQUARE = dataclasses.replace(CAUSAL, dtype="float32")
DECODE = dataclasses.replace(FORWARD, query_length=1, key_value_length=48, head_dim=128, value_head_dim=128)
PAGES = dataclasses.replace(DECODE, has_seq_lengths=True, page_size=16, num_pages=14)
SERVING = dataclasses.replace(
    PAGES, batch=1, query_length=24, is_causal=True, has_segment_ids=True, has_positions=True, has_seq_lengths=False
)
CONTIGUOUS = {"page_size": None, "num_pages": None}

# What each kernel takes, and the options that it needs for it.
TAKEN = {
    "cudnn": (PLAIN, H100, {}),
    "kvax": (CAUSAL, H100, {}),
    "paged_attention": (PAGES, V5E, {}),
    "pallas_flash": (FORWARD, H100, {}),
    "ragged_paged_attention": (SERVING, V5E, {"sequences": 3}),
    "splash": (SQUARE, V5E, {}),
    "tokamax_splash": (SQUARE, V5E, {}),
    "tokamax_triton": (PLAIN, H100, {}),
    "tpu_flash_attention": (SQUARE, V5E, {}),
}
REFUSED = [
    ("cudnn", {}, Target("cuda"), "compute capability"),
    ("cudnn", {}, T4, "7.5"),
    ("cudnn", {}, Target("cuda", compute_capability=(10, 3)), "9.11"),
    ("cudnn", {"head_dim": 76, "value_head_dim": 76}, H100, "head_dim=76"),
    ("cudnn", {"head_dim": 256, "value_head_dim": 256}, A100, "at most 128"),
    ("cudnn", {"head_dim": 256, "value_head_dim": 256}, B200, "at most 128"),
    ("cudnn", {"query_length": 1}, H100, "query_length=1"),
    ("cudnn", {"key_value_length": 1}, H100, "key_value_length=1"),
    ("cudnn", {"query_length": 32, "is_causal": True}, H100, "query_length=32"),
    ("cudnn", {"local_window_size": (8, 1)}, H100, "local_window_size=(8, 1)"),
    ("cudnn", {"local_window_size": (8, 0), "has_seq_lengths": True}, H100, "key_value_seq_lengths"),
    ("cudnn", {"query_length": 33, "has_mask": True}, H100, "query_length=33 with a gradient"),
    ("cudnn", {"key_value_length": 33}, H100, "key_value_length=33 with a gradient"),
    ("cudnn", {"has_bias": True}, H100, "a bias array with needs_grad=True"),
    ("kvax", {}, Target("cuda"), "compute capability"),
    ("kvax", {}, T4, "7.5"),
    ("kvax", {"head_dim": 80}, H100, "head_dim=80"),
    ("kvax", {"value_head_dim": 48}, H100, "value_head_dim=48"),
    ("kvax", {"head_dim": 192, "value_head_dim": 192}, H100, "value_head_dim=192"),
    ("kvax", {"value_head_dim": 512}, H100, "value_head_dim=512"),
    ("paged_attention", {"head_dim": 64, "value_head_dim": 64}, V5E, "head_dim=64"),
    ("paged_attention", {"query_length": 2}, V5E, "query_length=2"),
    ("paged_attention", CONTIGUOUS | {"key_value_length": 40}, V5E, "key_value_length=40"),
    ("paged_attention", {"batch": 256, "key_value_length": 16 * 505}, V5E, "in pages of 16 slots are not supported"),
    ("paged_attention", CONTIGUOUS | {"needs_grad": True}, V5E, "needs_grad=True"),
    ("pallas_flash", {"needs_grad": True}, H100, "needs_grad=True"),
    ("pallas_flash", {"query_length": 1}, H100, "query_length=1"),
    ("ragged_paged_attention", {"num_heads": 12, "num_kv_heads": 6}, V5E, "num_kv_heads=6"),
    ("ragged_paged_attention", {"is_causal": False}, V5E, "is_causal=False"),
    ("ragged_paged_attention", {"head_dim": 64, "value_head_dim": 64}, V5E, "head_dim=64"),
    ("splash", {"query_length": 32, "has_positions": True}, V5E, "query_length=32"),
    ("splash", {"is_causal": False, "local_window_size": 4, "has_positions": True}, V5E, "positions"),
    ("tokamax_triton", {}, T4, "too old"),
    ("tokamax_triton", {"head_dim": 320, "value_head_dim": 64}, H100, "head_dim=320"),
    ("tokamax_triton", {"local_window_size": 8}, H100, "local_window_size=(8, 8) with needs_grad=True"),
    ("tokamax_triton", {"logits_soft_cap": 3.0}, H100, "logits_soft_cap=3.0 with needs_grad=True"),
    ("tokamax_triton", {"has_bias": True}, H100, "before the soft cap"),
    ("tpu_flash_attention", {"dtype": "bfloat16"}, V5E, "needs_grad=True with dtype=bfloat16"),
    ("tpu_flash_attention", {"head_dim": 33, "value_head_dim": 33}, V5E, "head_dim=33"),
]


@pytest.mark.parametrize("name", TAKEN)
def test_a_kernel_takes_what_it_is_for_and_no_device_of_another_maker(name):
    backend, (spec, home, options) = registry.get(name), TAKEN[name]
    assert support(backend, spec, home, options=options)
    for target in (Target("cpu"), Target("rocm"), *{H100, V5E} - {home}):
        (reason,) = support(backend, spec, target, options=options).reasons
        assert str(target) in reason
        assert reason.endswith(".")


@pytest.mark.parametrize(("name", "changes", "target", "word"), REFUSED)
def test_refuses_with_the_offending_value(name, changes, target, word):
    spec, _, options = TAKEN[name]
    (reason,) = support(registry.get(name), dataclasses.replace(spec, **changes), target, options=options).reasons
    assert word in reason
    assert reason.endswith(".")


@pytest.mark.parametrize("name", ["cudnn", "kvax", "splash"])
def test_gives_every_reason_at_once(name):
    spec = dataclasses.replace(TAKEN[name][0], dtype="float64", has_bias=True, has_alibi=True)
    assert len(support(registry.get(name), spec, Target("cpu")).reasons) == 4


@pytest.mark.parametrize("name", ["paged_attention", "pallas_flash", "ragged_paged_attention", "tpu_flash_attention"])
def test_jax_without_the_module_is_a_reason(name, monkeypatch):
    def without_its_package(_):
        raise ModuleNotFoundError

    spec, target, options = TAKEN[name]
    for found in (lambda _: None, without_its_package):
        monkeypatch.setattr(util, "find_spec", found)
        assert "no longer has" in support(registry.get(name), spec, target, options=options).reasons[0]


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("kvax", {"query_block_size": 100}, "query_block_size=100 is not accepted"),
        ("kvax", {"num_warps": 3}, "num_warps=3 is not accepted"),
        ("kvax", {"num_stages": 0}, "num_stages=0 is not accepted"),
        ("kvax", {"backward_query_block_size": 512}, "backward_query_block_size=512 is not accepted"),
        ("kvax", {"backward_num_warps": True}, "backward_num_warps=True is not accepted"),
        ("paged_attention", {"pages_per_block": 0}, "pages_per_block=0 is not accepted"),
        ("paged_attention", {"pages_per_block": True}, "pages_per_block=True is not accepted"),
        ("paged_attention", {"pages_per_block": 2.0}, "pages_per_block=2.0 is not accepted"),
        ("ragged_paged_attention", {"sequences": 0}, "sequences=0 is not accepted"),
        ("ragged_paged_attention", {"sequences": True}, "sequences=True is not accepted"),
        ("ragged_paged_attention", {"sequences": 3.0}, "sequences=3.0 is not accepted"),
        ("ragged_paged_attention", {"sequences": 5}, "sequences=5 is not accepted"),
        ("splash", {"block_q": 100}, "block_q=100 is not accepted"),
        ("splash", {"block_kv": True}, "block_kv=True is not accepted"),
        ("splash", {"fused_backward": 1}, "fused_backward=1 is not accepted"),
        ("splash", {"block_kv": 256, "block_kv_compute": 384}, "block_kv_compute=384 does not divide block_kv=256"),
        ("tokamax_splash", {"block_q": 100}, "block_q=100 is not accepted; block_q is query rows per block"),
        ("tokamax_splash", {"fused_backward": True}, "fused_backward"),
    ],
)
def test_option_that_does_not_fit_is_refused(name, options, word):
    spec, target, _ = TAKEN[name]
    with pytest.raises(ValueError, match=word):
        registry.get(name).plan(spec, Layout(), target=target, mode="compile", options=options)
