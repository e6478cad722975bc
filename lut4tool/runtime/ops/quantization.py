"""Quantization (onnx/defs/quantization) and the integer convolutions of onnx/defs/nn."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from lut4tool.runtime import int8
from lut4tool.runtime.dtypes import MLX_OF, numpy_dtype, on_host, to_device
from lut4tool.runtime.ops import prepared
from lut4tool.runtime.ops.codes import encode
from lut4tool.runtime.ops.compute import finish, finish_as, numpy_type, working
from lut4tool.runtime.ops.conv import check_channels, convolve_host
from lut4tool.runtime.ops.products import EXACT_DEPTH
from lut4tool.runtime.ops.window import Ints, window
from lut4tool.runtime.registry import op

_INTEGERS = {np.dtype(name): np.iinfo(name) for name in ("int8", "uint8", "int16", "uint16", "int32")} | {
    np.dtype(name): ml_dtypes.iinfo(name) for name in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2)
}


def spread(xp: Any, value: Any, shape: Sequence[int], axis: int, block_size: int) -> Any:
    """Shape a scale or zero point to broadcast with x: one for all, one an index of `axis`, or one a block along it."""
    if value.size == 1 and value.ndim <= 1:
        return value.reshape(())
    if value.ndim == 1 and not block_size:
        return value.reshape([-1 if place == axis % len(shape) else 1 for place in range(len(shape))])
    return xp.repeat(value, block_size, axis=axis)[tuple(map(slice, shape))]


def to_integers(xp: Any, steps: Any, dtype: np.dtype) -> Any:
    """Saturate whole float32 numbers to an integer type; NaN becomes 0."""
    limits = _INTEGERS[dtype]
    whole = xp.clip(xp.where(xp.isnan(steps), 0 * limits.max, steps), float(limits.min), float(limits.max))
    return finish_as(whole.astype(xp.int32), dtype)


def to_small_float(value: np.ndarray, dtype: np.dtype, saturate: bool) -> np.ndarray:
    """Round to a float8 or float4 type; beyond its range to its largest value, or with saturate 0 to Inf or NaN."""
    info = ml_dtypes.finfo(dtype)
    if saturate or dtype == ml_dtypes.float4_e2m1fn:
        value = np.where(np.isnan(value), value, np.clip(value, float(info.min), float(info.max)))
    with np.errstate(all="ignore"):
        return value.astype(dtype)


@op("QuantizeLinear", since=10, codes=True)
def quantize_linear(
    x: Any, y_scale: Any, y_zero_point: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    precision: int = 0, saturate: int = 1,
) -> Any:  # fmt: skip
    """round(x / scale) + zero point, half to even, saturated; the division's type is `precision`, else the scale's."""
    declared = numpy_dtype(output_dtype) if output_dtype else np.dtype(np.uint8)
    dtype = declared if y_zero_point is None else numpy_type(y_zero_point)
    kind = numpy_dtype(precision) if precision else numpy_type(y_scale)
    if (
        on_host()
        and kind == np.float32
        and (found := int8.quantize_linear(x, y_scale, y_zero_point, dtype)) is not None
    ):
        return found
    xp, data, scale, zero = working(x, y_scale, y_zero_point)
    offset = 0 if zero is None else spread(xp, zero, x.shape, axis, block_size).astype(xp.float32)
    quotient = in_type(
        xp, in_type(xp, data, kind) / in_type(xp, spread(xp, scale, x.shape, axis, block_size), kind), kind
    )
    if dtype in _INTEGERS:
        return to_integers(xp, xp.round(quotient) + offset, dtype)
    if xp is np:
        return to_small_float(quotient + offset, dtype, bool(saturate))
    return encode(quotient + offset, dtype, saturate)


def in_type(xp: Any, value: Any, dtype: np.dtype) -> Any:
    """float32 `value` rounded to what `dtype` can hold; a half's quotient or product in float32 rounds correctly."""
    value = value.astype(xp.float32)
    if dtype.itemsize == 4:
        return value
    return value.astype(dtype if xp is np else MLX_OF[dtype]).astype(xp.float32)


