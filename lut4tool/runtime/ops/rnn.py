"""LSTM, GRU and RNN: one product for all inputs, then a loop over time for the recurrent part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lut4tool.runtime import dense, recurrent
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import op

Activation = Callable[[Any], Any]
Floats = Sequence[float] | None

# Each activation: its default alpha and beta (None: takes none) and f(xp, x, alpha, beta).
ACTIVATIONS: dict[str, tuple[float | None, float | None, Callable[..., Any]]] = {
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


def _activations(xp: Any, names: Sequence[str], alphas: Floats, betas: Floats) -> list[Activation]:
    """Return one function a name; alphas and betas are taken in order by the activations that have one."""
    alpha_left, beta_left = list(alphas or ()), list(betas or ())
    functions: list[Activation] = []
    for name in names:
        alpha, beta, function = ACTIVATIONS[name.lower()]
        if alpha is not None and alpha_left:
            alpha = alpha_left.pop(0)
        if beta is not None and beta_left:
            beta = beta_left.pop(0)
        functions.append(partial(function, xp, a=alpha, b=beta))
    return functions


@dataclass(frozen=True)
class Cell:
    """What one direction's steps are computed with: recurrent weights [H, gates * H], the biases and the options.

    multiply: the product of a state and the recurrent weights, or some columns of them.
    """

    xp: Any
    multiply: Callable[..., Any]
    recurrent: Any
    bias: Any
    peephole: Any
    activations: Sequence[Activation]
    clip: float | None
    flag: int

    def act(self, index: int, x: Any) -> Any:
        """An activation of a gate, its input bounded by `clip`."""
        return self.activations[index](self.xp.clip(x, -self.clip, self.clip) if self.clip else x)


def lstm_step(cell: Cell, x: Any, state: Any) -> Any:
    """One step from x [B, 4H] (i, o, f, c; biases added) and state (h, c), each [B, H]; flag: input_forget."""
    h, c = state
    size, gates = h.shape[-1], x + cell.multiply(h, cell.recurrent)
    new = cell.act(1, gates[:, 3 * size :])
    if cell.peephole is None:
        gates = cell.act(0, gates[:, : 3 * size])
        i, o, f = gates[:, :size], gates[:, size : 2 * size], gates[:, 2 * size :]
        c = (1 - i if cell.flag else f) * c + i * new
    else:
        p_i, p_o, p_f = cell.xp.split(cell.peephole, 3)
        i = cell.act(0, gates[:, :size] + p_i * c)
        f = 1 - i if cell.flag else cell.act(0, gates[:, 2 * size : 3 * size] + p_f * c)
        c = f * c + i * new
        o = cell.act(0, gates[:, size : 2 * size] + p_o * c)
    return o * cell.activations[2](c), c


def _gru_step(cell: Cell, x: Any, state: Any) -> Any:
    """One step from x [B, 3H] (z, r, h; all biases added but h's recurrent one) and (h,); flag: linear_before_reset."""
    (h,) = state
    both, bias = 2 * h.shape[-1], cell.bias[2 * h.shape[-1] :]
    if cell.flag:
        product = cell.multiply(h, cell.recurrent)
        gates = cell.act(0, x[:, :both] + product[:, :both])
        z, r = gates[:, : both // 2], gates[:, both // 2 :]
        new = cell.act(1, x[:, both:] + r * (product[:, both:] + bias))
    else:
        gates = cell.act(0, x[:, :both] + cell.multiply(h, cell.recurrent[:, :both]))
        z, r = gates[:, : both // 2], gates[:, both // 2 :]
        new = cell.act(1, x[:, both:] + cell.multiply(r * h, cell.recurrent[:, both:]) + bias)
    return ((1 - z) * new + z * h,)


def _rnn_step(cell: Cell, x: Any, state: Any) -> Any:
    """One step from x [B, H] (biases added) and state (h,)."""
    return (cell.act(0, x + cell.multiply(state[0], cell.recurrent)),)


def _multiply(xp: Any, x: Any, matrix: Any) -> Any:
    """Return x [..., I] @ matrix [I, gates * H]."""
    if xp is not np:
        return x @ matrix
    return dense.matmul(x.reshape(-1, x.shape[-1]), matrix).reshape(*x.shape[:-1], -1)


def _without_matrix(multiply: Activation) -> Callable[[Any, Any], Any]:
    return lambda x, _: multiply(x)


def usual(kind: str, node: Node) -> bool:
    """Whether the native library has a node's cell: sigmoid and tanh, and no option that changes a gate."""
    usual = ["sigmoid", "tanh", "tanh"] if kind == "lstm" else ["sigmoid", "tanh"]
    names, options = [name.lower() for name in node.attributes.get("activations") or ()], node.attributes
    peephole = len(node.given) > 7 and node.given[7]
    return names in ([], usual, 2 * usual) and not (options.get("clip") or options.get("input_forget") or peephole)


def _prepare(node: Node, general: Callable[..., Any]) -> Callable[..., Any] | None:
    """On a CPU an LSTM or a GRU in native code, its weights prepared where they are constant."""
    options = node.attributes
    kind = "gru_reset_after" if options.get("linear_before_reset") else node.op_type.lower()
    if not recurrent.available() or not usual(kind, node):
        return None
    backward, layout = options.get("direction") == "reverse", options.get("layout", 0)
    _, w, r, b = (*node.constants, None)[:4]
    given = len(node.given) > 3 and node.given[3]
    constant = (
        recurrent.layer(kind, w, r, b) if w is not None and r is not None and (b is not None or not given) else None
    )

    def run(x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None, *rest: Any) -> Any:
        layer = constant or recurrent.layer(kind, w, r, b)
        x_steps = x.swapaxes(0, 1) if layout else x
        if layer is None or not layer.serves(x_steps):
            return general(x, w, r, b, lengths, h, *rest)
        h, c = (None if s is None else s.swapaxes(0, 1) if layout else s for s in (h, *rest[:1], None)[:2])
        y, *last = layer(x_steps, h, c, lengths, backward)
        if not layout:
            return (y, *last)
        return (y.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in last))

    return run


def recur(
    step: Callable[[Cell, Any, Any], Any], x: Any, w: Any, r: Any, b: Any, lengths: Any, states: Sequence[Any], p: Any,
    *, names: Sequence[str], alphas: Floats, betas: Floats, clip: float | None, direction: str, layout: int,
    flag: int = 0, products: Sequence[tuple[Activation, Activation]] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run a cell over x [T, B, I] in each direction: Y [T, D, B, H] and each state [D, B, H] (layout 1: B first).

    products: for each direction what multiplies x and, in an LSTM, its state by the weights, in the place of w and r.
    Past a sequence's length its state stays and Y is 0; so a reverse direction starts at each sequence's own end.
    """
    like = x
    xp, x, w, r, b, p, *states = working(x, w, r, b, p, *states)
    if layout:
        x, states = xp.swapaxes(x, 0, 1), [None if s is None else xp.swapaxes(s, 0, 1) for s in states]
    steps, (directions, gates, hidden) = x.shape[0], r.shape
    functions = _activations(xp, names, alphas, betas)
    count = len(functions) // directions
    ends = None if lengths is None else [xp.array(lengths > t)[:, None] for t in range(steps)]
    outputs, finals = [], []
    for d in range(directions):
        w_bias, r_bias = (xp.zeros((gates,), dtype=x.dtype),) * 2 if b is None else (b[d, :gates], b[d, gates:])
        # The last recurrent bias of a GRU is added in its step: it may come under the reset gate.
        early = xp.where(xp.arange(gates) < 2 * hidden, r_bias, 0 * r_bias) if step is _gru_step else r_bias
        product, multiply = (None, None) if products is None else products[d]
        inputs = (_multiply(xp, x, w[d].T) if product is None else product(x)) + (w_bias + early)
        state = tuple(xp.zeros_like(inputs[0, :, :hidden]) if s is None else s[d] for s in states)
        backward = direction == "reverse" or d == 1
        act = functions[d * count : (d + 1) * count]
        recurrent = partial(_multiply, xp) if multiply is None else _without_matrix(multiply)
        cell = Cell(xp, recurrent, r[d].T, r_bias, None if p is None else p[d], act, clip, flag)
        sequence: list[Any] = [None] * steps
        for t in reversed(range(steps)) if backward else range(steps):
            new = step(cell, inputs[t], state)
            state = new if ends is None else tuple(xp.where(ends[t], a, s) for a, s in zip(new, state, strict=True))
            sequence[t] = state[0] if ends is None else xp.where(ends[t], new[0], xp.zeros_like(new[0]))
        outputs.append(xp.stack(sequence) if steps else inputs[..., :hidden])
        finals.append(state)
    y, last = xp.stack(outputs, 1), [xp.stack(parts) for parts in zip(*finals, strict=True)]
    if layout:
        y, last = xp.transpose(y, (2, 0, 1, 3)), [xp.swapaxes(s, 0, 1) for s in last]
    return tuple(finish(value, like) for value in (y, *last))


@op("LSTM", since=7, host=(4,), prepare=_prepare)
def lstm(
    x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None, initial_c: Any = None,
    p: Any = None, *, activation_alpha: Floats = None, activation_beta: Floats = None,
    activations: Sequence[str] | None = None, clip: float | None = None, direction: str = "forward",
    hidden_size: int | None = None, input_forget: int = 0, layout: int = 0,
) -> Any:  # fmt: skip
    """Gates i, o, f, c; peepholes i, o, f; `clip` bounds the gates' inputs, not the cell's, as onnxruntime does."""
    return recur(
        lstm_step, x, w, r, b, sequence_lens, (initial_h, initial_c), p,
        names=activations or ("Sigmoid", "Tanh", "Tanh") * r.shape[0], alphas=activation_alpha, betas=activation_beta,
        clip=clip, direction=direction, layout=layout, flag=input_forget,
    )  # fmt: skip


@op("GRU", since=7, host=(4,), prepare=_prepare)
def gru(
    x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None, *,
    activation_alpha: Floats = None, activation_beta: Floats = None, activations: Sequence[str] | None = None,
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None, layout: int = 0,
    linear_before_reset: int = 0,
) -> Any:  # fmt: skip
    """Gates z, r, h; `linear_before_reset` says whether the reset gate multiplies the state or its product."""
    return recur(
        _gru_step, x, w, r, b, sequence_lens, (initial_h,), None, names=activations or ("Sigmoid", "Tanh") * r.shape[0],
        alphas=activation_alpha, betas=activation_beta, clip=clip, direction=direction, layout=layout,
        flag=linear_before_reset,
    )  # fmt: skip


@op("RNN", since=7, host=(4,))
def rnn(
    x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None, *,
    activation_alpha: Floats = None, activation_beta: Floats = None, activations: Sequence[str] = ("Tanh", "Tanh"),
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None, layout: int = 0,
) -> Any:  # fmt: skip
    """One gate; MLX has no recurrent layer outside mlx.nn."""
    return recur(
        _rnn_step, x, w, r, b, sequence_lens, (initial_h,), None, names=activations, alphas=activation_alpha,
        betas=activation_beta, clip=clip, direction=direction, layout=layout,
    )  # fmt: skip
