"""The operators of onnx/defs/tensor, on onnx's own node tests, and at the edges of their indices."""

from __future__ import annotations

import numpy as np
import pytest
from backend_cases import against_onnxruntime, cases, check, single
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.planning import RunError
from lut4tool.runtime.session import Runtime


def run(op_type: str, *inputs: np.ndarray | None, version: int = 21, outputs: int = 1, **attributes: object) -> list:
    runtime = Runtime(single(op_type, version, inputs, attributes, outputs), device="cpu")
    return runtime.run(None, {f"x{index}": data for index, data in enumerate(inputs) if data is not None})


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("case", cases("tensor"))
def test_node(case):
    check(case)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


X = np.random.default_rng(0).standard_normal((3, 4, 2)).astype(np.float32)


@pytest.mark.parametrize("index", [-4, 3, 2**40])
@pytest.mark.parametrize("op_type", ["Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"])
def test_an_index_out_of_range_is_an_error_that_names_it(op_type, index):
    x = np.arange(3, dtype=np.float32)
    indices = ints(index).reshape(1, 1) if op_type.endswith("ND") else ints(index)
    updates = [np.ones(1, np.float32)] if op_type.startswith("Scatter") else []
    with pytest.raises(RunError, match=rf"{op_type}.*index {index} is out of range for an axis of 3: it takes -3 to 2"):
        run(op_type, x, indices, *updates)


@given(
    length=st.integers(0, 5),
    start=st.integers(-8, 8) | st.sampled_from([2**31 - 1, -(2**63), 2**63 - 1]),
    end=st.integers(-8, 8) | st.sampled_from([2**31 - 1, -(2**63), 2**63 - 1]),
    step=st.integers(-3, 3).filter(bool),
)
@settings(max_examples=150, deadline=None)
def test_slice_clamps_as_numpy_does(length, start, end, step):
    x = np.arange(2 * length, dtype=np.float32).reshape(2, length)
    (found,) = run("Slice", x, ints(start), ints(end), ints(-1), ints(step))
    if step < 0:  # the standard, and onnxruntime, clamp the start to the first element, where NumPy takes none
        start = max(start, -length)
    np.testing.assert_array_equal(found, x[:, start:end:step])


@pytest.mark.parametrize("start", [-1, -3, -4, -(2**63)])
@pytest.mark.parametrize("end", [-1, -4, -(2**63)])
def test_slice_backward_from_before_the_first_element(start, end):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    against_onnxruntime("Slice", 13, [x, ints(start), ints(end), ints(1), ints(-1)])


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("pads", [(1, 0, 1, 0, 2, 0), (0, -1, 0, 0, 1, 0), (2, 3, 1, 2, 3, 1), (-1, -1, 0, -1, -1, 0)])
def test_pad(mode, pads):
    against_onnxruntime("Pad", 19, [X, ints(*pads)], mode=mode)


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32, np.int64, np.uint8, np.bool_])
def test_pad_with_a_value_of_any_type_on_some_axes(dtype):
    x, value = np.ones((2, 3), dtype), np.array(1, dtype)
    against_onnxruntime("Pad", 18, [x, ints(1, 2), value, ints(-1)], mode="constant")


@pytest.mark.parametrize("wanted", [(0, -1), (-1,), (2, 0, -1), (24,), (1, -1, 1)])
def test_reshape(wanted):
    against_onnxruntime("Reshape", 14, [X.reshape(3, 4, 2), ints(*wanted)])


def test_reshape_of_nothing():
    empty = np.zeros((0, 3), np.float32)
    assert run("Reshape", empty, ints(3, 0), allowzero=1)[0].shape == (3, 0)
    assert run("Reshape", empty, ints(0, -1))[0].shape == (0, 0)


def test_a_reshape_that_cannot_be_names_both_shapes():
    with pytest.raises(RunError, match=r"Reshape.*shape \[3, 4, 2\] cannot be reshaped to \[5, -1\]"):
        run("Reshape", X, ints(5, -1))


@pytest.mark.parametrize("source", [np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_, np.float16])
@pytest.mark.parametrize(
    "target", [np.float32, np.float64, np.int8, np.int32, np.int64, np.uint16, np.bool_, np.float16]
)
def test_cast(source, target):
    x = np.array([0, 1, 2, 100, 3.7, 0.2], np.float64).astype(source)
    (found,) = run("Cast", x, to=TensorProto.DataType.Value(_name(target)))
    assert found.dtype == target
    np.testing.assert_array_equal(found, x.astype(target))


def _name(dtype: type) -> str:
    return {"float32": "FLOAT", "float64": "DOUBLE"}.get(np.dtype(dtype).name, np.dtype(dtype).name.upper())


def test_cast_of_integers_out_of_range_keeps_the_low_bits():
    x = np.array([200, -129, 2**40 + 5, -1], np.int64)
    np.testing.assert_array_equal(run("Cast", x, to=TensorProto.INT8)[0], x.astype(np.int8))
    np.testing.assert_array_equal(run("Cast", x, to=TensorProto.UINT32)[0], x.astype(np.uint32))


