"""The rewriter: the permitted differences and no other, and equal results."""

from __future__ import annotations

import copy

import numpy as np
import onnxruntime
import pytest
from differences import compare, raw
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from rewriting import assert_same_results, rewritten, run_reference
from spellings import CANONICAL, PLACES

from build import Chain, build, build_calls, build_many, find_node
from lut4tool import storage
from lut4tool.recognize import recognize
from lut4tool.rewrite import RewriteError, rewrite_model
from lut4tool.rewrite.edit import apply
from lut4tool.storage import Tensors


@pytest.mark.parametrize("name", CANONICAL)
def test_spellings(name):
    built = build(**CANONICAL[name])
    after = rewritten(built.model)
    assert_same_results(built, after)
    assert [node.op_type for node in after.graph.node if node.op_type not in ("Constant", "Identity")] == [
        "Lookup4MatMul"
    ]


@pytest.mark.parametrize("rounding", ["float16", "bfloat16"])
def test_forward_half_products(rounding):
    """onnxruntime drops a forward rounding by itself (float16) or has no product (bfloat16): onnx.reference judges."""
    built = build(rounding=rounding)
    assert_same_results(built, rewritten(built.model), [run_reference])


@pytest.mark.parametrize("opset", range(13, 27))
def test_opsets(opset):
    built = build(opset=opset)
    after = rewritten(built.model)
    assert [entry.version for entry in after.functions[0].opset_import] == [opset]
    assert_same_results(built, after)


@pytest.mark.parametrize("ir", [3, 4, 7, 8, 10, 13])
def test_ir_versions(ir):
    built = build(ir=ir)
    after = rewritten(built.model)
    assert after.ir_version == max(ir, 8)
    assert [entry.name for entry in after.graph.input] == ["x"]
    assert_same_results(built, after)


@pytest.mark.parametrize(
    ("place", "hold"), PLACES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_subgraphs_and_functions(place, hold):
    in_function = "function" in place
    spelling = {
        "literals": "constant",
        "leaves": "initializer initializer constant" if hold == "packed" else "constant",
    }
    built = build(place=place, hold=hold, **(spelling if in_function else {}))
    after = rewritten(built.model)
    for condition in (True, False) if "If" in place else (True,):
        if "If" in place:
            built.feeds["cond"] = np.array(condition)
        assert_same_results(built, after)


@pytest.mark.parametrize("depth", [1, 2])
def test_functions_called_with_other_weights(depth):
    built = build_calls(3, depth=depth)
    after = rewritten(built.model)
    assert [function.name for function in after.functions] == ["Lookup4MatMul", *(f"Layer{i}" for i in range(depth))]
    assert_same_results(built, after)


def test_shared_weights_stay_shared():
    built = build(products=3, perm="written")
    after = rewritten(built.model)
    assert sum(node.op_type == "Lookup4MatMul" for node in after.graph.node) == 3
    assert len(after.graph.initializer) == 3
    assert_same_results(built, after)


def test_a_weight_and_its_adjoint_share_bytes():
    shared = Chain(rows=8, cols=8, leaf_prefix="w/", prefix="a/")
    built = build_many([shared, Chain(rows=8, cols=8, leaf_prefix="w/", prefix="b/", perm="written")])
    after = rewritten(built.model)
    assert sorted(tensor.name for tensor in after.graph.initializer) == ["w/codebook", "w/packed", "w/scales"]
    assert_same_results(built, after)


@pytest.mark.parametrize("role", ["Cast", "Gather", "Mul", "Slice", "ToMatrix", "Transpose"])
@pytest.mark.parametrize("kind", ["consumers", "outputs"])
def test_values_with_other_uses_stay_alive(role, kind):
    built = build(perm="written", **{kind: [role]})
    after = rewritten(built.model)
    assert find_node(after, f"dec/{role}")
    assert_same_results(built, after)


def test_a_value_captured_by_a_subgraph_stays_alive():
    built = build(consumers=["Mul"])
    seen = next(node for node in built.model.graph.node if node.output[0] == "Mul_seen")
    branch = helper.make_graph(
        [helper.make_node("Identity", ["dec/Mul_out"], ["inner"])],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [None, None])],
    )
    seen.CopyFrom(helper.make_node("If", ["cond"], ["Mul_seen"], then_branch=branch, else_branch=branch))
    built.model.graph.input.append(helper.make_tensor_value_info("cond", TensorProto.BOOL, []))
    built.feeds["cond"] = np.array(True)
    after = rewritten(built.model)
    assert find_node(after, "dec/Mul")
    with pytest.raises(KeyError):
        find_node(after, "dec/Slice")
    assert_same_results(built, after)


