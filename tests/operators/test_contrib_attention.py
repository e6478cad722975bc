"""com.microsoft's attention operators against onnxruntime, over their masks, caches, biases and packings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from contrib_cases import close, compare, contrib, onnxruntimes, ours
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.registry import Unsupported
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(11)
BATCH, QUERIES, HEADS, SIZE, PAST = 2, 3, 2, 4, 2
HIDDEN = HEADS * SIZE


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def integers(*values) -> np.ndarray:
    return np.array(values, np.int32)


def masks(keys: int, queries: int = QUERIES) -> dict[str, np.ndarray | None]:
    """Every form of mask over `keys` keys for two sequences."""
    raw = np.ones((BATCH, keys), np.int32)
    raw[0, 0] = raw[1, -2:] = 0
    square = RNG.integers(0, 2, (BATCH, queries, keys)).astype(np.int32)
    square[:, :, 0] = 1
    return {
        "none": None,
        "lengths": integers(keys - 1, 2),
        "ends and starts": integers(keys, keys - 1, 1, 0),
        "packed": integers(keys - 1, 2, 0, 3, 6, 0, 4, 6),
        "raw": raw,
        "square": square,
    }


FORMS = ["none", "lengths", "ends and starts", "packed", "raw", "square"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("past", [0, PAST])
def test_attention_masks(form, unidirectional, past):
    cache = floats(2, BATCH, HEADS, past, SIZE) if past else None
    inputs = [floats(BATCH, QUERIES, 5), floats(5, 3 * HIDDEN), floats(3 * HIDDEN), masks(QUERIES + past)[form], cache]
    compare("Attention", inputs, outputs=2, num_heads=HEADS, unidirectional=unidirectional)


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.3}, {"mask_filter_value": -5.0}, {"qkv_hidden_sizes": [HIDDEN, HIDDEN, 2 * HIDDEN]}],
    ids=str,
)
@pytest.mark.parametrize("bias", ["none", "projection", "attention", "shared attention"])
def test_attention_options(options, bias):
    wide = sum(options.get("qkv_hidden_sizes", [HIDDEN] * 3))
    added = {"attention": floats(BATCH, HEADS, QUERIES, QUERIES), "shared attention": floats(1, 1, QUERIES, QUERIES)}
    inputs = [floats(BATCH, QUERIES, 5), floats(5, wide), floats(wide) if bias == "projection" else None]
    inputs += [masks(QUERIES)["raw"], None, added.get(bias)]
    compare("Attention", inputs, num_heads=HEADS, **options)


@pytest.mark.parametrize("dtype", [np.float16])
def test_attention_of_halves_is_computed_in_float32(dtype):
    x, w, b = (
        floats(BATCH, QUERIES, 5, dtype=dtype),
        floats(5, 3 * HIDDEN, dtype=dtype),
        floats(3 * HIDDEN, dtype=dtype),
    )
    options = {"num_heads": HEADS, "unidirectional": 1}
    (half,) = ours(contrib("Attention", [x, w, b], **options), [x, w, b])
    wide = [part.astype(np.float32) for part in (x, w, b)]
    (exact,) = ours(contrib("Attention", wide, **options), wide)
    np.testing.assert_array_equal(half, exact.astype(dtype))


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def heads_of(x: np.ndarray) -> np.ndarray:
    """[B, S, N * H] to [B, N, S, H] in float64."""
    return x.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3).astype(np.float64)


def rows_of(y: np.ndarray) -> np.ndarray:
    return y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)


def test_attention_with_the_square_mask_of_a_whole_cache():
    """Megatron's [B, 1, M, M]: onnxruntime's CPU refuses it."""
    x, w = floats(BATCH, QUERIES, 5), floats(5, 3 * HIDDEN)
    past, mask = floats(2, BATCH, HEADS, PAST, SIZE), np.tril(np.ones((BATCH, 1, 8, 8), np.int32))
    inputs = [x, w, None, mask, past]
    (y,) = ours(contrib("Attention", inputs, num_heads=HEADS), inputs)
    q, k, v = (heads_of(part) for part in np.split(x @ w, 3, axis=-1))
    k, v = (np.concatenate([old, new], 2) for old, new in zip(past, (k, v), strict=True))
    scores = q @ k.swapaxes(2, 3) / 2 + np.where(mask[:, :, PAST : PAST + QUERIES, : PAST + QUERIES], 0, -10000)
    np.testing.assert_allclose(y, rows_of(softmax(scores) @ v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("filled", [0, 2])
def test_attention_over_a_shared_buffer(filled):
    """onnxruntime's CPU writes no shared buffer: the same as its own cache cut to what is filled, put back."""
    x, w, buffer = floats(BATCH, QUERIES, 5), floats(5, 3 * HIDDEN), floats(2, BATCH, HEADS, 7, SIZE)
    shared = [x, w, None, None, buffer, None, integers(filled)]
    options = {"num_heads": HEADS, "unidirectional": 1}
    y, present = ours(contrib("Attention", shared, outputs=2, past_present_share_buffer=1, **options), shared)
    cut = [x, w, None, None, buffer[:, :, :, :filled]]
    expected, grown = ours(contrib("Attention", cut, outputs=2, **options), cut)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(present[:, :, :, : filled + QUERIES], grown)
    np.testing.assert_array_equal(present[:, :, :, filled + QUERIES :], buffer[:, :, :, filled + QUERIES :])


