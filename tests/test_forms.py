"""Every form of a lookup is recognized, witnessed, rewritten, and gives equal results wherever it is run."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import pytest
from differences import compare
from forms import FORMS, Model, make
from rewriting import run_onnxruntime, run_reference

from lut4tool.recognize import Proof, recognize
from lut4tool.recognize.layout import Layout
from lut4tool.recognize.witness import check
from lut4tool.rewrite import rewrite_model
from lut4tool.runtime import Runtime
from lut4tool.storage import Tensors, nbytes

TENSORS = Tensors(None)


def only_proof(model: onnx.ModelProto, **options: Any) -> Proof:
    report = recognize(model, **options)
    assert report.refusals == ()
    (proof,) = report.proofs
    return proof


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def matrix_of(proof: Proof) -> np.ndarray:
    """The matrix [K, N] that the new node multiplies by, by the decode of formats.py."""
    from lut4tool.formats import FLOAT_DTYPES, decode

    weight: Any = Layout(proof, TENSORS).weight()
    return decode(weight).astype(FLOAT_DTYPES[proof.dtype]).transpose(weight.perm)


@pytest.mark.parametrize("name", FORMS)
def test_the_proof_decodes_to_the_weight(name: str) -> None:
    built = make(name)
    proof = only_proof(built.model)
    assert proof.op == "Lookup4MatMul"
    assert same_bits(np.ascontiguousarray(matrix_of(proof)), np.ascontiguousarray(built.oracle))
    assert check(proof, TENSORS).all


@pytest.mark.parametrize("name", FORMS)
def test_a_large_one_is_sampled_and_verified(name: str) -> None:
    proof = only_proof(make(name, large=True).model)
    witness = check(proof, TENSORS)
    assert witness.compared < witness.elements // 10 or proof.cut is None
    assert check(proof, TENSORS, full=True).all


def rewritten(built: Model, **options: Any) -> onnx.ModelProto:
    after = copy.deepcopy(built.model)
    report = rewrite_model(after, TENSORS, **options)
    assert not report.refused
    assert compare(built.model, after).wrong == []
    onnx.checker.check_model(after, full_check=True)
    return after


@pytest.mark.parametrize("name", FORMS)
def test_results_are_the_same(name: str) -> None:
    built = make(name)
    after = rewritten(built)
    assert [node.op_type for node in after.graph.node] == ["Lookup4MatMul"]
    (before,), (now,) = (run_reference(model, built.feeds) for model in (built.model, after))
    assert same_bits(before, now)
    expected = built.feeds["x"].astype(np.float64) @ built.oracle.astype(np.float64)
    bound = np.abs(built.feeds["x"]).astype(np.float64) @ np.abs(built.oracle).astype(np.float64)
    runtime = Runtime(after)
    (ours,) = runtime.run(None, built.feeds)
    steps = {"float32": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7}[now.dtype.name]
    assert (np.abs(ours.astype(np.float64) - expected) <= steps * bound).all()
    assert [choice.kernel for choice in runtime.kernels.values()] != []
    if now.dtype == np.float32:  # half products: onnxruntime drops roundings by itself, or has no product
        (before,), (now,) = (run_onnxruntime(model, built.feeds) for model in (built.model, after))
        assert same_bits(before, now)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_laid_out_is_half_the_codes_or_less(name: str) -> None:
    built = make(name)
    proof = only_proof(built.model)
    packed = nbytes(proof.tensor("packed"))
    codes = next(tensor for tensor in built.model.graph.initializer if tensor.name == "dec/packed")
    one_each = any(word in name for word in ("unpacked", "scale a column", "half", "flat codes")) or (
        name == "blocks of columns"
    )
    assert packed <= (nbytes(codes) + 1) // 2 if one_each and "four" not in name else packed == nbytes(codes)
