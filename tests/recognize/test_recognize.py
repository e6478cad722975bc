"""Every spelling of the canonical chain is proved, wherever it stands; a proof decodes to what the chain computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from build import Built, Chain, build, build_calls, build_many, find_node, inject_chain, make_tensor, spell, value_of
from lut4tool.formats import FLOAT_DTYPES, decode
from lut4tool.recognize import Proof, recognize
from lut4tool.recognize.layout import Layout
from lut4tool.recognize.witness import check
from lut4tool.storage import Tensors

INSIDE = {"literals": "constant", "leaves": "constant"}
FORMAL = {"literals": "constant", "leaves": "initializer initializer constant", "hold": "packed"}


def matrix_of(proof: Proof) -> np.ndarray:
    """The matrix [K, N] that a proof says the product multiplies by."""
    facts: Any = proof.attributes
    weight: Any = Layout(proof, Tensors(None)).weight()
    dtype = FLOAT_DTYPES[{1: "float32", 10: "float16", 16: "bfloat16"}[facts["dtype"]]]
    return decode(weight).astype(dtype).transpose(weight.perm)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether type, shape and bytes are equal, a NaN for a NaN."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    kind = np.dtype(f"u{left.dtype.itemsize}")
    equal = np.ascontiguousarray(left).view(kind) == np.ascontiguousarray(right).view(kind)
    return bool((equal | (np.isnan(left) & np.isnan(right))).all())


def evaluated(built: Built, name: str) -> np.ndarray:
    """A value of the original main graph, by onnx.reference."""
    model = onnx.ModelProto()
    model.CopyFrom(built.model)
    model.graph.output.append(onnx.ValueInfoProto(name=name))
    return ReferenceEvaluator(model).run([name], built.feeds)[0]


def only_proof(built: Built) -> Proof:
    """The one proof of a model without refusals."""
    report = recognize(built.model)
    assert report.refusals == ()
    (proof,) = report.proofs
    return proof


def node_at(model: onnx.ModelProto, proof: Proof) -> onnx.NodeProto:
    """The node that a proof's site leads to."""
    body: Any = model.graph if proof.site.function is None else model.functions[proof.site.function]
    for index, position in proof.site.path:
        body = body.node[index].attribute[position].g
    return body.node[proof.site.index]


def assert_proved(**spelling: Any) -> None:
    """The chain is proved, and the proof, onnx.reference and the oracle give the same bits."""
    built = build(check=False, **spelling)
    chain = built.parts[0].chain
    proof = only_proof(built)
    assert (proof.rows, proof.cols, proof.block_size) == (chain.rows, chain.cols, chain.block)
    assert (proof.weight_dtype, proof.dtype) == (chain.weight_dtype, chain.dtype)
    assert proof.opset == chain.opset
    assert same_bits(matrix_of(proof), built.oracle)
    if not chain.domain:  # onnx.reference knows no "ai.onnx"
        assert same_bits(matrix_of(proof), evaluated(built, built.parts[0].weight))


SPELLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "operands of Mul swapped": {"swap": True},
    "scalar literals": {"scalar": True},
    "axis -1": {"axis": -1},
    "no step": {"step": False},
    "defaults written": {"defaults": True, "opset": 24},
    "a Cast for each nibble": {"casts": 2},
    "Identity everywhere": {"identities": ("*",)},
    "Identity everywhere, no literal an initializer": {"identities": ("*",), **INSIDE},
    "typed literals": {"literals": "typed", "leaves": "typed"},
    "Constant tensors": INSIDE,
    "Constant attributes": {"literals": "attribute", "leaves": "attribute"},
    "Constant attributes, scalar": {"literals": "attribute", "scalar": True},
    "mixed": {"literals": "mixed", "leaves": "constant initializer attribute"},
    "float16": {"rounding": "float16"},
    "bfloat16": {"rounding": "bfloat16"},
    "float16, adjoint": {"rounding": "float16", "adjoint": True},
    "bfloat16, adjoint": {"rounding": "bfloat16", "adjoint": True, "perm": "written"},
    "perm written": {"perm": "written"},
    "perm absent": {"perm": "absent"},
    "nameless": {"named": False},
    "ai.onnx": {"domain": "ai.onnx"},
    "x of rank 1": {"x_shape": (6,)},
    "x of rank 4": {"x_shape": (2, 1, 3, 6)},
    "fp4": {"codebook": "fp4"},
    "one element": {"rows": 1, "cols": 1, "block": 2},
    "block over size": {"rows": 3, "cols": 5, "block": 4096},
    "block 2, odd count": {"rows": 3, "cols": 7, "block": 2},
    "blocks that fit": {"rows": 8, "cols": 16, "block": 16},
    "blocks that cross rows": {"rows": 7, "cols": 9, "block": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    assert_proved(**SPELLINGS[name])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(
        {
            "rows": st.integers(1, 40),
            "cols": st.integers(1, 40),
            "block": st.integers(1, 40).map(lambda half: 2 * half),
            "rounding": st.sampled_from(["none", "float16", "bfloat16"]),
            "adjoint": st.booleans(),
            "perm": st.sampled_from(["none", "written", "absent"]),
            "codebook": st.sampled_from(["nf4", "fp4"]),
            "seed": st.integers(0, 3),
            "opset": st.integers(13, 28),
            "literals": st.sampled_from(["initializer", "typed", "constant", "attribute", "mixed"]),
            "leaves": st.sampled_from(["initializer", "constant", "typed attribute constant"]),
            "scalar": st.booleans(),
            "axis": st.sampled_from([1, -1]),
            "step": st.booleans(),
            "defaults": st.booleans(),
            "swap": st.booleans(),
            "casts": st.sampled_from([1, 2]),
            "identities": st.sampled_from([(), ("*",), ("Mul", "Cast", "Slice"), ("Gather", "Concat")]),
            "named": st.booleans(),
        }
    )
)  # fmt: skip
def test_spellings_combined(spelling: dict[str, Any]) -> None:
    spelling["adjoint"] &= spelling["rounding"] != "none"
    assert_proved(**spelling)


@pytest.mark.parametrize("role", [node.name.removeprefix("dec/") for node in spell(Chain()).nodes])
def test_identity_before_any_node(role: str) -> None:
    assert_proved(identities=(role,), perm="written", rounding="float16", casts=2)


@pytest.mark.parametrize("axes", [[], ["", "dec/step"]], ids=["no axes", "no axes, a step"])
def test_slice_without_axes(axes: list[str]) -> None:
    built = build(check=False)
    find_node(built.model, "dec/Slice").input[3:] = axes
    assert same_bits(matrix_of(only_proof(built)), evaluated(built, "dec/ToMatrix_out"))


@pytest.mark.parametrize("role", ["ToBlocks", "Flatten", "ToMatrix"])
def test_allowzero_where_no_shape_has_a_zero(role: str) -> None:
    built = build(check=False)
    node = find_node(built.model, f"dec/{role}")
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("allowzero", 1))
    assert same_bits(matrix_of(only_proof(built)), evaluated(built, "dec/ToMatrix_out"))


@pytest.mark.parametrize("opset", range(13, 29))
def test_every_opset(opset: int) -> None:
    assert_proved(opset=opset, defaults=True, rounding="float16", perm="written")


@pytest.mark.parametrize("ir", range(3, 15))
def test_every_ir_version(ir: int) -> None:
    built = build(ir=ir)
    assert len(built.model.graph.input) == (1 if ir >= 4 else 1 + len(built.model.graph.initializer))
    assert same_bits(matrix_of(only_proof(built)), built.oracle)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # onnx.reference, on the overflow that is tested
def test_special_values_keep_their_bits() -> None:
    scales = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -1], np.float32)
    for rounding in ("none", "float16", "bfloat16"):
        assert_proved(scales=scales, codebook="fp4", rounding=rounding, perm="written")


