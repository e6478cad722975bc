"""Operators at older versions where those differ from the newest, in onnxruntime; the others: test_ops_older.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from backend_cases import against_onnxruntime, single
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from lut4tool.runtime.session import Runtime

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4, 2)).astype(np.float32)
SQUARE = RNG.standard_normal((1, 8, 2, 3)).astype(np.float32)
POSITIVE = np.abs(X) + np.float32(0.5)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Case:
    """One operator at one opset version."""

    op_type: str
    version: int
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1


ROIS = np.array([[0, 0, 0, 1, 1]], np.float32)
SCALES = np.array([1, 1, 2, 3], np.float32)
KERNEL = {"kernel_shape": [2, 2], "strides": [2, 2]}
SOFTMAXES = ("Softmax", "LogSoftmax", "Hardmax")
BOUNDS = ((2, 11, 3), (5, -2, -2), (3, 1, 1))
CASES = [
    *(Case("Clip", v, (X,), a) for v in (7, 10) for a in ({}, {"min": -0.5}, {"min": -0.5, "max": 0.25})),
    *(Case(n, v, (X,), {"axis": a}) for n in SOFTMAXES for v in (7, 11, 12) for a in (0, 1, 2)),
    *(Case(n, 12, (X,), {"axis": -2}) for n in SOFTMAXES),
    *(Case("TopK", v, (X,), {"k": 2, "axis": a}, 2) for v in (7, 9) for a in (0, 1)),
    Case("TopK", 10, (X, ints(2)), {"axis": 1}, 2),
    *(Case("DFT", v, (X[..., :1], None), {"axis": 1, "onesided": o}) for v in (17, 19) for o in (0, 1)),
    Case("DFT", 17, (X, np.array(6, np.int64)), {"axis": 0, "inverse": 1}),
    *(
        Case(f"Reduce{n}", v, (POSITIVE,), a)
        for n in ("Max", "Min", "Mean", "Sum", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
        for v in (7, 11, 12, *(() if n == "Sum" else (13, 17)))
        for a in ({}, {"axes": [1]}, {"axes": [2, 0], "keepdims": 0})
    ),
    *(Case(n, v, (X,), {"axis": 1, "keepdims": k}) for n in ("ArgMax", "ArgMin") for v in (7, 11) for k in (0, 1)),
    *(Case(n, 11, (X,)) for n in ("ArgMax", "ArgMin")),
    *(Case("Shape", v, (X,)) for v in (7, 14)),
    *(Case("Reshape", v, (X, ints(0, -1))) for v in (7, 13)),
    *(Case("Split", v, (X,), {"axis": 1}, 2) for v in (7, 12)),
    *(Case("Split", v, (X,), {"axis": 1, "split": [1, 3]}, 2) for v in (7, 12)),
    Case("Split", 12, (X,), {"axis": -2}, 4),
    *(Case("Split", v, (X, s), {"axis": 1}, 2) for v in (13, 17) for s in (None, ints(3, 1))),
    *(Case("Slice", v, (X,), {"starts": [1, -1], "ends": [100, 2], "axes": [1, 2]}) for v in (7, 9)),
    Case("Slice", 9, (X,), {"starts": [0, 1], "ends": [2, -1]}),
    *(Case("Slice", v, (X, ints(-1, 0), ints(-100, 1), ints(1, 0), ints(-2, 1))) for v in (10, 11, 12)),
    *(Case("Squeeze", v, (X[:, :1],), a) for v in (7, 11, 12) for a in ({}, {"axes": [1]})),
    *(Case("Unsqueeze", v, (X,), {"axes": [0, 3]}) for v in (7, 11, 12)),
    *(Case("Pad", v, (X,), {"pads": [0, 1, 0, 2, 0, 1], "mode": m}) for v in (7, 10) for m in ("edge", "reflect")),
    Case("Pad", 7, (X,), {"pads": [0, 1, -1, 2, 0, 1], "value": 2.5}),
    *(Case("Pad", v, (X, ints(1, 0, 0, 0, 2, -1), np.array(3, np.float32))) for v in (11, 13, 17)),
    *(Case("Pad", v, (X, ints(1, 0, 0, 0, 2, 1)), {"mode": m}) for v in (11, 17) for m in ("edge", "reflect")),
    *(Case("DepthToSpace", v, (SQUARE,), {"blocksize": 2}) for v in (7, 10)),
    *(Case("SpaceToDepth", v, (SQUARE.reshape(1, 3, 4, 4),), {"blocksize": 2}) for v in (7, 13)),
    Case("GatherND", 11, (X, ints(0, 1, 2, -1).reshape(2, 2))),
    *(Case("ScatterElements", v, (X, ints(0, -1).reshape(1, 1, 2), X[:1, :1]), {"axis": 1}) for v in (11, 13, 15)),
    *(Case("Scatter", v, (X, ints(0, -1).reshape(1, 1, 2), X[:1, :1]), {"axis": 1}) for v in (9, 10)),
    *(Case("ScatterND", v, (X, ints(0, -1).reshape(2, 1), X[:2])) for v in (11, 13, 15)),
    *(Case("Cast", v, (X * 5,), {"to": t}) for v in (7, 9, 13, 18) for t in (TensorProto.INT32, TensorProto.BOOL)),
    *(Case("Cast", v, (X * 5,), {"to": t}) for v in (19, 23) for t in (TensorProto.FLOAT16, TensorProto.DOUBLE)),
    *(Case("CastLike", v, (X * 5, ints(1))) for v in (15, 18, 19, 23)),
    *(Case("OneHot", v, (ints(1, -1, 9), ints(4), np.array([2, 5], np.float32)), {"axis": 0}) for v in (9, 11)),
    *(Case("CumSum", v, (X, np.array(1, np.int64)), {"exclusive": 1}) for v in (11, 14)),
    *(Case("GlobalLpPool", v, (SQUARE,), {"p": 3}) for v in (7, 21)),
    *(Case("MaxRoiPool", v, (SQUARE, ROIS), {"pooled_shape": [1, 2]}) for v in (7, 21)),
    *(Case("RoiAlign", v, (SQUARE, ROIS[:, 1:], ints(0)), {"output_height": 2}) for v in (10, 16)),
    *(Case("MaxUnpool", v, (SQUARE, np.arange(48).reshape(SQUARE.shape) * 4), KERNEL) for v in (9, 11)),
    *(Case("Upsample", 7, (SQUARE,), {"scales": [1.0, 1.0, 2.0, 3.0], "mode": m}) for m in ("nearest", "linear")),
    *(Case("Upsample", 9, (SQUARE, SCALES), {"mode": m}) for m in ("nearest", "linear")),
    *(Case("Resize", 10, (SQUARE, SCALES), {"mode": m}) for m in ("nearest", "linear")),
    *(Case("Resize", v, (SQUARE, np.zeros(0, np.float32), SCALES), {"mode": "linear"}) for v in (11, 13)),
    *(Case("Range", 11, tuple(np.array(v, d) for v in b)) for d in (np.float32, np.int64) for b in BOUNDS),
]  # fmt: skip


def _name(case: Case) -> str:
    return "-".join([case.op_type, str(case.version), *(f"{key}={item}" for key, item in case.attributes.items())])


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_old_version(case):
    against_onnxruntime(
        case.op_type, case.version, case.inputs, outputs=case.outputs, rtol=1e-5, atol=1e-6, **case.attributes
    )


EARLY = {
    "Add": ({"broadcast": 1, "axis": 1}, X, X[0, :, 0]),
    "Sub": ({"broadcast": 1}, X, X[0, 0]),
    "Mul": ({"broadcast": 1, "axis": 0}, X, X[:, :1, 0].reshape(3)),
    "Div": ({}, X, POSITIVE),
    "Pow": ({"broadcast": 1, "axis": 1}, POSITIVE, X[0, :, 0]),
    "And": ({"broadcast": 1}, X > 0, X[0, 0] > 0.2),
    "Or": ({}, X > 0, X > 0.5),
    "Xor": ({"broadcast": 1, "axis": 1}, X > 0, X[0, :, 0] > 0.2),
    "Equal": ({"broadcast": 1}, (X * 2).astype(np.int32), np.array([0, 1], np.int32)),
    "Greater": ({"broadcast": 1}, X, X[0, 0]),
    "Less": ({"broadcast": 1, "axis": 1}, X, X[0, :, 0]),
    "PRelu": ({}, X, POSITIVE[0, :, 0]),
    "Gemm": ({"broadcast": 1, "alpha": 0.5, "transB": 1}, X[0], X[1], X[2, :, 0]),
    "AveragePool": ({"kernel_shape": [2, 2], "pads": [1, 1, 0, 0]}, SQUARE),
    "BatchNormalization": ({"is_test": 1}, SQUARE, *[POSITIVE.reshape(-1)[n : n + 8] for n in (0, 8, 16, 4)]),
}


@pytest.mark.parametrize("op_type", EARLY)
def test_before_version_7(op_type):
    """Broadcasting spelled out in NumPy, then version 7."""
    attributes, x, *others = EARLY[op_type]
    model = single(op_type, 6, [x, *others], attributes, 1)
    (found,) = Runtime(model, device="cpu").run(None, {f"x{i}": data for i, data in enumerate([x, *others])})
    kept = {key: data for key, data in attributes.items() if key not in ("axis", "broadcast", "is_test")}
    if op_type == "PRelu":
        others = [others[0].reshape(-1, 1)]
    elif "axis" in attributes:
        others = [others[0].reshape(-1, *[1] * (x.ndim - 1 - attributes["axis"]))]
    later = single(op_type, 14, [x, *others], kept, 1)
    (expected,) = ReferenceEvaluator(later).run(None, {f"x{i}": data for i, data in enumerate([x, *others])})
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


#: Operators of one or two inputs that are one function at every version: run at their oldest version from 7 on.
UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Elu Erf Exp Floor HardSigmoid Identity LeakyRelu Log "
    "Neg Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh ThresholdedRelu "
    "Transpose IsNaN Not Sum Max Min Mean Size NonZero"
)
BINARY = "Add Sub Mul Div Pow PRelu Equal Greater Less And Or Xor MatMul Sum Max Min Mean"


@pytest.mark.parametrize("op_type", UNARY.split())
def test_oldest_unary(op_type):
    x = {"Acosh": POSITIVE + 1, "Log": POSITIVE, "Sqrt": POSITIVE, "Not": X > 0}.get(op_type, np.tanh(X))
    against_onnxruntime(op_type, _oldest(op_type), [x], rtol=2e-5)


@pytest.mark.parametrize("op_type", BINARY.split())
def test_oldest_binary(op_type):
    a, b = POSITIVE, POSITIVE[:1, :, :].copy()
    if op_type in ("And", "Or", "Xor"):
        a, b = X > 0, X[:1] > 0.5
    elif op_type in ("Sum", "Max", "Min", "Mean"):  # they broadcast since 8
        b = POSITIVE[::-1].copy()
    elif op_type == "Equal":
        a, b = (X * 2).astype(np.int32), (X[:1] * 2).astype(np.int32)
    elif op_type == "MatMul":
        b = np.swapaxes(POSITIVE, 1, 2).copy()
    against_onnxruntime(op_type, _oldest(op_type), [a, b], rtol=1e-5)


def _oldest(op_type: str) -> int:
    versions = [
        s.since_version for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == ("", op_type)
    ]
    return max(7, min(versions))
