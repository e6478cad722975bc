"""Quantization and integer convolutions: onnx's own node tests, then types and granularities against onnxruntime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from backend_cases import against_onnxruntime, cases, check, single
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(3)
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16]


@pytest.mark.parametrize("case", cases("quantization"))
def test_node(case):
    check(case)


def floats(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 20).astype(np.float32)


def codes(dtype: type, *shape: int) -> np.ndarray:
    info = ml_dtypes.iinfo(dtype)
    return RNG.integers(int(info.min), int(info.max) + 1, shape).astype(dtype)


def run(op_type: str, version: int, *inputs: np.ndarray | None, **attributes: object) -> np.ndarray:
    feeds = {f"x{index}": data for index, data in enumerate(inputs) if data is not None}
    return Runtime(single(op_type, version, inputs, attributes, 1)).run(None, feeds)[0]


#: Every value halfway between two codes, around zero and at the ends.
HALVES = np.concatenate([np.arange(-12, 13) * 0.25, [-70000, 70000, -np.inf, np.inf]]).astype(np.float32).reshape(1, -1)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("zero", [0, 3])
def test_quantize_rounds_half_to_even_and_saturates(dtype, zero):
    against_onnxruntime("QuantizeLinear", 21, [HALVES, np.array(0.5, np.float32), np.array(zero, dtype)])


@pytest.mark.parametrize("version", [10, 13, 19, 21])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_versions(version, dtype):
    zero = codes(dtype)
    against_onnxruntime("QuantizeLinear", version, [floats(3, 4), np.array(0.3, np.float32), zero])
    against_onnxruntime("QuantizeLinear", version, [floats(3, 4), np.array(0.3, np.float32)])
    against_onnxruntime("DequantizeLinear", version, [codes(dtype, 3, 4), np.array(0.3, np.float32), zero])
    against_onnxruntime("DequantizeLinear", version, [codes(dtype, 3, 4), np.array(0.3, np.float32)])


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_scale_an_index(axis, dtype):
    x = floats(3, 4, 5)
    scale = RNG.uniform(0.1, 1, x.shape[axis]).astype(np.float32)
    zero = codes(dtype, x.shape[axis])
    against_onnxruntime("QuantizeLinear", 21, [x, scale, zero], axis=axis)
    against_onnxruntime("DequantizeLinear", 21, [codes(dtype, 3, 4, 5), scale, zero], axis=axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("block", [2, 3])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_scale_a_block(axis, block, zeros):
    x = floats(4, 7)
    shape = [-(-length // block) if at == axis else length for at, length in enumerate(x.shape)]
    scale = RNG.uniform(0.1, 1, shape).astype(np.float32)
    zero = [codes(np.int8, *shape)] if zeros else []
    options = {"axis": axis, "block_size": block} | ({} if zeros else {"output_dtype": 3})
    against_onnxruntime("QuantizeLinear", 21, [x, scale, *zero], **options)
    options.pop("output_dtype", None)
    against_onnxruntime("DequantizeLinear", 21, [codes(np.int8, 4, 7), scale, *zero], **options)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2])
@pytest.mark.parametrize("axis", [0, 1])
def test_codes_of_fewer_bits_against_numpy(dtype, axis):
    x, scale = floats(4, 6), np.array([[0.7], [1.3]], np.float32)
    scale = np.repeat(scale, 6, 1) if axis == 0 else np.repeat(scale.T, 4, 0)
    zero, block = codes(dtype, *scale.shape), 2 if axis == 0 else 3
    wide, steps = np.repeat(scale, block, axis), np.repeat(zero.astype(np.int32), block, axis)
    info = ml_dtypes.iinfo(dtype)
    found = run("QuantizeLinear", 25, x, scale, zero, axis=axis, block_size=block)
    assert found.dtype == dtype
    expected = np.clip(np.rint(x / wide) + steps, int(info.min), int(info.max))
    np.testing.assert_array_equal(found.astype(np.int32), expected.astype(np.int32))
    back = run("DequantizeLinear", 25, found, scale, zero, axis=axis, block_size=block)
    np.testing.assert_array_equal(back, (expected - steps).astype(np.float32) * wide)


FLOAT8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("saturate", [0, 1])
def test_float8(dtype, saturate):
    """Against ml_dtypes' rounding; with saturate 1 beyond the largest value is the largest value."""
    x = np.concatenate([floats(1, 40)[0], [1e6, -1e6, np.inf, 0, -0.0]]).astype(np.float32)
    scale, zero = np.array(0.5, np.float32), np.array(0, dtype)
    found = run("QuantizeLinear", 19, x, scale, zero, saturate=saturate)
    top = float(ml_dtypes.finfo(dtype).max)
    expected = (np.clip(x / scale, -top, top) if saturate else x / scale).astype(dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    finite = expected[:40]
    np.testing.assert_array_equal(run("DequantizeLinear", 19, finite, scale), finite.astype(np.float32) * scale)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_divide_and_multiply_in_their_own_type(dtype):
    x, scale = floats(50).astype(dtype), np.array(0.37, dtype)
    found = run("QuantizeLinear", 21, x, scale, np.array(0, np.int8))
    quotient = (x.astype(np.float64) / scale.astype(np.float64)).astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(found, np.clip(np.rint(quotient), -128, 127).astype(np.int8))
    back = run("DequantizeLinear", 21, found, scale)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, (found.astype(np.float64) * scale.astype(np.float64)).astype(dtype))


