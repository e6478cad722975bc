"""com.microsoft's operators on quantized tensors: QLinear*, and products of integers that give floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
from onnx import TensorProto

from lut4tool.runtime import int8, recurrent
from lut4tool.runtime.dtypes import on_host
from lut4tool.runtime.ops.compute import finish, numpy_type, working
from lut4tool.runtime.ops.contrib_attention import only, self_attention
from lut4tool.runtime.ops.math import coerced
from lut4tool.runtime.ops.pool import average_pool
from lut4tool.runtime.ops.products import integer_product
from lut4tool.runtime.ops.quantization import (
    dequantize_linear,
    dynamic_quantize_linear,
    qlinear_conv,
    quantize_linear,
    to_integers,
)
from lut4tool.runtime.ops.rnn import lstm, lstm_step, recur, usual
from lut4tool.runtime.ops.window import Ints
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import REQUIRED, Unsupported, op

MICROSOFT = "com.microsoft"


@op("QuantizeLinear", domain=MICROSOFT)
def quantize_linear_of_more_types(x: Any, y_scale: Any, y_zero_point: Any = None, *, axis: int | None = None) -> Any:
    """The standard's, but halves are divided in float32, and a scale of rank 1 needs an axis."""
    return quantize_linear(x, y_scale, y_zero_point, axis=_axis(axis, y_scale), precision=TensorProto.FLOAT)


@op("DequantizeLinear", domain=MICROSOFT)
def dequantize_linear_of_more_types(x: Any, x_scale: Any, x_zero_point: Any = None, *, axis: int | None = None) -> Any:
    """The standard's, but a scale of rank 1 needs an axis."""
    return dequantize_linear(x, x_scale, x_zero_point, axis=_axis(axis, x_scale))


def _axis(axis: int | None, scale: Any) -> int:
    if axis is None and scale.size > 1:
        raise ValueError(f"a scale of {scale.size} values needs the attribute axis")
    return 1 if axis is None else axis


# -- one float function between dequantizing and quantizing


def _real(xp: Any, q: Any, scale: Any, zero: Any) -> Any:
    """The float32 numbers that a quantized tensor stands for."""
    steps = q.astype(xp.float32)
    return (steps if zero is None else steps - _one(zero).astype(xp.float32)) * _one(scale)


def _one(value: Any) -> Any:
    """A scalar that may come as [1]."""
    return value.reshape(()) if value.size == 1 else value


def _requantized(xp: Any, y: Any, like: Any, scale: Any, zero: Any) -> Any:
    """Floats in steps of `scale`, half to even, saturated in the type of `like`."""
    steps = xp.round(y / _one(scale))
    return to_integers(xp, steps if zero is None else steps + _one(zero).astype(xp.float32), numpy_type(like))


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def run(
        a: Any, a_scale: Any, a_zero_point: Any = None, b: Any = REQUIRED, b_scale: Any = REQUIRED,
        b_zero_point: Any = None, c_scale: Any = REQUIRED, c_zero_point: Any = None,
    ) -> Any:  # fmt: skip
        xp, *ready = working(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point)
        return _requantized(xp, function(_real(xp, *ready[:3]), _real(xp, *ready[3:6])), a, *ready[6:])

    return run


op("QLinearAdd", domain=MICROSOFT)(_binary(lambda a, b: a + b))
op("QLinearMul", domain=MICROSOFT)(_binary(lambda a, b: a * b))


def _unary(function: Callable[[Any, Any], Any], *values: Any) -> Any:
    """Apply function(xp, floats) to x, scale, zero point, and quantize by the scale and zero point after them."""
    xp, *ready = working(*values)
    return _requantized(xp, function(xp, _real(xp, *ready[:3])), values[0], *ready[3:])


@op("QLinearSigmoid", domain=MICROSOFT)
def qlinear_sigmoid(
    x: Any, x_scale: Any, x_zero_point: Any = None, y_scale: Any = REQUIRED, y_zero_point: Any = None
) -> Any:
    """Sigmoid of what x stands for."""
    return _unary(lambda xp, x: 1 / (1 + xp.exp(-x)), x, x_scale, x_zero_point, y_scale, y_zero_point)


@op("QLinearLeakyRelu", domain=MICROSOFT)
def qlinear_leaky_relu(
    x: Any, x_scale: Any, x_zero_point: Any = None, y_scale: Any = REQUIRED, y_zero_point: Any = None, *,
    alpha: float = 0.01,
) -> Any:  # fmt: skip
    """LeakyRelu of what x stands for."""
    return _unary(lambda xp, x: xp.where(x < 0, alpha * x, x), x, x_scale, x_zero_point, y_scale, y_zero_point)


