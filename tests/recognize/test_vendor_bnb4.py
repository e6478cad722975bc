"""MatMulBnb4 with --vendor: against onnxruntime's own operator and quantizer, and what is refused in words."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from differences import compare, raw
from mutants import Mutant
from mutants_bnb4 import BNB4, bnb4
from onnx import TensorProto, helper, numpy_helper
from rewriting import run_onnxruntime, run_reference

from build import CODEBOOKS, value_of
from lut4tool.recognize import recognize
from lut4tool.recognize.witness import WitnessMismatch, check
from lut4tool.rewrite import rewrite_model
from lut4tool.runtime import Runtime
from lut4tool.storage import Tensors

TENSORS = Tensors(None)
BF16 = np.dtype(ml_dtypes.bfloat16)


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    after = copy.deepcopy(model)
    report = rewrite_model(after, TENSORS, vendor=True)
    assert report.rewritten
    assert report.refused == ()
    assert compare(model, after).wrong == []
    onnx.checker.check_model(after, full_check=True)
    return after


def assert_near(found: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """Within what sums in this type may differ by."""
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64)
    step = {"float32": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7}[found.dtype.name]
    assert (np.abs(found.astype(np.float64) - exact) <= step * bound).all()


@pytest.mark.parametrize("kind", [0, 1], ids=["fp4", "nf4"])
@pytest.mark.parametrize(("k", "n", "block"), [(24, 10, 16), (7, 5, 16), (3, 5, 64), (64, 64, 32)])
def test_results_are_those_of_onnxruntimes_operator(kind: int, k: int, n: int, block: int) -> None:
    model, feeds, weight = bnb4(k, n, block, kind)
    after = rewritten(model)
    for run in (run_onnxruntime, run_reference, lambda *given: Runtime(given[0]).run(None, given[1])):
        assert_near(run(after, feeds)[0], feeds["x"], weight.T)
    assert_near(run_onnxruntime(model, feeds)[0], feeds["x"], weight.T)
    assert recognize(model).proofs == ()


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_half_scales_round_the_weight(dtype: Any) -> None:
    model, feeds, weight = bnb4(dtype=dtype)
    after = rewritten(model)
    (y,) = run_reference(after, feeds)
    assert y.dtype == dtype
    assert_near(y, feeds["x"], weight.T)
    assert_near(Runtime(after).run(None, feeds)[0], feeds["x"], weight.T)


def test_the_weight_as_it_lies() -> None:
    """transB 0: A is multiplied by W [N, K] itself, as our Runtime takes the operator."""
    model, feeds, weight = bnb4(transB=0, training_mode=1)
    after = rewritten(model)
    for run in (run_onnxruntime, run_reference, lambda *given: Runtime(given[0]).run(None, given[1])):
        assert_near(run(after, feeds)[0], feeds["x"], weight)
    assert_near(Runtime(model).run(None, feeds)[0], feeds["x"], weight)


def test_bytes_are_kept_and_the_codebook_is_new() -> None:
    model, _, _ = bnb4()
    after = rewritten(model)
    assert [tensor.name for tensor in after.graph.initializer] == ["B", "absmax", "Lookup4MatMul/codebook"]
    assert numpy_helper.to_array(after.graph.initializer[2]).tobytes() == CODEBOOKS["nf4"].tobytes()
    (proof,) = recognize(model, vendor=True).proofs
    assert proof.to_json()["bytes"] == "kept"


def test_products_share_one_codebook() -> None:
    model, feeds, weight = bnb4()
    again = copy.deepcopy(model.graph.node[0])
    again.output[0], again.name = "z", "again"
    model.graph.node.append(again)
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, None]))
    after = rewritten(model)
    assert len(after.graph.initializer) == 3
    for y in run_reference(after, feeds):
        assert_near(y, feeds["x"], weight.T)


def test_columns_of_axes_of_one() -> None:
    model, feeds, weight = bnb4()
    for tensor in model.graph.initializer:
        tensor.dims.append(1)
    after = rewritten(model)
    assert [list(tensor.dims) for tensor in after.graph.initializer] == [[120], [15], [16]]
    assert_near(run_reference(after, feeds)[0], feeds["x"], weight.T)


def test_in_a_function() -> None:
    """B and absmax are formal inputs; the codebook is a Constant of the function."""
    model, feeds, weight = bnb4()
    node = model.graph.node[0]
    imports = list(model.opset_import)
    model.functions.append(helper.make_function("f", "F", list(node.input), list(node.output), [node], imports))
    node.CopyFrom(helper.make_node("F", list(node.input), list(node.output), domain="f"))
    model.opset_import.append(helper.make_opsetid("f", 1))
    after = rewritten(model)
    assert [inner.op_type for inner in after.functions[1].node] == ["Constant", "Lookup4MatMul"]
    assert_near(run_reference(after, feeds)[0], feeds["x"], weight.T)
    for tensor in model.graph.initializer:
        tensor.dims.append(1)
    after = rewritten(model)  # every call gives the same: it is laid out in the function
    assert [inner.op_type for inner in after.functions[1].node] == ["Constant"] * 3 + ["Lookup4MatMul"]
    assert_near(run_reference(after, feeds)[0], feeds["x"], weight.T)
    again, other = copy.deepcopy(model.graph.node[0]), copy.deepcopy(model.graph.initializer[0])
    again.output[0], again.input[1], other.name = "y_again", "other", "other"
    model.graph.node.append(again)
    model.graph.initializer.append(other)
    before = raw(model)
    (refusal,) = rewrite_model(model, TENSORS, vendor=True).refused
    assert "is another tensor at each call; one is expected where bytes are laid out anew" in refusal.reason
    assert raw(model) == before


@pytest.mark.parametrize("full", [False, True])
def test_a_large_one_is_sampled_and_verified(full: bool) -> None:
    model, _, _ = bnb4(1031, 1033, 64)
    (proof,) = recognize(model, vendor=True).proofs
    witness = check(proof, TENSORS, full=full)
    assert witness.all == full
    with pytest.raises(WitnessMismatch):
        check(replace(proof, attributes={**proof.attributes, "high_nibble_first": 0}), TENSORS, full=full)


@pytest.mark.parametrize("kind", [0, 1], ids=["fp4", "nf4"])
def test_what_onnxruntimes_quantizer_writes(kind: int) -> None:
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer

    rng = np.random.default_rng(0)
    tensors = [numpy_helper.from_array(rng.standard_normal((48, 20)).astype(np.float32), "w")]
    x = rng.standard_normal((3, 48)).astype(np.float32)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 20])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [value_of("x", x)], [result], tensors
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    quantizer = MatMulBnb4Quantizer(model, kind, 64)
    quantizer.process()
    quantized = quantizer.model.model
    (before,) = run_onnxruntime(quantized, {"x": x})
    (now,) = run_onnxruntime(rewritten(quantized), {"x": x})
    np.testing.assert_allclose(now, before, rtol=0, atol=2e-6 * np.abs(before).max())


@pytest.mark.parametrize("mutant", BNB4, ids=lambda mutant: mutant.name)
def test_refused_in_words(mutant: Mutant) -> None:
    report = recognize(mutant.model(), vendor=True)
    assert report.proofs == ()
    (refusal,) = report.refusals
    assert mutant.sentence in refusal.reason
    assert refusal.reason.endswith(f", at node '{refusal.at}'")


def test_a_models_own_function_of_that_name_is_not_the_operator() -> None:
    model, _, _ = bnb4()
    body = [helper.make_node("MatMul", ["a", "b"], ["y"])]
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("com.microsoft", "MatMulBnb4", ["a", "b", "c"], ["y"], body, imports))
    (refusal,) = recognize(model, vendor=True).refusals
    assert "MatMulBnb4 is a function of this model, not an operator" in refusal.reason
