"""Models of one com.microsoft::MatMulNBits: every layout of its constants, and its weight in NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

BF16 = np.dtype(ml_dtypes.bfloat16)


def nbits(
    k: int = 48,
    n: int = 5,
    block: int = 16,
    zeros: str = "packed",
    flat: str = "",
    dtype: Any = np.float32,
    bias: bool = False,
    opset: int = 17,
    **attributes: int,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    """A model of one MatMulNBits, feeds, and its weight [N, K] in float64.

    zeros: none, packed or typed; flat: which of "B", "scales" and "zeros" run their last axes together.
    """
    rng = np.random.default_rng(k + n)
    blocks = -(-k // block)
    codes = rng.integers(0, 16, (n, blocks * block)).astype(np.uint8)
    scales = rng.uniform(0.02, 0.3, (n, blocks)).astype(dtype)
    points = {"none": np.full((n, blocks), 8.0), "packed": rng.integers(0, 16, (n, blocks)).astype(float)}.get(
        zeros, rng.uniform(4, 12, (n, blocks)).astype(dtype).astype(float)
    )
    padded = np.zeros((n, blocks + blocks % 2), np.uint8)
    padded[:, :blocks] = points
    tensors = {
        "B": (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(n, blocks, block // 2),
        "scales": scales,
        "zeros": padded[:, 0::2] | padded[:, 1::2] << 4 if zeros == "packed" else points.astype(dtype),
    }
    for name in flat.split():
        tensors[name] = tensors[name].reshape(-1)
    if zeros == "none":
        del tensors["zeros"]
    feeds = {"x": rng.standard_normal((3, k)).astype(dtype)}
    inputs = ["x", *tensors]
    if bias:
        inputs += [""] * (5 - len(inputs)) + ["bias"]
        tensors["bias"] = rng.standard_normal(n).astype(dtype)
    node = helper.make_node(
        "MatMulNBits", inputs, ["y"], "nbits", domain="com.microsoft", K=k, N=n, block_size=block, **attributes
    )
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", kind, ["M", k])],
        [helper.make_tensor_value_info("y", kind, ["M", n])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    steps = (codes.astype(np.float32) - np.repeat(points, block, axis=1).astype(np.float32)).astype(dtype)
    weight = (steps.astype(np.float64) * np.repeat(scales.astype(np.float64), block, axis=1)).astype(dtype)
    return model, feeds, weight[:, :k].astype(np.float64)
