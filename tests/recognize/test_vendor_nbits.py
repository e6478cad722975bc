"""MatMulNBits with --vendor: every layout against onnxruntime's own operator, and what is refused in words."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import pytest
from build_nbits import BF16, nbits
from differences import compare, raw
from onnx import TensorProto, helper, numpy_helper
from rewriting import run_onnxruntime, run_reference

from lut4tool.formats import decode_qmm
from lut4tool.recognize import qmm, recognize
from lut4tool.recognize.layout import Layout
from lut4tool.recognize.witness import WitnessMismatch, check
from lut4tool.rewrite import rewrite_model
from lut4tool.rewrite.expand import expand_model
from lut4tool.runtime.session import Runtime
from lut4tool.storage import Tensors


def rewritten(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Any]:
    """A rewritten copy and its proof; the witness complete, nothing of com.microsoft left."""
    after = copy.deepcopy(model)
    assert rewrite_model(after, Tensors(None)).rewritten == ()  # not without being asked
    report = rewrite_model(after, Tensors(None), vendor=True)
    assert report.refused == ()
    ((proof, witness),) = report.rewritten
    assert witness is not None
    assert witness.all
    assert proof.op == "QMM"
    assert compare(model, after).wrong == []
    assert all(node.domain != "com.microsoft" for node in after.graph.node)
    onnx.checker.check_model(after, full_check=True)
    return after, proof


def assert_close(found: np.ndarray, feeds: dict[str, np.ndarray], weight: np.ndarray, bias: Any = None) -> None:
    """Within 2^-20 of the sum of magnitudes of float64's product in float32, a few steps in a half type."""
    x = feeds["x"].astype(np.float64)
    expected, magnitude = x @ weight.T, np.abs(x) @ np.abs(weight.T)
    if bias is not None:
        expected, magnitude = expected + bias.astype(np.float64), magnitude + np.abs(bias.astype(np.float64))
    unit = {np.dtype(np.float32): 2.0**-20, np.dtype(np.float16): 2.0**-8, BF16: 2.0**-5}[found.dtype]
    assert (np.abs(found.astype(np.float64) - expected) <= unit * magnitude).all()


LAYOUTS = ["", "scales", "zeros", "B", "B scales zeros"]