# -- MultiHeadAttention


@pytest.mark.parametrize("form", ["none", "lengths", "raw", "square"])
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("past", [0, PAST])
def test_multi_head_attention_masks(form, unidirectional, past):
    cache = [floats(BATCH, HEADS, past, SIZE), floats(BATCH, HEADS, past, SIZE)] if past else [None, None]
    inputs = [*(floats(BATCH, QUERIES, HIDDEN) for _ in range(3)), None, masks(QUERIES + past)[form], None, *cache]
    compare("MultiHeadAttention", inputs, outputs=3, num_heads=HEADS, unidirectional=unidirectional)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("added", [None, (BATCH, HEADS), (1, 1), (1, HEADS)])
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (1, 4), (4, 4)])
def test_multi_head_attention_to_other_keys(bias, added, queries, keys):
    wide = 3 * HEADS  # the values' heads have another size
    inputs = [floats(BATCH, queries, HIDDEN), floats(BATCH, keys, HIDDEN), floats(BATCH, keys, wide)]
    inputs += [floats(2 * HIDDEN + wide) if bias else None, None, floats(*added, queries, keys) if added else None]
    compare("MultiHeadAttention", inputs, num_heads=HEADS, scale=0.4)


@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention_to_the_cache_of_an_encoder(bias):
    inputs = [floats(BATCH, QUERIES, HIDDEN), floats(BATCH, HEADS, 5, SIZE), floats(BATCH, HEADS, 5, SIZE)]
    inputs += [floats(3 * HIDDEN) if bias else None]
    compare("MultiHeadAttention", inputs, num_heads=HEADS)


def test_multi_head_attention_gives_its_scores():
    inputs = [*(floats(BATCH, QUERIES, HIDDEN) for _ in range(3)), None, masks(QUERIES)["raw"]]
    compare("MultiHeadAttention", inputs, outputs=4, declared={3: 1}, num_heads=HEADS)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention_of_packed_projections(packed, bias):
    """onnxruntime's CPU refuses them: the same as the projections apart."""
    q, k, v = (floats(BATCH, QUERIES, HIDDEN) for _ in range(3))
    split = [part.reshape(BATCH, QUERIES, HEADS, SIZE) for part in (q, k, v)]
    shift = [floats(3 * HIDDEN)] if bias else [None]
    inputs = [np.stack(split, 3)] if packed == "qkv" else [q, np.stack(split[1:], 3), None]
    inputs += [None] * (3 - len(inputs)) + shift
    apart = [q, k, v, *shift]
    found = ours(contrib("MultiHeadAttention", inputs, num_heads=HEADS), inputs)
    expected = ours(contrib("MultiHeadAttention", apart, num_heads=HEADS), apart)
    np.testing.assert_array_equal(found[0], expected[0])


