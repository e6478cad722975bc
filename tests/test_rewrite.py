"""The rewriter: eight permitted differences and no other, equal results, and files that are whole at every moment."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from differences import compare, raw
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from build import Built, Chain, build, build_calls, build_many, find_node
from lut4tool import storage
from lut4tool.recognize import recognize
from lut4tool.rewrite import RewriteError, rewrite, rewrite_model
from lut4tool.rewrite.edit import apply
from lut4tool.storage import StorageError, Tensors


def rewritten(model: onnx.ModelProto, **options) -> onnx.ModelProto:
    """A rewritten copy, checked by onnx and by the eight differences."""
    after = copy.deepcopy(model)
    report = rewrite_model(after, Tensors(None), witness=False, **options)
    assert report.rewritten, report.refused
    comparison = compare(model, after)
    assert comparison.wrong == []
    assert comparison.replaced == len(report.rewritten)
    onnx.checker.check_model(after, full_check=True)
    assert after.ByteSize() <= model.ByteSize() + 8192
    return after


def run_reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ReferenceEvaluator(model).run(None, feeds)


def run_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Every optimization off: the bodies are inlined and no more."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def assert_same_results(built: Built, after: onnx.ModelProto, oracles=(run_reference, run_onnxruntime)) -> None:
    for run in oracles:
        before = run(built.model, built.feeds)
        now = run(after, built.feeds)
        assert [(array.dtype, array.tobytes()) for array in now] == [(array.dtype, array.tobytes()) for array in before]


SPELLINGS = {
    "plain": {},
    "transposed": {"perm": "written"},
    "transposed by default": {"perm": "absent"},
    "adjoint float16": {"rounding": "float16", "adjoint": True, "perm": "written"},
    "adjoint bfloat16": {"rounding": "bfloat16", "adjoint": True},
    "forward float16 transposed": {"rounding": "float16", "perm": "written"},
    "crossing rows": {"rows": 7, "cols": 9, "block": 16},
    "block over size": {"rows": 3, "cols": 5, "block": 64},
    "constants": {"literals": "constant", "leaves": "constant"},
    "mixed": {"literals": "mixed", "leaves": "constant initializer typed"},
    "attributes": {"literals": "attribute", "leaves": "typed"},
    "scalars": {"scalar": True, "axis": -1, "step": False, "swap": True, "casts": 2},
    "identities": {"identities": ("*",)},
    "nameless": {"named": False},
    "defaults": {"defaults": True, "opset": 19},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    built = build(**SPELLINGS[name])
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


CONTROL_FLOW = [["If"], ["Loop"], ["Scan"], ["If", "Loop"], ["Loop", "If"]]
PLACES = [(place, hold) for place in CONTROL_FLOW for hold in ("inside", "packed", "leaves", "chain")]
# Literals that are formal inputs of a function are refused: the recognizer's tests hold that.
PLACES += [(place, hold) for place in (["function"], ["If", "function"]) for hold in ("inside", "packed")]


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


# Files


def write(model: onnx.ModelProto, path: Path, external: str = "") -> Path:
    """Write a model, its initializers in one external file where `external` names it (at offsets with gaps)."""
    model = copy.deepcopy(model)
    if external:
        (path.parent / external).parent.mkdir(exist_ok=True, parents=True)
        with (path.parent / external).open("wb") as data:
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) < 64:  # the literals
                    continue
                data.seek(-(-(data.tell() + 1) // 4096) * 4096)
                entries = (("location", external), ("offset", data.tell()), ("length", len(tensor.raw_data)))
                data.write(tensor.raw_data)
                for key, value in entries:
                    tensor.external_data.add(key=key, value=str(value))
                tensor.data_location = TensorProto.EXTERNAL
                tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def built() -> Built:
    return build(rows=64, cols=64, block=32, perm="written")


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path)


def test_to_a_new_file_with_a_witness(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    report = rewrite(source, tmp_path / "out.onnx")
    assert load(source) == built.model
    assert_same_results(built, load(tmp_path / "out.onnx"))
    document = report.to_json()
    assert document["rewritten"] == [
        {
            "node": "dec/MatMul",
            "op": "Lookup4MatMul",
            "rows": 64,
            "cols": 64,
            "block_size": 32,
            "weight_dtype": "float32",
            "bytes": "kept",
            "witness": {"compared": 4096, "elements": 4096, "all": True},
        }
    ]
    assert document["refused"] == []
    assert document["output_bytes"] == (tmp_path / "out.onnx").stat().st_size
    assert document["input_bytes"] == source.stat().st_size
    assert (document["packed_bytes"], document["dense_bytes"]) == (2048 + 128 * 4 + 64, 64 * 64 * 4)


@pytest.mark.parametrize("external", ["", "w.bin", "data/w.bin"])
def test_in_place(built, tmp_path, external):
    source = write(built.model, tmp_path / "m.onnx", external)
    before = files(tmp_path)
    rewrite(source, source)
    after = files(tmp_path)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == ["m.onnx"]
    assert_same_results(built, load(source))


@pytest.mark.parametrize("external", ["w.bin", "data/w.bin"])
def test_the_same_folder_keeps_external_data_by_reference(built, tmp_path, external):
    source = write(built.model, tmp_path / "in.onnx", external)
    rewrite(source, tmp_path / "out.onnx")
    assert files(tmp_path).keys() == {"in.onnx", "out.onnx", external}
    assert compare(storage.read_model(source), storage.read_model(tmp_path / "out.onnx")).wrong == []
    assert_same_results(built, load(tmp_path / "out.onnx"))


@pytest.mark.parametrize("external", ["w.bin", "data/w.bin"])
def test_another_folder_gets_a_copy(built, tmp_path, external):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source = write(built.model, tmp_path / "a" / "in.onnx", external)
    report = rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "b").keys() == {"out.onnx", external}
    assert files(tmp_path / "b")[external] == files(tmp_path / "a")[external]
    assert (tmp_path / "b" / external).stat().st_nlink == 1
    size = storage.size_text((tmp_path / "a" / external).stat().st_size)
    assert report.notes == (f"external data '{external}' ({size}) was copied as '{external}'",)
    assert compare(storage.read_model(source), storage.read_model(tmp_path / "b" / "out.onnx")).wrong == []
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_a_taken_name_gets_a_number(built, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "w.bin").write_bytes(b"of another model")
    source = write(built.model, tmp_path / "in.onnx", "w.bin")
    report = rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "b").keys() == {"out.onnx", "w.bin", "w-1.bin"}
    assert (tmp_path / "b" / "w.bin").read_bytes() == b"of another model"
    size = storage.size_text((tmp_path / "w.bin").stat().st_size)
    assert report.notes == (f"external data 'w.bin' ({size}) was copied as 'w-1.bin'",)
    before, after = storage.read_model(source), storage.read_model(tmp_path / "b" / "out.onnx")
    assert {storage.location(tensor) for tensor in after.graph.initializer} == {"w-1.bin"}
    for tensor in after.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = "w.bin"
    assert compare(before, after).wrong == []
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_out_is_never_the_data(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx", "w.bin")
    (tmp_path / "b").mkdir()
    before = files(tmp_path)
    with pytest.raises(RewriteError, match=r"holds the model's external data 'w\.bin'"):
        rewrite(source, tmp_path / "w.bin", force=True)
    assert files(tmp_path) == before
    rewrite(source, tmp_path / "b" / "w.bin")
    assert_same_results(built, load(tmp_path / "b" / "w.bin"))


def test_an_existing_out_needs_force(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    out = tmp_path / "out.onnx"
    out.write_bytes(b"precious")
    with pytest.raises(RewriteError, match="exists; --force replaces it"):
        rewrite(source, out)
    assert out.read_bytes() == b"precious"
    rewrite(source, out, force=True)
    assert_same_results(built, load(out))


def test_places_that_cannot_be_written(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    with pytest.raises(RewriteError, match=r"the folder .* does not exist"):
        rewrite(source, tmp_path / "none" / "out.onnx")
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(RewriteError, match="not a regular file"):
            rewrite(source, target, force=True)
    with pytest.raises(StorageError, match="no such file"):
        rewrite(tmp_path / "none.onnx", tmp_path / "out.onnx")
    assert files(tmp_path).keys() == {"in.onnx"}


def test_a_dry_run_writes_nothing(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    before = files(tmp_path)
    report = rewrite(source, tmp_path / "out.onnx", dry_run=True)
    assert files(tmp_path) == before
    rewrite(source, tmp_path / "out.onnx")
    assert report.output_bytes == (tmp_path / "out.onnx").stat().st_size


def test_nothing_to_rewrite_writes_nothing(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    rewrite(source, source)
    before = files(tmp_path)
    assert rewrite(source, tmp_path / "out.onnx").rewritten == ()
    assert files(tmp_path) == before


def test_data_outside_the_folder_is_refused_and_may_be_allowed(built, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "b").mkdir()
    source = write(built.model, tmp_path / "m" / "in.onnx", "w.bin")
    (tmp_path / "m" / "w.bin").rename(tmp_path / "blobs" / "abc")
    (tmp_path / "m" / "w.bin").symlink_to(tmp_path / "blobs" / "abc")
    with pytest.raises(StorageError, match="outside the model's folder"):
        rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "b") == {}
    rewrite(source, tmp_path / "b" / "out.onnx", allow_external=[tmp_path / "blobs"])
    assert not (tmp_path / "b" / "w.bin").is_symlink()
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_a_path_through_the_parent_lands_in_outs_folder(built, tmp_path):
    for name in ("m", "shared", "b"):
        (tmp_path / name).mkdir()
    source = write(built.model, tmp_path / "m" / "in.onnx", "../shared/w.bin")
    rewrite(source, tmp_path / "b" / "out.onnx", allow_external=[tmp_path / "shared"])
    assert files(tmp_path / "b").keys() == {"out.onnx", "w.bin"}
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_data_is_not_copied_through_a_link_out_of_outs_folder(built, tmp_path):
    for name in ("m", "b", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "sub").symlink_to("../elsewhere")
    source = write(built.model, tmp_path / "m" / "in.onnx", "sub/w.bin")
    rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "elsewhere") == {}
    assert files(tmp_path / "b").keys() == {"out.onnx", "w.bin"}
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


FULL = OSError(errno.ENOSPC, "No space left on device")
CRASHES = [
    (error, moment, target)
    for target in ("m/in.onnx", "m/old.onnx", "b/old.onnx", "b/new.onnx")
    for moment in ("replace", "fsync")
    for error in (FULL, KeyboardInterrupt())
]
CRASHES += [(KeyboardInterrupt(), "copy_file_range", target) for target in ("b/old.onnx", "b/new.onnx")]


@pytest.mark.parametrize(("error", "moment", "target"), CRASHES)
def test_a_crash_leaves_every_file_whole(built, tmp_path, monkeypatch, error, moment, target):
    for name in ("m", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old.onnx").write_bytes(b"old")
    source = write(built.model, tmp_path / "m" / "in.onnx", "data/w.bin")
    before = files(tmp_path)

    def fail(*args):
        raise error

    monkeypatch.setattr(storage.os, moment, fail)
    with pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt):
        rewrite(source, tmp_path / target, force=True)
    monkeypatch.undo()
    assert files(tmp_path) == before
    assert not (tmp_path / "b" / "data").exists()


def test_a_disk_that_fills_while_the_proto_is_written(built, tmp_path):
    """The kernel's own limit on a file's size stands in for the full disk."""
    import resource
    import signal

    source = write(built.model, tmp_path / "in.onnx")
    before = files(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(StorageError, match=r"cannot write .*file too large"):
            rewrite(source, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert files(tmp_path) == before


def test_an_interrupt_after_the_rename_keeps_the_new_model_whole(built, tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    source = write(built.model, tmp_path / "in.onnx", "w.bin")
    replace = os.replace

    def late(*args):
        replace(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.os, "replace", late)
    with pytest.raises(KeyboardInterrupt):
        rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "b").keys() == {"out.onnx", "w.bin"}
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_a_proto_past_the_limit_gets_external_data(built, tmp_path, monkeypatch):
    source = write(built.model, tmp_path / "in.onnx")
    read = storage.read_model(source)
    monkeypatch.setattr("lut4tool.rewrite.read_model", lambda path: read)
    monkeypatch.setattr(storage, "PROTO_LIMIT", 5000)
    whole, replace = copy.deepcopy(read), os.replace
    monkeypatch.setattr(storage.os, "replace", lambda *args: (_ for _ in ()).throw(FULL))
    with pytest.raises(StorageError, match="no space left"):
        rewrite(source, tmp_path / "out.onnx")
    assert files(tmp_path).keys() == {"in.onnx"}
    monkeypatch.setattr(storage.os, "replace", replace)
    read.CopyFrom(whole)
    report = rewrite(source, tmp_path / "out.onnx")
    assert files(tmp_path).keys() == {"in.onnx", "out.onnx", "out.onnx.data"}
    assert report.notes == (
        "the model passes protobuf's 2 GiB: 2.0 KB of weights are external data now, in out.onnx.data",
    )
    assert_same_results(built, load(tmp_path / "out.onnx"))


def test_a_witness_that_differs_writes_nothing(built, tmp_path, monkeypatch):
    """The proof is bent after the fact, as a bug of the recognizer would."""
    import dataclasses

    from lut4tool import rewrite as module
    from lut4tool.recognize.witness import WitnessMismatch

    source = write(built.model, tmp_path / "in.onnx")
    before = files(tmp_path)

    def bent(model, vendor=False):
        report = recognize(model, vendor)
        wrong = dataclasses.replace(
            report.proofs[0], attributes={**report.proofs[0].attributes, "high_nibble_first": 0}
        )
        return dataclasses.replace(report, proofs=(wrong,))

    monkeypatch.setattr(module, "recognize", bent)
    with pytest.raises(WitnessMismatch):
        rewrite(source, tmp_path / "out.onnx")
    assert files(tmp_path) == before
