"""Constant weights of convolutions lie with their channels last where MLX convolves, and are what they were."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import pytest
from places import compute_in

from lut4tool.runtime import Runtime

RANDOM = np.random.default_rng(3)


@pytest.mark.parametrize(
    ("shape", "group", "dtype"),
    [
        ((6, 4, 3, 2), 1, np.float32),
        ((8, 2, 3, 3), 2, np.float32),
        ((6, 4, 5), 1, np.float16),
        ((4, 4, 2, 3, 2), 1, np.float32),
    ],
)
def test_a_constant_weight_is_laid_out_once(
    shape: tuple[int, ...], group: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in("mlx", monkeypatch)
    weight = RANDOM.standard_normal(shape).astype(dtype)
    x = RANDOM.standard_normal((2, shape[1] * group, *[9] * (len(shape) - 2))).astype(dtype)
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    bias = RANDOM.standard_normal(shape[0]).astype(dtype)
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in (("w", weight), ("b", bias))]
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w", "b"], ["y"], group=group),
        onnx.helper.make_node("Identity", ["w"], ["seen"]),
    ]
    ports = [onnx.helper.make_tensor_value_info(name, kind, None) for name in ("x", "y", "seen")]
    graph = onnx.helper.make_graph(nodes, "g", ports[:1], ports[1:], tensors)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    runtime = Runtime(proto)
    (slot,) = {step.inputs[1] for step in runtime.plan.graph.steps if step.operator.name == "Conv"}
    placed = np.array(runtime.plan.graph.frame[slot], copy=False)
    assert np.moveaxis(placed, 1, -1).flags.c_contiguous
    wide = onnx.reference.ReferenceEvaluator(proto).run(["y"], {"x": x})[0]
    y, seen = runtime.run(None, {"x": x})
    np.testing.assert_allclose(
        y, wide, rtol=1e-2 if dtype is np.float16 else 1e-5, atol=1e-2 if dtype is np.float16 else 1e-5
    )
    np.testing.assert_array_equal(seen, weight)


def test_a_weight_that_is_computed_stays_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in("mlx", monkeypatch)
    text = "agraph (float[n, c, h, w] x, float[m, c, k, l] u) => (float[n, m, p, q] y) { v = Relu(u) y = Conv(x, v) }"
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    shapes = {"x": (1, 2, 5, 5), "u": (3, 2, 2, 2)}
    feeds = {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    (wanted,) = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    np.testing.assert_allclose(Runtime(proto).run(None, feeds)[0], wanted, rtol=1e-5, atol=1e-5)
