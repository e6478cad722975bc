"""com.microsoft's GroupQueryAttention and RotaryEmbedding against onnxruntime, over their caches and options."""

from __future__ import annotations

import numpy as np
import pytest
from contrib_cases import close, compare, contrib, onnxruntimes, ours
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.registry import Unsupported
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(13)
HEADS, GROUPS, SIZE = 4, 2, 32
CACHE = 12


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def gqa(
    batch: int, steps: int, past: int, buffer: int = 0, packed: bool = False, lengths: list[int] | None = None,
    tables: int = 0, dtype: type = np.float32,
) -> list:  # fmt: skip
    """Inputs of GroupQueryAttention: `past` filled keys in a buffer (0: of that size), tables of `tables` columns."""
    wide = (HEADS + 2 * GROUPS) * SIZE if packed else HEADS * SIZE
    inputs = [floats(batch, steps, wide, dtype=dtype)]
    inputs += [None, None] if packed else [floats(batch, steps, GROUPS * SIZE, dtype=dtype) for _ in range(2)]
    size = buffer or past
    inputs += [floats(batch, GROUPS, size, SIZE, dtype=dtype) if size else None for _ in range(2)]
    inputs += [np.array(lengths or [past + steps] * batch, np.int32) - 1, np.array([past + steps], np.int32)]
    angles = np.arange(CACHE)[:, None] / 10 ** (np.arange(tables) / 4) if tables else None
    return inputs + ([np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)] if tables else [None, None])


def check(inputs: list, rtol: float = 1e-5, atol: float = 1e-5, **options) -> None:
    """Compare what is specified: a prompt's own steps, and of each cache what is filled."""
    outputs = 4 if options.get("qk_output") else 3
    model = contrib("GroupQueryAttention", inputs, outputs=outputs, num_heads=HEADS, kv_num_heads=GROUPS, **options)
    found, expected = ours(model, inputs), onnxruntimes(model, inputs)
    prompt = inputs[0].shape[1] == inputs[6][0]
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    for index, length in enumerate(inputs[5] + 1):
        steps = slice(0, length) if prompt else slice(None)
        close(found[0][index, steps], expected[0][index, steps], rtol, atol)
        for one, other in zip(found[1:3], expected[1:3], strict=True):
            close(one[index, :, :length], other[index, :, :length], rtol, atol)
    if outputs == 4:
        close(found[3], expected[3], rtol, atol)


