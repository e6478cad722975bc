"""The products whose weight is looked at: which operand that is, and what stands around it."""

from __future__ import annotations

from typing import NamedTuple

from lut4tool.recognize.proof import Product
from lut4tool.recognize.walk import Place, Value, Walk, attribute, check


class Operands(NamedTuple):
    """A product's weight, whether it is read transposed, and the rest."""

    product: Product
    weight: Value
    flipped: bool


def operands(walk: Walk, site: Place) -> Operands:
    """The operands of a MatMul or Gemm whose weight, if it has one, is on the right. Raises Refuse."""
    node = site.node
    site.require(walk.is_standard(node, node.op_type), f"{node.op_type} is a function of this model, not ONNX's")
    if node.op_type == "Gemm":
        return _gemm(walk, site)
    check(site)
    return Operands(Product(_visible(walk, site, 0)), _weight(walk, site, 1), False)


def _gemm(walk: Walk, site: Place) -> Operands:
    """Gemm: alpha * A' @ B' + beta * C, where beta 0 and a missing C are the same."""
    check(site, ("alpha", "beta", "transA", "transB"))
    flags = {name: attribute(site, name, 0) for name in ("transA", "transB")}
    beta = attribute(site, "beta", 1.0)
    has_bias = len(site.node.input) > 2 and bool(site.node.input[2]) and beta != 0
    product = Product(
        x=_visible(walk, site, 0),
        alpha=attribute(site, "alpha", 1.0),
        bias=_visible(walk, site, 2) if has_bias else "",
        beta=beta if has_bias else 1.0,
        transpose_x=bool(flags["transA"]),
    )
    return Operands(product, _weight(walk, site, 1), bool(flags["transB"]))


def _visible(walk: Walk, site: Place, index: int) -> str:
    """The name of an input, which must have one meaning at the site."""
    name = site.node.input[index]
    walk.find(site.scope, name, site)
    return name


def _weight(walk: Walk, site: Place, index: int) -> Value:
    return walk.source(walk.find(site.scope, site.node.input[index], site), site)