def test_a_value_captured_by_a_list_of_graphs_stays_alive():
    """No standard operator has such an attribute; a custom one may."""
    model = build().model
    output = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    nodes = [helper.make_node("Identity", ["dec/Mul_out"], ["inner"])]
    graphs = [helper.make_graph(nodes, f"graph{index}", [], [output]) for index in range(2)]
    model.graph.node.append(helper.make_node("Any", [], ["any"], domain="custom", bodies=graphs))
    model.opset_import.append(helper.make_opsetid("custom", 1))
    after = copy.deepcopy(model)
    rewrite_model(after, Tensors(None), witness=False)
    assert compare(model, after).wrong == []
    assert find_node(after, "dec/Mul")


def test_a_name_that_a_subgraph_takes_again_is_no_use_of_ours():
    """Not valid ONNX, but in the wild: an inner input or initializer of the same name hides the chain's value."""
    model = build().model
    floats, flag = helper.make_tensor_type_proto(TensorProto.FLOAT, [60]), helper.make_tensor_type_proto(9, [])
    inputs = [helper.make_value_info("tick", helper.make_tensor_type_proto(7, [])), helper.make_value_info("on", flag)]
    body = helper.make_graph(
        [helper.make_node("Add", ["dec/Mul_out", "dec/Slice_out"], ["sum"])],
        "body",
        [*inputs, helper.make_value_info("dec/Mul_out", floats)],
        [inputs[1], helper.make_value_info("sum", floats)],
        [numpy_helper.from_array(np.ones(60, np.float32), "dec/Slice_out")],
    )
    loop = helper.make_node("Loop", ["", "", "start"], ["final"], "loop", body=body)
    model.graph.node.append(loop)
    rewrite_model(model, Tensors(None), witness=False)
    assert [node.name for node in model.graph.node] == ["dec/MatMul", "loop"]
    assert model.graph.node[1] == loop


def test_what_was_dead_before_stays():
    """A dead node keeps what it reads; a dead initializer, and entries about them, are not ours to remove."""
    built = build()
    graph = built.model.graph
    graph.node.insert(0, helper.make_node("Identity", ["unused"], ["dead"], "dead"))
    graph.node.append(helper.make_node("Neg", ["dec/Flatten_out"], ["dead2"], "dead2"))
    graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "unused"))
    graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "never read"))
    graph.value_info.append(helper.make_tensor_value_info("dead", TensorProto.FLOAT, [3]))
    after = rewritten(built.model)
    names = [node.name for node in after.graph.node]
    assert {"dead", "dead2", "dec/Flatten"} <= set(names)
    assert "dec/Slice" not in names
    assert_same_results(built, after)


def test_entries_about_orphaned_values_go_and_others_stay():
    built = build()
    graph = built.model.graph
    graph.value_info.append(helper.make_tensor_value_info("dec/Mul_out", TensorProto.FLOAT, [8, 8]))
    graph.value_info.append(helper.make_tensor_value_info("dec/packed", TensorProto.UINT8, [32]))
    for tensor, scale in (("dec/Mul_out", "scale one"), ("y", "scale two"), ("dec/end", "scale two")):
        annotation = graph.quantization_annotation.add(tensor_name=tensor)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=scale)
    for name in ("scale one", "scale two"):
        graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), name))
    after = rewritten(built.model).graph
    assert [entry.name for entry in after.value_info] == ["dec/packed"]
    assert [entry.tensor_name for entry in after.quantization_annotation] == ["y"]
    assert "scale two" in [tensor.name for tensor in after.initializer]
    assert "scale one" not in [tensor.name for tensor in after.initializer]