CALLS = {
    "prompt": {"batch": 2, "steps": 5, "past": 0},
    "padded prompt": {"batch": 3, "steps": 5, "past": 0, "lengths": [5, 2, 3]},
    "prompt into a buffer": {"batch": 2, "steps": 5, "past": 0, "buffer": 9},
    "token": {"batch": 2, "steps": 1, "past": 4},
    "token into a buffer": {"batch": 2, "steps": 1, "past": 4, "buffer": 9},
    "tokens of different pasts": {"batch": 3, "steps": 1, "past": 4, "lengths": [5, 2, 4], "buffer": 9},
    "chunk": {"batch": 1, "steps": 3, "past": 4},
    "chunk into a buffer": {"batch": 1, "steps": 3, "past": 4, "buffer": 9},
}
call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@call
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotary", [None, 0, 1])
def test_calls(call, packed, rotary):
    options = {} if rotary is None else {"do_rotary": 1, "rotary_interleaved": rotary}
    check(gqa(**call, packed=packed, tables=0 if rotary is None else SIZE // 2), **options)


OPTIONS = [
    {"local_window_size": 1},
    {"local_window_size": 3},
    {"softcap": 1.5},
    {"smooth_softmax": 1},
    {"scale": 0.7},
    {"causal": 0},
    {"softcap": 0.8, "local_window_size": 2, "smooth_softmax": 1, "scale": 1.3},
]


@call
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(call, options):
    check(gqa(**call), **options)


@call
@pytest.mark.parametrize("shape", [(1, 1), (1, HEADS), ("batch", HEADS), ("batch", 1)], ids=str)
def test_attention_bias(call, shape):
    inputs = gqa(**call)
    batch = call["batch"] if shape[0] == "batch" else 1
    bias = floats(batch, shape[1], call["steps"], call["past"] + call["steps"])
    check([*inputs, None, bias], softcap=1.1)


@call
def test_head_sink(call):
    check([*gqa(**call), None, None, floats(HEADS)])


@call
def test_half_of_a_head_turns(call):
    check(gqa(**call, tables=SIZE // 4), do_rotary=1)


@call
def test_positions_are_an_input(call):
    batch, steps = call["batch"], call["steps"]
    positions = RNG.integers(0, CACHE - steps, (batch, steps)).astype(np.int64)
    if steps > 1 and not call["past"]:
        positions[:] = 3 + np.arange(steps)  # a prompt's first position is the only one that counts
    check([*gqa(**call, tables=SIZE // 2), positions], do_rotary=1)


@pytest.mark.parametrize("qk_output", [1, 2])
@pytest.mark.parametrize("call", ["prompt", "token", "chunk"])
def test_scores_come_out(qk_output, call):
    inputs = gqa(**CALLS[call])
    options = {"num_heads": HEADS, "kv_num_heads": GROUPS, "qk_output": qk_output, "softcap": 1.2}
    model = contrib("GroupQueryAttention", inputs, outputs=4, **options)
    one, other = ours(model, inputs)[3], onnxruntimes(model, inputs)[3]
    if qk_output == 1:  # onnxruntime leaves scores there that causality hides
        other = np.where(np.isfinite(one), other, -np.inf)
    close(one, other)


@call
def test_halves(call):
    check(gqa(**call, dtype=np.float16, tables=SIZE // 2), rtol=2e-3, atol=2e-3, do_rotary=1)


# -- what onnxruntime's CPU lacks, against NumPy


def numpy_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """[B, S, N * H] from q [B, N, S, H], k and v [B, G, T, H] in float64."""
    k, v = (np.repeat(part, HEADS // GROUPS, axis=1) for part in (k, v))
    scores = np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(SIZE), -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    y = powers / powers.sum(-1, keepdims=True) @ v
    return y.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2).astype(np.float64)


@pytest.mark.parametrize(
    "epsilons", [{}, {"q_norm_epsilon": 0.1, "k_norm_epsilon": 0.2}, {"qk_norm_epsilon": 0.3}], ids=str
)
def test_queries_and_keys_are_normalized_a_head(epsilons):
    inputs = [*gqa(2, 4, 0), *[None] * 5, 1 + floats(SIZE), 1 + floats(SIZE)]
    (y,) = ours(contrib("GroupQueryAttention", inputs, num_heads=HEADS, kv_num_heads=GROUPS, **epsilons), inputs)
    q, k, v = heads_of(inputs[0], HEADS), heads_of(inputs[1], GROUPS), heads_of(inputs[2], GROUPS)
    common = epsilons.get("qk_norm_epsilon", 1e-6)
    q = q / np.sqrt((q * q).mean(-1, keepdims=True) + epsilons.get("q_norm_epsilon", common)) * inputs[14]
    k = k / np.sqrt((k * k).mean(-1, keepdims=True) + epsilons.get("k_norm_epsilon", common)) * inputs[15]
    np.testing.assert_allclose(y, numpy_attention(q, k, v, np.tri(4, dtype=bool)), rtol=1e-5, atol=1e-5)


def test_a_padded_chunk_equals_the_chunk_without_its_padding():
    """query_seqlens: rows after it are padding; each sequence against its own call."""
    inputs, valid = gqa(2, 3, 4, buffer=CACHE, lengths=[7, 5]), [3, 2]
    inputs = [*inputs, *[None] * 7, np.array(valid, np.int32)]
    inputs[6] = np.array([CACHE], np.int32)
    options = {"num_heads": HEADS, "kv_num_heads": GROUPS}
    y, key, value = ours(contrib("GroupQueryAttention", inputs, outputs=3, **options), inputs)
    for index, (end, steps) in enumerate(zip([7, 5], valid, strict=True)):
        row, start = slice(index, index + 1), end - steps
        alone = [part[row, :steps] for part in inputs[:3]] + [part[row, :, :start] for part in inputs[3:5]]
        alone += [np.array([end - 1], np.int32), np.array([end], np.int32)]
        expected = ours(contrib("GroupQueryAttention", alone, outputs=3, **options), alone)
        close(y[row, :steps], expected[0])
        close(key[row, :, :end], expected[1])
        close(value[row, :, :end], expected[2])


# -- RotaryEmbedding


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("form", ["[B, S, N * H]", "[B, N, S, H]"])
@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("positions", ["all", "first"])
def test_rotary_embedding(interleaved, form, part, positions):
    x = floats(2, 3, HEADS * SIZE) if form == "[B, S, N * H]" else floats(2, HEADS, 3, SIZE)
    columns = (part or SIZE) // 2
    at = RNG.integers(0, CACHE, (2, 3)) if positions == "all" else np.array([4])
    options = {"rotary_embedding_dim": part, "num_heads": HEADS} if part else {}
    inputs = [x, at.astype(np.int64), floats(CACHE, columns), floats(CACHE, columns)]
    compare("RotaryEmbedding", inputs, interleaved=interleaved, **options)


# -- refusals


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"k_quant_type": "PER_TENSOR"}, "k_quant_type must be NONE, not PER_TENSOR"),
        ({"sliding_window_cache": 1, "local_window_size": 4}, "sliding_window_cache must be 0"),
        ({"kv_num_heads": 3}, "must be a multiple of kv_num_heads 3"),
        ({"causal": 0, "local_window_size": 4}, "local_window_size must be -1"),
        ({"qk_output": 3}, "qk_output must be 0 or 1 or 2, not 3"),
        ({"outputs": 4}, "output_qk needs qk_output 1 or 2"),
        ({"do_rotary": 1}, "do_rotary needs the inputs cos_cache and sin_cache"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_before_running(options, why):
    inputs = gqa(1, 2, 0)
    with pytest.raises(Unsupported, match=why):
        Runtime(
            contrib("GroupQueryAttention", inputs, **{"num_heads": HEADS, "kv_num_heads": GROUPS, **options}),
            device="cpu",
        )


def test_scale_of_rotary_embedding_is_refused():
    """onnxruntime takes it and does nothing with it."""
    inputs = [floats(2, 3, 8), np.array([0]), floats(CACHE, 4), floats(CACHE, 4)]
    with pytest.raises(Unsupported, match=r"scale must be 1\.0, not 2\.0"):
        Runtime(contrib("RotaryEmbedding", inputs, scale=2.0), device="cpu")


@pytest.mark.parametrize("position", [CACHE, -1])
def test_a_position_outside_the_tables_is_an_error(position):
    inputs = [floats(1, 1, 8), np.array([[position]]), floats(CACHE, 4), floats(CACHE, 4)]
    with pytest.raises(Exception, match=str(position)):
        ours(contrib("RotaryEmbedding", inputs), inputs)
