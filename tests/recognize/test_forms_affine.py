"""Affine weights as PyTorch and others export them: proved, witnessed, rewritten to QMM, the same to the last bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from build_affine import build_affine
from differences import compare
from forms_affine import AFFINE_FORMS, make_affine
from rewriting import run_onnxruntime, run_reference
from test_forms import only_proof, same_bits, wrong

from build import build
from lut4tool.formats import decode_qmm
from lut4tool.recognize.layout import Layout
from lut4tool.recognize.witness import WitnessMismatch, check
from lut4tool.rewrite import rewrite_model
from lut4tool.rewrite.expand import expand_model
from lut4tool.runtime import Runtime
from lut4tool.storage import Tensors

TENSORS = Tensors(None)
#: Their rows lie in two halves of the bytes, so that no part of the chain gives some of N.
WHOLE = {"scattered halves", "scattered halves in float16", "halves one after the other"}
WHOLE |= {"codes by columns"}  # two of N share a byte


@pytest.mark.parametrize("name", AFFINE_FORMS)
def test_results_are_the_same_to_the_last_bit(name: str) -> None:
    """x is the identity, so the product is the weight."""
    built = make_affine(name)
    onnx.checker.check_model(built.model, full_check=True)
    proof = only_proof(built.model)
    assert proof.op == "QMM"
    weight: Any = Layout(proof, TENSORS).weight()
    assert same_bits(np.ascontiguousarray(decode_qmm(weight).T), built.oracle)
    after = copy.deepcopy(built.model)
    ((_, witness),) = rewrite_model(after, TENSORS).rewritten
    assert witness is not None
    assert witness.all
    assert compare(built.model, after).wrong == []
    onnx.checker.check_model(after, full_check=True)
    assert [node.op_type for node in after.graph.node] == ["QMM"]
    expanded = copy.deepcopy(after)
    assert expand_model(expanded).expanded
    for model in (built.model, after, expanded):
        (found,) = run_reference(model, built.feeds)
        assert same_bits(found, built.oracle)
        if found.dtype == np.float32:  # onnxruntime drops roundings to half types by itself
            (found,) = run_onnxruntime(model, built.feeds)
            assert same_bits(found, built.oracle)
    runtime = Runtime(after, device="cpu")
    assert same_bits(runtime.run(None, built.feeds)[0], built.oracle)
    assert [choice.backend for choice in runtime.kernels.values()] == ["cpu"]


@pytest.mark.parametrize("name", AFFINE_FORMS)
def test_a_large_one_is_sampled_and_a_wrong_layout_is_caught(name: str) -> None:
    proof = only_proof(make_affine(name, large=True).model)
    witness = check(proof, TENSORS)
    assert witness.all == (name in WHOLE)
    assert check(proof, TENSORS, full=True).all
    for role, held in proof.roles.items():
        if not isinstance(held, str) and held.sources:
            roles = {**proof.roles, role: replace(held, make=wrong(held.make))}
            with pytest.raises(WitnessMismatch, match="dec/MatMul"):
                check(replace(proof, roles=roles), TENSORS)


@pytest.mark.parametrize("name", AFFINE_FORMS)
def test_pieces_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lut4tool.recognize.layout._PIECE_ELEMENTS", 1 << 16)
    layout = Layout(only_proof(make_affine(name, large=True).model), TENSORS)
    for role in layout.proof.roles:
        pieces = [np.ascontiguousarray(piece) for piece in layout.pieces(role)]
        assert b"".join(piece.tobytes() for piece in pieces) == np.ascontiguousarray(layout.role(role)).tobytes()


@pytest.mark.parametrize("points", [-1, 256])
def test_a_zero_point_that_is_no_byte_leaves_its_site(points: int) -> None:
    built = make_affine("integer zero points")
    tensor = next(tensor for tensor in built.model.graph.initializer if tensor.name == "dec/points")
    array = onnx.numpy_helper.to_array(tensor).copy()
    array[3, 2] = points
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    report = rewrite_model(built.model, TENSORS)
    assert (report.rewritten, report.differing) == ((), ())
    assert f"zero point {points} of codes from 0 to 15 is not 0 to 255" in report.refused[0].reason


@pytest.mark.parametrize("block", [2, 6, 24, 48, 100])
@pytest.mark.parametrize("chain", ["dequantize", "nibbles", "arithmetic"])
def test_any_even_block(chain: str, block: int) -> None:
    """Blocks are powers of two in com.microsoft's operators only."""
    built = build_affine(chain=chain, block=block, k=2 * block + 2, n=3)
    ((proof, witness),) = rewrite_model(built.model, TENSORS).rewritten
    assert (proof.block_size, witness and witness.all) == (block, True)
    lookup = build(rows=5, cols=block + 3, block=block)
    ((proof, witness),) = rewrite_model(lookup.model, TENSORS).rewritten
    assert (proof.block_size, witness and witness.all) == (block, True)
