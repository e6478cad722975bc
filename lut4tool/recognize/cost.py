"""What a site costs in bytes: packed, decoded, and in onnxruntime, which folds a chain when it loads the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from lut4tool.recognize.chains import VENDOR_CHAINS
from lut4tool.recognize.proof import Proof


@dataclass(frozen=True)
class Cost:
    """Bytes of one weight.

    packed: as the rewritten model holds it; dense: decoded to the product's type.
    onnxruntime: what constant folding allocates for it while the model loads, all of it at once: every value that the
        chain computes (benchmarks/onnxruntime_load.py: the peak was that and 40 to 100 MB more). None where its
        own kernel or its DequantizeLinear serves and nothing is folded.
    """

    packed: int
    dense: int
    onnxruntime: int | None

    def to_json(self) -> dict[str, Any]:
        """As keys of a site in `inspect --json`."""
        return {"packed_bytes": self.packed, "dense_bytes": self.dense, "onnxruntime_bytes": self.onnxruntime}


def cost(proof: Proof) -> Cost:
    """The cost of a proof's weight, from its shapes alone."""
    width = helper.tensor_dtype_to_np_dtype(int(proof.attributes["dtype"])).itemsize  # type: ignore[arg-type]
    return Cost(proof.nbytes, width * proof.rows * proof.cols, _folded(proof))


def folds(proof: Proof) -> bool:
    """Whether onnxruntime decodes the weight when it loads the model: no kernel of its own takes it packed."""
    return proof.chain_name not in VENDOR_CHAINS and all(node.op_type != "DequantizeLinear" for node in proof.chain)


def _folded(proof: Proof) -> int | None:
    """Bytes of every value that the chain computes, by shape inference."""
    if not folds(proof):
        return None
    sources = [helper.make_tensor_value_info(n, t.data_type, list(t.dims)) for n, t in proof.sources.items()]
    held = [TensorProto.FromString(tensor.SerializeToString()) for tensor in proof.literals.values()]
    for name, tensor in zip(proof.literals, held, strict=True):
        tensor.name = name
    result = [onnx.ValueInfoProto(name=proof.weight)]
    graph = helper.make_graph(list(proof.chain), "chain", sources, result, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", proof.opset)])
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    made = {value.name: value.type.tensor_type for value in (*inferred.value_info, *inferred.output)}
    return sum(map(_size, made.values()))


def _size(tensor: onnx.TypeProto.Tensor) -> int:
    bits = 4 if tensor.elem_type in (TensorProto.INT4, TensorProto.UINT4) else 0
    bits = bits or 8 * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).itemsize
    return math.prod(entry.dim_value for entry in tensor.shape.dim) * bits // 8
