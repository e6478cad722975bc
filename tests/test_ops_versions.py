"""Every range of versions below the newest of the operators of math, logic, reductions and tensors, in onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from backend_cases import against_onnxruntime
from onnx import TensorProto

from lut4tool.runtime import registry

#: The files of lut4tool/runtime/ops that this file answers for.
FILES = {"cast", "generator", "indexing", "logical", "loss", "math", "products", "reduction", "signal", "tensor"}
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
    *(Case("Range", 11, tuple(np.array(v, d) for v in b)) for d in (np.float32, np.int64) for b in BOUNDS),
]  # fmt: skip


def _file(row: registry.Operator) -> str:
    return getattr(row.run, "func", row.run).__module__.rsplit(".", 1)[1]


def _name(case: Case) -> str:
    return "-".join([case.op_type, str(case.version), *(f"{key}={item}" for key, item in case.attributes.items())])


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_old_version(case):
    against_onnxruntime(
        case.op_type, case.version, case.inputs, outputs=case.outputs, rtol=1e-5, atol=1e-6, **case.attributes
    )


def test_every_older_range_has_a_case():
    registry.load()
    older = [
        row for row in registry.operators() if row.domain == "" and row.until != registry.NEWEST and _file(row) in FILES
    ]
    assert len(older) > 30
    missing = [
        f"{row.name} {row.since} to {row.until}"
        for row in older
        if not any(case.op_type == row.name and row.since <= case.version <= row.until for case in CASES)
    ]
    assert not missing


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
