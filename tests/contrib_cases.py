"""Models of one com.microsoft operator, run here and in onnxruntime on its CPU, unoptimized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from backend_cases import frozen
from onnx import helper, numpy_helper

from lut4tool.runtime.session import Runtime


def contrib(
    op_type: str,
    inputs: Sequence[Any],
    *,
    outputs: Sequence[bool] | int = 1,
    constant: Sequence[int] = (),
    domain: str = "com.microsoft",
    declared: Mapping[int, int] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one operator: a None among the inputs is absent, those in `constant` are initializers.

    outputs: how many, or which of them are asked for; declared: the types of those that onnxruntime cannot infer.
    """
    names = ["" if data is None else f"x{index}" for index, data in enumerate(inputs)]
    wanted = [True] * outputs if isinstance(outputs, int) else outputs
    results = [f"y{index}" if asked else "" for index, asked in enumerate(wanted)]
    node = helper.make_node(op_type, names, results, domain=domain, **attributes)
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
        for index, (name, data) in enumerate(zip(names, inputs, strict=True))
        if name and index not in constant
    ]
    weights = [numpy_helper.from_array(inputs[index], names[index]) for index in constant if names[index]]
    types = {f"y{index}": kind for index, kind in (declared or {}).items()}
    ends = [
        helper.make_tensor_value_info(name, types[name], None) if name in types else onnx.ValueInfoProto(name=name)
        for name in results
        if name
    ]
    graph = helper.make_graph([node], "contrib", given, ends, weights)
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=10)


def feeds(model: onnx.ModelProto, inputs: Sequence[Any]) -> dict[str, Any]:
    """The values of a model's inputs, by name."""
    return {value.name: inputs[int(value.name[1:])] for value in model.graph.input}


def onnxruntimes(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    """What onnxruntime computes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds(model, inputs))


def ours(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    """What Runtime computes."""
    return Runtime(model, device="cpu").run(None, feeds(model, [frozen(value) for value in inputs]))


def close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Equal types and shapes, and values within the tolerances."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=atol)


def compare(op_type: str, inputs: Sequence[Any], rtol: float = 1e-5, atol: float = 1e-5, **options: Any) -> None:
    """Run one operator in both and compare every output."""
    model = contrib(op_type, inputs, **options)
    for found, expected in zip(ours(model, inputs), onnxruntimes(model, inputs), strict=True):
        close(found, expected, rtol, atol)