def test_dequantize_int32():
    x = np.array([2**31 - 1, -(2**31), 5, -7], np.int32)
    against_onnxruntime("DequantizeLinear", 10, [x, np.array(0.25, np.float32)])


@pytest.mark.parametrize(
    "x",
    [floats(3, 5), np.abs(floats(7)), -np.abs(floats(7)), np.zeros((2, 3), np.float32)],
    ids=["both", "above", "below", "zero"],
)
def test_dynamic_quantize(x):
    against_onnxruntime("DynamicQuantizeLinear", 11, [x], outputs=3)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"pads": [1, 2, 0, 1], "strides": [2, 1]}, {"dilations": [2, 2]}, {"auto_pad": "SAME_UPPER"}],
    ids=str,
)
@pytest.mark.parametrize("zero", [True, False])
def test_conv_integer(group, options, zero):
    x, w = codes(np.uint8, 2, 4, 7, 8), codes(np.uint8, 6, 4 // group, 3, 3)
    points = [np.array(200, np.uint8), np.array(9, np.uint8)] if zero else []
    against_onnxruntime("ConvInteger", 10, [x, w, *points], group=group, **options)


def test_conv_integer_with_a_zero_point_a_channel_against_numpy():
    x, w = codes(np.uint8, 1, 3, 6), codes(np.int8, 4, 3, 2)
    point, points = np.array(17, np.uint8), codes(np.int8, 4)
    found = run("ConvInteger", 10, x, w, point, points)
    data, kernels = x.astype(np.int64) - 17, w.astype(np.int64) - points.astype(np.int64)[:, None, None]
    expected = np.stack([np.tensordot(kernels, data[0, :, t : t + 2], 2) for t in range(5)], 1)
    np.testing.assert_array_equal(found[0], expected)


def test_conv_integer_is_exact_where_float32_is_not():
    """2,304 products of 255 * 255 reach 2^27: float32 would round them."""
    x, w = np.full((1, 256, 4, 4), 255, np.uint8), np.full((1, 256, 3, 3), 255, np.uint8)
    w[0, 0, 0, 0] = 254
    found = run("ConvInteger", 10, x, w)
    np.testing.assert_array_equal(found, np.full((1, 1, 2, 2), 2304 * 255 * 255 - 255, np.int32))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", [1, 2])
def test_qlinear_conv(dtype, channels, bias, group):
    x, w = codes(dtype, 2, 4, 6, 7), codes(np.int8, 6, 4 // group, 3, 3)
    scale = RNG.uniform(0.01, 0.02, 6 if channels else ()).astype(np.float32)
    points = np.zeros(6 if channels else (), np.int8)
    inputs = [
        x,
        np.array(0.05, np.float32),
        np.array(5, dtype),
        w,
        scale,
        points,
        np.array(0.3, np.float32),
        np.array(7, dtype),
    ]
    inputs += [RNG.integers(-5000, 5000, 6).astype(np.int32)] if bias else []
    against_onnxruntime("QLinearConv", 10, inputs, group=group, pads=[1, 1, 0, 1])
