"""com.microsoft's operators on quantized tensors against onnxruntime."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from backend_cases import single
from contrib_cases import close, compare, contrib, onnxruntimes, ours
from onnx.reference import ReferenceEvaluator
from places import place  # noqa: F401 - a fixture

from lut4tool import native
from lut4tool.runtime import int8
from lut4tool.runtime.registry import Unsupported
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(19)
TYPES = [np.uint8, np.int8]


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def bytes_(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.asarray(RNG.integers(limits.min, limits.max + 1, shape), dtype)


def scalar(value: float, dtype: type = np.float32) -> np.ndarray:
    return np.array(value, dtype)


def steps(op_type: str, inputs: list, most: int = 1, share: float = 0.02, **options) -> None:
    """Compare quantized results: onnxruntime rounds float32 in another order, so that a tie may fall elsewhere."""
    model = contrib(op_type, inputs, **options)
    (found,), (expected,) = ours(model, inputs), onnxruntimes(model, inputs)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    gap = np.abs(found.astype(int) - expected.astype(int))
    assert gap.max(initial=0) <= most
    assert (gap > 0).mean() <= share


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("shapes", [((3, 40), (3, 40)), ((3, 40), (40,)), ((3, 1), (40,)), ((), (3, 40))], ids=str)
def test_binary(op_type, dtype, shapes):
    zero = [scalar(value, dtype) for value in (3, 100, 7)]
    a, b = (bytes_(*shape, dtype=dtype) for shape in shapes)
    scale = scalar(0.1134 if op_type == "QLinearAdd" else 2.537)
    steps(op_type, [a, scalar(0.0513), zero[0], b, scalar(0.0732), zero[1], scale, zero[2]])


@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
def test_a_zero_point_left_out_is_zero(op_type):
    """onnxruntime's own type inference refuses its operator there."""
    a, b, scale, zero = bytes_(50), bytes_(50), scalar(0.0513), scalar(0, np.uint8)
    without, given = (
        [a, scale, None, b, scale, None, scalar(0.1134)],
        [a, scale, zero, b, scale, zero, scalar(0.1134), zero],
    )
    (found,) = ours(contrib(op_type, without), without)
    (expected,) = onnxruntimes(contrib(op_type, given), given)
    assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(
    ("op_type", "options"), [("QLinearSigmoid", {}), ("QLinearLeakyRelu", {}), ("QLinearLeakyRelu", {"alpha": 0.3})]
)
def test_unary(op_type, options, dtype, zeros):
    zero = [scalar(value, dtype) if zeros else None for value in (100, 7)]
    scale = scalar(1 / 128) if op_type == "QLinearSigmoid" else scalar(0.0317)
    steps(op_type, [bytes_(5, 60, dtype=dtype), scalar(0.0513), zero[0], scale, zero[1]], **options)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("axis", "opset"), [(-1, 13), (1, 13), (1, 11), (2, 11)])
def test_softmax(dtype, axis, opset):
    zero = scalar(0 if dtype == np.uint8 else -128, dtype)
    inputs = [bytes_(2, 5, 7, dtype=dtype), scalar(0.0513), scalar(3, dtype), scalar(1 / 256), zero]
    steps("QLinearSoftmax", inputs, share=0.1, axis=axis, opset=opset)


@pytest.mark.parametrize("dtype", TYPES)
def test_where(dtype):
    x, y = bytes_(3, 40, dtype=dtype), bytes_(40, dtype=dtype)
    inputs = [RNG.random((3, 1)) < 0.5, x, scalar(0.0513), scalar(3, dtype), y, scalar(0.0732), scalar(9, dtype)]
    steps("QLinearWhere", [*inputs, scalar(0.0619), scalar(5, dtype)])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(dtype, axis):
    parts = [(bytes_(2, 3, 4, dtype=dtype), scalar(0.0513 + i / 50), scalar(3 + i, dtype)) for i in range(3)]
    steps("QLinearConcat", [scalar(0.0619), scalar(5, dtype), *itertools.chain(*parts)], constant=(0, 1), axis=axis)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("last", [0, 1])
def test_global_average_pool(dtype, last):
    inputs = [bytes_(2, 6, 5, 7, dtype=dtype), scalar(0.0513), scalar(3, dtype), scalar(0.0317), scalar(9, dtype)]
    steps("QLinearGlobalAveragePool", inputs, channels_last=last)


