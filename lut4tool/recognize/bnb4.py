"""com.microsoft's MatMulBnb4: a Lookup4MatMul whose codebook only its name says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import NodeProto, TensorProto, helper, numpy_helper

from lut4tool.formats import CODEBOOKS, DTYPE_NAME, LOOKUP4_MATMUL, ONNX_DTYPE, lookup4_attributes
from lut4tool.recognize import packing, vendor
from lut4tool.recognize.clauses import Leaves
from lut4tool.recognize.layout import Axis, Cut, Laid, flattened
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.walk import OPSETS, Constant, Place, Walk

#: Attributes and their defaults; those without one are required.
_ATTRIBUTES: Mapping[str, int | None] = {
    "K": None, "N": None, "block_size": None, "quant_type": None, "transB": 1, "training_mode": 0,
}  # fmt: skip
_CODEBOOKS = {0: "fp4", 1: "nf4"}


def matmul_bnb4(walk: Walk, site: Place) -> Proof:
    """MatMulBnb4 (onnxruntime's ContribOperators.md): A @ W.T, or A @ W where transB is 0. Raises Refuse.

    W [N, K] is flat, in blocks, the high nibble first; what a block's entries times its scale give is rounded to the
    scales' type. The proof's chain is this definition in standard nodes.
    """
    node, leaves = site.node, Leaves(Trail(walk))
    site.require(site.scope.opset in OPSETS, f"opset {site.scope.opset}, not one of {OPSETS[0]} to {OPSETS[-1]}")
    site.require(len(node.input) == 3 and all(node.input), "MatMulBnb4 without A, B or absmax, or with more inputs")
    site.require(len(node.output) == 1, f"MatMulBnb4 with {len(node.output)} outputs, not one")
    facts = vendor.facts(site, _ATTRIBUTES)
    kind = facts["quant_type"]
    site.require(kind in _CODEBOOKS, f"MatMulBnb4 with quant_type {kind}, not 0 (FP4) or 1 (NF4)")
    rows, cols, block, table = facts["N"], facts["K"], facts["block_size"], _CODEBOOKS[kind]
    count, blocks = (rows * cols + 1) // 2, -(-rows * cols // block)
    walk.find(site.scope, node.input[0], site)
    values = [walk.source(walk.find(site.scope, name, site), site) for name in node.input[1:]]
    packed = leaves.read(values[0], site, "B", frozenset({TensorProto.UINT8}), "UINT8")
    scales = leaves.floats(values[1], site, "absmax")
    roles = {
        "packed": _flat(site, "B", packed, count),
        "scales": _flat(site, "absmax", scales, blocks),
        "codebook": Laid(packing.codebook, (), (table,), TensorProto.FLOAT, (16,)),
    }
    for held in roles.values():
        leaves.require_fixed(() if isinstance(held, str) else held.sources)
    dtype, perm = DTYPE_NAME[next(iter(scales.types))], (1, 0) if facts["transB"] else (0, 1)
    nodes, product, weight = _spelled(packed.name, scales.name, facts, table, dtype)
    return Proof(
        site=site.site,
        op=LOOKUP4_MATMUL,
        chain_name="matmul_bnb4",
        rows=rows,
        cols=cols,
        block_size=block,
        weight_dtype=dtype,
        dtype=dtype,
        product=Product(node.input[0]),
        attributes=lookup4_attributes(rows, cols, block, perm, True, dtype, dtype),
        roles=roles,
        sources={packed.name: packed.tensors[0], scales.name: scales.tensors[0]},
        literals={},
        weight=weight,
        chain=nodes,
        cut=Cut(blocks, block, product, "float32", {packed.name: Axis(0, 2), scales.name: Axis(0, block)}),
        opset=site.scope.opset,
    )


def _flat(site: Place, what: str, constant: Constant, count: int) -> str | Laid:
    """A constant of so many elements, flat or with axes of 1 after them. Raises Refuse."""
    shape = constant.shape
    flat = shape[:1] == (count,) and all(size == 1 for size in shape[1:])
    site.require(flat, f"{what} {constant} is not [{count}]")
    if len(shape) == 1:
        return constant.name
    return Laid(flattened, (constant.name,), (), next(iter(constant.types)), (count,), view=True)


def _spelled(
    packed: str, scales: str, facts: Mapping[str, int], table: str, dtype: str
) -> tuple[tuple[NodeProto, ...], str, str]:
    """What the operator means in standard nodes: (the nodes, the product by the scales, the weight [K, N])."""
    nodes: list[NodeProto] = []

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"{len(nodes)}: {op}"], **attributes))
        return nodes[-1].output[0]

    def ints(*values: int) -> str:
        return node("Constant", value_ints=list(values))

    rows, cols, block = facts["N"], facts["K"], facts["block_size"]
    codes = node("Cast", node("Reshape", packed, ints(-1)), to=TensorProto.INT64)
    halves = (node("Unsqueeze", node(op, codes, ints(16)), ints(1)) for op in ("Div", "Mod"))
    flat = node("Reshape", node("Concat", *halves, axis=1), ints(-1))
    missing = node("Mod", node("Neg", node("Shape", flat)), ints(block))  # up to whole blocks
    flat = node("Pad", flat, node("Concat", ints(0), missing, axis=0))
    entries = node("Constant", value=numpy_helper.from_array(CODEBOOKS[table]))
    values = node("Gather", entries, node("Reshape", flat, ints(-1, block)))
    factors = node("Cast", node("Reshape", scales, ints(-1, 1)), to=TensorProto.FLOAT)
    product = node("Mul", values, factors)
    cut = node("Slice", node("Reshape", product, ints(-1)), ints(0), ints(rows * cols), ints(0))
    weight = node("Cast", node("Reshape", cut, ints(rows, cols)), to=ONNX_DTYPE[dtype])
    weight = node("Transpose", weight, perm=[1, 0]) if facts["transB"] else weight
    return tuple(nodes), product, weight
