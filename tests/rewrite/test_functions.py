"""The function bodies against NumPy, onnx.reference and onnxruntime, at every opset they claim."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from lut4tool import formats
from lut4tool.rewrite.edit import RewriteError
from lut4tool.rewrite.functions import FIRST_OPSET, LAST_OPSET, body

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is one of the two oracles")

OPSETS = range(FIRST_OPSET, LAST_OPSET + 1)
#: (type of X and Y, type the weight is rounded to)
TYPES = [
    ("float32", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
]


def lookup_weight(rows=6, cols=10, block_size=8, seed=0, short=False, half=None, **facts) -> formats.Lookup4Weight:
    """A random weight; `short` drops the bytes past the last element, `half` is the type of scales and codebook."""
    random = np.random.default_rng(seed)
    blocks = -(-rows * cols // block_size)
    size = (rows * cols + 1) // 2 if short else blocks * block_size // 2
    kind = formats.FLOAT_DTYPES[half or "float32"]
    return formats.Lookup4Weight(
        random.integers(0, 256, size, dtype=np.uint8),
        (random.standard_normal(blocks) * 3).astype(kind),
        formats.NF4.astype(kind),
        rows,
        cols,
        block_size,
        **facts,
    )


def model_of(op: str, weight, dtype: str, opset: int, inputs: tuple[str, ...], rank: int = 2) -> onnx.ModelProto:
    """Y = op(X, *inputs) with its body, checked by onnx."""
    elem, dims = formats.ONNX_DTYPE[dtype], [f"d{axis}" for axis in range(rank)]
    node = helper.make_node(op, ["X", *inputs], ["Y"], domain=formats.DOMAIN, **weight.attributes(dtype))
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("X", elem, dims)],
        [helper.make_tensor_value_info("Y", elem, dims)],
        [numpy_helper.from_array(getattr(weight, name), name) for name in inputs],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(formats.DOMAIN, formats.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, functions=[body(op, opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def matmul_model(matrix: np.ndarray, dtype: str, opset: int, rank: int = 2) -> onnx.ModelProto:
    """Y = MatMul(X, matrix): the same product with a dense weight."""
    elem, dims = formats.ONNX_DTYPE[dtype], [f"d{axis}" for axis in range(rank)]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "W"], ["Y"])],
        "g",
        [helper.make_tensor_value_info("X", elem, dims)],
        [helper.make_tensor_value_info("Y", elem, dims)],
        [numpy_helper.from_array(np.ascontiguousarray(matrix), "W")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run_reference(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return ReferenceEvaluator(model).run(None, {"X": x})[0]


def run_onnxruntime(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Run with every optimization off, so that onnxruntime inlines the body and no more."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"X": x})[0]


def matrix_of(weight: formats.Lookup4Weight, dtype: str) -> np.ndarray:
    """The [K, N] matrix by NumPy alone, element by element of the standard's operators."""
    codes = np.stack((weight.packed >> 4, weight.packed & 15), axis=1)
    codes = (codes if weight.high_nibble_first else codes[:, ::-1]).reshape(-1)
    count = weight.rows * weight.cols
    scales = np.repeat(weight.scales.astype(np.float32), weight.block_size)[:count]
    with np.errstate(all="ignore"):
        flat = weight.codebook.astype(np.float32)[codes[:count]] * scales
        values = flat.astype(formats.FLOAT_DTYPES[weight.weight_dtype]).astype(formats.FLOAT_DTYPES[dtype])
    return values.reshape(weight.rows, weight.cols).transpose(weight.perm)


def assert_same_bytes(actual: np.ndarray, expected: np.ndarray) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


LOOKUP_INPUTS = ("packed", "scales", "codebook")


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_lookup4_body_is_exact_in_onnx_reference(opset, dtype, weight_dtype):
    for perm in ((0, 1), (1, 0)):
        for high_first in (True, False):
            weight = lookup_weight(perm=perm, high_nibble_first=high_first, weight_dtype=weight_dtype)
            matrix = matrix_of(weight, dtype)
            x = np.random.default_rng(1).standard_normal((3, matrix.shape[0])).astype(matrix.dtype)
            actual = run_reference(model_of("Lookup4MatMul", weight, dtype, opset, LOOKUP_INPUTS), x)
            assert_same_bytes(actual, run_reference(matmul_model(matrix, dtype, opset), x))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES[:3])
def test_lookup4_body_is_exact_in_onnxruntime(opset, dtype, weight_dtype):
    for perm in ((0, 1), (1, 0)):
        for high_first in (True, False):
            weight = lookup_weight(perm=perm, high_nibble_first=high_first, weight_dtype=weight_dtype)
            matrix = matrix_of(weight, dtype)
            x = np.random.default_rng(1).standard_normal((3, matrix.shape[0])).astype(matrix.dtype)
            actual = run_onnxruntime(model_of("Lookup4MatMul", weight, dtype, opset, LOOKUP_INPUTS), x)
            assert_same_bytes(actual, run_onnxruntime(matmul_model(matrix, dtype, opset), x))


@pytest.mark.parametrize("run", [run_reference, run_onnxruntime])
@pytest.mark.parametrize("half", [None, "float16", "bfloat16"])
@pytest.mark.parametrize(
    "facts",
    [
        {"rows": 5, "cols": 7, "block_size": 4, "short": True},  # odd, so the last byte is half used
        {"rows": 3, "cols": 5, "block_size": 64, "short": True},  # one block, longer than the weight
        {"rows": 7, "cols": 9, "block_size": 16},  # blocks cross rows
        {"rows": 1, "cols": 1, "block_size": 2},
        {"rows": 64, "cols": 64, "block_size": 4096},
        {"rows": 8, "cols": 8, "block_size": 2, "high_nibble_first": False, "short": True},
    ],
)
def test_lookup4_body_with_short_packed_and_half_scales(run, half, facts):
    weight = lookup_weight(half=half, **facts)
    matrix = matrix_of(weight, "float32")
    x = np.random.default_rng(2).standard_normal((2, 2, matrix.shape[0])).astype(np.float32)
    actual = run(model_of("Lookup4MatMul", weight, "float32", 17, LOOKUP_INPUTS, rank=3), x)
    assert_same_bytes(actual, run(matmul_model(matrix, "float32", 17, rank=3), x))