@pytest.mark.parametrize("zeros", ["none", "packed", "typed"])
@pytest.mark.parametrize("flat", LAYOUTS)
@pytest.mark.parametrize(("k", "block"), [(32, 16), (48, 16), (17, 16), (4, 16), (80, 32), (33, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_every_layout(zeros: str, flat: str, k: int, block: int, bias: bool) -> None:
    """Against onnxruntime's own operator, in onnx.reference, onnxruntime by the body, our Runtime, and expanded."""
    flat = " ".join(part for part in flat.split() if part != "zeros" or zeros != "none")
    model, feeds, weight = nbits(k=k, block=block, zeros=zeros, flat=flat, bias=bias)
    after, proof = rewritten(model)
    assert proof.kept
    np.testing.assert_array_equal(decode_qmm(Layout(proof, Tensors(None)).weight()), weight.astype(np.float32))
    added = next((numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "bias"), None)
    back = copy.deepcopy(after)
    assert expand_model(back).expanded
    runtime = Runtime(after, device="cpu")
    results = [runtime.run(None, feeds), *(run_reference(each, feeds) for each in (after, back))]
    results += [run_onnxruntime(after, feeds)]
    if flat in ("", "scales"):  # onnxruntime's shapes
        results += [run_onnxruntime(model, feeds)]
    for (result,) in results:
        assert_close(result, feeds, weight, added)
    assert [choice.backend for choice in runtime.kernels.values()] == ["cpu"]


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("zeros", ["none", "packed", "typed"])
@pytest.mark.parametrize("bias", [False, True])
def test_half_types(dtype: Any, zeros: str, bias: bool) -> None:
    model, feeds, weight = nbits(dtype=dtype, zeros=zeros, bias=bias)
    after, proof = rewritten(model)
    assert (proof.weight_dtype, proof.dtype) == (np.dtype(dtype).name,) * 2
    np.testing.assert_array_equal(decode_qmm(Layout(proof, Tensors(None)).weight()).astype(np.float64), weight)
    added = next((numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "bias"), None)
    for results in (Runtime(after, device="cpu").run(None, feeds), run_reference(after, feeds)):
        assert_close(results[0], feeds, weight, added)


@pytest.mark.parametrize("level", [0, 1, 2, 3, 4])
def test_no_accuracy_level_rounds_anything(level: int) -> None:
    """The level is what a runtime may fall to; ours never does."""
    model, feeds, weight = nbits(accuracy_level=level)
    after = rewritten(model)[0]
    for results in (Runtime(after, device="cpu").run(None, feeds), run_reference(after, feeds)):
        assert_close(results[0], feeds, weight)


@pytest.mark.parametrize("level", [-1, 5])
def test_unknown_accuracy_levels(level: int) -> None:
    assert f"accuracy_level {level}, not 0 to 4" in refused(nbits(accuracy_level=level)[0])


@pytest.mark.parametrize("opset", [13, 21, 26])
def test_opsets(opset: int) -> None:
    model, feeds, weight = nbits(opset=opset)
    assert_close(run_reference(rewritten(model)[0], feeds)[0], feeds, weight)


def test_one_weight_of_several_nodes_stays_one() -> None:
    model, feeds, weight = nbits(flat="B scales")
    model.graph.node.append(copy.deepcopy(model.graph.node[0]))
    model.graph.node[1].output[0] = "z"
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["M", 5]))
    after = copy.deepcopy(model)
    assert len(rewrite_model(after, Tensors(None), vendor=True).rewritten) == 2
    assert len(after.graph.initializer) == 3
    for result in run_reference(after, feeds):
        assert_close(result, feeds, weight)


@pytest.mark.parametrize("flat", ["", "scales zeros", "B scales"])
def test_a_large_weight_is_sampled(flat: str) -> None:
    (proof,) = recognize(nbits(k=1024, n=1040, block=32, flat=flat)[0], vendor=True).proofs
    witness = check(proof, Tensors(None))
    assert 3 * 1024 <= witness.compared < witness.elements
    assert check(proof, Tensors(None), full=True).all
    wrong = copy.copy(proof)
    object.__setattr__(wrong, "roles", {**proof.roles, "zero_points": qmm.one_point(3)})
    with pytest.raises(WitnessMismatch):
        check(wrong, Tensors(None))


def test_rows_of_bytes_that_do_not_share_k_evenly_are_run_whole() -> None:
    model, _, _ = nbits(k=1040, n=1040, block=16, flat="zeros")  # 65 blocks: 33 bytes of zero points a row
    (proof,) = recognize(model, vendor=True).proofs
    assert proof.cut is None
    assert check(proof, Tensors(None)).all


# -- Refused in words


def refused(model: onnx.ModelProto) -> str:
    """The reason why a model's only node is refused; the model stays as it is."""
    before = raw(model)
    report = rewrite_model(model, Tensors(None), vendor=True)
    assert report.rewritten == ()
    (refusal,) = report.refused
    assert refusal.node == "nbits"
    assert "nbits" in refusal.reason
    assert raw(model) == before
    return refusal.reason


@pytest.mark.parametrize("bits", [2, 8])
def test_other_bits(bits: int) -> None:
    assert f"MatMulNBits of {bits} bits, not 4" in refused(nbits(bits=bits)[0])


def test_groups() -> None:
    model, _, _ = nbits()
    model.graph.node[0].input.append("g_idx")
    model.graph.initializer.append(numpy_helper.from_array(np.arange(48, dtype=np.int32) // 16, "g_idx"))
    assert "MatMulNBits with g_idx" in refused(model)


# -- Files of other projects, re-made by hand: OpenVINO's tests of MatMulNBits


@pytest.mark.parametrize(("k", "domains", "reason"), [
    (17, [("", 7), ("", 1)], "opset 1 and 7, not one of 13 to 28"),
    (17, [("", 7), ("com.microsoft", 1)], "opset 7, not one of 13 to 28"),
    (4, [("", 7), ("com.microsoft", 1)], "opset 7, not one of 13 to 28"),
])  # fmt: skip
def test_openvinos_models_are_refused_for_a_true_reason(k: int, domains: list[tuple[str, int]], reason: str) -> None:
    """IR 3 at opset 7, and one of them without com.microsoft among its imports."""
    model, _, _ = nbits(k=k, n=3, zeros="none", flat="scales", accuracy_level=4)
    model.ir_version = 3
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*entry) for entry in domains)
    assert reason in refused(model)


def test_a_missing_import_is_repaired() -> None:
    """onnx refuses such a model; the rewritten one has no node of com.microsoft, so nothing is missing."""
    model, feeds, weight = nbits(k=17, zeros="none", flat="scales")
    del model.opset_import[1]
    with pytest.raises(onnx.checker.ValidationError, match=r"com\.microsoft"):
        onnx.checker.check_model(model)
    after, _ = rewritten(model)
    assert_close(run_onnxruntime(after, feeds)[0], feeds, weight)
