"""MatMulInteger, Cast and Mul as one step: to the last bit what the nodes give, and fused only where unseen."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from lut4tool import native
from lut4tool.runtime import int8, planning
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.skipif(not native.compiled(), reason="no native library was compiled")

RNG = np.random.default_rng(0)
WIDTH = 24


def model(
    scale: np.ndarray, zero: np.ndarray | None, *, to: int = 1, swapped: bool = False, seen: str = ""
) -> onnx.ModelProto:
    """x rounded, multiplied by constant bytes [40, 24], cast, and scaled by x's scale times `scale`."""
    weight = RNG.integers(-128, 128, (40, WIDTH)).astype(np.int8)
    tensors = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(scale, "w_scale")]
    inputs = ["q", "w", "x_zero"]
    if zero is not None:
        tensors.append(numpy_helper.from_array(zero, "w_zero"))
        inputs.append("w_zero")
    factors = ["factor", "wide"] if swapped else ["wide", "factor"]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "x_scale", "x_zero"]),
        helper.make_node("Mul", ["x_scale", "w_scale"], ["factor"]),
        helper.make_node("MatMulInteger", inputs, ["total"], name="product"),
        helper.make_node("Cast", ["total"], ["wide"], to=to),
        helper.make_node("Mul", factors, ["y"]),
        helper.make_node("Add", ["y", "y"], ["z"]),
    ]
    outputs = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in {"z": 1, seen: 6 if seen == "total" else 1}.items()
        if name
    ]
    graph = helper.make_graph(
        nodes, "scaled", [helper.make_tensor_value_info("x", 1, ["a", "b", 40])], outputs, tensors
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def fused(runtime: Runtime) -> list[str]:
    return [row["op"] for row in runtime.plan.describe() if row["where"] == "fused into product"]


def expected(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, {"x": x})


SCALES = [np.array(0.01, np.float32), np.array([0.02], np.float32), RNG.uniform(0.01, 0.1, WIDTH).astype(np.float32)]
ZEROS = [None, np.array(3, np.int8), RNG.integers(-9, 9, WIDTH).astype(np.int8)]


@pytest.mark.parametrize("scale", SCALES, ids=["scalar", "one", "columns"])
@pytest.mark.parametrize("zero", ZEROS, ids=["none", "one", "columns"])
@pytest.mark.parametrize("swapped", [False, True])
def test_equal_to_onnxruntime(scale, zero, swapped, monkeypatch):
    proto = model(scale, zero, swapped=swapped)
    runtime = Runtime(proto, device="cpu")
    assert fused(runtime) == ["ai.onnx::Cast", "ai.onnx::Mul"]
    monkeypatch.setattr(planning, "fuse", lambda *_: None)
    plain = Runtime(proto, device="cpu")
    assert not fused(plain)
    for shape in ((2, 3, 40), (1, 1, 40), (1, 40, 40)):
        x = RNG.standard_normal(shape).astype(np.float32)
        (found,), (unfused,) = runtime.run(None, {"x": x}), plain.run(None, {"x": x})
        np.testing.assert_array_equal(found, unfused)
        np.testing.assert_array_equal(found, expected(proto, x)[0])


def test_a_factor_that_broadcasts_otherwise():
    """A scale [3, 1, 24] is neither one number nor one a column."""
    proto, x = model(RNG.uniform(0.01, 0.1, (3, 1, WIDTH)).astype(np.float32), None), np.ones((1, 2, 40), np.float32)
    runtime = Runtime(proto, device="cpu")
    assert fused(runtime)
    np.testing.assert_array_equal(runtime.run(None, {"x": x})[0], expected(proto, x)[0])


@pytest.mark.parametrize("seen", ["total", "wide", "y"])
def test_what_is_seen_is_not_fused_over(seen):
    proto, x = model(SCALES[0], None, seen=seen), RNG.standard_normal((2, 3, 40)).astype(np.float32)
    runtime = Runtime(proto, device="cpu")
    assert bool(fused(runtime)) == (seen == "y")
    for one, other in zip(runtime.run(None, {"x": x}), expected(proto, x), strict=True):
        np.testing.assert_array_equal(one, other)


# -- MatMul of dequantized values


def dequantized(
    scale: np.ndarray, zero: np.ndarray | None, *, dtype=np.int8, axis: int = 1, seen: bool = False
) -> onnx.ModelProto:
    """x quantized and dequantized, times two weights [40, 24] that are dequantized, one with an Add after it."""
    info = np.iinfo(dtype)
    tensors = [
        numpy_helper.from_array(RNG.integers(info.min, info.max + 1, (40, WIDTH)).astype(dtype), name)
        for name in ("v", "w")
    ]
    tensors += [
        numpy_helper.from_array(scale, "scale"),
        numpy_helper.from_array(np.float32(0.03).reshape(()), "x_scale"),
    ]
    tensors.append(numpy_helper.from_array(np.asarray(7, dtype), "x_zero"))
    tensors.append(numpy_helper.from_array(RNG.standard_normal(WIDTH).astype(np.float32), "bias"))
    ends = ["scale"]
    if zero is not None:
        tensors.append(numpy_helper.from_array(zero.astype(dtype), "zero"))
        ends.append("zero")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "x_scale", "x_zero"], ["d"], name="back"),
        helper.make_node("DequantizeLinear", ["v", *ends], ["vf"], axis=axis),
        helper.make_node("DequantizeLinear", ["w", *ends], ["wf"], axis=axis),
        helper.make_node("MatMul", ["d", "vf"], ["y"], name="product"),
        helper.make_node("MatMul", ["d", "wf"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["z"]),
    ]
    results = ["y", "z", *(["d"] if seen else [])]
    graph = helper.make_graph(
        nodes, "dequantized", [helper.make_tensor_value_info("x", 1, ["a", "b", 40])],
        [helper.make_tensor_value_info(name, 1, None) for name in results], tensors,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.mark.parametrize("scale", SCALES, ids=["scalar", "one", "columns"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("seen", [False, True])
def test_products_of_what_is_dequantized(scale, zero, dtype, seen, monkeypatch):
    """Within the rounding of float32 of what onnxruntime multiplies in float32."""
    calls, times = [], int8.Product.times
    monkeypatch.setattr(int8.Product, "times", lambda *values: calls.append(1) or times(*values))
    proto = dequantized(scale, np.full(scale.shape, 3) if zero else None, dtype=dtype, seen=seen)
    runtime = Runtime(proto, device="cpu")
    steps = [step.operator.name for step in runtime.plan.steps()]
    assert ("DequantizeLinear" in steps) == seen
    x = RNG.standard_normal((2, 3, 40)).astype(np.float32)
    found, wanted = runtime.run(None, {"x": x}), expected(proto, x)
    assert len(calls) == 2
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
    assert runtime.run(None, {"x": x[:0]})[0].shape == (0, 3, WIDTH)


def test_scales_of_rows_are_left_to_floats():
    """A scale for each row of the weight is no factor of a column."""
    rows = RNG.uniform(0.01, 0.1, 40).astype(np.float32)
    proto, x = dequantized(rows, None, axis=0), RNG.standard_normal((2, 3, 40)).astype(np.float32)
    runtime = Runtime(proto, device="cpu")
    assert "DequantizeLinear" in [step.operator.name for step in runtime.plan.steps()]
    for one, other in zip(runtime.run(None, {"x": x}), expected(proto, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