@pytest.mark.parametrize("kind", ["If", "Loop", "Scan"])
@pytest.mark.parametrize("hold", ["inside", "packed", "leaves", "chain"])
def test_subgraph(kind: str, hold: str) -> None:
    built = build(place=[kind], hold=hold)
    report = recognize(built.model)
    assert report.refusals == ()
    branches = {"If": ["else_branch", "then_branch"], "Loop": ["body"], "Scan": ["body"]}[kind]
    assert [proof.site.name for proof in report.proofs] == [f"dec/{kind}/{branch}/dec/MatMul" for branch in branches]
    own = kind == "If" and hold == "inside"  # the branches hold two chains of the same names
    parts = [built.parts[1], built.parts[0]] if own else [built.parts[0]] * len(branches)
    for proof, part in zip(report.proofs, parts, strict=True):
        assert node_at(built.model, proof).name == "dec/MatMul"
        assert same_bits(matrix_of(proof), part.oracle)
    assert len({proof.key for proof in report.proofs}) == (1 if hold == "chain" else len(branches))


def test_nested_subgraphs() -> None:
    built = build(place=["If", "Loop", "Scan", "If"], hold="packed")
    report = recognize(built.model)
    assert len(report.proofs) == 4
    assert report.refusals == ()
    assert report.proofs[-1].site.name == "dec/If/then_branch/dec/Loop/body/dec/Scan/body/dec/If/then_branch/dec/MatMul"
    assert all(node_at(built.model, proof).op_type == "MatMul" for proof in report.proofs)
    assert all(same_bits(matrix_of(proof), built.oracle) for proof in report.proofs)


@pytest.mark.parametrize("place", ["function", "function function", "Loop function", "function Loop"])
@pytest.mark.parametrize("spelling", [INSIDE, FORMAL], ids=["constants", "formal inputs"])
def test_function(place: str, spelling: dict[str, str]) -> None:
    built = build(place=place.split(), **spelling)
    proof = only_proof(built)
    assert proof.site.function == 0
    assert proof.site.name.startswith("function test.layers::Layer0/")
    assert node_at(built.model, proof).name == "dec/MatMul"
    formal = "formal_" if spelling is FORMAL else ""
    assert proof.inputs == ("formal_x", f"{formal}dec/packed", f"{formal}dec/scales", "dec/codebook")
    assert same_bits(matrix_of(proof), built.oracle)


@pytest.mark.parametrize("depth", [1, 2])
def test_function_called_with_several_weights(depth: int) -> None:
    built = build_calls(3, depth=depth)
    proof = only_proof(built)
    assert proof.tensor("packed").name == "main/0/dec/packed"
    assert proof.tensor("scales").name == "main/0/dec/scales"
    assert same_bits(matrix_of(proof), built.oracle)


def test_function_bound_through_identity_and_constant() -> None:
    built = build_calls(2)
    graph = built.model.graph
    bound = next(name for name in find_node(built.model, "Call0").input if name.endswith("packed"))
    graph.node.insert(0, helper.make_node("Identity", [bound], ["same"]))
    tensor = next(t for t in graph.initializer if t.name == "main/1/dec/packed")
    graph.initializer.remove(tensor)
    graph.node.insert(0, helper.make_node("Constant", [], ["main/1/dec/packed"], value=tensor))
    call = find_node(built.model, "Call0")
    call.input[:] = ["same" if name == bound else name for name in call.input]
    assert same_bits(matrix_of(only_proof(built)), built.oracle)


def test_function_of_another_opset_than_the_graph() -> None:
    built = build_calls(1, opset=21)
    built.model.opset_import[0].version = 13
    assert only_proof(built).opset == 21


def test_products_that_share_a_chain_share_its_proof() -> None:
    proofs = recognize(build(products=3).model).proofs
    assert [proof.site.name for proof in proofs] == ["dec/MatMul", "dec/MatMul1", "dec/MatMul2"]
    assert len({proof.key for proof in proofs}) == 1


def test_products_behind_their_own_identity_share_a_proof() -> None:
    built = build(products=2)
    find_node(built.model, "dec/MatMul1").input[1] = "same"
    built.model.graph.node.insert(13, helper.make_node("Identity", ["dec/ToMatrix_out"], ["same"]))
    proofs = recognize(built.model).proofs
    assert [proof.site.index for proof in proofs] == [14, 15]
    assert proofs[0].key == proofs[1].key


