"""Models of one product of any operator with a canonical chain, on its right or left."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from build import Chain, Parts, make_tensor, spell, value_of

DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def product(
    op: str,
    chain: Chain,
    x_shape: tuple[int, ...],
    *,
    left: bool = False,
    bias: Any = None,
    domain: str = "",
    **options: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray], Parts]:
    """A model of one product of x and a chain's weight, on its right or left; feeds; the chain."""
    parts = spell(chain)
    rng = np.random.default_rng(1)
    dtype = parts.oracle.dtype
    x = rng.standard_normal(x_shape).astype(dtype)
    names = [parts.weight, "x"] if left else ["x", parts.weight]
    tensors = list(parts.tensors)
    if bias is not None:
        tensors.append(make_tensor("bias", rng.standard_normal(bias).astype(dtype)))
        names.append("bias")
    node = helper.make_node(op, names, ["y"], "site", domain=domain, doc_string="here", **options)
    result = helper.make_tensor_value_info("y", DTYPES[dtype.name], [None] * x.ndim)
    graph = helper.make_graph([*parts.nodes, node], "g", [value_of("x", x)], [result], tensors)
    imports = [helper.make_opsetid("", chain.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), {"x": x}, parts
