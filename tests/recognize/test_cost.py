"""What a site costs: bytes counted on the values themselves, which onnx.reference computes."""

from __future__ import annotations

import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from lut4tool.recognize import recognize
from lut4tool.recognize.cost import cost
from tests.build import Chain, build
from tests.build_nbits import nbits

SPELLINGS = {
    "plain": Chain(rows=32, cols=48, block=16),
    "cut": Chain(rows=5, cols=10, block=8),
    "rounded, transposed": Chain(rows=32, cols=48, block=16, rounding="float16", adjoint=True, perm="written"),
    "two casts": Chain(rows=32, cols=48, block=16, casts=2, literals="constant"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_value_that_folding_makes_is_counted(name: str) -> None:
    model = build(SPELLINGS[name]).model
    (proof,) = recognize(model).proofs
    made = [node.output[0] for node in proof.chain]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    del model.graph.input[:]
    model.graph.node.pop()  # the product, which is no part of it
    values = ReferenceEvaluator(model).run(None, {})
    assert cost(proof).onnxruntime == sum(value.nbytes for value in values)
    weight = values[made.index(proof.weight)]
    assert cost(proof).dense == weight.nbytes


def test_packed_is_what_the_new_node_holds() -> None:
    built = build(Chain(rows=32, cols=48, block=16))
    (proof,) = recognize(built.model).proofs
    (part,) = built.parts
    assert cost(proof).packed == part.packed.nbytes + part.scales.nbytes + part.codebook.nbytes


def test_nothing_is_folded_where_onnxruntime_has_a_kernel() -> None:
    (proof,) = recognize(nbits()[0], vendor=True).proofs
    assert cost(proof).onnxruntime is None