def test_primal_and_adjoint_share_packed_not_a_chain() -> None:
    primal = Chain(rows=10, cols=10, rounding="float16", adjoint=True)
    adjoint = replace(primal, perm="written", prefix="adj/", leaf_prefix="dec/")
    built = build_many([primal, adjoint])
    first, second = recognize(built.model).proofs
    assert first.tensor("packed") is second.tensor("packed")
    assert first.key != second.key
    for proof, part in zip((first, second), built.parts, strict=True):
        assert same_bits(matrix_of(proof), part.oracle)


def test_other_consumers_and_chain_values_as_outputs() -> None:
    roles = [node.name.removeprefix("dec/") for node in spell(Chain(perm="written", rounding="float16")).nodes]
    built = build(consumers=roles[::2], outputs=roles[1::2], perm="written", rounding="float16")
    assert same_bits(matrix_of(only_proof(built)), built.oracle)


def test_the_weight_may_be_the_x_of_its_own_product() -> None:
    built = build(rows=8, cols=8)
    find_node(built.model, "dec/MatMul").input[0] = "dec/ToMatrix_out"
    assert only_proof(built).inputs[0] == "dec/ToMatrix_out"


def test_one_tensor_may_be_scales_and_codebook() -> None:
    built = build(rows=16, cols=8, block=8, scales=np.linspace(0.5, 1, 16, dtype=np.float32))
    find_node(built.model, "dec/Gather").input[0] = "dec/scales"
    proof = only_proof(built)
    assert proof.inputs[2:] == ("dec/scales", "dec/scales")
    assert same_bits(matrix_of(proof), evaluated(built, "dec/ToMatrix_out"))


def test_weights_are_not_read() -> None:
    built = build()
    for tensor in built.model.graph.initializer:
        if tensor.name in ("dec/packed", "dec/scales", "dec/codebook"):
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="nowhere.data")
    assert only_proof(built).tensor("packed").data_location == TensorProto.EXTERNAL


def test_literals_may_be_external_data(tmp_path: Path) -> None:
    built = build(codebook="nf4", perm="written")
    onnx.save(built.model, tmp_path / "m.onnx", save_as_external_data=True, location="all.bin", size_threshold=0)
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert all(tensor.data_location == TensorProto.EXTERNAL for tensor in model.graph.initializer)
    (proof,) = recognize(model, tensors=Tensors(tmp_path)).proofs
    assert check(proof, Tensors(tmp_path)).all
    (refusal,) = recognize(model).refusals
    assert "is external data, and no folder is given to read it from" in refusal.reason
    (tmp_path / "all.bin").unlink()
    (refusal,) = recognize(model, tensors=Tensors(tmp_path)).refusals
    assert "literal 'dec/shape' cannot be read: external data of tensor 'dec/shape'" in refusal.reason
    assert refusal.reason.endswith("no such file or directory, at node 'dec/ToMatrix'")


def test_the_proof_holds_the_chain_in_topological_order() -> None:
    built = build(identities=("*",), casts=2, perm="written", rounding="float16", adjoint=True, literals="mixed")
    proof = only_proof(built)
    known = {*proof.inputs[1:], *proof.literals}
    for node in proof.chain:
        assert known.issuperset(node.input)
        known.update(node.output)
    assert proof.weight in known
    assert proof.cut.output == "dec/Mul_out"
    assert len({id(node) for node in proof.chain}) == len(proof.chain)


def test_the_order_of_nodes_does_not_matter_to_a_proof() -> None:
    built = build()
    nodes = list(built.model.graph.node)
    del built.model.graph.node[:]
    built.model.graph.node.extend(reversed(nodes))
    proof = only_proof(built)
    assert proof.site.index == 0
    assert proof.chain[-1].name == "dec/ToMatrix"


def test_sites_come_in_graph_order() -> None:
    built = build(place=["If"], hold="chain", products=2)
    again = inject_chain(built.model)
    names = [proof.site.name for proof in recognize(again.model).proofs]
    branches = [f"dec/If/{branch}_branch/dec/MatMul{index}" for branch in ("else", "then") for index in ("", "1")]
    assert names == [*branches, "injected/MatMul"]


