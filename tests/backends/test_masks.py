"""Mask functions: the named ones show what their names say, they compose, and blocks are judged by every pair."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Target, attention, masks, registry, support
from attnsuite.backends.blocks import FULL, PARTIAL, SKIP, classify, pad_layout
from drawn import draw
from landing import swept

pytestmark = pytest.mark.standard

Q, K = np.arange(48)[:, None], np.arange(48)[None, :]
SPEC = AttentionSpec(batch=1, query_length=48, key_value_length=48, num_heads=1, num_kv_heads=1, head_dim=8)
NAMED = {
    masks.Causal(): lambda q, k: k <= q,
    masks.Window(5, 2): lambda q, k: q - 5 <= k <= q + 2,
    masks.Chunk(10): lambda q, k: q // 10 == k // 10,
    masks.Prefix(7): lambda _, k: k < 7,
    masks.Documents((10, 3, 20)): lambda q, k: any(q in run and k in run for run in RUNS),
    masks.Dilated(4): lambda q, k: abs(q - k) in range(0, 48, 4),
    masks.Neighbourhood(8, 1): lambda q, k: max(abs(q // 8 - k // 8), abs(q % 8 - k % 8)) <= 1,
    masks.Causal() & masks.Dilated(3): lambda q, k: k <= q and (q - k) % 3 == 0,
    masks.Causal() | masks.Prefix(7): lambda q, k: k <= q or k < 7,
    masks.Causal() & (masks.Window(9) & masks.Dilated(3)): lambda q, k: 0 <= q - k <= 9 and (q - k) % 3 == 0,
    ~masks.Window(2, 2): lambda q, k: abs(q - k) > 2,
}
OWN = masks.Where(lambda q, k: jnp.abs(q - k) % 16 == 0)
RUNS = (range(10), range(10, 13), range(13, 33))


@pytest.mark.parametrize("mask", NAMED, ids=str)
def test_a_named_mask_shows_what_its_name_says(mask):
    one_by_one = [[NAMED[mask](q, k) for k in range(48)] for q in range(48)]
    np.testing.assert_array_equal(mask(Q, K), one_by_one)
    np.testing.assert_array_equal(jax.jit(mask)(Q, K), one_by_one)


@pytest.mark.parametrize("mask", NAMED, ids=str)
def test_an_interval_holds_every_visible_key_and_no_other_where_it_is_exact(mask):
    positions, seen = np.arange(48, dtype=np.int32), np.asarray(mask(Q, K))
    exact = mask.interval(positions).exact
    for first, last in (mask.interval(positions)[:2], jax.jit(lambda q: mask.interval(q)[:2])(positions)):
        first = np.full(48, -1) if first is None else np.asarray(first)  # noqa: PLW2901
        last = np.full(48, 48) if last is None else np.asarray(last)  # noqa: PLW2901
        inside = (first[:, None] <= K) & (last[:, None] >= K)
        assert not (seen & ~inside).any()
        assert not exact or (seen == inside).all()
        assert (np.diff(first) >= 0).all() and (np.diff(last) >= 0).all()  # noqa: PT018


def test_intervals_are_held_at_the_ends_of_int32():
    ends = np.asarray([-(2**31), -(2**31) + 3, 2**31 - 2, 2**31 - 1], np.int32)
    first, last, _ = (masks.Window(5, 4) & masks.Causal()).interval(ends)
    assert first.tolist() == [-(2**31), -(2**31), 2**31 - 7, 2**31 - 6]
    assert last.tolist() == ends.tolist()
    q, k = ends.astype(np.int64)[:, None], ends.astype(np.int64)
    np.testing.assert_array_equal(masks.Window(5, 4)(ends[:, None], ends), (q - 5 <= k) & (k <= q + 4))


ENDLESS = [masks.Window(2**31 - 1, 3), masks.Window(3, 2**31 - 1)]


@pytest.mark.parametrize("mask", swept(ENDLESS, ENDLESS[:1]), ids=str)
def test_a_window_without_end_shows_its_keys_before_negative_positions(mask):
    one_by_one = [[q - mask.left <= k <= q + mask.right for k in range(-9, 9)] for q in range(-9, 9)]
    positions = np.arange(-9, 9, dtype=np.int32)
    np.testing.assert_array_equal(mask(positions[:, None], positions), one_by_one)
    x = jax.random.normal(jax.random.key(0), (1, 18, 1, 8))
    for function in (mask, mask & masks.Dilated(2)):
        by = {"mask_function": function, "query_positions": positions[None], "key_value_positions": positions[None]}
        want, got = (attention(x, x, x, backend=name, on_unavailable="raise", **by) for name in ("standard", "auto"))
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("mask", NAMED, ids=str)
def test_a_mask_is_read_from_its_words(mask):
    assert masks.parse(str(mask)) == mask
    assert masks.description_of(mask) == str(mask)


def test_a_mask_of_a_readers_own_needs_no_line_elsewhere():
    """Blocks, every exact backend of this CPU, and words know it by its class alone."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class EveryOtherChunk(masks.Mask):
        size: int

        def _shows(self, query, key):
            return (key // self.size) % 2 == (query // self.size) % 2

    mask = masks.Causal() & EveryOtherChunk(16)
    assert str(mask) == "causal & every_other_chunk(16)"
    assert masks.parse(str(mask)) == mask
    x = draw(1, 96, 2, 16)
    seen = jnp.asarray(mask(np.arange(96)[:, None], np.arange(96)[None]))
    want = jax.nn.dot_product_attention(x, x, x, mask=seen[None, None])
    for backend in (
        "standard",
        "chunked",
        *(["flash_cpu"] if support(registry.get("flash_cpu"), SPEC, Target.here()) else []),
    ):
        found = attention(x, x, x, mask_function=mask, backend=backend, on_unavailable="raise")
        np.testing.assert_allclose(found, want, atol=2e-6, err_msg=backend)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("causal & windw(3)", "windw is no mask"),
        ("window(2.5)", "something else than whole numbers"),
        ("window(left=2)", r"window\(left=2\) is no mask"),
        ("causal + window(2)", r"causal \+ window\(2\) is no mask"),
        ("__import__('os')", "something else than whole numbers"),
        ("where(causal)", "where is no mask|malformed node"),
        ("window()", "missing"),
        ("causal &", "invalid syntax"),
        pytest.param("documents(3)", "lengths=3 must be a tuple", marks=pytest.mark.wrong_types),
        ("documents(())", r"lengths=\(\) must be a tuple"),
        ("window(3000000000)", "left=3000000000 must be an integer"),
        ("chunk(0)", r"size=0 must be an integer from 1 to 2\*\*31 - 1"),
        ("dilated(0)", "stride=0"),
        ("neighbourhood(4, -1)", "radius=-1"),
        ("prefix(3000000000)", "length=3000000000"),
    ],
)
def test_words_that_name_no_mask_are_refused(words, reason):
    with pytest.raises(ValueError, match=reason) as error:
        masks.parse(words)
    assert "it is made of causal, chunk, dilated, documents" in str(error.value)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("mask", [*NAMED, OWN], ids=lambda mask: "own" if mask is OWN else str(mask))
