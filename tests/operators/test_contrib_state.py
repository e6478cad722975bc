"""com.microsoft's CausalConvWithState and LinearAttention against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from contrib_cases import close, compare, contrib, onnxruntimes, ours
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.registry import Unsupported
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(29)


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


CHANNELS = 6


@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_causal_conv(activation, bias, past, steps):
    inputs = [floats(2, CHANNELS, steps), floats(CHANNELS, 1, 4), floats(CHANNELS) if bias else None]
    inputs += [floats(2, CHANNELS, 3) if past else None]
    compare("CausalConvWithState", inputs, outputs=2, activation=activation)


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 4])
def test_causal_conv_with_dilations(dilation, steps):
    inputs = [floats(2, CHANNELS, steps), floats(CHANNELS, 1, 3), None, floats(2, CHANNELS, 2 * dilation)]
    compare("CausalConvWithState", inputs, outputs=2, dilation=dilation)


@pytest.mark.parametrize("channels", [(CHANNELS,), (2, 3)], ids=str)
def test_causal_conv_with_channels_last(channels):
    inputs = [floats(2, 5, *channels), floats(CHANNELS, 1, 4), floats(CHANNELS), floats(2, 3, *channels)]
    compare("CausalConvWithState", inputs, outputs=2, channels_last=1, activation="silu")


def prefixes(op_type: str, inputs: list, sequences: dict[int, int], window: int, **options) -> list[np.ndarray]:
    """onnxruntime's state after each of the last `window` steps, from calls that end there; zeros before the first.

    sequences: the inputs with a step axis, and that axis. Its own windows are for a GPU.
    """
    steps = inputs[0].shape[sequences[0]]
    states = []
    for end in range(steps - window + 1, steps + 1):
        cut = [
            np.take(part, range(end), axis=sequences[at]) if at in sequences and part is not None else part
            for at, part in enumerate(inputs)
        ]
        states.append(onnxruntimes(contrib(op_type, cut, outputs=2, **options), cut)[1] if end > 0 else None)
    return [np.zeros_like(states[-1]) if state is None else state for state in states]


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 4])
def test_causal_conv_windows(last, window, steps):
    x, state = floats(2, CHANNELS, steps), floats(window, 2, CHANNELS, 3)
    if last:
        x, state = x.swapaxes(1, 2).copy(), state.swapaxes(2, 3).copy()
    weight, options = floats(CHANNELS, 1, 4), {"channels_last": last}
    inputs, plain = [x, weight, None, state], [x, weight, None, state[-1]]
    y, present = ours(contrib("CausalConvWithState", inputs, outputs=2, state_window=window, **options), inputs)
    close(y, onnxruntimes(contrib("CausalConvWithState", plain, outputs=2, **options), plain)[0])
    expected = prefixes("CausalConvWithState", plain, {0: 1 if last else 2}, window, **options)
    close(present, np.stack(expected))


def test_causal_conv_of_halves_is_rounded_once():
    inputs = [floats(2, CHANNELS, 5, dtype=np.float16), floats(CHANNELS, 1, 4, dtype=np.float16)]
    model = contrib("CausalConvWithState", inputs, outputs=2)
    wide = [part.astype(np.float32) for part in inputs]
    exact = ours(contrib("CausalConvWithState", wide, outputs=2), wide)
    for one, other in zip(ours(model, inputs), exact, strict=True):
        np.testing.assert_array_equal(one, other.astype(np.float16))


def test_two_calls_equal_one():
    x, weight = floats(2, CHANNELS, 8), floats(CHANNELS, 1, 4)
    model = contrib("CausalConvWithState", [x, weight], outputs=2)
    whole, last = ours(model, [x, weight])
    first, state = ours(contrib("CausalConvWithState", [x[:, :, :5], weight], outputs=2), [x[:, :, :5], weight])
    rest = [x[:, :, 5:], weight, None, state]
    second, end = ours(contrib("CausalConvWithState", rest, outputs=2), rest)
    close(np.concatenate([first, second], 2), whole)
    close(end, last)


# -- LinearAttention


def linear(rule: str, heads: tuple[int, int], steps: int, past: bool, wide: bool = False, shared: bool = False) -> list:
    """Inputs of LinearAttention for (query, key-value) heads of 4 and 3 elements; keys are normalized."""
    queries, states = heads
    key = floats(2, steps, states, 4)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    inputs = [floats(2, steps, queries * 4), key.reshape(2, steps, -1), floats(2, steps, states * 3)]
    inputs += [floats(2, states, 4, 3) if past else None]
    inputs += [-np.abs(floats(2, steps, states * (4 if wide else 1))) if "gated" in rule else None]
    inputs += [RNG.random((2, steps, 1 if shared else states)).astype(np.float32) if "delta" in rule else None]
    return inputs


RULES = ["linear", "gated", "delta", "gated_delta"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("past", [False, True])
def test_linear_attention(rule, heads, steps, past):
    options = {"q_num_heads": heads[0], "kv_num_heads": heads[1], "update_rule": rule}
    compare("LinearAttention", linear(rule, heads, steps, past), outputs=2, declared={1: 1}, **options)


@pytest.mark.parametrize(("wide", "shared"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_linear_attention_gates(wide, shared, scale):
    inputs = linear("gated_delta", (2, 2), 5, True, wide, shared)
    compare("LinearAttention", inputs, outputs=2, q_num_heads=2, kv_num_heads=2, scale=scale)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_linear_attention_windows(window, steps):
    plain = linear("gated_delta", (2, 2), steps, True)
    inputs, options = [*plain], {"q_num_heads": 2, "kv_num_heads": 2}
    inputs[3] = np.concatenate([floats(window - 1, 2, 2, 4, 3), plain[3][None]])
    y, present = ours(contrib("LinearAttention", inputs, outputs=2, state_window=window, **options), inputs)
    close(y, onnxruntimes(contrib("LinearAttention", plain, outputs=2, **options), plain)[0])
    close(present, np.stack(prefixes("LinearAttention", plain, dict.fromkeys((0, 1, 2, 4, 5), 1), window, **options)))


def test_a_chunk_size_changes_nothing_but_the_order():
    inputs = linear("gated_delta", (2, 2), 9, True)
    options = {"q_num_heads": 2, "kv_num_heads": 2}
    found = ours(contrib("LinearAttention", inputs, outputs=2, chunk_size=4, **options), inputs)
    expected = onnxruntimes(contrib("LinearAttention", inputs, outputs=2, **options), inputs)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


# -- refusals


@pytest.mark.parametrize(
    ("op_type", "options", "why"),
    [
        ("CausalConvWithState", {"ndim": 2}, "ndim must be 1, not 2"),
        ("CausalConvWithState", {"activation": "relu"}, "activation must be none or silu or swish, not relu"),
        ("CausalConvWithState", {"state_length": 9}, "state_length must be 0, not 9"),
        ("LinearAttention", {"update_rule": "decay"}, "update_rule must be gated_delta or"),
        ("LinearAttention", {"update_rule": "gated"}, "the update rule gated needs the input decay"),
    ],
)
def test_what_is_not_supported_is_refused_before_running(op_type, options, why):
    inputs = [floats(2, CHANNELS, 4), floats(CHANNELS, 1, 4)]
    if op_type == "LinearAttention":
        inputs, options = linear("linear", (2, 2), 3, True), {"q_num_heads": 2, "kv_num_heads": 2, **options}
    with pytest.raises(Unsupported, match=why):
        Runtime(contrib(op_type, inputs, **options), device="cpu")


def test_a_state_of_another_length_is_an_error():
    inputs = [floats(2, CHANNELS, 4), floats(CHANNELS, 1, 4), None, floats(2, CHANNELS, 5)]
    with pytest.raises(Exception, match="the state holds 5 positions, not 3"):
        ours(contrib("CausalConvWithState", inputs, outputs=2), inputs)