@pytest.mark.parametrize("run", [run_reference, run_onnxruntime])
@pytest.mark.parametrize("weight_dtype", formats.FLOAT_DTYPES)
def test_lookup4_body_keeps_bits_of_special_values(run, weight_dtype):
    """The body's weight, before its MatMul (whose sums would hide a -0.0): Inf, overflow, subnormals and NaN."""
    scales = np.array([np.inf, -np.inf, 1e38, 1e-40, -0.0, 70000.0, 6e-8, np.nan], np.float32)
    codebook = np.array([-0.0, 0.0, np.inf, 3.0, 1e-3, *formats.FP4[:11]], np.float32)
    weight = lookup_weight(8, 32, 32, weight_dtype=weight_dtype)
    weight = dataclasses.replace(weight, scales=scales, codebook=codebook)
    model = model_of("Lookup4MatMul", weight, "float32", 21, LOOKUP_INPUTS)
    nodes = model.functions[0].node
    nodes[-1].CopyFrom(helper.make_node("Identity", [nodes[-1].input[1]], nodes[-1].output))
    actual, expected = run(model, np.ones((1, 1), np.float32)), matrix_of(weight, "float32")
    nan = np.isnan(expected)
    assert nan.any()
    assert np.isinf(expected).any()
    assert np.signbit(expected[expected == 0]).any()
    assert np.array_equal(np.isnan(actual), nan)
    assert_same_bytes(np.where(nan, np.float32(0), actual), np.where(nan, np.float32(0), expected))


def qmm_weight(dtype: str, zero_points: str, N=6, K=21, block_size=8) -> formats.QmmWeight:
    random = np.random.default_rng(3)
    kind, grid = formats.FLOAT_DTYPES[dtype], (N, -(-K // block_size))
    zeros = {
        "one": np.full((1, 1), 8, np.uint8),
        "uint8": random.integers(0, 16, grid, dtype=np.uint8),
        "float": (random.random(grid) * 15).astype(kind),
    }[zero_points]
    packed = random.integers(0, 256, (*grid, block_size // 2), dtype=np.uint8)
    return formats.QmmWeight(packed, random.standard_normal(grid).astype(kind), zeros, K, N, block_size)


def qmm_matrix(weight: formats.QmmWeight, dtype: str) -> np.ndarray:
    """The [K, N] matrix, one code at a time."""
    kind = weight.scales.dtype
    matrix = np.empty((weight.N, weight.K), kind)
    for n, k in np.ndindex(weight.N, weight.K):
        block, within = divmod(k, weight.block_size)
        code = weight.packed[n, block, within // 2] >> (4 * (within % 2)) & 15
        zero = weight.zero_points[0, 0] if weight.zero_points.size == 1 else weight.zero_points[n, block]
        matrix[n, k] = kind.type(np.float32(code) - np.float32(zero)) * weight.scales[n, block]
    return matrix.astype(formats.FLOAT_DTYPES[dtype]).T


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("dtype", formats.FLOAT_DTYPES)
@pytest.mark.parametrize("zero_points", ["one", "uint8", "float"])
def test_qmm_body_is_exact_in_onnx_reference(opset, dtype, zero_points):
    weight = qmm_weight(dtype, zero_points)
    matrix = qmm_matrix(weight, dtype)
    x = np.random.default_rng(4).standard_normal((2, weight.K)).astype(matrix.dtype)
    actual = run_reference(model_of("QMM", weight, dtype, opset, ("packed", "scales", "zero_points")), x)
    assert_same_bytes(actual, run_reference(matmul_model(matrix, dtype, opset), x))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("zero_points", ["one", "uint8", "float"])
def test_qmm_body_is_exact_in_onnxruntime(opset, zero_points):
    weight = qmm_weight("float32", zero_points)
    x = np.random.default_rng(4).standard_normal((2, weight.K)).astype(np.float32)
    actual = run_onnxruntime(model_of("QMM", weight, "float32", opset, ("packed", "scales", "zero_points")), x)
    assert_same_bytes(actual, run_onnxruntime(matmul_model(qmm_matrix(weight, "float32"), "float32", opset), x))


@pytest.mark.parametrize("op", ["Lookup4MatMul", "QMM"])
def test_bodies_define_no_default_and_use_every_attribute(op):
    function = body(op, 13)
    used = {attribute.ref_attr_name for node in function.node for attribute in node.attribute}
    assert set(function.attribute) == used - {""}
    assert not function.attribute_proto
    assert not any(node.op_type == "CastLike" for node in function.node)


@pytest.mark.parametrize("opset", [12, 29])
def test_no_body_outside_its_opsets(opset):
    with pytest.raises(RewriteError, match=f"opset {opset}.*13 to 28"):
        body("Lookup4MatMul", opset)


def test_bfloat16_products_are_of_ml_dtypes():
    """The oracle of the bfloat16 cases computes in bfloat16 (and not, say, on raw uint16)."""
    model = matmul_model(np.ones((2, 2), ml_dtypes.bfloat16), "bfloat16", 17)
    result = run_reference(model, np.full((1, 2), 1.5, ml_dtypes.bfloat16))
    assert result.dtype == ml_dtypes.bfloat16
    assert result.tolist() == [[3.0, 3.0]]