def test_a_block_is_skipped_only_if_empty_and_unmasked_only_if_full(mask, traced):
    spec = dataclasses.replace(SPEC, mask_function=mask, query_length=44)

    def kinds(positions):
        layout = pad_layout(spec, Layout(query_positions=positions), 16, 8)
        return classify(spec, layout, 16, 8)

    found = np.asarray((jax.jit(kinds) if traced else kinds)(np.arange(44, dtype=np.int32)[None]))[0]
    seen = np.asarray(mask(Q[:44], K))
    for row, column in np.ndindex(3, 6):
        block = seen[16 * row : 16 * row + 16, 8 * column : 8 * column + 8]
        assert found[row, column] == (FULL if block.all() else PARTIAL if block.any() else SKIP), (row, column)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param(
            3, "mask_function=3 must be a hashable function of query and key positions", marks=pytest.mark.wrong_types
        ),
        (lambda _, k: k, r"gives int32 \(1, 3\) .* has to give bool \(2, 3\)"),
        (lambda _, k: k < 4, r"gives bool \(1, 3\) .* has to give bool \(2, 3\)"),
        (lambda _b, _h, q, k: k <= q, r"raises TypeError .* takes these two integer arrays"),
        (masks.Causal() | (lambda q, k: q > 3 and k > 3), "raises ValueError .*, and &, | and ~ for `and`"),
        (lambda q, k: np.arange(64)[k] <= q, "calls NumPy; .* tables have to be those of jax.numpy"),
    ],
    ids=["number", "positions", "one side", "four arguments", "and", "NumPy's table"],
)
def test_what_is_no_mask_function_is_refused(function, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SPEC, mask_function=function)


def test_a_mask_that_is_no_dataclass_has_no_words():
    class Odd(masks.Mask):
        def _shows(self, query, key):
            return (query - key) % 2 == 1

    assert masks.description_of(Odd() & masks.Causal()) is None


def test_a_function_may_stand_before_a_mask():
    positions = np.arange(9)[:, None], np.arange(9)
    both, either = (lambda q, k: q % 3 == k % 3) & masks.Causal(), (lambda q, k: q % 3 == k % 3) | masks.Causal()
    same, before = positions[0] % 3 == positions[1] % 3, positions[1] <= positions[0]
    np.testing.assert_array_equal(both(*positions), same & before)
    np.testing.assert_array_equal(either(*positions), same | before)


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match=r"join causal by &, | and ~ for `and`, `or` and `not`"):
        masks.Causal() and masks.Prefix(3)  # pyright: ignore[reportUnusedExpression]  (Python would take the second)


def test_a_function_of_a_traced_number_is_refused_in_a_sentence():
    def run(length):
        x = jnp.ones((1, 4, 1, 8))
        return attention(x, x, x, mask_function=masks.Causal() | (lambda q, k: q + k < length))

    with pytest.raises(
        ValueError, match=r"depends on a traced array.* go into mask, segment ids, positions or lengths"
    ):
        jax.jit(run)(3)


def test_a_function_of_jax_numpy_is_planned_inside_of_jit():
    x = draw(1, 160, 1, 8)
    far = masks.Where(lambda q, k: jnp.abs(q - k) % 5 < 2)

    def run(x, backend):
        return attention(x, x, x, mask_function=far & masks.Causal(), backend=backend)

    chunked, standard = (jax.jit(run, static_argnums=1)(x, name) for name in ("chunked", "standard"))
    np.testing.assert_allclose(chunked, standard, atol=1e-6)
