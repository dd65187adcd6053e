"""Kascade in a whole model: the retrieval gate (controls: tests/suite/test_kascade.py), calibration, decoding, text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends.kascade import Calibration, Schedule, dynamic_programming, greedy, layer_similarity, manual
from attnsuite.models import load_shipped, load_text, next_token_loss, open_checkpoint, retrieval, save, streamed_nats
from attnsuite.models.config import ModelConfig
from attnsuite.models.forward_pass import forward
from attnsuite.models.kascade import calibration as calibration
from attnsuite.models.kascade.loss_search import schedule_by_loss, schedule_losses
from attnsuite.models.loss import token_nats
from attnsuite.models.planning import resolve_attention
from attnsuite.models.transformer import Transformer

pytestmark = pytest.mark.kascade

LENGTH, TILE = 256, 16
OPTIONS = {"top_k": 0.4, "min_keys": 0, "tile_size": TILE, "query_tile": TILE}
# In the gate: units enough for the four needles of a KV head, and hardly more. Where a layer attends to nothing in
# particular, rounding decides what it selects, and more units would find needles by chance.
FEW = OPTIONS | {"top_k": 0.26}
GAP = 48  # needles stand in most tiles


@pytest.fixture(scope="module")
def model():
    return retrieval.build(4, 32, 1, 2, context=1024)


@pytest.fixture(scope="module")
def batch():
    return retrieval.sample(np.random.default_rng(0), LENGTH, batch=8, gap=GAP)


@pytest.fixture(scope="module")
def measured(model) -> Calibration:
    rng = np.random.default_rng(1)
    return calibration.calibrate(model, [retrieval.sample(rng, LENGTH, gap=GAP).tokens[0] for _ in range(2)], FEW)


@pytest.mark.thorough
def test_a_checkpoint_read_layer_by_layer_gives_the_calibration_and_the_losses_of_the_whole_model(
    model, batch, measured, tmp_path
):
    save(model, tmp_path)
    checkpoint, rng = open_checkpoint(tmp_path), np.random.default_rng(1)
    prompts = [retrieval.sample(rng, LENGTH, gap=GAP).tokens[0] for _ in range(2)]
    streamed = calibration.calibrate(checkpoint, prompts, FEW)
    for name in ("mass_similarity", "jaccard_similarity", "importance", "mass"):
        np.testing.assert_allclose(getattr(streamed, name), getattr(measured, name), atol=1e-6, err_msg=name)
    schedule = dynamic_programming(streamed, 2)
    assert schedule == dynamic_programming(measured, 2)
    assert (streamed.fingerprint, streamed.settings) == (measured.fingerprint, measured.settings)
    call, some = {"backend": "kascade", "backend_options": FEW | {"schedule": schedule}}, batch.tokens[:1]
    whole = token_nats(model(some[:, :-1], needs_grad=False, **call), jnp.asarray(some[:, 1:]))
    np.testing.assert_allclose(streamed_nats(checkpoint, some, batch=1, **call), whole, atol=2e-4)
    # The search for a schedule by its loss, on the same checkpoint.
    crossed = Schedule(tuple(dataclasses.replace(x, head_map=x.head_map[::-1]) for x in schedule.layers))
    others = [
        manual(anchors, num_layers=4, kv_heads=2, calibration=streamed) for anchors in ((0, 2, 3), (0, 1, 3), (0, 1, 2))
    ]
    found, wrong, *losses = schedule_losses(checkpoint, some, [schedule, crossed, *others], FEW)
    assert found == pytest.approx(float(whole.mean()), abs=1e-4)
    assert abs(wrong - found) > 0.01
    assert np.ptp(losses) > 0.01
    best = others[int(np.argmin(losses))]
    assert schedule_by_loss(checkpoint, some, streamed, 3).anchors == best.anchors


def recall(model, batch, schedule, **options):
    call = {"backend": "kascade", "backend_options": FEW | {"schedule": schedule} | options}
    return retrieval.hits(model(batch.tokens, needs_grad=False, on_unavailable="raise", **call), batch).mean()


def test_by_single_keys_less_is_enough(model, batch):
    good = manual((0, 1), num_layers=4, kv_heads=2)  # layer 1 finds half of an answer, layer 2 reuses for the other
    assert recall(model, batch, good, granularity="token", top_k=0.1) == 1.0


def test_calibrated_schedules_pass_too(model, batch, measured):
    assert 1 not in greedy(measured).anchors  # its default threshold is below what flat layers reach
    schedule = dynamic_programming(measured, 2)
    assert greedy(measured, threshold=0.95).layers == schedule.layers
    assert 1 in schedule.anchors
    assert schedule.layers[2].role == "reuse"
    assert recall(model, batch, schedule) == 1.0


def test_calibration_sees_the_circuit(measured):
    similar = layer_similarity(measured.mass_similarity)
    assert similar[1, 2] > 0.95  # same queries and keys
    assert similar[0, 1] < 0.93  # layer 0 attends to nothing in particular
    assert measured.importance[[1, 2]].min() > 10 * max(measured.importance[[0, 3]].max(), 1e-9)
    assert measured.mass.shape == (4, 2, LENGTH // TILE)
    assert measured.mass.max() <= 1.0 + 1e-5
    heads = measured.mass_similarity[1, 2]
    assert heads[0, 0] > heads[1, 0]
    assert heads[1, 1] > heads[0, 1]


def small(**changes):
    config = ModelConfig.from_preset(
        "debug", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=32, **changes
    )
    return Transformer(config)


def test_calibration_agrees_with_the_definition():
    """Similarity and mass once more, in NumPy, from whole attention matrices."""
    model, tokens = small(), np.random.default_rng(0).integers(0, 256, 70)
    found = calibration.calibrate(model, [tokens], OPTIONS)
    probs = _attention_matrices(model, tokens)  # [layers, KV heads, queries, keys], summed over a group
    layers, heads, length, _ = probs.shape
    least = np.ones((layers, layers, heads, heads))
    overlaps, tiles = np.zeros_like(least), 0
    for tile in range(-(-length // TILE)):
        rows = probs[:, :, tile * TILE : (tile + 1) * TILE].sum(2)
        mass = np.stack([rows[..., u * TILE : (u + 1) * TILE].sum(-1) for u in range(tile)], -1) if tile else None
        if mass is None:
            continue
        own = rows.sum(-1) - mass.sum(-1)
        count = min(int(np.ceil(0.4 * tile - 1e-9)), tile)
        chosen = np.argsort(-mass, axis=-1, kind="stable")[..., :count]
        tiles += count < tile
        for a, b, ha, hb in np.ndindex(least.shape):
            on, alone = mass[b, hb][chosen[a, ha]].sum(), mass[b, hb][chosen[b, hb]].sum()
            least[a, b, ha, hb] = min(least[a, b, ha, hb], (on + own[b, hb]) / (alone + own[b, hb]))
            both, union = (set(chosen[a, ha]) & set(chosen[b, hb])), (set(chosen[a, ha]) | set(chosen[b, hb]))
            overlaps[a, b, ha, hb] += len(both) / len(union) * (count < tile)
    earlier = np.triu(np.ones((layers, layers)))[..., None, None]
    np.testing.assert_allclose(found.mass_similarity, least * earlier, atol=1e-5)
    np.testing.assert_allclose(found.jaccard_similarity, overlaps / tiles * earlier, atol=1e-5)
    assert found.mass_similarity[0, 1].min() < 0.999


@functools.partial(jax.jit, static_argnums=0)
def observed(config, params, tokens):
    """Queries, keys, the stream and what attention adds to it, of each layer."""
    seen = []
    found = resolve_attention(config, batch=1, query_length=len(tokens), backend="standard")
    observe = lambda _, *arrays: seen.append([x[0] for x in arrays])  # noqa: E731
    forward(config, params, tokens[None], resolutions=found, observe=observe)
    return seen


def _attention_matrices(model, tokens):
    seen = []
    for query, key, *_ in observed(model.config, model.arrays(), tokens):
        q, k = np.asarray(query, np.float64), np.repeat(np.asarray(key, np.float64), 2, axis=1)
        logits = np.einsum("tnh,snh->nts", q, k) * q.shape[-1] ** -0.5
        logits = np.where(np.tri(len(q), dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        seen.append(weights.reshape(2, 2, *weights.shape[1:]).sum(1))
    return np.stack(seen)


def test_a_function_of_queries_and_keys_is_calibrated_like_the_model_that_it_is_of():
    """A function without the stream cannot tell how much each layer changes it: that is 1."""
    model, prompts = small(), np.random.default_rng(0).integers(0, 256, (2, 70))

    def queries_and_keys(prompt, *, stream=False):
        return [layer if stream else layer[:2] for layer in observed(model.config, model.arrays(), prompt)]

    of_model = calibration.calibrate(model, prompts, OPTIONS)
    found = calibration.calibrate(queries_and_keys, prompts, OPTIONS)
    for name in ("mass_similarity", "jaccard_similarity", "mass"):
        np.testing.assert_allclose(getattr(found, name), getattr(of_model, name), atol=1e-5)
    assert (found.importance == 1).all()
    with_stream = calibration.calibrate(lambda prompt: queries_and_keys(prompt, stream=True), prompts, OPTIONS)
    np.testing.assert_allclose(with_stream.importance, of_model.importance, atol=1e-5)
    assert with_stream.fingerprint == found.fingerprint
    assert found.fingerprint != of_model.fingerprint
    assert dynamic_programming(found, 2).anchors[0] == 0
    with pytest.raises(ValueError, match=r"scale=1.0 is of a function"):
        calibration.calibrate(model, prompts, OPTIONS, scale=1.0)
    scaled = calibration.calibrate(queries_and_keys, prompts, OPTIONS, scale=4.0)
    assert np.abs(scaled.mass - found.mass).max() > 0.01


def test_prompts_are_averaged_one_at_a_time(model):
    rng = np.random.default_rng(3)
    prompts = [retrieval.sample(rng, length).tokens[0] for length in (128, 256)]
    both = calibration.calibrate(model, iter(prompts), FEW)
    alone = [calibration.calibrate(model, [prompt], FEW) for prompt in prompts]
    mean = np.mean([x.mass_similarity for x in alone], axis=0)
    np.testing.assert_allclose(both.mass_similarity, mean, atol=1e-6)
    np.testing.assert_allclose(both.mass[..., 8:], alone[1].mass[..., 8:], atol=1e-6)
    assert both.text == {"prompts": 2}


def test_a_calibration_is_for_its_model_only(tmp_path, model, measured):
    path = measured.save(tmp_path / "calibration")
    assert calibration.load(path, model).fingerprint == calibration.fingerprint(model)
    assert calibration.load(path, model.with_config(dtype="bfloat16"))  # the same model, computed otherwise
    for other in (retrieval.build(4, 32, 1, 2, context=1024, seed=1), retrieval.build(4, 32, 1, 3, context=1024)):
        with pytest.raises(ValueError, match="was calibrated on another model"):
            calibration.load(path, other)


def test_a_checkpoint_on_disk_has_the_fingerprint_of_its_model(tmp_path):
    for number, change in enumerate(({}, {"tie_embeddings": False, "param_dtype": "bfloat16"})):
        model = small(**change)
        save(model, tmp_path / str(number))
        assert calibration.fingerprint(open_checkpoint(tmp_path / str(number))) == calibration.fingerprint(model)


ZEROS = [np.zeros(100, int)]


@pytest.mark.parametrize(
    ("source", "prompts", "sentence"),
    [
        ({}, [], "no prompt to calibrate with"),
        ({}, [[[1, 2]]], r"shape \(1, 2\); expected one dimension"),
        ({}, ZEROS, "leaves no choice"),
        ({}, [np.full(100, 256)], "tokens reach from 256 to 256; this model has"),
        ({"attention": "sliding", "window_size": 8}, ZEROS, "layers with sliding attention"),
        ({"attention_sinks": True}, ZEROS, "attention mass is measured only with attention_sinks=False"),
        ({"logits_soft_cap": 5.0}, ZEROS, "has logits_soft_cap=5.0"),
        (lambda _: [1.0], ZEROS, "layer 0 gave no pair of arrays"),
        (lambda _: [], ZEROS, "there are none"),
        (
            lambda x: [(jnp.ones((len(x), 2, 8)),) * 2 + (jnp.ones((len(x), 16)),)],
            ZEROS,
            r"layer 0 gave \(100, 16\) behind its queries and keys; expected the stream and what attention adds",
        ),
        (
            lambda x: [(jnp.ones((len(x), 3, 8)), jnp.ones((9, 2, 8)))],
            ZEROS,
            r"layer 0 gave queries float32\[100, 3, 8\] and keys float32\[9, 2, 8\]; expected \[100, heads, head_dim\]",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused(source, prompts, sentence):
    with pytest.raises(ValueError, match=sentence):
        calibration.calibrate(small(**source) if isinstance(source, dict) else source, prompts)


@pytest.mark.parametrize(
    ("schedule", "changes", "sentence"),
    [
        (manual((0,), num_layers=4, kv_heads=2), {}, "the schedule is for 4 layers, and the model has 3"),
        (
            manual((0, 1), num_layers=3, kv_heads=2),
            {"attention": ("global", "sliding", "global"), "window_size": 8},
            r"layer 2 \(global attention\) of the schedule reuses the selection of layer 1 \(sliding\)",
        ),
    ],
)
def test_a_schedule_of_another_model_is_refused(schedule, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        small(**changes)(np.zeros((1, 40), int), backend="kascade", backend_options={"schedule": schedule})


def sparsely(**options):
    options = OPTIONS | {"schedule": manual((0, 1), num_layers=3, kv_heads=2)} | options
    return {"backend": "kascade", "backend_options": options, "on_unavailable": "raise"}


def test_decoding_equals_prefill_with_one_query_per_tile():
    """Teacher-forced, anchors reselecting at every step."""
    model, tokens = small(), np.random.default_rng(0).integers(0, 256, (2, 40))
    call = sparsely(top_k=0.4, query_tile=1, tile_size=8)
    whole = model(tokens, needs_grad=False, **call)
    dense = model(tokens, backend="standard", needs_grad=False)
    assert np.abs(whole - dense).max() > 1e-3
    cache = model.new_cache(2, 48)
    logits, cache = model.prefill(tokens[:, :30], cache, **call)
    np.testing.assert_allclose(logits, whole[:, :30], atol=1e-4)
    for at in range(30, 36):
        logits, cache = model.decode(tokens[:, at], cache, **call)
        np.testing.assert_allclose(logits, whole[:, at], atol=1e-4)


def test_a_second_prompt_behind_the_cache_is_as_one_prompt():
    model, tokens = small(), np.random.default_rng(0).integers(0, 256, (2, 40))
    call = sparsely(top_k=1.0)
    _, cache = model.prefill(tokens[:, :21], model.new_cache(2, 48), **call)
    logits, _ = model.prefill(tokens[:, 21:], cache, **call)
    dense = model(tokens, backend="standard", needs_grad=False)
    np.testing.assert_allclose(logits, dense[:, 21:], atol=1e-4)


@pytest.mark.thorough
def test_5_perplexity_is_of_a_working_model_over_many_tokens():
    """The earlier fork's 752,570 was one token's loss on a broken model, worse than guessing."""
    model = load_shipped()
    text = load_text().held_out[:512].reshape(1, -1).astype(int)
    options = OPTIONS | {"schedule": manual((0, 2), num_layers=4, kv_heads=2)}
    sparse = model(text, backend="kascade", backend_options=options, needs_grad=False, on_unavailable="raise")
    dense = model(text, backend="standard", needs_grad=False)
    losses = [float(next_token_loss(logits, jnp.asarray(text))) for logits in (dense, sparse)]
    guessing = float(np.log(model.config.vocab_size))
    assert max(losses) < 0.4 * guessing
    assert 0 < abs(losses[1] - losses[0]) < 0.2
    params = model.arrays()
    for layer in params["layers"]:
        layer["gate_proj"], layer["up_proj"] = layer["up_proj"], layer["gate_proj"]
    broken = Transformer(model.config, params)(text, backend="standard", needs_grad=False)
    assert float(next_token_loss(broken, jnp.asarray(text))) > 0.4 * guessing