def test_the_node_keeps_its_name_outputs_documentation_and_metadata():
    built = build()
    node = find_node(built.model, "dec/MatMul")
    node.doc_string = "projection"
    node.metadata_props.add(key="source", value="layer.py:3")
    built.model.metadata_props.add(key="author", value="me")
    built.model.doc_string, built.model.domain, built.model.model_version = "model", "org", 7
    after = find_node(rewritten(built.model), "dec/MatMul")
    assert (after.op_type, after.domain) == ("Lookup4MatMul", "ai.lut4tool")
    assert (after.doc_string, after.output, after.metadata_props) == ("projection", node.output, node.metadata_props)
    assert list(after.input) == ["x", "dec/packed", "dec/scales", "dec/codebook"]


def test_nothing_else_of_the_old_node_stays():
    """Other products than MatMul have attributes, and a function's node may name an overload."""
    model = build().model
    proofs = recognize(model).proofs
    node = find_node(model, "dec/MatMul")
    node.attribute.append(helper.make_attribute("alpha", 1.0))
    node.overload = "other"
    apply(model, proofs)
    names = ["rows", "cols", "block_size", "perm", "high_nibble_first", "weight_dtype", "dtype"]
    assert [attribute.name for attribute in node.attribute] == names
    assert not node.overload


def test_training_information_keeps_what_it_reads():
    built = build()
    info = built.model.training_info.add()
    info.algorithm.node.append(helper.make_node("Neg", ["dec/Slice_out"], ["gradient"]))
    info.algorithm.output.append(helper.make_tensor_value_info("gradient", TensorProto.FLOAT, [60]))
    info.update_binding.add(key="dec/shape", value="gradient")
    after = copy.deepcopy(built.model)
    rewrite_model(after, Tensors(None), witness=False)
    names = {node.name for node in after.graph.node}
    assert "dec/Slice" in names
    assert "dec/ToMatrix" not in names
    assert "dec/shape" in {tensor.name for tensor in after.graph.initializer}
    assert raw(after.training_info[0]) == raw(built.model.training_info[0])


def test_one_name_in_two_branches():
    """Both branches hold nodes and values of the same names and other weights."""
    built = build(place=["If"], perm="written")
    after = rewritten(built.model)
    branches = {entry.name: entry.g for node in after.graph.node for entry in node.attribute}
    assert [[node.op_type for node in graph.node] for graph in branches.values()] == [["Lookup4MatMul"]] * 2
    for condition in (False, True, False, True):
        built.feeds["cond"] = np.array(condition)
        assert_same_results(built, after)


def test_a_branch_that_is_written_twice_keeps_its_sites_apart():
    """onnx.checker refuses it, a runtime may read either: each is rewritten at its own indices."""
    built = build(place=["If"])
    branch = next(node for node in built.model.graph.node if node.op_type == "If").attribute
    (then,) = (entry for entry in branch if entry.name == "then_branch")
    branch.add().CopyFrom(then)
    then.g.node.insert(0, helper.make_node("Neg", ["x"], ["unread"]))
    after = copy.deepcopy(built.model)
    rewrite_model(after, Tensors(None))
    found = [entry for node in after.graph.node for entry in node.attribute if entry.name == "then_branch"]
    assert [[node.op_type for node in entry.g.node] for entry in found] == [["Neg", "Lookup4MatMul"], ["Lookup4MatMul"]]
    results = [ReferenceEvaluator(model).run(None, built.feeds) for model in (built.model, after)]
    np.testing.assert_array_equal(*results)


def test_rewriting_twice_changes_nothing():
    once = rewritten(build().model)
    twice = copy.deepcopy(once)
    report = rewrite_model(twice, Tensors(None), witness=False)
    assert report.rewritten == ()
    assert raw(twice) == raw(once)


