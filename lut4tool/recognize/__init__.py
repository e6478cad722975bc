"""The recognizer: for each product whose weight is decoded from constants, a proof of what it is or a refusal."""

from __future__ import annotations

from dataclasses import replace

import onnx

from lut4tool.recognize import chains
from lut4tool.recognize.products import operands
from lut4tool.recognize.proof import Proof, Refusal, Report, Site, Witness
from lut4tool.recognize.walk import VENDOR, Place, Refuse, Value, Walk, worth_a_walk

__all__ = ["Proof", "Refusal", "Report", "Site", "Witness", "recognize"]


def recognize(model: onnx.ModelProto, vendor: bool = False) -> Report:
    """Prove or refuse, in graph order, every MatMul and Gemm whose weight is decoded from constants (DESIGN section 1).

    model: loaded with load_external_data=False; only metadata and literals of at most 16 elements are read.
    vendor: com.microsoft's 4-bit operators are listed too; no chain proves one yet, so each is refused.
    A refusal is listed where the weight is computed from constants only and passes a Gather, or a Mul or
    DequantizeLinear fed by integers; other products are silent.
    """
    if not worth_a_walk(model, vendor):
        return Report((), ())
    walk = Walk(model, vendor)
    known: dict[tuple[Value, bool], Proof | Refuse] = {}
    proofs, refusals = [], []
    for site in walk.products:
        try:
            proofs.append(_prove(walk, site, known))
        except Refuse as refuse:
            if site.node.domain == VENDOR or any(_decoded(walk, site)):
                refusals.append(Refusal(site.title, refuse.reason, refuse.at))
    return Report(tuple(proofs), tuple(refusals))


def _decoded(walk: Walk, site: Place) -> list[bool]:
    """Whether each operand of a product is a weight that is decoded from constants."""
    operands = (walk.lookup(site.scope, name) for name in site.node.input[:2])
    return [operand is not None and walk.decoded(operand) for operand in operands]


def _prove(walk: Walk, site: Place, known: dict[tuple[Value, bool], Proof | Refuse]) -> Proof:
    """The proof of one product; `known` is shared by those that share a weight. Raises Refuse."""
    node = site.node
    if node.domain == VENDOR:
        site.require(node.op_type in chains.VENDOR_PROOFS, f"{node.op_type} of {VENDOR}, which no chain proves yet")
        return chains.VENDOR_PROOFS[node.op_type](walk, site)
    product, weight, flipped = operands(walk, site)
    if (weight, flipped) not in known:
        try:
            known[weight, flipped] = chains.prove(walk, site, weight, flipped)
        except Refuse as refuse:
            known[weight, flipped] = refuse.with_traceback(None)  # or it would keep the walk alive
    found = known[weight, flipped]
    if isinstance(found, Refuse):
        site.require(
            _decoded(walk, site) != [True, False], f"the weight is on the left of {node.op_type}, not on its right"
        )
        raise found
    for name in found.inputs[1:]:
        walk.find(site.scope, name, site)
    return replace(found, site=site.site, product=product)