@op("DequantizeLinear", since=10, codes=True, prepare=prepared.dequantize)
def dequantize_linear(
    x: Any, x_scale: Any, x_zero_point: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Any:
    """(x - zero point) * scale; the difference is exact, the product is rounded once to the output's type."""
    dtype = numpy_dtype(output_dtype) if output_dtype else numpy_type(x_scale)
    xp, steps, scale, zero = working(x, x_scale, x_zero_point)
    wide = xp.int32 if numpy_type(x) in _INTEGERS else xp.float32
    steps = steps.astype(wide)
    if zero is not None:
        steps = steps - spread(xp, zero, x.shape, axis, block_size).astype(wide)
    return finish_as(steps.astype(xp.float32) * spread(xp, scale, x.shape, axis, block_size).astype(xp.float32), dtype)


@op("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Any) -> Any:
    """uint8 y, scale and zero point of a range that holds 0; a range of nothing has scale 1, as in onnxruntime."""
    xp, data = working(x)
    if xp is np and (found := int8.quantized(data)) is not None:
        return found
    uint8 = np.dtype(np.uint8)
    low, high = xp.minimum(data.min(), 0), xp.maximum(data.max(), 0)
    scale = (high - low) / 255
    scale = xp.where(scale == 0, xp.ones_like(scale), scale).astype(xp.float32)
    zero = xp.round(xp.clip(-low / scale, 0, 255))
    return to_integers(xp, xp.round(data / scale) + zero, uint8), finish(scale, x), finish_as(zero, uint8)


def _integer_conv(x: np.ndarray, w: np.ndarray, x_zero: Any, w_zero: Any, group: int, geometry: Any) -> np.ndarray:
    """Convolve integers less their zero points, exactly: float32 sums of at most 256 byte products, in int64.

    Groups of deeper sums are convolved in float64.
    """
    check_channels(x, w, None, group)
    channels, area = w.shape[1], prod(w.shape[2:])
    exact = area <= EXACT_DEPTH and (group == 1 or channels * area <= EXACT_DEPTH)
    wide: Any = np.float32 if exact else np.float64
    data: Any = x.astype(wide) - (0 if x_zero is None else wide(x_zero.reshape(())))
    kernels: Any = w.astype(wide)
    if w_zero is not None:
        kernels -= w_zero.astype(wide).reshape(-1, *[1] * (w.ndim - 1))
    if not exact or channels * area <= EXACT_DEPTH:
        return convolve_host(data, kernels, None, geometry, group).astype(np.int64)
    step, total = EXACT_DEPTH // area, np.zeros((), np.int64)
    for start in range(0, channels, step):
        part = slice(start, start + step)
        total = total + convolve_host(data[:, part], kernels[:, part], None, geometry, 1).astype(np.int64)
    return total


@op("ConvInteger", host=(0, 1, 2, 3), on_host=True)
def conv_integer(
    x: Any, w: Any, x_zero_point: Any = None, w_zero_point: Any = None, *, auto_pad: str = "NOTSET",
    dilations: Ints = None, group: int = 1, kernel_shape: Ints = None,
    pads: Ints = None, strides: Ints = None,
) -> Any:  # fmt: skip
    """Exact int32; the padding stands for x's zero point."""
    grid = window(x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad)
    return to_device(_integer_conv(x, w, x_zero_point, w_zero_point, group, grid).astype(np.int32))


@op("QLinearConv", host=tuple(range(9)), on_host=True)
def qlinear_conv(
    x: Any, x_scale: Any, x_zero_point: Any, w: Any, w_scale: Any, w_zero_point: Any, y_scale: Any, y_zero_point: Any,
    b: Any = None, *, auto_pad: str = "NOTSET", dilations: Ints = None, group: int = 1,
    kernel_shape: Ints = None, pads: Ints = None, strides: Ints = None,
) -> Any:  # fmt: skip
    """An exact integer convolution, its int32 bias in units of x_scale * w_scale, requantized half to even."""
    grid = window(x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad)
    total = _integer_conv(x, w, x_zero_point, w_zero_point, group, grid)
    channels = (-1, *[1] * grid.rank)
    if b is not None:
        total = total + b.astype(np.float64).reshape(channels)
    scale = (np.float32(x_scale.reshape(())) * w_scale / y_scale.reshape(())).astype(np.float32).reshape(channels)
    steps = np.rint(total.astype(np.float32) * scale) + np.float32(y_zero_point.reshape(()))
    return to_integers(np, steps, y_zero_point.dtype)
