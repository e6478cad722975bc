"""Products with constant weights laid out in panels, against float64 and onnxruntime."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import onnxruntime
import pytest
from backend_cases import frozen
from onnx import helper, numpy_helper
from test_prepared import floats, ints, model, without_general

from lut4tool import native
from lut4tool.runtime import panels, registry
from lut4tool.runtime.graph import RunError
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.skipif(not native.compiled(), reason="no native library was compiled")


@pytest.fixture(params=["avx512", "avx2", "neon", "portable"])
def instruction_set(request):
    """Multiply with one set; those that this machine lacks are skipped."""
    before = native.product_instruction_set()
    try:
        native._native.use_instruction_set(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    assert native.product_instruction_set() == request.param
    yield request.param
    native._native.use_instruction_set(before)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 19, 70])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (3, 16), (129, 33), (300, 200), (640, 49)])
@pytest.mark.parametrize("biased", [False, True])
def test_products(instruction_set, rows, depth, width, biased):
    random = np.random.default_rng(rows)
    x, w, b = (frozen(random.standard_normal(s).astype(np.float32)) for s in ((rows, depth), (depth, width), (width,)))
    wide = x.astype(np.float64) @ w + (b if biased else 0)
    bound = 2.0**-20 * (np.abs(x.astype(np.float64)) @ np.abs(w) + np.abs(b))
    for weight, transposed in ((w, False), (np.ascontiguousarray(w.T), True)):
        found = panels.product(weight, b if biased else None, transposed)(x)
        assert found.shape == (rows, width)
        assert (np.abs(found - wide) <= bound).all()


@pytest.mark.parametrize("rows", [1, 3, 11])
def test_equal_columns_and_rows_give_equal_results(instruction_set, rows):
    """So that a softmax of huge equal values stays even."""
    x, w = np.full((rows, 2048), 3e15, np.float32), np.full((2048, 1000), 0.02, np.float32)
    found = panels.product(w)(x)
    assert (found == found[0, 0]).all()
    np.testing.assert_allclose(found, 2048 * 3e15 * 0.02, rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_products_are_divided(threads, monkeypatch):
    """Between threads, by columns and by rows, with the same bits."""
    random = np.random.default_rng(0)
    x, w = random.standard_normal((400, 130)).astype(np.float32), random.standard_normal((130, 90)).astype(np.float32)
    product = panels.product(w)
    monkeypatch.setattr(panels, "_THREADS", 1)
    wanted = product(x)
    monkeypatch.setattr(panels, "_THREADS", threads)
    np.testing.assert_array_equal(product(x), wanted)
    np.testing.assert_allclose(wanted, x.astype(np.float64) @ w, rtol=0, atol=1e-4)


CASES = [
    ("MatMul", [floats(2, 3, 4), floats(4, 20)], {}),
    ("MatMul", [floats(4), floats(4, 20)], {}),
    ("MatMul", [floats(0, 4), floats(4, 3)], {}),
    ("Gemm", [floats(3, 4), floats(4, 5)], {}),
    ("Gemm", [floats(3, 4), floats(5, 4), floats(5)], {"transB": 1}),
    ("Gemm", [floats(3, 4), floats(4, 5), floats(1, 5)], {"alpha": 1.0}),
]
GENERAL = [
    ("MatMul", [floats(2, 3, 4), floats(2, 4, 5)], {}),
    ("Gemm", [floats(3, 4), floats(4, 5), floats(3, 1)], {}),
    ("Gemm", [floats(3, 4), floats(4, 5), floats(5)], {"alpha": 0.5}),
    ("Gemm", [floats(3, 4), floats(4, 5), ("fed", floats(5))], {"beta": 2.0}),
    ("Gemm", [floats(4, 3), floats(4, 5)], {"transA": 1}),
]


@pytest.mark.parametrize(("laid", "case"), [(True, case) for case in CASES] + [(False, case) for case in GENERAL])
def test_operators(laid, case, monkeypatch):
    op_type, inputs, attributes = case
    registry.load()
    proto, feeds = model(op_type, 13, inputs, attributes, 1)
    if laid:
        without_general(monkeypatch, op_type, 13)
    found = Runtime(proto, device="cpu").run(None, feeds)[0]
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit():
    proto, _ = model("MatMul", 13, [floats(2, 4), floats(4, 3)], {}, 1)
    with pytest.raises(RunError, match=r"of shape \[2, 5\] and b of shape \[4, 3\] have no product"):
        Runtime(proto, device="cpu").run(None, {"x0": floats(2, 5)})


def test_a_weight_is_laid_out_once_and_let_go():
    """Nodes that share a weight share its panels; the weight itself leaves the frame."""
    weight = floats(4, 4)
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in (("x", "h"), ("h", "y"))]
    ports = [[helper.make_tensor_value_info(name, 1, [2, 4])] for name in "xy"]
    graph = helper.make_graph(nodes, "shared", *ports, [numpy_helper.from_array(weight, "w")])
    runtime = Runtime(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), device="cpu")
    kept = [value for value in runtime.plan.graph.frame if isinstance(value, np.ndarray) and value.shape == (4, 4)]
    assert not kept
    x = floats(2, 4)
    np.testing.assert_allclose(
        runtime.run(None, {"x": x})[0], x.astype(np.float64) @ weight @ weight, rtol=1e-5, atol=1e-5
    )
    one, other = panels.product(weight), panels.product(weight)
    assert one.weight is other.weight
    array = weakref.ref(weight)
    del weight
    one(x)
    gc.collect()
    assert one.weight.source is None
    assert array() is None


def test_large_and_other_weights_are_left_where_they_lie():
    assert panels.product(np.zeros((4, 4), np.float64)) is None
    assert panels.product(np.broadcast_to(np.float32(0), (1 << 12, 1 << 11))) is None
    assert panels.product(ints(1, 2)) is None