@op("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(
    x: Any, x_scale: Any, x_zero_point: Any = None, y_scale: Any = REQUIRED, y_zero_point: Any = REQUIRED, *,
    axis: int = -1, opset: int,
) -> Any:  # fmt: skip
    """Softmax of what x stands for, of all axes from `axis` on where `opset` is below 13."""

    def rows(xp: Any, x: Any) -> Any:
        data, along = (coerced(x, axis), -1) if opset < 13 else (x, axis)
        powers = xp.exp(data - data.max(axis=along, keepdims=True))
        return (powers / powers.sum(axis=along, keepdims=True)).reshape(x.shape)

    return _unary(rows, x, x_scale, x_zero_point, y_scale, y_zero_point) if x.size else x


@op("QLinearWhere", domain=MICROSOFT)
def qlinear_where(
    condition: Any, x: Any, x_scale: Any, x_zero_point: Any, y: Any, y_scale: Any, y_zero_point: Any, z_scale: Any,
    z_zero_point: Any,
) -> Any:  # fmt: skip
    """Where, each side brought to the result's scale."""
    xp, chosen, *ready = working(
        condition, x, x_scale, x_zero_point, y, y_scale, y_zero_point, z_scale, z_zero_point
    )  # fmt: skip
    return _requantized(xp, xp.where(chosen, _real(xp, *ready[:3]), _real(xp, *ready[3:6])), x, *ready[6:])


