"""Every form of a lookup is recognized, witnessed, rewritten, and gives equal results wherever it is run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from differences import compare
from forms import FORMS, NF4, Model, Writer, assemble, make
from rewriting import run_onnxruntime, run_reference

from lut4tool import native, storage
from lut4tool.recognize import Proof, recognize
from lut4tool.recognize.layout import Layout
from lut4tool.recognize.witness import WitnessMismatch, check
from lut4tool.rewrite import rewrite, rewrite_model
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
    runtime = Runtime(after, device="cpu")
    (ours,) = runtime.run(None, built.feeds)
    steps = {"float32": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7}[now.dtype.name]
    assert (np.abs(ours.astype(np.float64) - expected) <= steps * bound).all()
    assert [choice.backend for choice in runtime.kernels.values()] == ["cpu" if native.compiled() else "reference"]
    if now.dtype == np.float32:  # half products: onnxruntime drops roundings by itself, or has no product
        (before,), (now,) = (run_onnxruntime(model, built.feeds) for model in (built.model, after))
        assert same_bits(before, now)


def wrong(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A layout whose first element is one bit off, which a rounding to float16 does not hide."""

    def bent(*given: Any) -> np.ndarray:
        array = np.array(make(*given))
        array.view(f"u{array.itemsize}").reshape(-1)[0] ^= 1 << 20 if array.itemsize == 4 else 1
        return array

    return bent


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", FORMS)
def test_a_wrong_layout_is_caught(name: str, large: bool) -> None:
    """Of every role that is laid out anew, by the witness of the whole and of samples alike."""
    proof = only_proof(make(name, large=large).model)
    for role, held in proof.roles.items():
        if not isinstance(held, str):
            roles = {**proof.roles, role: replace(held, make=wrong(held.make))}
            with pytest.raises(WitnessMismatch, match="dec/MatMul"):
                check(replace(proof, roles=roles), TENSORS)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_laid_out_is_half_the_codes_or_less(name: str) -> None:
    built = make(name)
    proof = only_proof(built.model)
    packed = nbytes(proof.tensor("packed"))
    codes = next(tensor for tensor in built.model.graph.initializer if tensor.name == "dec/packed")
    one_each = any(word in name for word in ("unpacked", "scale a column", "half", "flat codes", "an element")) or (
        name == "blocks of columns"
    )
    assert packed <= (nbytes(codes) + 1) // 2 if one_each and "four" not in name else packed == nbytes(codes)


# Several forms in one model


def mixed(names: list[str], **options: Any) -> Model:
    """One model of a product for each form; each has its own x."""
    nodes, tensors, inputs, outputs, feeds = [], [], [], [], {}
    for index, name in enumerate(names):
        built = make(name, seed=index, **options)
        prefix = f"{index}/"
        for node in built.model.graph.node:
            node.name = prefix + node.name
            node.input[:] = [prefix + value for value in node.input]
            node.output[:] = [prefix + value for value in node.output]
        for tensor in built.model.graph.initializer:
            tensor.name = prefix + tensor.name
        for entry in (*built.model.graph.input, *built.model.graph.output):
            entry.name = prefix + entry.name
        nodes += built.model.graph.node
        tensors += built.model.graph.initializer
        inputs += built.model.graph.input
        outputs += built.model.graph.output
        feeds[f"{prefix}x"] = built.feeds["x"]
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, tensors)
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return Model(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10), feeds, np.empty(0))


def test_a_model_of_all_forms() -> None:
    built = mixed(list(FORMS))
    after = copy.deepcopy(built.model)
    report = rewrite_model(after, TENSORS)
    assert len(report.rewritten) == len(FORMS)
    assert {proof.to_json()["bytes"] for proof, _ in report.rewritten} == {"kept", "repacked"}
    assert compare(built.model, after).wrong == []
    assert {node.op_type for node in after.graph.node} == {"Lookup4MatMul"}
    for before, now in zip(*(run_reference(model, built.feeds) for model in (built.model, after)), strict=True):
        assert same_bits(before, now)


def test_a_thousand_sites() -> None:
    names = [name for name in FORMS if "float" not in name and "half" not in name]
    built = mixed([names[index % len(names)] for index in range(1000)])
    after = copy.deepcopy(built.model)
    assert len(rewrite_model(after, TENSORS).rewritten) == 1000
    assert compare(built.model, after).wrong == []
    for before, now in zip(*(run_onnxruntime(model, built.feeds) for model in (built.model, after)), strict=True):
        assert same_bits(before, now)