def test_a_deep_graph_does_not_overflow() -> None:
    built = build(check=False)
    graph = built.model.graph
    product = onnx.NodeProto()
    product.CopyFrom(graph.node[-1])
    del graph.node[-1]
    value = product.input[1]
    for index in range(10_000):
        graph.node.append(helper.make_node("Identity", [value], [value := f"same{index}"]))
    product.input[1] = value
    graph.node.append(product)
    assert same_bits(matrix_of(only_proof(built)), built.oracle)
    for node in graph.node:
        node.op_type = "Neg" if node.op_type == "Identity" else node.op_type
    (refusal,) = recognize(built.model).refusals
    assert refusal.reason == "Neg, not Mul by scales or Gather of a codebook, at node 'Neg:same9999'"


def test_an_initializer_listed_as_input_is_a_constant_in_ir_3_only() -> None:
    built = build(ir=3)
    assert only_proof(built)
    built.model.ir_version = 4
    (refusal,) = recognize(built.model).refusals
    assert "is also a graph input" in refusal.reason


def test_a_model_that_has_no_chain_has_an_empty_report() -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [value_of("x", np.ones((2, 3), np.float32))],
        [value_of("y", np.ones((2, 4), np.float32))],
        [make_tensor("w", np.ones((3, 4), np.float32))],
    )
    report = recognize(helper.make_model(graph))
    assert (report.proofs, report.refusals) == ((), ())


# Soundness: whatever is done to a chain, a proof that is still given says what the chain computes.

OTHER_OPERATORS = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Mod",
    "Identity",
    "Abs",
    "Neg",
    "Reshape",
    "Unsqueeze",
    "Transpose",
    "Cast",
)


def disturb(draw: Any, model: onnx.ModelProto) -> None:
    """Make one random edit: another literal, wire, operator, attribute or shape."""
    graph = model.graph
    kind = draw(st.sampled_from(["literal", "wire", "operator", "attribute", "shape"]))
    if kind in ("literal", "shape"):
        tensor = draw(st.sampled_from(list(graph.initializer)))
        array = numpy_helper.to_array(tensor)
        if kind == "shape":
            array = draw(
                st.sampled_from([array.reshape(-1, 1), array.reshape(1, -1), array[:-1], np.append(array, array[:1])])
            )
        elif array.dtype == np.int64 and array.size:
            array = np.array(array)
            place = draw(st.integers(0, array.size - 1))
            array.flat[place] = draw(st.sampled_from([-16, -1, 0, 1, 2, 6, 8, 10, 15, 16, 60, 64]))
        tensor.CopyFrom(make_tensor(tensor.name, array))
        return
    position = draw(st.integers(0, len(graph.node) - 1))
    node = graph.node[position]
    if kind == "wire" and node.input:
        names = ["x", *(t.name for t in graph.initializer), *(n.output[0] for n in graph.node[:position])]
        node.input[draw(st.integers(0, len(node.input) - 1))] = draw(st.sampled_from(names))
    elif kind == "operator":
        node.op_type = draw(st.sampled_from(OTHER_OPERATORS))
    elif kind == "attribute" and node.attribute and node.attribute[0].type == onnx.AttributeProto.INT:
        node.attribute[0].i = draw(st.sampled_from([-1, 0, 1, 6, 7, 10, 16]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # onnx.reference, on what the edits make of the numbers
@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 3))
def test_no_edit_leads_to_a_wrong_proof(data: st.DataObject, count: int) -> None:
    rounding, perm = data.draw(st.sampled_from([("none", "none"), ("float16", "written")]))
    built = build(check=False, rounding=rounding, perm=perm, defaults=True, adjoint=rounding != "none")
    for _ in range(count):
        disturb(data.draw, built.model)
    for proof in recognize(built.model).proofs:
        assert same_bits(matrix_of(proof), weight_alone(built.model, proof.weight))


def weight_alone(model: onnx.ModelProto, name: str) -> np.ndarray:
    """A value that needs no input, by onnx.reference on the nodes before it: others may be broken."""
    wanted, nodes = {name}, []
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            nodes.insert(0, node)
    graph = helper.make_graph(nodes, "weight", [], [onnx.ValueInfoProto(name=name)], model.graph.initializer)
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=model.opset_import)).run(None, {})[0]
