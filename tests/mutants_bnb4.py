"""Models of MatMulBnb4, right and wrong in one fact each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from forms import Model
from mutants import Mutant
from onnx import helper, numpy_helper

from build import CODEBOOKS, value_of


def bnb4(
    k: int = 24, n: int = 10, block: int = 16, kind: int = 1, dtype: Any = np.float32, **attributes: int
) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    """A model of one MatMulBnb4, feeds, and its weight [N, K] in its type."""
    rng = np.random.default_rng(k * n)
    size = n * k
    codes = rng.integers(0, 16, size + size % 2, dtype=np.uint8)
    scales = rng.uniform(0.02, 2, -(-size // block)).astype(dtype)
    entries = CODEBOOKS["nf4" if kind else "fp4"][codes[:size]]
    weight = (entries * np.repeat(scales.astype(np.float32), block)[:size]).astype(dtype).reshape(n, k)
    tensors = [
        numpy_helper.from_array(codes[0::2] << 4 | codes[1::2], "B"),
        numpy_helper.from_array(scales, "absmax"),
    ]
    facts = {"K": k, "N": n, "block_size": block, "quant_type": kind, **attributes}
    node = helper.make_node("MatMulBnb4", ["x", "B", "absmax"], ["y"], "site", domain="com.microsoft", **facts)
    x = rng.standard_normal((3, k if attributes.get("transB", 1) else n)).astype(dtype)
    result = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(x.dtype), [None, None])
    graph = helper.make_graph([node], "g", [value_of("x", x)], [result], tensors)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), {"x": x}, weight


def edit(name: str, value: int | None) -> Callable[[onnx.ModelProto], None]:
    """Set an attribute of the node, or remove it."""

    def change(model: onnx.ModelProto) -> None:
        node = model.graph.node[0]
        kept = [written for written in node.attribute if written.name != name]
        del node.attribute[:]
        node.attribute.extend(kept + ([] if value is None else [helper.make_attribute(name, value)]))

    return change


def tensor(name: str, array: np.ndarray) -> Callable[[onnx.ModelProto], None]:
    """Replace an initializer."""

    def change(model: onnx.ModelProto) -> None:
        next(entry for entry in model.graph.initializer if entry.name == name).CopyFrom(
            numpy_helper.from_array(array, name)
        )

    return change


REFUSED = {
    "MatMulBnb4 without K": edit("K", None),
    "MatMulBnb4 without quant_type": edit("quant_type", None),
    "MatMulBnb4 with quant_type 2, not 0 (FP4) or 1 (NF4)": edit("quant_type", 2),
    "MatMulBnb4 with block_size 24, not a power of two": edit("block_size", 24),
    "MatMulBnb4 with block_size 8, not a power of two from 16": edit("block_size", 8),
    "MatMulBnb4 with K 0 and N 10, not both positive": edit("K", 0),
    "MatMulBnb4 with K 24 and N -1, not both positive": edit("N", -1),
    "MatMulBnb4 with unknown attribute 'bits'": edit("bits", 4),
    "MatMulBnb4 with K that is not a written INT": lambda model: edit("K", 1.5)(model),  # type: ignore[arg-type]
    "B 'B', UINT8 [119], is not [120]": tensor("B", np.zeros(119, np.uint8)),
    "B 'B', UINT8 [120, 2], is not [120]": tensor("B", np.zeros((120, 2), np.uint8)),
    "B 'B', INT8 [120], is not UINT8": tensor("B", np.zeros(120, np.int8)),
    "absmax 'absmax', FLOAT [14], is not [15]": tensor("absmax", np.zeros(14, np.float32)),
    "absmax 'absmax', FLOAT [], is not [15]": tensor("absmax", np.zeros((), np.float32)),
    "absmax 'absmax', DOUBLE [15], is not FLOAT": tensor("absmax", np.zeros(15, np.float64)),
    "Abs, not a constant of absmax": lambda model: (
        model.graph.node.insert(0, helper.make_node("Abs", ["absmax"], ["abs"], "abs")),
        model.graph.node[1].input.__setitem__(2, "abs"),
    ),
    "MatMulBnb4 without A, B or absmax": lambda model: model.graph.node[0].input.__setitem__(1, ""),
    "or with more inputs": lambda model: model.graph.node[0].input.append("x"),
    "MatMulBnb4 with 2 outputs": lambda model: model.graph.node[0].output.append("z"),
    "value 'nothing' is not defined": lambda model: model.graph.node[0].input.__setitem__(0, "nothing"),
    "opset 12, not one of 13 to 28": lambda model: setattr(model.opset_import[0], "version", 12),
}


def made() -> Model:
    """The right model that each edit makes wrong."""
    return Model(*bnb4())


BNB4 = [Mutant(sentence, sentence, (change,), make=made) for sentence, change in REFUSED.items()]
