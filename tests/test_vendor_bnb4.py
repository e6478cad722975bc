"""MatMulBnb4 with --vendor: against onnxruntime's own operator and quantizer, and what is refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from differences import compare, raw
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
    before = raw(model)
    (refusal,) = rewrite_model(model, TENSORS, vendor=True).refused
    assert "is an input of a function and not as Lookup4MatMul wants it" in refusal.reason
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
    "MatMulBnb4 with K 0 and N 10, not positive": edit("K", 0),
    "MatMulBnb4 with K 24 and N -1, not positive": edit("N", -1),
    "MatMulBnb4 with unknown attribute 'bits'": edit("bits", 4),
    "MatMulBnb4 with K that is not a written INT": lambda model: edit("K", 1.5)(model),  # type: ignore[arg-type]
    "B 'B', UINT8 [119], is not [120]": tensor("B", np.zeros(119, np.uint8)),
    "B 'B', UINT8 [120, 2], is not [120]": tensor("B", np.zeros((120, 2), np.uint8)),
    "B 'B', INT8 [120], is not UINT8": tensor("B", np.zeros(120, np.int8)),
    "absmax 'absmax', FLOAT [14], is not [15]": tensor("absmax", np.zeros(14, np.float32)),
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


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_in_words(sentence: str) -> None:
    model, _, _ = bnb4()
    REFUSED[sentence](model)
    report = recognize(model, vendor=True)
    assert report.proofs == ()
    (refusal,) = report.refusals
    assert sentence in refusal.reason
    assert refusal.reason.endswith(f", at node '{refusal.at}'")