def shared() -> Model:
    """Codes [16, 16] of one element each, read by four chains in three ways, and their table and scales."""
    writer = Writer(16, 16, 8, np.random.default_rng(3))
    codes, scales = writer.codes(16, 16), writer.floats(2, 16)
    name, factors = writer.constant(codes, "dec/codes"), writer.constant(scales, "dec/scales")
    table = writer.constant(NF4, "dec/codebook")
    weights = []
    for form in ("columns", "none", "columns", "rows"):
        index = writer.node("Cast", name, to=onnx.TensorProto.INT64)
        value = writer.node("Gather", table, index)
        if form == "columns":
            value = writer.node("Reshape", value, [2, 8, 16])
            value = writer.node("Mul", value, writer.node("Unsqueeze", factors, [1]))
            value = writer.node("Reshape", value, [16, 16])
        elif form == "rows":
            value = writer.node("Reshape", value, [-1, 8])
            value = writer.node("Mul", value, writer.node("Reshape", factors, [-1, 1]))
            value = writer.node("Reshape", value, [16, 16])
        weights.append(value)
    x = writer.rng.standard_normal((3, 16)).astype(np.float32)
    products = [onnx.helper.make_node("MatMul", ["x", weight], [f"y{at}"]) for at, weight in enumerate(weights)]
    return Model(assemble(writer, products, {"x": x}, x.dtype, 21), {"x": x}, np.empty(0))


def test_a_weight_that_several_forms_read() -> None:
    built = shared()
    after = copy.deepcopy(built.model)
    assert len(rewrite_model(after, TENSORS).rewritten) == 4
    assert compare(built.model, after).wrong == []
    onnx.checker.check_model(after, full_check=True)
    inputs = [list(node.input) for node in after.graph.node]
    assert inputs[0] == inputs[2]  # the same layout is one tensor
    assert inputs[1][1] == inputs[3][1]  # so are the flat codes, scaled or not
    assert len({names[1] for names in inputs}) == 2
    assert {names[3] for names in inputs} == {"dec/codebook"}
    for run in (run_reference, run_onnxruntime):
        for before, now in zip(*(run(model, built.feeds) for model in (built.model, after)), strict=True):
            assert same_bits(before, now)


def test_int8_look_alikes_stay_untouched() -> None:
    """Weight-only int8 beside a 4-bit chain: refused in words, byte for byte as it was."""
    built = make("unpacked uint8")
    graph = built.model.graph
    graph.initializer.append(onnx.numpy_helper.from_array(np.ones((16, 4), np.int8), "q"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 4), np.float32), "by"))
    graph.node.extend(
        [
            onnx.helper.make_node("Cast", ["q"], ["f"], "cast", to=1),
            onnx.helper.make_node("Mul", ["f", "by"], ["w"], "scale"),
            onnx.helper.make_node("MatMul", ["x", "w"], ["z"], "int8"),
        ]
    )
    graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [3, 4]))
    after = copy.deepcopy(built.model)
    report = rewrite_model(after, TENSORS)
    assert [refusal.node for refusal in report.refused] == ["int8"]
    assert compare(built.model, after).wrong == []
    assert [node.op_type for node in after.graph.node] == ["Lookup4MatMul", "Cast", "Mul", "MatMul"]


@pytest.mark.parametrize("name", ["unpacked int64", "blocks of columns", "double quantized", "bytes of rank two"])
def test_large_ones_are_streamed_to_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lut4tool.rewrite.save._MOST_INLINE", 10_000)
    built = make(name, large=True)
    onnx.save(copy.deepcopy(built.model), tmp_path / "in.onnx", save_as_external_data=True, location="w.bin")
    rewrite(tmp_path / "in.onnx", tmp_path / "out.onnx")
    after = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    where = {tensor.name: storage.location(tensor) for tensor in after.graph.initializer}
    packed = "Lookup4MatMul/packed" if name != "double quantized" else "dec/packed"
    (place,) = (location for key, location in where.items() if packed in key)
    assert place == ("w.bin" if name in ("double quantized", "bytes of rank two") else "out.onnx.data")
    (before,), (now,) = (run_reference(onnx.load(tmp_path / f"{side}.onnx"), built.feeds) for side in ("in", "out"))
    assert same_bits(before, now)