def test_strings():
    words = np.array([["1.5", "-2"], ["NaN", "-INF"]], object)
    np.testing.assert_array_equal(run("Cast", words, to=TensorProto.FLOAT)[0], [[1.5, -2], [np.nan, -np.inf]])
    np.testing.assert_array_equal(run("Cast", np.array(["7", "-3"], object), to=TensorProto.INT64)[0], [7, -3])
    assert run("Reshape", words, ints(4))[0].tolist() == ["1.5", "-2", "NaN", "-INF"]
    picked = run("Where", np.array([[True], [False]]), words, np.array("none", object))[0]
    assert picked.tolist() == [["1.5", "-2"], ["none", "none"]]
    assert run("Gather", words, ints(1))[0].tolist() == [["NaN", "-INF"]]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float64])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter(dtype, reduction):
    x = np.arange(12).reshape(4, 3).astype(dtype)
    indices = ints(0, -1, 2, 1).reshape(2, 2)
    updates = np.array([[5, 6], [7, 8]], dtype)
    against_onnxruntime("ScatterElements", 18, [x, indices, updates], axis=1, reduction=reduction)
    rows = np.array([[[1, 2, 3], [4, 5, 6]]], dtype)
    repeated = ints(1, -1) if reduction == "none" else ints(1, 1)
    against_onnxruntime("ScatterND", 18, [x, repeated.reshape(1, 2, 1), rows], reduction=reduction)


def test_scatter_leaves_its_input_alone():
    x = np.zeros(3, np.float32)
    run("ScatterElements", x, ints(1), np.ones(1, np.float32))
    assert not x.any()


@pytest.mark.parametrize("batch_dims", [0, 1, 2])
def test_gather_nd(batch_dims):
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    indices = {0: [[1, 2], [0, -1]], 1: [[[1], [2]], [[0], [-1]]], 2: [[[3], [0], [1]], [[-1], [2], [2]]]}[batch_dims]
    against_onnxruntime("GatherND", 13, [x, np.array(indices, np.int64)], batch_dims=batch_dims)


def test_gather_elements_with_fewer_rows_than_the_data():
    against_onnxruntime("GatherElements", 13, [X, ints(1, -1, 0, 3).reshape(2, 2, 1)], axis=1)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("in_order", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_unique(axis, in_order, dtype):
    x = np.array([[3, 1, 3], [2, 2, 2], [3, 1, 3]], dtype)
    given = {} if axis is None else {"axis": axis}
    against_onnxruntime("Unique", 11, [x], outputs=4, sorted=in_order, **given)


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("indices", [np.array([[0, -1], [5, 2]], np.int64), np.array([[0, 2], [5, 2]], np.float32)])
def test_one_hot(axis, indices):
    against_onnxruntime("OneHot", 11, [indices, np.array(4, indices.dtype), np.array([2, 7], np.float32)], axis=axis)


@pytest.mark.parametrize("k", [-2, 0, 1, 5])
@pytest.mark.parametrize("upper", [0, 1])
def test_trilu_clears_nan_and_infinity(k, upper):
    x = np.full((2, 3, 4), np.nan, np.float32)
    x[0] = np.inf
    against_onnxruntime("Trilu", 14, [x, np.array(k, np.int64)], upper=upper)


def test_split_that_does_not_add_up_is_an_error():
    with pytest.raises(RunError, match=r"pieces of \[1, 1\] do not add up to the 4 of axis 0"):
        run("Split", np.zeros(4, np.float32), ints(1, 1), outputs=2)


def test_split_makes_no_more_parts_than_the_node_has_outputs():
    """Of 2^40 parts the first two have an element each; the others, never listed, the rest."""
    first, second = run("Split", np.arange(6, dtype=np.float32), outputs=2, num_outputs=1 << 40)
    np.testing.assert_array_equal(first, [0])
    np.testing.assert_array_equal(second, [1])


def test_squeeze_of_a_larger_axis_is_an_error():
    with pytest.raises(RunError, match=r"axis 1 of shape \[3, 4, 2\] is not 1"):
        run("Squeeze", X, ints(1))


BAD = {
    "Squeeze": ((X, ints(7)), "axis 7 is out of range for rank 3: it takes -3 to 2"),
    "Unsqueeze": ((X, ints(-5)), "axis -5 is out of range for rank 4"),
    "ReduceSum": ((X, ints(3)), "axis 3 is out of range for rank 3"),
    "Slice": ((X, ints(0), ints(1), ints(3)), "axis 3 is out of range for rank 3"),
    "Pad": ((X, ints(-2, 0, 0, -2, 0, 0)), "pads -2 and -2 cut more than the 3 of an axis"),
    "Compress": ((X, np.array([0, 0, 0, 1], bool)), "index 3 is out of range"),
    "ReverseSequence": ((X, ints(1, 2, 3, 4)), "index 3 is out of range for an axis of 3"),
    "Tile": ((X, ints(1, -1, 1)), "must not be negative"),
    "TopK": ((X, ints(-1)), "k is -1"),
}


@pytest.mark.parametrize("op_type", BAD)
def test_what_would_read_outside_the_tensor_is_an_error(op_type):
    inputs, text = BAD[op_type]
    attributes = {"axis": 0} if op_type == "Compress" else {}
    with pytest.raises(RunError, match=f"node '{op_type}.*{text}"):
        run(op_type, *inputs, outputs=2 if op_type == "TopK" else 1, **attributes)
