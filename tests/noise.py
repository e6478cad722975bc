"""How far a model's own outputs move when its weights move by one rounding, in onnxruntime, and what that allows us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnxruntime

#: Largest |difference| allowed over the largest value of an output, by the output's type, where a model is no noisier.
TABLE = {
    np.dtype(np.float32): 2e-5,
    np.dtype(np.float64): 1e-12,
    np.dtype(np.float16): 2e-3,
    np.dtype(ml_dtypes.bfloat16): 2e-2,
}
#: A float tensor of fewer elements is a scale, an exponent or a size: one step of it may change what is computed.
WEIGHT = 16


@dataclass(frozen=True)
class Gap:
    """How far an output is from another: largest |difference| over the largest value, and 1 - cosine."""

    largest: float
    angle: float

    def __le__(self, other: Gap) -> bool:
        return self.largest <= other.largest and self.angle <= other.angle

    def __or__(self, other: Gap) -> Gap:
        return Gap(max(self.largest, other.largest), max(self.angle, other.angle))


NONE = Gap(0.0, 0.0)


def gap(found: np.ndarray, expected: np.ndarray) -> Gap:
    """The gap of two outputs of one type and shape; integers and booleans differ by 0 or infinity."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if expected.dtype not in TABLE:
        return NONE if np.array_equal(found, expected) else Gap(np.inf, np.inf)
    a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    tiny = np.finfo(np.float64).tiny
    norms = max(float(np.linalg.norm(a) * np.linalg.norm(b)), tiny)
    largest = float(np.abs(a - b).max(initial=0)) / max(float(np.abs(b).max(initial=0)), tiny)
    return Gap(largest, max(0.0, 1 - float(a @ b) / norms) if np.any(a) or np.any(b) else 0.0)


def session(model: onnx.ModelProto | str) -> onnxruntime.InferenceSession:
    """An onnxruntime session with every optimization off, on two threads."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    source = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def noise(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], expected: list[np.ndarray], seeds: int = 5
) -> list[Gap]:
    """The largest gap of each output from `expected` when every float weight moves by one step of its type, up or down.

    Weights are initializers and constants of at least WEIGHT elements, in subgraphs too; zeros stay zeros, and so do
    integers: a step of an int8 weight is its quantization, not a rounding.
    """
    gaps = [NONE] * len(expected)
    weights = [(tensor, onnx.numpy_helper.to_array(tensor)) for tensor in _weights(model.graph)]
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        for tensor, values in weights:
            up = random.integers(0, 2, values.shape, bool)
            limit = np.where(up, np.inf, -np.inf).astype(values.dtype)
            moved = np.where(values == 0, values, np.nextafter(values, limit))
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
        found = session(model).run(None, dict(feeds))
        gaps = [known | gap(*pair) for known, *pair in zip(gaps, found, expected, strict=True)]
    return gaps


def allowed(dtype: np.dtype, moved: Gap = NONE) -> Gap:
    """What a runtime that computes in another order may differ by: the table's figure, or 3 times the model's noise."""
    table = TABLE.get(dtype, 0.0)
    return Gap(max(table, 3 * moved.largest), max(table, 3 * moved.angle))


def _weights(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _weights(attribute.g)
            elif attribute.type == onnx.AttributeProto.TENSOR and node.op_type == "Constant":
                tensors.append(attribute.t)
    for tensor in tensors:
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if kind in TABLE and np.prod(tensor.dims) >= WEIGHT:
            yield tensor
