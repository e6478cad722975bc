"""Elementwise operators and reductions in every type that their schemas list and NumPy has: exact result types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from backend_cases import single
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.session import Runtime

VERSION = 26
DTYPES = {
    "float": np.float32, "double": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64, "bool": np.bool_,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("place")

#: Operator -> what NumPy says of one or two operands; floats are handed over as float64.
ELEMENTWISE: dict[str, Any] = {
    "Abs": np.abs, "Neg": np.negative, "Sign": np.sign, "Ceil": np.ceil, "Floor": np.floor, "Round": np.rint,
    "Exp": np.exp, "Log": np.log, "Sqrt": np.sqrt, "Tanh": np.tanh, "Sin": np.sin, "Atan": np.arctan,
    "Reciprocal": lambda x: 1 / x,
    "Relu": lambda x: np.maximum(x, 0), "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Not": np.logical_not, "BitwiseNot": np.invert, "Add": np.add, "Sub": np.subtract, "Mul": np.multiply,
    "Max": np.maximum,
    "Min": np.minimum,
    "Div": lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a.astype(float) / b.astype(float)).astype(a.dtype),
    "Equal": np.equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Less": np.less,
    "LessOrEqual": np.less_equal,
    "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor,
}  # fmt: skip
BOOLEAN = {"Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"}
REDUCTIONS: dict[str, Any] = {
    "ReduceSum": np.sum, "ReduceProd": np.prod, "ReduceMax": np.max, "ReduceMin": np.min, "ReduceMean": np.mean,
    "ReduceL1": lambda x, **k: np.sum(np.abs(x), **k), "ReduceSumSquare": lambda x, **k: np.sum(x * x, **k),
    "ReduceL2": lambda x, **k: np.sqrt(np.sum(x * x, **k)), "ReduceLogSum": lambda x, **k: np.log(np.sum(x, **k)),
}  # fmt: skip


def allowed(op_type: str) -> list[str]:
    """The types that the operator's first input may have, of those that NumPy has."""
    schema = onnx.defs.get_schema(op_type, VERSION)
    listed = {t.removeprefix("tensor(").removesuffix(")") for t in schema.inputs[0].types}
    return [name for name in DTYPES if name in listed]


def pairs(operators: dict[str, Any]) -> list[tuple[str, str]]:
    return [(op_type, name) for op_type in operators for name in allowed(op_type)]


def operands(dtype: Any, count: int) -> list[np.ndarray]:
    first, second = np.array([[1, 2, 3], [7, 4, 2]]), np.array([3, 1, 2])
    return [values.astype(dtype) for values in (first, second)[:count]]


def check(op_type: str, inputs: list[np.ndarray], expected: np.ndarray) -> None:
    runtime = Runtime(single(op_type, VERSION, inputs, {}, 1), device="cpu")
    (found,) = runtime.run(None, {f"x{index}": data for index, data in enumerate(inputs)})
    assert found.dtype == expected.dtype
    rtol = {2: 1e-2, 4: 1e-6}.get(found.dtype.itemsize, 1e-12) if found.dtype.kind in "fV" else 0
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=rtol)


def exact(values: np.ndarray) -> np.ndarray:
    """Floats in float64, integers as they are."""
    return values if values.dtype.kind in "iub" else values.astype(np.float64)


@pytest.mark.parametrize(("op_type", "name"), pairs(ELEMENTWISE))
def test_elementwise(op_type, name):
    function = ELEMENTWISE[op_type]
    inputs = operands(DTYPES[name], len(onnx.defs.get_schema(op_type, VERSION).inputs))
    if op_type in ("Max", "Min"):
        inputs = operands(DTYPES[name], 2)
    expected = np.asarray(function(*map(exact, inputs)))
    check(op_type, inputs, expected.astype(bool if op_type in BOOLEAN else DTYPES[name]))


@pytest.mark.parametrize(("op_type", "name"), pairs(REDUCTIONS))
def test_reduction(op_type, name):
    (x,) = operands(DTYPES[name], 1)
    expected = REDUCTIONS[op_type](exact(x), axis=0, keepdims=True)
    check(op_type, [x, np.array([0])], np.asarray(expected).astype(DTYPES[name]))