@op("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(y_scale: Any, y_zero_point: Any, *inputs: Any, axis: int) -> Any:
    """Inputs come as tensor, scale and zero point, each brought to the result's scale."""
    xp, scale, zero, *ready = working(y_scale, y_zero_point, *inputs)
    parts = [_real(xp, *ready[at : at + 3]) for at in range(0, len(ready), 3)]
    return _requantized(xp, xp.concatenate(parts, axis=axis), y_zero_point, scale, zero)


def _channels_first(xp: Any, x: Any, channels_last: int) -> Any:
    return xp.moveaxis(x, -1, 1) if channels_last else x


def _channels_back(xp: Any, x: Any, channels_last: int) -> Any:
    return xp.moveaxis(x, 1, -1) if channels_last else x


@op("QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_global_average_pool(
    x: Any, x_scale: Any, x_zero_point: Any, y_scale: Any, y_zero_point: Any, *, channels_last: int = 0
) -> Any:
    """The mean of each channel, which may be the last axis."""
    axes = tuple(range(1, x.ndim - 1) if channels_last else range(2, x.ndim))
    return _unary(lambda xp, x: xp.mean(x, axis=axes, keepdims=True), x, x_scale, x_zero_point, y_scale, y_zero_point)


@op("QLinearAveragePool", domain=MICROSOFT)
def qlinear_average_pool(
    x: Any, x_scale: Any, x_zero_point: Any = None, y_scale: Any = REQUIRED, y_zero_point: Any = None, *,
    auto_pad: str = "NOTSET", ceil_mode: int = 0, channels_last: int = 0, count_include_pad: int = 0,
    kernel_shape: Sequence[int], pads: Ints = None, strides: Ints = None,
) -> Any:  # fmt: skip
    """AveragePool of what x stands for; its channels may be the last axis."""

    def pooled(xp: Any, x: Any) -> Any:
        y = average_pool(
            _channels_first(xp, x, channels_last), auto_pad=auto_pad, ceil_mode=ceil_mode, pads=pads, strides=strides,
            count_include_pad=count_include_pad, kernel_shape=kernel_shape,
        )  # fmt: skip
        return _channels_back(xp, working(y)[1], channels_last)

    return _unary(pooled, x, x_scale, x_zero_point, y_scale, y_zero_point)


@op("QLinearConv", domain=MICROSOFT, host=tuple(range(9)))
def qlinear_conv_of_any_layout(
    x: Any, x_scale: Any, x_zero_point: Any, w: Any, w_scale: Any, w_zero_point: Any, y_scale: Any, y_zero_point: Any,
    b: Any = None, *, auto_pad: str = "NOTSET", channels_last: int = 0, dilations: Ints = None, group: int = 1,
    kernel_shape: Ints = None, pads: Ints = None, strides: Ints = None,
) -> Any:  # fmt: skip
    """The standard's, whose channels may be the last axis of x and y."""
    y = qlinear_conv(
        _channels_first(np, x, channels_last), x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point,
        b, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides,
    )  # fmt: skip
    xp, whole = working(y)
    return finish(_channels_back(xp, whole, channels_last), y)


# -- products of integers


def _scaled_product(a: Any, b: Any, a_scale: Any, b_scale: Any, a_zero: Any, b_zero: Any, bias: Any) -> tuple[Any, Any]:
    """Return (xp, the exact integer product times both scales in float32 plus a bias)."""
    xp, total, left, right, added = working(integer_product(a, b, a_zero, b_zero), a_scale, b_scale, bias)
    y = total.astype(xp.float32) * (_one(left) * _one(right))
    return xp, y if added is None else y + added


def _packed_matrix(node: Node, matrix: int, zero: int) -> int8.Product | None:
    """A constant matrix and its zero points, packed; None where they are not constant, or NumPy must multiply."""
    b, offset = node.constants[matrix], (*node.constants, *[None] * 6)[zero]
    if b is None or (offset is None and len(node.given) > zero and node.given[zero]):
        return None
    packed = int8.pack(b, offset)
    return None if packed is None else int8.Product(packed, integer_product)


def _prepare_scaled(node: Node, general: Callable[..., Any]) -> Callable[..., Any] | None:
    product = _packed_matrix(node, 1, 5)
    if product is None or node.types[2] != "tensor(float)":
        return None

    def run(
        a: Any, b: Any, a_scale: Any, b_scale: Any, a_zero: Any = None, b_zero: Any = None, bias: Any = None
    ) -> Any:
        y = product.times(np.asarray(_one(a_scale) * _one(b_scale)), a, b, a_zero)
        return y if bias is None else y + bias

    return run


def _prepare_dynamic(node: Node, general: Callable[..., Any]) -> Callable[..., Any] | None:
    product = _packed_matrix(node, 1, 3)
    if product is None:
        return None

    def run(a: Any, b: Any, b_scale: Any, b_zero: Any = None, bias: Any = None) -> Any:
        steps, a_scale, a_zero = dynamic_quantize_linear(a)
        y = product.times(np.asarray(a_scale * _one(b_scale)), steps, b, a_zero)
        return y if bias is None else y + bias

    return run


@op("MatMulIntegerToFloat", domain=MICROSOFT, prepare=_prepare_scaled)
def matmul_integer_to_float(
    a: Any, b: Any, a_scale: Any, b_scale: Any, a_zero_point: Any = None, b_zero_point: Any = None, bias: Any = None
) -> Any:
    """MatMulInteger times both scales, one for all or one a column of b, plus a bias."""
    _, y = _scaled_product(a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias)
    return finish(y, a_scale)


@op("DynamicQuantizeMatMul", domain=MICROSOFT, prepare=_prepare_dynamic)
def dynamic_quantize_matmul(a: Any, b: Any, b_scale: Any, b_zero_point: Any = None, bias: Any = None) -> Any:
    """MatMulIntegerToFloat of a after DynamicQuantizeLinear."""
    steps, a_scale, a_zero = dynamic_quantize_linear(a)
    _, y = _scaled_product(steps, b, a_scale, b_scale, a_zero, b_zero_point, bias)
    return finish(y, a)


@op("QGemm", domain=MICROSOFT)
def qgemm(
    a: Any, a_scale: Any, a_zero_point: Any, b: Any, b_scale: Any, b_zero_point: Any, c: Any = None,
    y_scale: Any = None, y_zero_point: Any = None, *, alpha: float = 1.0, transA: int = 0, transB: int = 0,
) -> Any:  # fmt: skip
    """Gemm with an int32 c in units of the product's; a float32 result without y_scale and y_zero_point."""
    total = integer_product(a.T if transA else a, b.T if transB else b, a_zero_point, b_zero_point)
    xp, whole, added, left, right, scale, zero = working(total, c, a_scale, b_scale, y_scale, y_zero_point)
    whole = whole if added is None else whole + added
    y = whole.astype(xp.float32) * (alpha * _one(left) * _one(right))
    return finish(y, a_scale) if scale is None else _requantized(xp, y, y_zero_point, scale, zero)


@op("QAttention", domain=MICROSOFT, host=(5,), check=only(do_rotary=(0,), past_present_share_buffer=(0,)))
def qattention(
    x: Any, weight: Any, bias: Any, input_scale: Any, weight_scale: Any, mask_index: Any = None,
    input_zero_point: Any = None, weight_zero_point: Any = None, past: Any = None, *, do_rotary: int | None = None,
    mask_filter_value: float | None = None, num_heads: int, past_present_share_buffer: int | None = None,
    scale: float | None = None, unidirectional: int = 0, outputs: int = 1,
) -> Any:  # fmt: skip
    """Attention whose projections are a MatMulIntegerToFloat."""
    _, qkv = _scaled_product(x, weight, input_scale, weight_scale, input_zero_point, weight_zero_point, bias)
    xp, old = working(past)
    return self_attention(
        xp, qkv, input_scale, mask_index, old, None, None, heads=num_heads, sizes=None, scale=scale,
        unidirectional=unidirectional, fill=mask_filter_value, outputs=outputs,
    )  # fmt: skip


# -- DynamicQuantizeLSTM


@op("DynamicQuantizeLSTM", domain=MICROSOFT, host=(4,), planned=True)
def dynamic_quantize_lstm(node: Node) -> Callable[..., Any]:
    """LSTM with quantized weights [D, I or H, 4 * H]; its inputs, and its state in each step, are rounded to 8 bits.

    On a CPU constant weights are packed, and their products are those of integers.
    """
    options: dict[str, Any] = {"direction": "forward", "input_forget": 0, "clip": None, "activation_alpha": None}
    options |= {"activation_beta": None, "activations": None, "hidden_size": None, **node.attributes}
    if unknown := sorted(set(options) - set(signature(lstm).parameters)):
        raise Unsupported(f"it has no attribute '{unknown[0]}' that is supported")
    layer = _packed(node) if on_host() and usual("lstm", node) else None

    def run(
        x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None, initial_c: Any = None,
        p: Any = None, w_scale: Any = REQUIRED, w_zero_point: Any = REQUIRED, r_scale: Any = REQUIRED,
        r_zero_point: Any = REQUIRED,
    ) -> Any:  # fmt: skip
        if layer is not None and layer.serves(x):
            return layer(x, initial_h, initial_c, sequence_lens, options["direction"] == "reverse")
        through, back = _products(w, w_scale, w_zero_point), _products(r, r_scale, r_zero_point)
        xp, w, r = working(w, r)
        return recur(
            lstm_step, x, xp.swapaxes(w, 1, 2), xp.swapaxes(r, 1, 2), b, sequence_lens, (initial_h, initial_c), p,
            names=options["activations"] or ("Sigmoid", "Tanh", "Tanh") * w.shape[0],
            alphas=options["activation_alpha"], betas=options["activation_beta"], clip=options["clip"],
            direction=options["direction"], layout=0, flag=options["input_forget"],
            products=list(zip(through, back, strict=True)),
        )  # fmt: skip

    return run


def _packed(node: Node) -> recurrent.Layer | None:
    """The layer prepared from weights, scales, zero points and biases, None where one of them is not constant."""
    _, w, r, b, *_ = node.constants
    numbers = node.constants[8:12]
    if w is None or r is None or any(part is None for part in numbers) or (b is None and node.given[3]):
        return None
    w_scale, w_zero, r_scale, r_zero = (part.reshape(len(w), -1) for part in numbers if part is not None)
    inputs = [recurrent.byte_panels(*parts) for parts in zip(w, w_zero, w_scale, strict=True)]
    states = [recurrent.byte_panels(*parts) for parts in zip(r, r_zero, r_scale, strict=True)]
    return recurrent.byte_layer(inputs, states, b, r.shape[1])


def _products(q: Any, scale: Any, zero: Any) -> list[Callable[[Any], Any]]:
    """What multiplies rounded values by the weights q [D, I, 4 * H] of each direction, one scale each or a column."""
    xp, factors, steps, offset = working(scale.reshape(q.shape[0], -1), q, zero.reshape(q.shape[0], 1, -1))
    floats = (steps.astype(xp.float32) - offset.astype(xp.float32)) * factors[:, None]
    return [partial(_rounded_product, matrix) for matrix in floats]


def _rounded_product(matrix: Any, x: Any) -> Any:
    """The product of what DynamicQuantizeLinear keeps of x."""
    xp, steps, scale, zero = working(*dynamic_quantize_linear(x))
    return _real(xp, steps, scale, zero) @ matrix
