"""What stands around a 4-bit weight: Gemm, FusedMatMul and the weight on the left compute what they did."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from build_product import product
from differences import compare
from onnx import TensorProto, helper
from rewriting import run_onnxruntime, run_reference

from build import Chain, make_tensor
from lut4tool.recognize import recognize
from lut4tool.rewrite import rewrite_model
from lut4tool.runtime import Runtime
from lut4tool.storage import Tensors

CHAIN = Chain(rows=6, cols=10, block=8)


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    after = copy.deepcopy(model)
    report = rewrite_model(after, Tensors(None))
    assert report.refused == ()
    assert [proof.site.name for proof, _ in report.rewritten] == ["site"]
    comparison = compare(model, after)
    assert comparison.wrong == []
    assert comparison.replaced == 1
    onnx.checker.check_model(after, full_check=True)
    node = next(node for node in after.graph.node if node.domain == "ai.lut4tool")
    assert (node.name, node.doc_string) == ("site", "here")
    return after


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def assert_same(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *, reference: bool = True) -> onnx.ModelProto:
    """The rewritten model, its results compared: bit for bit in onnx.reference, near in onnxruntime and ours."""
    after = rewritten(model)
    if reference:
        (before,), (now,) = (run_reference(one, feeds) for one in (model, after))
        assert (now.dtype, now.shape, now.tobytes()) == (before.dtype, before.shape, before.tobytes())
    else:
        (before,) = run_onnxruntime(model, feeds)
        (now,) = run_reference(after, feeds)
    tolerance = 4e-6 if before.dtype == np.float32 else 4e-3
    results = [now, *(Runtime(one).run(None, feeds)[0] for one in (after, *([model] if reference else [])))]
    if before.dtype == np.float32:
        results += run_onnxruntime(after, feeds)
    for result in results:
        np.testing.assert_allclose(result, before, rtol=tolerance, atol=tolerance * np.abs(before).max())
    return after


TERMS = [
    ({}, []),
    ({"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}, []),
    ({"alpha": 0.3}, ["Constant", "Mul"]),
    ({"beta": 0.7}, []),  # of no bias
]


@pytest.mark.parametrize("rounding", ["none", "float16"])
@pytest.mark.parametrize(("options", "around"), TERMS, ids=str)
def test_gemm_without_a_bias(options: dict[str, float], around: list[str], rounding: str) -> None:
    model, feeds, _ = product("Gemm", replace(CHAIN, rounding=rounding), (3, 6), **options)
    around = [*around, *["Cast"] * (2 * bool(around) * (rounding != "none"))]
    assert sorted(operators(assert_same(model, feeds))) == sorted(["Lookup4MatMul", *around])


@pytest.mark.parametrize("rounding", ["none", "float16"])
@pytest.mark.parametrize("bias", [(10,), (1, 10), (3, 10), (3, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("options", [{}, {"alpha": 0.3}, {"beta": 0.7}, {"alpha": -2.0, "beta": 1.5}], ids=str)
def test_gemm_with_a_bias(options: dict[str, float], bias: tuple[int, ...], rounding: str) -> None:
    model, feeds, _ = product("Gemm", replace(CHAIN, rounding=rounding), (3, 6), bias=bias, **options)
    assert "Add" in operators(assert_same(model, feeds))


def test_beta_0_drops_the_bias() -> None:
    model, feeds, _ = product("Gemm", CHAIN, (3, 6), bias=(10,), beta=0.0)
    after = assert_same(model, feeds)
    assert operators(after) == ["Lookup4MatMul"]
    assert "bias" not in [tensor.name for tensor in after.graph.initializer]


@pytest.mark.parametrize("perm", ["none", "written"])
@pytest.mark.parametrize("turn_x", [0, 1])
@pytest.mark.parametrize("turn_w", [0, 1])
def test_gemm_turned(turn_x: int, turn_w: int, perm: str) -> None:
    chain = replace(CHAIN, perm=perm)
    k = chain.shape[turn_w]
    model, feeds, _ = product("Gemm", chain, (k, 3) if turn_x else (3, k), transA=turn_x, transB=turn_w, alpha=0.5)
    after = assert_same(model, feeds)
    assert operators(after).count("Transpose") == turn_x


@pytest.mark.parametrize("turn_x", [0, 1])
@pytest.mark.parametrize("turn_w", [0, 1])
@pytest.mark.parametrize("bias", [None, (3,), (6, 1)], ids=str)
def test_gemm_with_the_weight_on_its_left(turn_x: int, turn_w: int, bias: Any) -> None:
    chain = replace(CHAIN, rows=6, cols=6)
    model, feeds, _ = product(
        "Gemm",
        chain,
        (3, 6) if turn_x else (6, 3),
        left=True,
        bias=bias,
        transA=turn_w,
        transB=turn_x,
        alpha=0.5,
        beta=2.0,
    )
    after = assert_same(model, feeds)
    assert operators(after).count("Transpose") == 2 - turn_x


def test_matmul_with_the_weight_on_its_left() -> None:
    model, feeds, _ = product("MatMul", CHAIN, (10, 3), left=True)
    assert operators(assert_same(model, feeds)) == ["Transpose", "Lookup4MatMul", "Transpose"]


@pytest.mark.parametrize("maker", ["Transpose", "Gemm"])
def test_matmul_with_the_weight_on_the_left_of_a_matrix(maker: str) -> None:
    """That the other operand has rank 2 is known from what makes it."""
    model, feeds, _ = product("MatMul", CHAIN, (3, 10), left=True)
    site = model.graph.node[-1]
    if maker == "Transpose":
        node = helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0])
    else:
        model.graph.initializer.append(make_tensor("eye", np.eye(10, dtype=np.float32)))
        node = helper.make_node("Gemm", ["eye", "x"], ["turned"], transB=1)
    model.graph.node.insert(0, node)
    model.graph.node[-1].input[1] = "turned"
    assert site.name == "site"
    assert "Lookup4MatMul" in operators(assert_same(model, feeds))


@pytest.mark.parametrize("options", [{}, {"alpha": 0.25}, {"transB": 1}, {"transA": 1, "alpha": 3.0}], ids=str)
@pytest.mark.parametrize("left", [False, True])
def test_fused_matmul(options: dict[str, Any], left: bool) -> None:
    chain = replace(CHAIN, rows=10, cols=10)
    turn = options.get("transB" if left else "transA", 0)
    shape = (3, 10) if turn == left else (10, 3)
    model, feeds, _ = product("FusedMatMul", chain, shape, left=left, domain="com.microsoft", **options)
    assert "Lookup4MatMul" in operators(assert_same(model, feeds, reference=False))


@pytest.mark.parametrize("x_shape", [(6,), (2, 3, 6), (2, 1, 3, 6)], ids=str)
def test_fused_matmul_of_any_rank(x_shape: tuple[int, ...]) -> None:
    model, feeds, _ = product("FusedMatMul", CHAIN, x_shape, domain="com.microsoft", alpha=0.25)
    assert_same(model, feeds, reference=False)


def test_a_weight_read_both_ways_shares_its_bytes() -> None:
    """A Gemm with transB beside a MatMul: two proofs, one packed."""
    model, feeds, parts = product("MatMul", replace(CHAIN, rows=8, cols=8), (3, 8))
    model.graph.node.append(helper.make_node("Gemm", ["x", parts.weight], ["z"], "other", transB=1))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, None]))
    first, second = recognize(model).proofs
    assert first.tensor("packed") is second.tensor("packed")
    assert (first.flipped, second.flipped) == (False, True)
    after = copy.deepcopy(model)
    rewrite_model(after, Tensors(None))
    assert compare(model, after).wrong == []
    assert len(after.graph.initializer) == 3
    for before, now in zip(run_reference(model, feeds), run_reference(after, feeds), strict=True):
        assert before.tobytes() == now.tobytes()


def test_nodes_around_a_nameless_product_are_nameless_and_values_get_free_names() -> None:
    model, feeds, _ = product("Gemm", CHAIN, (3, 6), bias=(10,), alpha=0.5, beta=0.5)
    model.graph.node[-1].name = ""
    taken = ["y/Lookup4MatMul", "y/Constant", "y/Constant_1", "y/Mul"]
    model.graph.initializer.extend(make_tensor(name, np.ones(1, np.float32)) for name in taken)
    after = copy.deepcopy(model)
    rewrite_model(after, Tensors(None))
    assert compare(model, after).wrong == []
    assert {node.name for node in after.graph.node} == {""}
    assert run_reference(after, feeds)[0].tobytes() == run_reference(model, feeds)[0].tobytes()


def test_in_a_function() -> None:
    """The nodes around stand in the function too."""
    chain = replace(CHAIN, literals="constant", leaves="constant")
    model, feeds, _ = product("Gemm", chain, (3, 6), alpha=0.5)
    imports = list(model.opset_import)
    model.functions.append(helper.make_function("f", "F", ["x"], ["y"], list(model.graph.node), imports))
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("F", ["x"], ["y"], domain="f"))
    model.opset_import.append(helper.make_opsetid("f", 1))
    after = copy.deepcopy(model)
    rewrite_model(after, Tensors(None))
    assert compare(model, after).wrong == []
    assert "Mul" in [node.op_type for node in after.functions[1].node]
    onnx.checker.check_model(after, full_check=True)
    assert run_reference(after, feeds)[0].tobytes() == run_reference(model, feeds)[0].tobytes()