def test_a_second_chain_in_a_rewritten_model_uses_the_body_that_is_there():
    from build import inject_chain

    again = rewritten(inject_chain(rewritten(build().model)).model)
    assert [function.name for function in again.functions] == ["Lookup4MatMul"]
    assert [entry.domain for entry in again.opset_import] == ["", "ai.lut4tool"]


def test_a_foreign_body_is_refused():
    model = build().model
    model.functions.append(
        helper.make_function(
            "ai.lut4tool", "Lookup4MatMul", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])],
            [helper.make_opsetid("", 17)],
        )
    )  # fmt: skip
    before = raw(model)
    with pytest.raises(RewriteError, match=r"already defines a function ai\.lut4tool::Lookup4MatMul"):
        rewrite_model(model, Tensors(None), witness=False)
    assert raw(model) == before


def test_another_version_of_our_domain_is_refused():
    model = build().model
    model.opset_import.append(helper.make_opsetid("ai.lut4tool", 2))
    with pytest.raises(RewriteError, match=r"imports ai\.lut4tool at version 2"):
        rewrite_model(model, Tensors(None), witness=False)


def test_a_model_without_chains_keeps_its_bytes():
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
        [numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")],
    )
    model = helper.make_model(graph, ir_version=3)
    before = raw(model)
    assert rewrite_model(model, Tensors(None), witness=False).rewritten == ()
    assert raw(model) == before


def test_no_dense_weight_is_left():
    built = build(rows=64, cols=64, block=32, perm="written")
    after = rewritten(built.model)
    assert max(storage.nbytes(tensor) for tensor in after.graph.initializer) == 64 * 64 // 2


def test_onnxruntime_with_its_own_settings_runs_the_body():
    """With every optimization on, as a user has it: not bit for bit, and no less exact than the original."""
    built = build(rows=64, cols=64, block=32, perm="written")
    session = onnxruntime.InferenceSession(
        rewritten(built.model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    actual = session.run(None, built.feeds)[0]
    bound = 2**-21 * (np.abs(built.feeds["x"]).astype(np.float64) @ np.abs(built.oracle).astype(np.float64))
    assert (np.abs(actual - built.expected) <= bound).all()


# The comparison itself


def test_the_comparison_notices_every_other_difference():
    before = build(place=["If"], perm="written").model
    before.graph.value_info.append(helper.make_tensor_value_info("cond_copy", TensorProto.BOOL, []))
    after = copy.deepcopy(before)
    rewrite_model(after, Tensors(None), witness=False)
    assert compare(before, after).wrong == []
    changes = {
        "producer": lambda model: setattr(model, "producer_name", "other"),
        "ir": lambda model: setattr(model, "ir_version", 11),
        "opset": lambda model: model.opset_import.reverse(),
        "function": lambda model: model.functions.append(model.functions[0]),
        "graph name": lambda model: setattr(model.graph, "name", "h"),
        "input": lambda model: model.graph.input.reverse(),
        "output": lambda model: model.graph.output.pop(),
        "value_info": lambda model: model.graph.value_info.pop(),
        "node name": lambda model: setattr(model.graph.node[-1], "name", "other"),
        "node": lambda model: model.graph.node.append(helper.make_node("Neg", ["x"], ["z"])),
        "site name": lambda model: setattr(model.graph.node[-1].attribute[0].g.node[-1], "name", "other"),
        "site attribute": lambda model: model.graph.node[-1].attribute[0].g.node[-1].attribute.pop(),
        "inner initializer": lambda model: model.graph.node[-1].attribute[0].g.initializer.pop(),
        "inner order": lambda model: model.graph.node[-1].attribute[0].g.initializer.reverse(),
        "inner value": lambda model: model.graph.node[-1].attribute[0].g.initializer[0].dims.append(1),
        "metadata": lambda model: model.metadata_props.add(key="a", value="b"),
    }
    for name, change in changes.items():
        wrong = copy.deepcopy(after)
        change(wrong)
        assert compare(before, wrong).wrong, name
