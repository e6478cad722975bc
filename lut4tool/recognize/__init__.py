"""The recognizer: for each product whose weight is decoded from constants, a proof of what it is or a refusal."""

from __future__ import annotations

from dataclasses import replace

import onnx

from lut4tool.formats import DOMAIN
from lut4tool.recognize import chains
from lut4tool.recognize.products import Operands, operands, operands_from_left
from lut4tool.recognize.proof import Proof, Refusal, Report, Site, Witness
from lut4tool.recognize.walk import VENDOR_PRODUCTS, Place, Refuse, Value, Walk, worth_a_walk
from lut4tool.storage import Tensors

#: Of a weight, and whether it is read transposed.
Known = dict[tuple[Value, bool], Proof | Refuse]

__all__ = ["Proof", "Refusal", "Report", "Site", "Witness", "recognize"]


def recognize(model: onnx.ModelProto, vendor: bool = False, tensors: Tensors | None = None) -> Report:
    """Prove or refuse, in graph order, every MatMul and Gemm whose weight is decoded from constants (DESIGN section 1).

    model: loaded with load_external_data=False; only metadata and literals of at most 16 elements are read.
    tensors: reads literals that are external data; without it a chain with one is refused.
    vendor: com.microsoft's MatMulBnb4 and MatMulNBits are proved or refused too.
    A refusal is listed where the weight is computed from constants only and passes a Gather, or a Mul or
    DequantizeLinear fed by integers; other products are silent, and so are those in the bodies of our own operators.
    """
    if not worth_a_walk(model, vendor):
        return Report((), ())
    walk = Walk(model, vendor, tensors=tensors)
    known: Known = {}
    proofs, refusals = [], []
    bodies = {index for index, function in enumerate(model.functions) if function.domain == DOMAIN}
    for site in walk.products:
        if site.scope.function in bodies:
            continue
        try:
            proofs.append(_prove(walk, site, known))
        except Refuse as refuse:
            if (site.node.domain, site.node.op_type) in VENDOR_PRODUCTS or any(_decoded(walk, site)):
                refusals.append(Refusal(site.title, refuse.reason, refuse.at))
    return Report(tuple(proofs), tuple(refusals))


def _decoded(walk: Walk, site: Place) -> list[bool]:
    """Whether each operand of a product is a weight that is decoded from constants."""
    operands = (walk.lookup(site.scope, name) for name in site.node.input[:2])
    return [operand is not None and walk.decoded(operand) for operand in operands]


def _prove(walk: Walk, site: Place, known: Known) -> Proof:
    """The proof of one product; `known` is shared by those that share a weight. Raises Refuse."""
    if (site.node.domain, site.node.op_type) in VENDOR_PRODUCTS:
        site.require(not walk.is_own(site.node), f"{site.node.op_type} is a function of this model, not an operator")
        return _seen(walk, site, chains.VENDOR_PROOFS[site.node.op_type](walk, site))
    try:
        return _prove_operands(walk, site, operands(walk, site), known)
    except Refuse:
        if _decoded(walk, site) != [True, False]:
            raise
    return _prove_operands(walk, site, operands_from_left(walk, site), known)


def _prove_operands(walk: Walk, site: Place, found: Operands, known: Known) -> Proof:
    """The proof of a product with its weight at one side."""
    product, weight, flipped = found
    if (weight, flipped) not in known:
        try:
            known[weight, flipped] = chains.prove(walk, site, weight, flipped)
        except Refuse as refuse:
            known[weight, flipped] = refuse.with_traceback(None)  # or it would keep the walk alive
    proof = known[weight, flipped]
    if isinstance(proof, Refuse):
        raise proof
    return replace(_seen(walk, site, proof), site=site.site, product=product)


def _seen(walk: Walk, site: Place, proof: Proof) -> Proof:
    """The proof, whose constants that are kept must mean at the site what they mean in its chain. Raises Refuse."""
    for name in proof.inputs[1:]:
        walk.find(site.scope, name, site)
    return proof
