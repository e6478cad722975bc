"""Float matrices that a model makes of bytes: they stay bytes, and products and rows of them are the floats' own."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lut4tool import native
from lut4tool.runtime import panels
from lut4tool.runtime.graph import RunError
from lut4tool.runtime.quantized import Quantized
from lut4tool.runtime.session import Runtime

K, N = 70, 50
RANDOM = np.random.default_rng(0)
FORMS = ["one", "columns", "rows", "cast"]


def parts(form: str, dtype: type = np.int8) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Bytes [K, N], their scale and, but for a Cast, their zero point."""
    limits = np.iinfo(dtype)
    count = {"one": (), "columns": (N,), "rows": (K,), "cast": (1, N)}[form]
    matrix = RANDOM.integers(limits.min, limits.max, (K, N), dtype, endpoint=True)
    scale = RANDOM.uniform(0.001, 0.02, count).astype(np.float32)
    zero = None if form == "cast" else RANDOM.integers(limits.min, limits.max, count, dtype, endpoint=True)
    return matrix, scale, None if zero is None else np.asarray(zero, dtype)


def model(form: str, after: str, dtype: type = np.int8, seen: bool = False, **attributes) -> onnx.ModelProto:
    """W made of bytes, then the operator `after` of x and W; seen: W is an output too."""
    matrix, scale, zero = parts(form, dtype)
    if form == "cast":
        makers = [
            helper.make_node("Cast", ["q"], ["c"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["s", "c"], ["w"]),
        ]
        constants = {"q": matrix, "s": scale}
    else:
        axis = {} if form == "one" else {"axis": {"columns": 1, "rows": -2}[form]}
        makers = [helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], **axis)]
        constants = {"q": matrix, "s": scale, "z": zero}
    kind = TensorProto.INT64 if after == "Gather" else TensorProto.FLOAT
    inputs = ["w", "x"] if after == "Gather" else ["x", "w"]
    graph = helper.make_graph(
        [*makers, helper.make_node(after, inputs, ["y"], **attributes)],
        "bytes",
        [helper.make_tensor_value_info("x", kind, None)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (["y", "w"] if seen else ["y"])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def expected(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def floats_of(runtime: Runtime) -> list[np.ndarray]:
    """Constant matrices of floats that the runtime keeps."""
    values = [value for value in runtime.plan.graph.frame if isinstance(value, np.ndarray)]
    return [value for value in values if value.dtype == np.float32 and value.size >= K * N]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("after", "attributes", "shape"),
    [("MatMul", {}, (3, 5, K)), ("Gemm", {}, (4, K)), ("Gemm", {"transB": 1}, (4, N)), ("Gather", {}, None)],
)
def test_what_is_made_of_bytes(after, attributes, shape, form, dtype):
    """The results are onnxruntime's, and no float matrix is kept where rows do not have their own scales."""
    x = RANDOM.integers(-K, K, (2, 6)) if shape is None else RANDOM.standard_normal(shape).astype(np.float32)
    proto = model(form, after, dtype, **attributes)
    runtime = Runtime(proto, device="cpu")
    (found,), (wanted,) = runtime.run(None, {"x": x}), expected(proto, x)
    assert found.dtype == np.float32
    if after == "Gather":
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max() * K**0.5)
    apart = form == "rows" if not attributes else form in ("columns", "cast")
    if native.compiled() and (after == "Gather" or not apart):
        assert not floats_of(runtime)


def test_what_is_seen_is_floats():
    proto, x = model("columns", "MatMul", seen=True), RANDOM.standard_normal((2, K)).astype(np.float32)
    for found, wanted in zip(Runtime(proto, device="cpu").run(None, {"x": x}), expected(proto, x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("indices", [3, -1, [], [[0, 5, 69]], [[[1]], [[-70]]]], ids=str)
def test_rows_by_indices_of_any_rank(form, indices):
    proto, x = model(form, "Gather"), np.array(indices, np.int64)
    np.testing.assert_array_equal(Runtime(proto, device="cpu").run(None, {"x": x})[0], expected(proto, x)[0])


def test_rows_that_are_not_there():
    runtime = Runtime(model("rows", "Gather"), device="cpu")
    with pytest.raises(RunError, match=r"Gather.*70"):
        runtime.run(None, {"x": np.array([K])})


@pytest.mark.skipif(not native.compiled(), reason="no native library was compiled")
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("form", ["one", "columns", "cast"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_products_have_the_bits_of_the_floats(dtype, form, rows):
    matrix, scale, zero = parts(form, dtype)
    both = [None if part is None else part.reshape(1, -1) for part in (scale, zero)]
    weight, x = Quantized(matrix, *both), RANDOM.standard_normal((rows, K)).astype(np.float32)
    wanted = panels.product(weight.array())(x)
    np.testing.assert_array_equal(panels.product(weight)(x), wanted)
    np.testing.assert_array_equal(panels.product(weight.T, None, transposed=True)(x), wanted)


def test_a_matrix_of_floats_in_float64():
    """The floats themselves, each form against its definition."""
    for form in FORMS:
        matrix, scale, zero = parts(form, np.uint8)
        shape = (-1, 1) if form == "rows" else (1, -1)
        both = [None if part is None else part.reshape(shape) for part in (scale, zero)]
        wide = matrix.astype(np.float64) - (0 if both[1] is None else both[1])
        np.testing.assert_allclose(Quantized(matrix, *both).array(), wide * both[0], rtol=2**-23)