POOLS = [
    {"kernel_shape": [3, 2]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1},
    {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
]


@pytest.mark.parametrize("options", POOLS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("last", [0, 1])
def test_average_pool(options, dtype, last):
    shape = (2, 7, 9, 4) if last else (2, 4, 7, 9)
    inputs = [bytes_(*shape, dtype=dtype), scalar(0.0513), scalar(3, dtype), scalar(0.0317), scalar(9, dtype)]
    steps("QLinearAveragePool", inputs, channels_last=last, **options)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_conv(last, bias):
    x = bytes_(1, 7, 9, 4) if last else bytes_(1, 4, 7, 9)
    inputs = [x, scalar(0.0513), scalar(120, np.uint8), bytes_(6, 4, 3, 3, dtype=np.int8)]
    inputs += [0.01 + np.abs(floats(6)) / 100, np.zeros(6, np.int8), scalar(0.917), scalar(128, np.uint8)]
    inputs += [RNG.integers(-999, 999, 6).astype(np.int32)] if bias else []
    steps("QLinearConv", inputs, constant=(3, 4, 5), channels_last=last, pads=[1, 1, 1, 1])


# -- products


@pytest.mark.parametrize(("a", "b"), [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("zeros", "bias"), [(False, False), (True, False), (True, True)])
def test_matmul_integer_to_float(a, b, columns, zeros, bias):
    shape = (6,) if columns else ()
    inputs = [
        bytes_(2, 3, 300, dtype=a),
        bytes_(300, 6, dtype=b),
        scalar(0.02),
        np.asarray(np.abs(floats(*shape)), np.float32),
    ]
    inputs += [scalar(5, a), np.asarray(bytes_(*shape, dtype=b), b)] if zeros else [None, None]
    compare("MatMulIntegerToFloat", [*inputs, *([floats(6)] if bias else [])], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("zeros", "bias"), [(False, False), (True, False), (False, True), (True, True)])
def test_dynamic_quantize_matmul(dtype, columns, zeros, bias):
    shape = (6,) if columns else ()
    inputs = [floats(2, 3, 20), bytes_(20, 6, dtype=dtype), np.asarray(np.abs(floats(*shape)), np.float32)]
    inputs += [np.asarray(bytes_(*shape, dtype=dtype), dtype) if zeros else None, floats(6) if bias else None]
    compare("DynamicQuantizeMatMul", inputs, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not native.compiled(), reason="no native library was compiled")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("zeros", "bias"), [(False, False), (True, False), (True, True)])
def test_products_of_constant_bytes_are_packed(place, dtype, columns, zeros, bias, monkeypatch):  # noqa: F811
    """Both operators, by the native product on a CPU."""
    calls, times = [], int8.Product.times
    monkeypatch.setattr(int8.Product, "times", lambda *values: calls.append(1) or times(*values))
    shape, steps = (6,) if columns else (), bytes_(2, 3, 20)
    b, scale = bytes_(20, 6, dtype=dtype), np.asarray(np.abs(floats(*shape)), np.float32)
    tail = [np.asarray(bytes_(*shape, dtype=dtype), dtype) if zeros else None, floats(6) if bias else None]
    fixed = [3] if zeros else []
    compare("DynamicQuantizeMatMul", [floats(2, 3, 20), b, scale, *tail], 1e-5, 1e-4, constant=(1, *fixed))
    fixed = [5] if zeros else []
    inputs = [steps, b, scalar(0.02), scale, scalar(5, np.uint8), *tail]
    compare("MatMulIntegerToFloat", inputs, 1e-5, 1e-4, constant=(1, *fixed))
    assert len(calls) == (2 if place == "numpy" else 0)


@pytest.mark.parametrize(
    "flags", [{}, {"transA": 1}, {"transB": 1}, {"transA": 1, "transB": 1}, {"alpha": 0.5}], ids=str
)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_qgemm(flags, columns, quantized, bias):
    a, b = bytes_(4, 20), bytes_(20, 6, dtype=np.int8)
    shape = (6,) if columns else ()
    inputs = [a.T.copy() if "transA" in flags else a, scalar(0.0513), scalar(100, np.uint8)]
    inputs += [b.T.copy() if "transB" in flags else b, np.asarray(0.01 + np.abs(floats(*shape)) / 9, np.float32)]
    inputs += [np.zeros(shape, np.int8), RNG.integers(-999, 999, 6).astype(np.int32) if bias else None]
    if quantized:
        steps("QGemm", [*inputs, scalar(3.07), scalar(100, np.uint8)], **flags)
    else:
        compare("QGemm", inputs, atol=1e-4, **flags)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("options", [{}, {"unidirectional": 1}, {"scale": 0.4}], ids=str)
def test_qattention(mask, past, options):
    inputs = [bytes_(2, 3, 8), bytes_(8, 24, dtype=np.int8), floats(24), scalar(0.02), scalar(0.02)]
    inputs += [np.array([past + 3, 2], np.int32) if mask else None, scalar(128, np.uint8), scalar(1, np.int8)]
    inputs += [floats(2, 2, 2, past, 4) if past else None]
    compare("QAttention", inputs, outputs=2, constant=(1,), num_heads=2, atol=1e-4, rtol=1e-4, **options)


# -- DynamicQuantizeLSTM


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_dynamic_quantize_lstm(direction, dtype, columns, states):
    """One sequence: onnxruntime rounds the states of several in groups that depend on its threads."""
    directions, inputs, hidden = 1 + (direction == "bidirectional"), 5, 6
    scales = (directions, 4 * hidden) if columns else (directions,)
    zeros = [np.full(scales, 0 if dtype == np.int8 else 128, dtype) for _ in range(2)]
    values = [floats(7, 1, inputs), bytes_(directions, inputs, 4 * hidden, dtype=dtype)]
    values += [bytes_(directions, hidden, 4 * hidden, dtype=dtype), floats(directions, 8 * hidden), None]
    values += [floats(directions, 1, hidden) if states else None for _ in range(2)]
    values += [floats(directions, 3 * hidden) if states else None]
    scale = (0.001 + np.abs(floats(*scales)) / 500).astype(np.float32)
    values += [scale, zeros[0], scale, zeros[1]]
    compare(
        "DynamicQuantizeLSTM", values, outputs=3, constant=(1, 2, 8, 9, 10, 11), direction=direction,
        hidden_size=hidden, rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_dynamic_quantize_lstm_is_near_the_lstm_of_its_weights():
    """Several sequences of different lengths: within 8 bits of the LSTM of what the weights stand for."""
    hidden = 6
    w, r = bytes_(1, 5, 24, dtype=np.int8), bytes_(1, hidden, 24, dtype=np.int8)
    x, b, lengths, scale = floats(7, 3, 5), floats(1, 48), np.array([7, 3, 5], np.int32), np.array([0.004], np.float32)
    zero = np.zeros(1, np.int8)
    inputs = [x, w, r, b, lengths, None, None, None, scale, zero, scale, zero]
    found = ours(contrib("DynamicQuantizeLSTM", inputs, outputs=3, hidden_size=hidden), inputs)
    plain = [x, *(part.swapaxes(1, 2) * scale for part in (w, r)), b, lengths]
    expected = onnxruntimes(contrib("LSTM", plain, outputs=3, domain="", hidden_size=hidden), plain)
    for one, other in zip(found, expected, strict=True):
        close(one, other, rtol=0, atol=0.03)


# -- QuantizeLinear and DequantizeLinear


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("wide", [np.float32, np.float16])
def test_quantize_and_dequantize(dtype, axis, wide):
    x, zero_of = 9 * floats(3, 4, 5, dtype=wide), scalar if axis is None else lambda v, t: np.full(x.shape[axis], v, t)
    scale = zero_of(0.3, wide) * (1 if axis is None else np.arange(1, 1 + x.shape[axis]).astype(wide))
    scale, zero = np.asarray(scale, wide), zero_of(3, dtype)
    options = {} if axis is None else {"axis": axis}
    compare("QuantizeLinear", [x, scale, zero], rtol=0, atol=0, **options)
    compare("DequantizeLinear", [RNG.integers(0, 99, x.shape).astype(dtype), scale, zero], rtol=0, atol=0, **options)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_quantize_and_dequantize_four_bits(dtype):
    """onnxruntime's Python takes no such feeds: against onnx.reference's standard operator."""
    x, scale, zero = 9 * floats(3, 5), np.array([0.7, 1.3, 2.1], np.float32), np.array([1, 2, 3]).astype(dtype)
    q = RNG.integers(0, 8, x.shape).astype(dtype)
    for op_type, inputs in (("QuantizeLinear", [x, scale, zero]), ("DequantizeLinear", [q, scale, zero])):
        standard = single(op_type, 21, inputs, {"axis": 0}, 1)
        (expected,) = ReferenceEvaluator(standard).run(None, {f"x{i}": data for i, data in enumerate(inputs)})
        close(ours(contrib(op_type, inputs, axis=0), inputs)[0], expected, rtol=0, atol=0)


def test_several_scales_need_an_axis():
    inputs = [floats(3, 4), np.ones(4, np.float32)]
    with pytest.raises(Exception, match="4 values needs the attribute axis"):
        ours(contrib("QuantizeLinear", inputs), inputs)


def test_rotary_qattention_is_refused():
    inputs = [bytes_(2, 3, 8), bytes_(8, 24, dtype=np.int8), floats(24), scalar(0.02), scalar(0.02)]
    with pytest.raises(Unsupported, match="do_rotary must be 0, not 1"):
        Runtime(contrib("QAttention", inputs, num_heads=2, do_rotary=1), device="cpu")
