"""com.microsoft's operators that carry a state from call to call: causal convolution and linear attention."""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

from lut4tool.runtime.ops.attention import split_heads
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.ops.contrib_attention import joined_heads, only
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import Unsupported, op

MICROSOFT = "com.microsoft"


def _windowed(xp: Any, states: list[Any], window: int) -> Any:
    """The last state of a call or, with a window, the last `window` ones, zeros for those before the call."""
    if not window:
        return states[-1]
    found = states[-window:]
    return xp.stack([xp.zeros_like(states[-1])] * (window - len(found)) + found)


def _conv_check(node: Node) -> None:
    """Refuse more than one dimension, other activations than silu, and the output state_update."""
    only(
        ndim=(1,), activation=("none", "silu", "swish"), state_update_capacity=(0,), state_channels_last=(-1,),
        state_length=(0,), input_channel_offset=(0,), input_channels=(0,),
    )(node)  # fmt: skip
    if node.attributes.get("dilation", 1) < 1:
        raise Unsupported(f"dilation must be at least 1, not {node.attributes['dilation']}")
    if node.outputs > 2:
        raise Unsupported("its output state_update is not supported")


@op("CausalConvWithState", domain=MICROSOFT, check=_conv_check)
def causal_conv_with_state(
    x: Any, weight: Any, bias: Any = None, past_state: Any = None, *, activation: str = "none", channels_last: int = 0,
    dilation: int = 1, input_channel_offset: int = 0, input_channels: int = 0, ndim: int = 1,
    state_channels_last: int = -1, state_length: int = 0, state_update_capacity: int = 0, state_window: int = 0,
) -> Any:  # fmt: skip
    """A depthwise Conv [B, C, L] of what the state holds and x; the state is the end of both, what the next call needs.

    channels_last: x and the state are [B, L, ...] with all axes from the third on as channels.
    """
    xp, data, kernel, shift, past = working(x, weight, bias, past_state)
    channels, steps = kernel.shape[0], data.shape[1 if channels_last else 2]
    length = (kernel.shape[-1] - 1) * dilation
    if channels != (prod(data.shape[2:]) if channels_last else data.shape[1]):
        raise ValueError(f"an input of shape {list(x.shape)} does not have {channels} channels")
    old = past[-1] if past is not None and state_window else past

    def inward(value: Any) -> Any:
        return xp.swapaxes(value.reshape(*value.shape[:2], -1), 1, 2) if channels_last else value

    def outward(value: Any) -> Any:
        shape = (value.shape[0], value.shape[2], *data.shape[2:])
        return xp.swapaxes(value, 1, 2).reshape(shape) if channels_last else value

    rows = inward(data)
    before = xp.zeros((rows.shape[0], channels, length), dtype=rows.dtype) if old is None else inward(old)
    if before.shape[2] != length:
        raise ValueError(f"the state holds {before.shape[2]} positions, not {length}")
    whole = xp.concatenate([before, rows], axis=2)
    taps = [kernel[:, 0, at, None] * whole[:, :, at * dilation :][:, :, :steps] for at in range(kernel.shape[-1])]
    y = sum(taps) if shift is None else sum(taps) + shift[:, None]
    y = y if activation == "none" else y / (1 + xp.exp(-y))
    ends = range(max(0, steps - state_window) if state_window else steps - 1, steps)
    states = [outward(whole[:, :, end + 1 : end + 1 + length]) for end in ends]
    return finish(outward(y), x), finish(_windowed(xp, states, state_window), x)


@op("CausalConvWithState", since=27)
def causal_convolution(
    x: Any, weight: Any, bias: Any = None, past_state: Any = None, *, activation: str = "none"
) -> Any:
    """The standard's is com.microsoft's of three dimensions, channels first."""
    return causal_conv_with_state(x, weight, bias, past_state, activation=activation)


def _attention_check(node: Node) -> None:
    """Refuse inputs that the update rule does not use, and rules without theirs."""
    only(update_rule=("gated_delta", "linear", "gated", "delta"))(node)
    rule, given = node.attributes.get("update_rule", "gated_delta"), (*node.given, *[False] * 6)
    for name, place, part in (("decay", 4, "gated"), ("beta", 5, "delta")):
        if part in rule and not given[place]:
            raise Unsupported(f"the update rule {rule} needs the input {name}")
        if part not in rule and given[place]:
            raise Unsupported(f"the update rule {rule} does not use its input {name}")


@op("LinearAttention", domain=MICROSOFT, check=_attention_check)
def linear_attention(
    query: Any, key: Any, value: Any, past_state: Any = None, decay: Any = None, beta: Any = None, *,
    chunk_size: int = 64, kv_num_heads: int, q_num_heads: int, scale: float = 0.0, state_window: int = 0,
    update_rule: str = "gated_delta",
) -> Any:  # fmt: skip
    """A state [B, H, K, V] takes in each key and value, fading by exp(decay), and answers each query.

    delta: what the state already says of the key is taken off the value, and beta says how much of it is written.
    chunk_size is another order of the same sums.
    """
    xp, q, k, v, past, fade, rate = working(query, key, value, past_state, decay, beta)
    q, k, v = split_heads(xp, q, q_num_heads), split_heads(xp, k, kv_num_heads), split_heads(xp, v, kv_num_heads)
    batch, heads, steps, size = k.shape
    q = q * (scale or 1 / sqrt(size))
    if past is None:
        state = xp.zeros((batch, heads, size, v.shape[3]), dtype=q.dtype)
    else:
        state = past[-1] if state_window else past
    fades = None if fade is None else xp.exp(split_heads(xp, fade, heads))[..., None]  # [B, H, T, K or 1, 1]
    rates = None if rate is None else xp.swapaxes(rate, 1, 2)[..., None]  # [B, H or 1, T, 1]
    outputs, states = list[Any](), list[Any]()
    for t in range(steps):
        state = state if fades is None else fades[:, :, t] * state
        new, column = v[:, :, t], k[:, :, t, :, None]
        if rates is not None:
            new = rates[:, :, t] * (new - xp.sum(column * state, axis=2))
        state = state + column * new[:, :, None]
        outputs.append(_answers(xp, q[:, :, t], state))
        states = [*states[1 - state_window :], state] if state_window > 1 else [state]
    y = joined_heads(xp, xp.stack(outputs, axis=2))
    like = query if past_state is None else past_state
    return finish(y, query), finish(_windowed(xp, states, state_window), like)


def _answers(xp: Any, q: Any, state: Any) -> Any:
    """Multiply q [B, N, K] by state [B, H, K, V], the fewer heads shared by groups of the more: [B, max(N, H), V]."""
    heads, states = q.shape[1], state.shape[1]
    if heads < states:
        q = xp.repeat(q, states // heads, axis=1)
    grouped = q.reshape(q.shape[0], states, -1, q.shape[2])
    return xp.matmul(grouped, state).reshape(q.shape[0], q.shape[1], -1)
