"""Every fact of a proof has a mutant that is refused with its own sentence; look-alikes are left alone."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from mutants import MUTANTS, Mutant
from mutants_affine import AFFINE
from mutants_of_affine_forms import AFFINE_FORMS_WRONG
from mutants_of_forms import MUTANTS_OF_FORMS
from onnx import TensorProto, helper

from build import build, build_calls, find_node, make_tensor, value_of
from lut4tool.recognize import recognize


@pytest.mark.parametrize("mutant", [*MUTANTS, *MUTANTS_OF_FORMS], ids=lambda mutant: mutant.name)
def test_mutant_is_refused_with_its_sentence(mutant: Mutant) -> None:
    report = recognize(mutant.model())
    assert not report.proofs
    assert report.refusals
    for refusal in report.refusals:
        assert mutant.sentence in refusal.reason
        assert refusal.reason.endswith(f", at node '{refusal.at}'")


@pytest.mark.parametrize("mutant", [*AFFINE_FORMS_WRONG, *AFFINE], ids=lambda mutant: mutant.name)
def test_affine_mutant_is_refused_with_its_sentence(mutant: Mutant) -> None:
    report = recognize(mutant.model(), vendor=True)
    assert not report.proofs
    assert report.refusals
    assert all(mutant.sentence in refusal.reason for refusal in report.refusals)


def test_a_refusal_names_the_product_and_the_node_where_the_walk_stopped() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "mod")
    (refusal,) = recognize(mutant.model()).refusals
    assert refusal.node == "dec/MatMul"
    assert refusal.at == "dec/Mod"
    assert refusal.reason == "Mod by 15, not 16, at node 'dec/Mod'"


def test_a_nameless_node_is_named_by_its_operator_and_output() -> None:
    model = build(named=False, place=["If"], hold="packed").model
    branch = model.graph.node[0].attribute[0].g
    next(node for node in branch.node if node.op_type == "Mod").op_type = "Sub"
    refusal = recognize(model).refusals[0]
    assert refusal.node == "If:y_if/else_branch/MatMul:y"
    assert refusal.at == "If:y_if/else_branch/Sub:dec/Mod_out"


def test_an_old_opset_of_a_function_is_refused_there() -> None:
    model = build_calls().model
    model.functions[0].opset_import[0].version = 12
    (refusal,) = recognize(model).refusals
    assert refusal.node == "function test.layers::Layer0/dec/MatMul"
    assert "opset 12, not 13 to 28" in refusal.reason


def test_a_cycle_is_refused() -> None:
    model = build(identities=("UnsqueezeScales",), check=False).model
    same = find_node(model, "dec/UnsqueezeScalesInput0")
    same.input[0] = same.output[0]
    (refusal,) = recognize(model).refusals
    assert "reads its own output, a cycle" in refusal.reason


@pytest.mark.parametrize(("role", "reads"), [("Cast", "Div"), ("Mod", "Mod")])
def test_a_cycle_of_steps_that_may_repeat_is_refused(role: str, reads: str) -> None:
    model = build(check=False).model
    find_node(model, f"dec/{role}").input[0] = f"dec/{reads}_out"
    (refusal,) = recognize(model).refusals
    assert "a walk of over 1000 nodes, as in a cycle" in refusal.reason


def test_a_cycle_of_the_chain_itself_is_refused() -> None:
    model = build(check=False).model
    find_node(model, "dec/Cast").input[0] = "dec/Concat_out"
    (refusal,) = recognize(model).refusals
    assert refusal.reason.startswith("Concat, not Div, BitShift, Mod or BitwiseAnd of a constant of packed bytes")


# Look-alikes: products that no refusal may speak of, beside a real chain that makes the model worth a walk.


def beside(nodes: Sequence[onnx.NodeProto], tensors: Sequence[TensorProto], inputs: Sequence[onnx.ValueInfoProto] = ()):
    """A model with a proved chain and other nodes."""
    model = build().model
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(tensors)
    model.graph.input.extend(inputs)
    report = recognize(model)
    assert [proof.site.name for proof in report.proofs] == ["dec/MatMul"]
    return report.refusals


FOUR_BITS = "INT4 or UINT4, nor the nibbles of bytes"
FLOATS = make_tensor("w", np.ones((10, 4), np.float32))
INTEGERS = make_tensor("q", np.ones((10, 4), np.int8))
PRODUCT = helper.make_node("MatMul", ["y", "weight"], ["z"], "product")

SILENT = {
    "plain floats": ([helper.make_node("MatMul", ["y", "w"], ["z"])], [FLOATS], []),
    "plain Gemm": ([helper.make_node("Gemm", ["y", "w"], ["z"])], [FLOATS], []),
    "transposed floats": ([helper.make_node("Transpose", ["wt"], ["weight"], perm=[1, 0]), PRODUCT],
                          [make_tensor("wt", np.ones((4, 10), np.float32))], []),
    "scaled floats": ([helper.make_node("Mul", ["w", "by"], ["weight"]), PRODUCT],
                      [FLOATS, make_tensor("by", np.ones(1, np.float32))], []),
    "reshaped floats": ([helper.make_node("Reshape", ["w", "to"], ["flat"]),
                         helper.make_node("Mul", ["flat", "by"], ["weight"]), PRODUCT],
                        [FLOATS, make_tensor("by", np.ones(1, np.float32)), make_tensor("to", np.array([10, 4]))], []),
    "two activations": ([helper.make_node("MatMul", ["y", "given"], ["z"])], [],
                        [value_of("given", np.ones((10, 4), np.float32))]),
    "embedding": ([helper.make_node("Gather", ["w", "ids"], ["weight"]),
                   helper.make_node("Transpose", ["weight"], ["turned"]),
                   helper.make_node("MatMul", ["y", "turned"], ["z"])], [FLOATS], [value_of("ids", np.arange(10))]),
    "quantized activations": ([helper.make_node("QuantizeLinear", ["y", "by"], ["yq"]),
                               helper.make_node("DequantizeLinear", ["yq", "by"], ["yd"]),
                               helper.make_node("MatMul", ["yd", "w"], ["z"])],
                              [FLOATS, make_tensor("by", np.float32(1))], []),
    "random": ([helper.make_node("RandomUniformLike", ["picked"], ["weight"]),
                helper.make_node("Gather", ["w", "at"], ["picked"]), PRODUCT],
               [FLOATS, make_tensor("at", np.arange(4))], []),
    "an undefined part": ([helper.make_node("Gather", ["w", "nowhere"], ["weight"]), PRODUCT], [FLOATS], []),
    "a shape of a constant": ([helper.make_node("Shape", ["q"], ["size"]),
                               helper.make_node("Cast", ["size"], ["f"], to=1),
                               helper.make_node("Mul", ["w", "f"], ["weight"]), PRODUCT], [FLOATS, INTEGERS], []),
}  # fmt: skip

LISTED = {
    "int8 Cast and Mul": ([helper.make_node("Cast", ["q"], ["f"], "cast", to=1),
                           helper.make_node("Mul", ["f", "by"], ["weight"], "scale"), PRODUCT],
                          [INTEGERS, make_tensor("by", np.ones(1, np.float32))],
                          "Mul of Cast and initializer, not of a Gather of entries and scales, at node 'scale'"),
    "int8 DequantizeLinear": ([helper.make_node("DequantizeLinear", ["q", "by"], ["weight"], "dequantize"), PRODUCT],
                              [INTEGERS, make_tensor("by", np.float32(1))],
                              f"codes 'q', INT8 [10, 4], is not {FOUR_BITS}, at node 'dequantize'"),
    "constant Gather": ([helper.make_node("Gather", ["w", "at"], ["weight"], "pick"), PRODUCT],
                        [FLOATS, make_tensor("at", np.arange(10))],
                        "codebook 'w', FLOAT [10, 4], is not [16], at node 'pick'"),
    "int8 Gemm": ([helper.make_node("DequantizeLinear", ["q", "by"], ["weight"], "dequantize"),
                   helper.make_node("Gemm", ["y", "weight"], ["z"], "product")],
                  [INTEGERS, make_tensor("by", np.float32(1))],
                  f"codes 'q', INT8 [10, 4], is not {FOUR_BITS}, at node 'dequantize'"),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_a_look_alike_is_silent(name: str) -> None:
    assert beside(*SILENT[name]) == ()


@pytest.mark.parametrize("name", LISTED)
def test_a_look_alike_with_integers_is_refused_in_words(name: str) -> None:
    nodes, tensors, reason = LISTED[name]
    (refusal,) = beside(nodes, tensors)
    assert (refusal.node, refusal.reason) == ("product", reason)


def test_packed_bytes_that_a_caller_gives_are_silent() -> None:
    built = build()
    graph = built.model.graph
    graph.initializer.remove(next(t for t in graph.initializer if t.name == "dec/packed"))
    graph.input.append(value_of("dec/packed", built.parts[0].packed))
    report = recognize(built.model)
    assert (report.proofs, report.refusals) == ((), ())


def test_packed_bytes_that_a_loop_carries_are_silent() -> None:
    built = build(place=["Loop"])
    body = find_node(built.model, "dec/Loop").attribute[0].g
    body.initializer.remove(next(t for t in body.initializer if t.name == "dec/packed"))
    body.input.append(value_of("dec/packed", built.parts[0].packed))
    report = recognize(built.model)
    assert (report.proofs, report.refusals) == ((), ())


def test_a_model_without_integer_arithmetic_or_a_table_of_16_is_not_walked() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "codebook short")
    model = mutant.model()
    assert recognize(model).refusals
    find_node(model, "dec/Mod").op_type = "BitwiseOr"
    report = recognize(model)
    assert (report.proofs, report.refusals) == ((), ())
    model.graph.initializer.append(make_tensor("table", np.ones(16, np.float32)))
    assert recognize(model).refusals


def test_a_chain_in_a_function_whose_product_is_outside_is_refused() -> None:
    model = build(
        place=["function"], hold="packed", literals="constant", leaves="initializer initializer constant"
    ).model
    function = model.functions[0]
    product = function.node.pop()
    function.input.remove("formal_x")
    function.output[:] = [product.input[1]]
    call = find_node(model, "dec/Layer0")
    call.input.remove("x")
    model.graph.node.append(helper.make_node("MatMul", ["x", call.output[0]], ["z"], "outside"))
    (refusal,) = recognize(model).refusals
    assert refusal.node == "outside"
    assert refusal.reason == "test.layers::Layer0, not Mul by scales or Gather of a codebook, at node 'dec/Layer0'"


def test_vendor_products_are_listed_only_when_asked_for() -> None:
    model = build().model
    model.graph.node.append(helper.make_node("MatMulNBits", ["x", "a", "b"], ["z"], "nbits", domain="com.microsoft"))
    assert recognize(model).refusals == ()
    report = recognize(model, vendor=True)
    assert len(report.proofs) == 1
    assert [refusal.node for refusal in report.refusals] == ["nbits"]
    assert report.refusals[0].reason == "MatMulNBits without K, at node 'nbits'"
