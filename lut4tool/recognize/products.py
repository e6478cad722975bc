"""The products whose weight is looked at: which operand that is, and what stands around it."""

from __future__ import annotations

from typing import NamedTuple

from onnx import AttributeProto, GraphProto, NodeProto, helper

from lut4tool.recognize.proof import Product
from lut4tool.recognize.walk import Argument, Place, Value, Walk, attribute, check

_FUSED = {"alpha": AttributeProto.FLOAT, "transA": AttributeProto.INT, "transB": AttributeProto.INT}
_FUSED |= {"transBatchA": AttributeProto.INT, "transBatchB": AttributeProto.INT}


class Operands(NamedTuple):
    """A product's weight, whether it is read transposed, and the rest."""

    product: Product
    weight: Value
    flipped: bool


class _Terms(NamedTuple):
    """Y = alpha * A' @ B' + beta * bias, A' and B' transposed where their flags say so."""

    alpha: float = 1.0
    turned: tuple[bool, bool] = (False, False)
    bias: str = ""
    beta: float = 1.0


def operands(walk: Walk, site: Place) -> Operands:
    """The operands of a product whose weight, if it has one, is on the right. Raises Refuse."""
    terms = _terms(walk, site)
    turn_x, flipped = terms.turned
    if turn_x:
        _require_matrix(walk, site, 0, "transA")
    product = Product(_visible(walk, site, 0), terms.alpha, terms.bias, terms.beta, transpose_x=turn_x)
    return Operands(product, _weight(walk, site, 1), flipped)


def operands_from_left(walk: Walk, site: Place) -> Operands:
    """The operands of a product whose weight is on the left: W @ X is (X.T @ W.T).T, of matrices. Raises Refuse."""
    terms = _terms(walk, site)
    turned_w, turned_x = terms.turned
    _require_matrix(walk, site, 1, "the weight on its left")
    x = _visible(walk, site, 1)
    product = Product(x, terms.alpha, terms.bias, terms.beta, transpose_x=not turned_x, transpose_y=True)
    return Operands(product, _weight(walk, site, 0), not turned_w)


def _terms(walk: Walk, site: Place) -> _Terms:
    """What a MatMul, Gemm or FusedMatMul computes of its operands. Raises Refuse."""
    op = site.node.op_type
    site.require(not walk.is_own(site.node), f"{op} is a function of this model, not an operator")
    if op == "FusedMatMul":
        return _fused(site)
    if op == "MatMul":
        check(site)
        return _Terms()
    check(site, ("alpha", "beta", "transA", "transB"))
    beta = attribute(site, "beta", 1.0)
    bias = site.node.input[2] if len(site.node.input) > 2 and beta != 0 else ""
    if bias:
        walk.find(site.scope, bias, site)
    turned = (bool(attribute(site, "transA", 0)), bool(attribute(site, "transB", 0)))
    return _Terms(attribute(site, "alpha", 1.0), turned, bias, beta if bias else 1.0)


def _fused(site: Place) -> _Terms:
    """com.microsoft's FusedMatMul: alpha * A' @ B' with the last two axes turned; batches stay where they are."""
    node = site.node
    site.require(len(node.input) == 2, f"FusedMatMul with {len(node.input)} inputs, not 2")
    site.require(len(node.output) == 1, f"FusedMatMul with {len(node.output)} outputs, not one")
    facts: dict[str, float] = {"alpha": 1.0}
    for written in node.attribute:
        known = _FUSED.get(written.name) == written.type and not written.ref_attr_name
        site.require(known, f"FusedMatMul with attribute '{written.name}', unknown or not written as onnxruntime does")
        facts[written.name] = helper.get_attribute_value(written)
    for name in ("transBatchA", "transBatchB"):
        site.require(not facts.get(name), f"FusedMatMul with {name} {facts.get(name)}, not 0")
    return _Terms(facts["alpha"], (bool(facts.get("transA")), bool(facts.get("transB"))))


def _require_matrix(walk: Walk, site: Place, index: int, why: str) -> None:
    """Refuse an operand that has to be transposed unless it is known to have rank 2."""
    if site.node.op_type == "Gemm":
        return
    value = walk.source(walk.find(site.scope, site.node.input[index], site), site)
    made, known = value.definition, False
    if isinstance(made, Argument) and value.scope.parent is None and isinstance(value.scope.body, GraphProto):
        declared = next(entry.type.tensor_type for entry in value.scope.body.input if entry.name == value.name)
        known = declared.HasField("shape") and len(declared.shape.dim) == 2
    elif isinstance(made, NodeProto) and walk.is_standard(made, "Transpose"):
        known = any(written.name == "perm" and len(written.ints) == 2 for written in made.attribute)
    elif isinstance(made, NodeProto):
        known = walk.is_standard(made, "Gemm")
    accepted = "a Gemm, or an operand that is a Transpose with perm, a Gemm's or a graph input of rank 2, is expected"
    site.require(known, f"{site.node.op_type} with {why}, and '{value.name}' of a rank that is not known; {accepted}")


def _visible(walk: Walk, site: Place, index: int) -> str:
    """The name of an input, which must have one meaning at the site."""
    name = site.node.input[index]
    walk.find(site.scope, name, site)
    return name


def _weight(walk: Walk, site: Place, index: int) -> Value:
    return walk.source(walk.find(site.scope, site.node.input[index], site), site)
