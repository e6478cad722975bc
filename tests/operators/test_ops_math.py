"""The operators of onnx/defs/math, on onnx's own node tests and where ONNX's arithmetic is not NumPy's or MLX's."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from backend_cases import against_onnxruntime, cases, check, single
from onnx import helper
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.session import Runtime


def run(
    op_type: str, *inputs: np.ndarray, version: int = 21, outputs: int = 1, **attributes: object
) -> list[np.ndarray]:
    runtime = Runtime(single(op_type, version, inputs, attributes, outputs), device="cpu")
    return runtime.run(None, {f"x{index}": data for index, data in enumerate(inputs)})


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("case", cases("math"))
def test_node(case):
    check(case, atol=5e-6 if "dft" in case.name else 0)  # noise around exact zeros, of another order in MLX


SIGNED = (np.int8, np.int16, np.int32, np.int64)


@pytest.mark.parametrize("dtype", SIGNED)
def test_signed_division_truncates(dtype):
    a, b = np.meshgrid(np.array([-128, -7, -1, 0, 1, 7, 127], dtype), np.array([-3, -2, -1, 1, 2, 3], dtype))
    (found,) = run("Div", a, b)
    exact = np.trunc(a.astype(np.float64) / b.astype(np.float64)).astype(np.int64)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, exact.astype(dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_smallest_integer_by_minus_one_does_not_stop_the_process(dtype):
    lowest = np.array([np.iinfo(dtype).min, 5], dtype)
    (found,) = run("Div", lowest, np.array([-1, -1], dtype))
    np.testing.assert_array_equal(found, [np.iinfo(dtype).min, -5])


@pytest.mark.parametrize("fmod", [0, 1])
@pytest.mark.parametrize("dtype", [*SIGNED, np.uint8, np.uint16, np.uint32, np.uint64])
def test_integer_mod(dtype, fmod):
    signs = (1,) if np.issubdtype(dtype, np.unsignedinteger) else (-1, 1)
    a, b = np.meshgrid(
        np.array([s * v for v in (0, 1, 5, 7, 100) for s in signs], dtype),
        np.array([s * v for v in (1, 2, 3, 7) for s in signs], dtype),
    )
    (found,) = run("Mod", a, b, fmod=fmod)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, (np.fmod if fmod else np.mod)(a, b))


@pytest.mark.parametrize("base", [np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("exponent", [np.int32, np.int64, np.float32, np.float64])
def test_pow_of_mixed_types(base, exponent):
    against_onnxruntime("Pow", 15, [np.array([1, 2, 3, 7], base), np.array([3, 5, 2, 0], exponent)])


def test_negative_powers_of_integers():
    x, y = np.array([1, -1, -1, 2, 5], np.int64), np.array([-2, -2, -3, -1, -4], np.int64)
    (found,) = run("Pow", x, y)
    np.testing.assert_array_equal(found, [1, 1, -1, 0, 0])


SHAPES = [
    ((5,), (5,)),
    ((2, 3), (3,)),
    ((3,), (4, 3, 2)),
    ((2, 1, 3, 4), (5, 4, 2)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 2)),
]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shapes", SHAPES)
def test_matmul_shapes_and_types(dtype, shapes):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    (found,) = run("MatMul", a, b)
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    assert found.dtype == dtype
    assert found.shape == exact.shape
    rtol, atol = (2e-2, 1e-2) if found.dtype.itemsize == 2 else (1e-5, 1e-6)
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_integer_products_are_exact(dtype):
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1000, (3, 40)).astype(dtype), rng.integers(0, 1000, (40, 2)).astype(dtype)
    np.testing.assert_array_equal(run("MatMul", a, b)[0], a.astype(object) @ b.astype(object))
    c = np.ones((2,), dtype)
    np.testing.assert_array_equal(run("Gemm", a, b.T.copy(), c, transB=1)[0], a.astype(object) @ b.astype(object) + 1)


@pytest.mark.parametrize("depth", [1, 255, 257, 1000])
def test_matmul_integer_is_exact_at_any_depth(depth):
    a, b = np.full((2, depth), 255, np.uint8), np.full((depth, 3), -128, np.int8)
    (found,) = run("MatMulInteger", a, b, np.array(0, np.uint8), np.array(127, np.int8))
    np.testing.assert_array_equal(found, np.full((2, 3), 255 * -255 * depth, np.int32))


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (0, 3), (2, 0)])
def test_matmul_integer_of_no_depth_is_zeros_in_int32(rows, columns):
    (found,) = run("MatMulInteger", np.zeros((rows, 0), np.uint8), np.zeros((0, columns), np.int8))
    assert (found.dtype, found.shape, found.any()) == (np.int32, (rows, columns), False)


@pytest.mark.parametrize("options", [{}, {"transA": 1}, {"transB": 1}, {"alpha": 0.5, "beta": 2.0}])
@pytest.mark.parametrize("bias", [(), (4,), (3, 1), (3, 4)])
def test_gemm(options, bias):
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 5), (5, 4), bias))
    a, b = (a.T.copy() if options.get("transA") else a), (b.T.copy() if options.get("transB") else b)
    against_onnxruntime("Gemm", 13, [a, b, c], rtol=1e-5, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_top_k_takes_the_lower_index_of_equals(dtype, largest, axis):
    x = np.random.default_rng(2).integers(0, 4, (5, 6)).astype(dtype)
    order = np.argsort(-x.astype(np.float64) if largest else x, axis=axis, kind="stable")
    index = np.take(order, range(3), axis=axis)
    values, indices = run("TopK", x, np.array([3], np.int64), outputs=2, largest=largest, axis=axis)
    assert values.dtype == dtype
    assert indices.dtype == np.int64
    np.testing.assert_array_equal(indices, index)
    np.testing.assert_array_equal(values, np.take_along_axis(x, index, axis))


def test_top_k_beyond_the_axis_is_an_error():
    with pytest.raises(Exception, match="k is 9, but axis -1 has 4 elements"):
        run("TopK", np.zeros(4, np.float32), np.array([9], np.int64), outputs=2)


EQUATIONS = [
    ("ii->i", [(3, 3)]),
    ("i j , j k -> i k", [(2, 3), (3, 4)]),
    ("...ij->...", [(2, 3, 4)]),
    ("bhid,bhjd->bhij", [(1, 2, 3, 4)] * 2),
    ("ij", [(2, 3)]),
]


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_einsum(equation, shapes, dtype):
    operands = [np.random.default_rng(3).integers(-4, 5, shape).astype(dtype) for shape in shapes]
    (found,) = run("Einsum", *operands, equation=equation)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.einsum(equation, *operands))


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("version", [11, 12, 13])
def test_softmax_before_13_normalizes_the_matrix_from_the_axis_on(name, axis, version):
    x = np.random.default_rng(4).standard_normal((2, 3, 4)).astype(np.float32)
    against_onnxruntime(name, version, [x], rtol=1e-5, axis=axis)


def test_softmax_stays_finite_for_large_values():
    x = np.array([[1e4, 1e4 - 1, -np.inf], [-1e4, -1e4, -1e4]], np.float32)
    (found,) = run("Softmax", x)
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(found, exact / exact.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(None, 0.5), (-0.5, None), (0.5, -0.5), (None, None)])
def test_clip(low, high):
    x = np.random.default_rng(5).standard_normal(20).astype(np.float32)
    bounds = [None if bound is None else np.array(bound, np.float32) for bound in (low, high)]
    against_onnxruntime("Clip", 13, [x, *bounds])


TOTALS = [
    (0, 0, [2, 5, 9], [2, 6, 24]),
    (1, 0, [0, 2, 5], [1, 2, 6]),
    (0, 1, [9, 7, 4], [24, 12, 4]),
    (1, 1, [7, 4, 0], [12, 4, 1]),
]


@pytest.mark.parametrize(("exclusive", "reverse", "sums", "products"), TOTALS)
def test_running_totals_of_a_shape_are_computed_on_the_host(exclusive, reverse, sums, products):
    """Of the shape [2, 3, 4]; the node tests have MLX's side."""
    options = {"exclusive": exclusive, "reverse": reverse}
    nodes = [helper.make_node("Shape", ["x"], ["shape"])]
    nodes += [helper.make_node(name, ["shape", "axis"], [name], **options) for name in ("CumSum", "CumProd")]
    values = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in (("x", 1), ("axis", 7), ("CumSum", 7), ("CumProd", 7))
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", values[:2], values[2:]), opset_imports=[helper.make_opsetid("", 26)]
    )
    found = Runtime(model, device="cpu").run(None, {"x": np.zeros((2, 3, 4), np.float32), "axis": np.array(0)})
    np.testing.assert_array_equal(found, [sums, products])


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float16, 1e-3), (np.float32, 4e-7), (np.float64, 1e-15)])
@pytest.mark.parametrize("op_type", ["Erf", "Gelu"])
def test_error_function_near_zero_and_far_out(op_type, dtype, rtol):
    ends = np.array([0.0, -0.0, np.inf, np.nan, 1e-7, -3.9999, 4.0001, 6.0, 40.0])
    x = np.concatenate([ends, np.linspace(-0.5 if op_type == "Gelu" else -5, 5, 40_001)]).astype(dtype)
    (found,) = run(op_type, x)
    wide = x.astype(np.float64)
    exact = np.array([math.erf(v) if op_type == "Erf" else 0.5 * v * (1 + math.erf(v * math.sqrt(0.5))) for v in wide])
    assert found.dtype == dtype
    cancelled = 0 if op_type == "Erf" else np.finfo(dtype).eps * 4  # 1 + erf far below zero
    np.testing.assert_allclose(found, exact.astype(dtype), rtol=rtol, atol=cancelled)
    assert np.signbit(found[1])
