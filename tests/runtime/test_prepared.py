"""Operators as a CPU prepares them: the fast form runs where it should, and gives what onnxruntime gives."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from lut4tool import native
from lut4tool.runtime import registry
from lut4tool.runtime.graph import RunError
from lut4tool.runtime.session import Runtime

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values):
    return np.array(values, np.int64)


X = floats(2, 3, 4)

#: Operator, opset, inputs (the first is fed, "fed" marks others that are), attributes, number of outputs.
CASES = [
    ("Reshape", 13, [X, ints(-1, 4)], {}, 1),
    ("Reshape", 13, [X, ("fed", ints(6, 4))], {}, 1),
    ("Unsqueeze", 13, [X, ints(1)], {}, 1),
    ("Unsqueeze", 11, [X], {"axes": [3]}, 1),
    ("Squeeze", 13, [floats(2, 1, 3), ints(1)], {}, 1),
    ("Squeeze", 11, [floats(2, 1, 3, 1)], {"axes": [1, -1]}, 1),
    ("Transpose", 13, [X], {"perm": [2, 0, 1]}, 1),
    ("Transpose", 13, [X], {}, 1),
    ("Slice", 13, [X, ints(1), ints(2**40), ints(2)], {}, 1),
    ("Slice", 13, [X, ints(-3, 0), ints(-1, 9), ints(1, 2), ints(1, 3)], {}, 1),
    ("Slice", 13, [X, ("fed", ints(-3)), ("fed", ints(2**40)), ints(2)], {}, 1),
    ("Slice", 13, [X, ints(1), ("fed", ints(-1)), ints(1), ints(1)], {}, 1),
    ("Slice", 9, [X], {"starts": [0, 1], "ends": [1, 3]}, 1),
    ("Split", 13, [X, ints(1, 3)], {"axis": 2}, 2),
    ("Split", 11, [X], {"axis": -1}, 2),
    ("Split", 18, [X], {"axis": 2, "num_outputs": 2}, 2),
    ("Expand", 13, [floats(3, 1), ints(2, 3, 5)], {}, 1),
    ("Expand", 13, [X, ("fed", ints(2, 3, 4))], {}, 1),
    ("Expand", 13, [floats(1, 3, 1), ints(5, 2, 3, 4)], {}, 1),
    ("ConstantOfShape", 9, [ints(2, 3)], {}, 1),
    ("ConstantOfShape", 9, [ints(0, 3)], {"value": numpy_helper.from_array(ints(7))}, 1),
    ("Range", 11, [np.array(3), ("fed", np.array(10)), ("fed", np.array(2))], {}, 1),
    ("Range", 11, [np.array(3), ("fed", np.array(-4)), ("fed", np.array(-3))], {}, 1),
    ("Range", 11, [np.array(3), ("fed", np.array(1)), ("fed", np.array(1))], {}, 1),
    ("Pad", 13, [X, ints(0, 1, 2, 0, 0, 3)], {}, 1),
    ("Pad", 13, [X, ints(0, 1, 2, 0, 0, 3), np.float32(7)], {}, 1),
    ("Pad", 10, [X], {"pads": [0, 1, 2, 0, 0, 3], "value": 2.5}, 1),
    *[("Pad", 19, [X, ints(0, 1, 2, 0, 2, 3)], {"mode": mode}, 1) for mode in ("reflect", "edge", "wrap")],
    ("Gather", 13, [X, np.array(-1)], {"axis": 1}, 1),
    ("Gather", 13, [ints(5, 6, 7), np.array(1)], {}, 1),
    ("Gather", 13, [X, ("fed", np.array([[2, -3], [0, 1]]))], {"axis": 1}, 1),
    ("Concat", 13, [X, ("fed", floats(2, 1, 4))], {"axis": 1}, 1),
    ("Cast", 13, [X], {"to": onnx.TensorProto.INT64}, 1),
    ("Cast", 13, [X], {"to": onnx.TensorProto.FLOAT}, 1),
    ("Cast", 19, [X], {"to": onnx.TensorProto.BOOL}, 1),
    ("Add", 13, [X, ("fed", floats(4))], {}, 1),
    ("Sub", 13, [X, ("fed", floats(3, 1))], {}, 1),
    ("Mul", 13, [ints(2, -3), ("fed", ints(5))], {}, 1),
    ("Div", 13, [X, ("fed", floats(4))], {}, 1),
    ("Div", 13, [ints(-7), ("fed", ints(2))], {}, 1),
    ("Div", 13, [ints(7), ("fed", np.array(2))], {}, 1),
    ("Equal", 13, [ints(1, 2), ("fed", ints(1))], {}, 1),
    ("Not", 13, [np.array([True, False])], {}, 1),
    ("Max", 13, [X, ("fed", floats(4))], {}, 1),
    ("Pow", 13, [X, np.float32(2)], {}, 1),
    ("Pow", 13, [X, ints(2)], {}, 1),
    ("Relu", 14, [X], {}, 1),
    ("Sqrt", 13, [np.abs(X)], {}, 1),
    ("Tanh", 13, [X], {}, 1),
    ("Sigmoid", 13, [X], {}, 1),
    ("Erf", 13, [X], {}, 1),
    ("Gelu", 20, [X], {}, 1),
    ("Softmax", 13, [X], {}, 1),
    ("LogSoftmax", 13, [X], {"axis": 2}, 1),
    ("LayerNormalization", 17, [X, floats(4), floats(4)], {}, 1),
    ("LayerNormalization", 17, [X, floats(3, 4)], {"axis": 1, "epsilon": 1e-2}, 1),
    ("DequantizeLinear", 13, [ints(0, 9, 255).astype(np.uint8), np.float32(0.3), np.uint8(7)], {}, 1),
    ("DequantizeLinear", 13, [ints(-128, 9).astype(np.int8), np.float32(0.3)], {}, 1),
    ("Round", 13, [4 * X], {}, 1),
    ("Neg", 13, [X], {}, 1),
    ("ReduceMean", 18, [X, ints(1)], {}, 1),
    ("ReduceMean", 13, [X], {"axes": [-1, 0], "keepdims": 0}, 1),
    ("ReduceSum", 13, [X, ints(0, 2)], {"keepdims": 0}, 1),
    ("ReduceMax", 13, [X], {"axes": [2], "keepdims": 0}, 1),
    ("ReduceMin", 13, [X], {"axes": [1]}, 1),
]


#: Prepared by the native library alone.
CURVES = {"Sigmoid", "Erf", "Gelu", "Softmax", "LogSoftmax", "LayerNormalization"}


def model(op_type, opset, inputs, attributes, outputs):
    """A model of one operator and its feeds: all inputs but the first are constants, unless marked."""
    names, values, weights, feeds = [], [], [], {}
    for place, given in enumerate(inputs):
        name, fed = f"x{place}", place == 0 or isinstance(given, tuple)
        data = np.asarray(given[1] if isinstance(given, tuple) else given)
        names.append(name)
        if fed:
            feeds[name] = data
            shape = [f"{name}_{axis}" for axis in range(data.ndim)]
            values.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), shape))
        else:
            weights.append(numpy_helper.from_array(data, name))
    results = [f"y{index}" for index in range(outputs)]
    node = helper.make_node(op_type, names, results, **attributes)
    graph = helper.make_graph([node], "one", values, [onnx.ValueInfoProto(name=name) for name in results], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), feeds


def without_general(monkeypatch, op_type, opset):
    """Let the row's own function fail, so that only what was prepared can serve."""
    row = registry.find("", op_type, opset)
    rows = registry._TABLE["", op_type]

    @wraps(row.run)
    def fail(*values, **options):
        raise AssertionError(f"{op_type} was not prepared")

    monkeypatch.setitem(registry._TABLE, ("", op_type), [replace(r, run=fail) if r is row else r for r in rows])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_as_onnxruntime(case, monkeypatch):
    op_type, opset = case[:2]
    if op_type in CURVES and not native.compiled():
        pytest.skip("what serves it prepared is in the native library, which was not compiled")
    registry.load()
    proto, feeds = model(*case)
    without_general(monkeypatch, op_type, opset)
    found = Runtime(proto, device="cpu").run(None, feeds)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("Reshape", [X, ints(5, -1)], {}, "cannot be reshaped"),
        ("Gather", [X, np.array(3)], {"axis": 1}, "index 3 is out of range for an axis of 3"),
        ("Gather", [X, ("fed", ints(-4))], {"axis": 1}, "index -4 is out of range for an axis of 3"),
        ("Squeeze", [X, ints(1)], {}, "is not 1 and cannot be squeezed"),
        ("Unsqueeze", [X, ints(4)], {}, "axis 4 is out of range for rank 4"),
        ("Expand", [X, ints(2, 5, 4)], {}, "shape mismatch"),
        ("Slice", [X, ints(0), ints(1), ints(3)], {}, "axis 3 is out of range for rank 3"),
        ("Split", [X, ints(1, 1)], {"axis": 2}, "do not add up to the 4 of axis 2"),
    ],
)
def test_what_is_wrong_is_said_as_ever(op_type, inputs, attributes, message):
    proto, feeds = model(op_type, 13, inputs, attributes, 2 if op_type == "Split" else 1)
    with pytest.raises(RunError, match=message):
        Runtime(proto, device="cpu").run(None, feeds)