# -- DecoderMaskedMultiHeadAttention


@pytest.mark.parametrize(("mask", "added", "bias"), list(itertools.product([False, True], repeat=3)))
def test_decoder_masked_attention(mask, added, bias):
    """onnxruntime takes a shared buffer only."""
    keys = PAST + 1
    inputs = [floats(BATCH, 1, HIDDEN), floats(BATCH, 1, HIDDEN), floats(BATCH, 1, HIDDEN)]
    inputs += [masks(keys)["raw"] if mask else None, floats(1, HEADS, 1, keys) if added else None]
    inputs += [floats(BATCH, HEADS, 6, SIZE), floats(BATCH, HEADS, 6, SIZE)]
    inputs += [integers(PAST), None, None, floats(3 * HIDDEN) if bias else None]
    model = contrib("DecoderMaskedMultiHeadAttention", inputs, outputs=3, num_heads=HEADS, past_present_share_buffer=1)
    found, expected = ours(model, inputs), onnxruntimes(model, inputs)
    close(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        close(one[:, :, :keys], other[:, :, :keys])


def test_decoder_masked_attention_over_a_shared_buffer():
    inputs = [floats(BATCH, 1, HIDDEN), floats(BATCH, 1, HIDDEN), floats(BATCH, 1, HIDDEN), None, None]
    inputs += [floats(BATCH, HEADS, 6, SIZE), floats(BATCH, HEADS, 6, SIZE), integers(PAST)]
    model = contrib("DecoderMaskedMultiHeadAttention", inputs, outputs=3, num_heads=HEADS, past_present_share_buffer=1)
    y, key, _ = ours(model, inputs)
    cut = [*inputs[:5], inputs[5][:, :, :PAST], inputs[6][:, :, :PAST]]
    expected, grown, _ = ours(contrib("DecoderMaskedMultiHeadAttention", cut, outputs=3, num_heads=HEADS), cut)
    close(y, expected)
    np.testing.assert_array_equal(key, np.concatenate([grown, inputs[5][:, :, PAST + 1 :]], 2))


# -- refusals


@pytest.mark.parametrize(
    ("op_type", "count", "options", "why"),
    [
        ("Attention", 2, {"do_rotary": 1}, "do_rotary must be 0, not 1"),
        ("MultiHeadAttention", 10, {}, "cache_indirection is not supported"),
        ("DecoderMaskedMultiHeadAttention", 9, {}, "beam_width is not supported"),
        ("Attention", 2, {"window": 3}, "no attribute 'window'"),
        ("Attention", 5, {"past_present_share_buffer": 1}, "are supported together only"),
        ("Attention", 7, {}, "are supported together only"),
        ("DecoderMaskedMultiHeadAttention", 8, {}, "are supported together only"),
    ],
)
def test_what_is_not_supported_is_refused_before_running(op_type, count, options, why):
    inputs = [floats(1, 1, HIDDEN)] * count
    with pytest.raises(Unsupported, match=why):
        Runtime(contrib(op_type, inputs, num_heads=HEADS, **options), device="cpu")


def test_a_mask_that_does_not_fit_is_an_error():
    inputs = [floats(BATCH, QUERIES, 5), floats(5, 3 * HIDDEN), None, np.ones((BATCH, 9), np.int32)]
    with pytest.raises(Exception, match=r"mask of shape \[2, 9\] does not fit 3 keys"):
        ours(contrib("Attention", inputs, num_heads=HEADS), inputs)
