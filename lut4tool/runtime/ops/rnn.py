"""LSTM, GRU and RNN: one product for all inputs, then a loop over time for the recurrent part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.registry import op

# Each activation: its default alpha and beta (None: takes none) and f(xp, x, alpha, beta).
_ACTIVATIONS: dict[str, tuple[float | None, float | None, Callable[..., Any]]] = {
    "sigmoid": (None, None, lambda xp, x, a, b: 1 / (1 + xp.exp(-x))),
    "tanh": (None, None, lambda xp, x, a, b: xp.tanh(x)),
    "relu": (None, None, lambda xp, x, a, b: xp.maximum(x, 0)),
    "affine": (1.0, 0.0, lambda xp, x, a, b: a * x + b),
    "leakyrelu": (0.01, None, lambda xp, x, a, b: xp.where(x < 0, a * x, x)),
    "thresholdedrelu": (1.0, None, lambda xp, x, a, b: xp.where(x < a, 0 * x, x)),
    "scaledtanh": (1.0, 1.0, lambda xp, x, a, b: a * xp.tanh(b * x)),
    "hardsigmoid": (0.2, 0.5, lambda xp, x, a, b: xp.clip(a * x + b, 0, 1)),
    "elu": (1.0, None, lambda xp, x, a, b: xp.where(x < 0, a * (xp.exp(xp.minimum(x, 0)) - 1), x)),
    "softsign": (None, None, lambda xp, x, a, b: x / (1 + abs(x))),
    "softplus": (None, None, lambda xp, x, a, b: xp.logaddexp(x, 0 * x)),
}


def _activations(
    xp: Any, names: Sequence[str], alphas: Sequence[float] | None, betas: Sequence[float] | None, clip: float | None
) -> list[Callable[[Any], Any]]:
    """Return one function a name; alphas and betas are taken in order by the activations that have one."""
    alpha_left, beta_left = list(alphas or ()), list(betas or ())
    functions = []
    for name in names:
        alpha, beta, function = _ACTIVATIONS[name.lower()]
        if alpha is not None and alpha_left:
            alpha = alpha_left.pop(0)
        if beta is not None and beta_left:
            beta = beta_left.pop(0)

        def activate(
            x: Any, function: Any = function, alpha: Any = alpha, beta: Any = beta, clipped: bool = True
        ) -> Any:
            return function(xp, xp.clip(x, -clip, clip) if clip and clipped else x, alpha, beta)

        functions.append(activate)
    return functions


def _lstm_step(
    xp: Any, x: Any, state: Any, recurrent: Any, bias: Any, peephole: Any, act: Any, *, input_forget: int
) -> Any:
    """One step from x [B, 4H] (i, o, f, c; biases added) and state (h, c), each [B, H]."""
    h, c = state
    i, o, f, g = xp.split(x + h @ recurrent, 4, axis=-1)
    if peephole is not None:
        p_i, p_o, p_f = xp.split(peephole, 3, axis=-1)
        i, f = i + p_i * c, f + p_f * c
    i = act[0](i)
    f = 1 - i if input_forget else act[0](f)
    c = f * c + i * act[1](g)
    o = act[0](o + p_o * c if peephole is not None else o)
    return o * act[2](c, clipped=False), c


def _gru_step(
    xp: Any, x: Any, state: Any, recurrent: Any, bias: Any, _: Any, act: Any, *, linear_before_reset: int
) -> Any:
    """One step from x [B, 3H] (z, r, h; all biases added but the recurrent one of h) and state (h,)."""
    (h,) = state
    size = h.shape[-1]
    x_zr, x_h = x[..., : 2 * size], x[..., 2 * size :]
    bias_h = bias[2 * size :]
    if linear_before_reset:
        product = h @ recurrent
        z, r = xp.split(act[0](x_zr + product[..., : 2 * size]), 2, axis=-1)
        new = act[1](x_h + r * (product[..., 2 * size :] + bias_h))
    else:
        z, r = xp.split(act[0](x_zr + h @ recurrent[:, : 2 * size]), 2, axis=-1)
        new = act[1](x_h + (r * h) @ recurrent[:, 2 * size :] + bias_h)
    return ((1 - z) * new + z * h,)


def _rnn_step(xp: Any, x: Any, state: Any, recurrent: Any, bias: Any, _: Any, act: Any) -> Any:
    """One step from x [B, H] (biases added) and state (h,)."""
    return (act[0](x + state[0] @ recurrent),)


def _run(
    step: Callable[..., Any],
    x: Any,
    w: Any,
    r: Any,
    b: Any,
    lengths: Any,
    states: Sequence[Any],
    p: Any,
    names: Sequence[str],
    *,
    direction: str,
    layout: int,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
    **options: int,
) -> tuple[Any, ...]:
    """Run a cell over x [T, B, I] in each direction: Y [T, D, B, H] and each state [D, B, H] (layout 1: B first).

    Past a sequence's length its state stays and Y is 0; so a reverse direction starts at each sequence's own end.
    """
    like = x
    xp, x, w, r, b, p, *states = working(x, w, r, b, p, *states)
    if layout:
        x = xp.swapaxes(x, 0, 1)
        states = [None if s is None else xp.swapaxes(s, 0, 1) for s in states]
    steps, batch, hidden = x.shape[0], x.shape[1], r.shape[-1]
    gates, cell = r.shape[1], step is _gru_step
    names = list(activations or names * r.shape[0])
    count = len(names) // r.shape[0]
    functions = _activations(xp, names, activation_alpha, activation_beta, clip)
    ends = None if lengths is None else [(xp.asarray(lengths) > t)[:, None] for t in range(steps)]
    outputs, finals = [], []
    for d in range(r.shape[0]):
        w_bias, r_bias = (b[d, :gates], b[d, gates:]) if b is not None else (xp.zeros_like(r[d, :, 0]),) * 2
        kept = 2 * hidden if cell else gates  # a GRU's last recurrent bias may come after a product with the reset gate
        bias = w_bias + xp.concatenate([r_bias[:kept], xp.zeros_like(r_bias[kept:])])
        projected = x @ w[d].T + bias
        state = tuple(xp.zeros_like(projected[0, :, :hidden]) if s is None else s[d] for s in states)
        act = functions[d * count : (d + 1) * count]
        backward = direction == "reverse" or d == 1
        sequence: list[Any] = [None] * steps
        for t in reversed(range(steps)) if backward else range(steps):
            new = step(xp, projected[t], state, r[d].T, r_bias, None if p is None else p[d], act, **options)
            state = new if ends is None else tuple(xp.where(ends[t], a, s) for a, s in zip(new, state, strict=True))
            sequence[t] = state[0] if ends is None else xp.where(ends[t], new[0], 0 * new[0])
        outputs.append(xp.stack(sequence))
        finals.append(state)
    y = xp.stack(outputs, 1)
    last = [xp.stack(parts) for parts in zip(*finals, strict=True)]
    if layout:
        y, last = xp.transpose(y, (2, 0, 1, 3)), [xp.swapaxes(s, 0, 1) for s in last]
    return tuple(finish(value, like) for value in (y, *last))


@op("LSTM", since=7, host=(4,))
def lstm(
    x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None, initial_c: Any = None, p: Any = None,
    *, activation_alpha: Sequence[float] | None = None, activation_beta: Sequence[float] | None = None, activations: Sequence[str] | None = None,
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None, input_forget: int = 0, layout: int = 0,
) -> Any:  # fmt: skip
    """Gates i, o, f, c; peepholes i, o, f; `clip` bounds the gates' inputs, not the cell's, as onnxruntime does."""
    return _run(
        _lstm_step, x, w, r, b, sequence_lens, (initial_h, initial_c), p, ["Sigmoid", "Tanh", "Tanh"], direction=direction,
        layout=layout, activations=activations, activation_alpha=activation_alpha, activation_beta=activation_beta, clip=clip,
        input_forget=input_forget,
    )  # fmt: skip


@op("GRU", since=7, host=(4,))
def gru(
    x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None,
    *, activation_alpha: Sequence[float] | None = None, activation_beta: Sequence[float] | None = None, activations: Sequence[str] | None = None,
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None, layout: int = 0, linear_before_reset: int = 0,
) -> Any:  # fmt: skip
    """Gates z, r, h; `linear_before_reset` says whether the reset gate multiplies the state or its product."""
    return _run(
        _gru_step, x, w, r, b, sequence_lens, (initial_h,), None, ["Sigmoid", "Tanh"], direction=direction, layout=layout,
        activations=activations, activation_alpha=activation_alpha, activation_beta=activation_beta, clip=clip,
        linear_before_reset=linear_before_reset,
    )  # fmt: skip


@op("RNN", since=7, host=(4,))
def rnn(
    x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None,
    *, activation_alpha: Sequence[float] | None = None, activation_beta: Sequence[float] | None = None, activations: Sequence[str] = ("Tanh", "Tanh"),
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None, layout: int = 0,
) -> Any:  # fmt: skip
    """One gate; MLX has no recurrent layer outside mlx.nn."""
    return _run(
        _rnn_step, x, w, r, b, sequence_lens, (initial_h,), None, ["Tanh"], direction=direction, layout=layout,
        activations=activations, activation_alpha=activation_alpha, activation_beta=activation_beta, clip=clip,
    )  # fmt: skip
