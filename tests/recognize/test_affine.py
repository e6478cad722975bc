"""Affine weights in every spelling: proved, checked by the witness, rewritten to QMM, run everywhere, expanded."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from build_affine import Affine, BuiltAffine, build_affine, decode, spell
from differences import compare, raw
from onnx import TensorProto, helper
from rewriting import run_onnxruntime, run_reference
from spellings import AFFINE, ARITHMETIC, NIBBLES

from build import build, value_of
from lut4tool.recognize import qmm, recognize
from lut4tool.recognize.witness import WitnessMismatch, check
from lut4tool.rewrite import rewrite, rewrite_model
from lut4tool.rewrite.expand import expand_model
from lut4tool.runtime.session import Runtime
from lut4tool.storage import Tensors

#: Rows of whole blocks, low nibble first: the bytes stay, whatever type and shape they had.
KEPT = {"whole blocks", "one scale a column", "nibbles in blocks", "nibbles, flat", "nibbles cast first"}
KEPT |= {"nibbles, one scale a column", *(name for name in AFFINE if name.startswith("arithmetic"))}
#: It has no Identity and no Reshape of 4-bit types.
NOT_IN_ONNXRUNTIME = {"Identity everywhere", "nibbles cast first"}


def rewritten(built: BuiltAffine, bytes_: str | None = None) -> onnx.ModelProto:
    """A rewritten copy, its witness complete, checked by onnx and by the permitted differences."""
    onnx.checker.check_model(built.model, full_check=True)
    after = copy.deepcopy(built.model)
    report = rewrite_model(after, Tensors(None))
    assert report.refused == ()
    assert report.rewritten
    for proof, witness in report.rewritten:
        assert witness is not None
        assert witness.all
        assert (proof.op, proof.rows, proof.cols) == ("QMM", built.affine.n, built.affine.k)
        assert bytes_ is None or proof.to_json()["bytes"] == bytes_
    assert compare(built.model, after).wrong == []
    onnx.checker.check_model(after, full_check=True)
    return after


def bound(built: BuiltAffine) -> np.ndarray:
    """How far a product may be from float64: 2^-20 of the sum of magnitudes in float32, a few steps in a half type."""
    gemm = dict(built.affine.gemm)
    magnitude = np.abs(built.feeds["x"]).astype(np.float64) @ np.abs(built.oracle).astype(np.float64)
    if built.affine.bias:
        magnitude = magnitude + abs(gemm.get("beta", 1.0)) * np.abs(built.feeds["bias"].astype(np.float64))
    return {"float32": 2.0**-20, "float16": 2.0**-8, "bfloat16": 2.0**-5}[built.affine.dtype] * magnitude


def assert_close(built: BuiltAffine, results: list[np.ndarray]) -> None:
    for result in results:
        assert result.dtype == built.oracle.dtype
        assert (np.abs(result.astype(np.float64) - built.expected) <= bound(built)).all()


@pytest.mark.parametrize("name", AFFINE)
def test_spellings(name: str) -> None:
    """Original and rewritten in onnx.reference and onnxruntime, rewritten in our Runtime by a kernel of ours."""
    built = build_affine(**AFFINE[name])
    after = rewritten(built, "kept" if name in KEPT else "repacked")
    affine = built.affine
    for model in (built.model, after):
        assert_close(built, run_reference(model, built.feeds))
    # onnxruntime has no bfloat16 product, and drops a rounding to float16 that a Cast to float follows.
    if affine.dtype == affine.scales == "float32":
        if name not in NOT_IN_ONNXRUNTIME:
            assert_close(built, run_onnxruntime(built.model, built.feeds))
        assert_close(built, run_onnxruntime(after, built.feeds))
    runtime = Runtime(after, device="cpu")
    assert_close(built, runtime.run(None, built.feeds))
    cast = (affine.scales, affine.dtype) == ("float32", "float16")  # which no kernel of ours has
    assert [choice.backend for choice in runtime.kernels.values()] == ["reference" if cast else "cpu"]


@pytest.mark.parametrize("name", AFFINE)
def test_expanding_gives_the_same_weight_and_is_found_again(name: str) -> None:
    built = build_affine(**AFFINE[name])
    once = rewritten(built)
    back = copy.deepcopy(once)
    assert expand_model(back).expanded
    assert [out.tobytes() for out in run_reference(back, built.feeds)] == [
        out.tobytes() for out in run_reference(once, built.feeds)
    ]
    again = copy.deepcopy(back)
    ((proof, witness),) = rewrite_model(again, Tensors(None)).rewritten
    assert (proof.chain_name, proof.kept) == ("arithmetic", True)
    assert witness is not None
    assert witness.all
    assert raw(again) == raw(once)


#: Nibbles are cast to UINT4, and their zero points are a matrix.
LAYOUTS = [
    (kind, first, points, by, chain)
    for kind in ("int4", "uint4")
    for first in ("n", "k")
    for points in (False, True)
    for by in ("block", "column", "all")
    for chain in ("dequantize", "nibbles")
    if chain == "dequantize" or (kind == "uint4" and (by == "block" or not points))
]


@pytest.mark.parametrize(("kind", "first", "points", "by", "chain"), LAYOUTS)
@pytest.mark.parametrize("sizes", [(8, 3, 4), (10, 5, 4), (6, 1, 16), (5, 2, 2), (3, 4, 16)], ids=str)
def test_layouts(kind: str, first: str, points: bool, by: str, chain: str, sizes: tuple[int, int, int]) -> None:
    """All ways that codes, scales and zero points can lie, together; exact, since x and the scales are."""
    k, n, block = sizes
    built = build_affine(kind=kind, first=first, points=points, by=by, chain=chain, k=k, n=n, block=block)
    built.feeds["x"] = np.round(built.feeds["x"] * 4).astype(np.float32)
    scales = next(tensor for tensor in built.model.graph.initializer if tensor.name == "dec/scales")
    exact = 2.0 ** np.round(np.log2(onnx.numpy_helper.to_array(scales)))
    scales.CopyFrom(onnx.numpy_helper.from_array(exact.astype(np.float32), scales.name))
    after = rewritten(built)
    expected = run_reference(built.model, built.feeds)
    back = copy.deepcopy(after)
    expand_model(back)
    for model in (after, back):
        np.testing.assert_array_equal(run_reference(model, built.feeds), expected)
    np.testing.assert_array_equal(Runtime(after, device="cpu").run(None, built.feeds), expected)


@pytest.mark.parametrize("place", [["If"], ["Loop"], ["Scan"], ["Loop", "If"], ["function"]], ids="-".join)
@pytest.mark.parametrize("spelling", ["dequantize", "nibbles", "arithmetic"])
def test_subgraphs_and_functions(place: list[str], spelling: str) -> None:
    constants = {"literals": "constant", "leaves": "constant"} if "function" in place else {}
    built = build_affine(place=place, chain=spelling, **constants)
    after = rewritten(built)
    for run in (run_reference, run_onnxruntime):
        for found, expected in zip(run(after, built.feeds), run(built.model, built.feeds), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_calls_with_weights_of_their_own() -> None:
    """The bytes are kept, so each call can have its own."""
    built = build_affine(**ARITHMETIC, place=["function"], hold="leaves", literals="constant", calls=3)
    after = rewritten(built, "kept")
    for found, expected in zip(run_reference(after, built.feeds), run_reference(built.model, built.feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_one_weight_of_many_products_is_laid_out_once() -> None:
    built = build_affine(products=5, first="k")
    after = rewritten(built)
    assert sum(node.op_type == "QMM" for node in after.graph.node) == 5
    assert len(after.graph.initializer) == 3
    assert_close(built, run_reference(after, built.feeds))


def test_a_weight_and_its_adjoint_share_nothing_of_their_layout() -> None:
    """X @ W and X @ W.T run along other axes, of which blocks can follow only one."""
    built = build_affine(k=8, n=8, block=4)
    graph = built.model.graph
    graph.node.append(helper.make_node("MatMul", ["x", "dec/Dequantize_out"], ["z"], "adjoint"))
    graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, None]))
    after = copy.deepcopy(built.model)
    report = rewrite_model(after, Tensors(None))
    assert [proof.site.name for proof, _ in report.rewritten] == ["dec/MatMul"]
    assert [refusal.node for refusal in report.refused] == ["adjoint"]
    assert "changes with each element along K, not with each block of them" in report.refused[0].reason
    for found, expected in zip(run_reference(after, built.feeds), run_reference(built.model, built.feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_lookups_and_affine_weights_in_one_model() -> None:
    lookup, affine = build(opset=21, prefix="lut/"), Affine(prefix="aff/")
    body = spell(affine)
    graph = lookup.model.graph
    graph.node.extend([*body.nodes, helper.make_node("MatMul", ["z", body.output], ["u"], "aff/MatMul")])
    graph.initializer.extend(body.tensors)
    z = np.ones((2, affine.k), np.float32)
    graph.input.append(value_of("z", z))
    graph.output.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, [None, None]))
    after = copy.deepcopy(lookup.model)
    report = rewrite_model(after, Tensors(None))
    assert [proof.op for proof, _ in report.rewritten] == ["Lookup4MatMul", "QMM"]
    assert sorted(function.name for function in after.functions) == ["Lookup4MatMul", "QMM"]
    found = run_reference(after, {**lookup.feeds, "z": z})[-1]
    np.testing.assert_allclose(found, z @ decode(affine), rtol=1e-5)


def test_an_affine_codebook_stays_a_lookup() -> None:
    built = build(codebook=np.arange(-8, 8).astype(np.float32))
    (proof,) = recognize(built.model).proofs
    assert proof.op == "Lookup4MatMul"


# -- Large weights


@pytest.mark.parametrize(
    "spelling",
    [{}, {"first": "k"}, {"kind": "int4", "by": "column"}, {"by": "all"}, NIBBLES, {**NIBBLES, "bytes": "blocks"},
     {**NIBBLES, "bytes": "flat"}, {**NIBBLES, "first": "k"}, ARITHMETIC, {**ARITHMETIC, "one_point": True}],
    ids=str,
)  # fmt: skip
def test_a_large_weight_is_sampled_and_a_wrong_one_is_caught(spelling: dict[str, Any]) -> None:
    built = build_affine(k=1024, n=1030, block=32, **spelling)
    (proof,) = recognize(built.model).proofs
    witness = check(proof, Tensors(None))
    whole = spelling.get("first") == "k" and "chain" in spelling  # bytes of two columns cannot be told apart
    assert witness.all == whole
    assert witness.compared >= 3 * 1024
    wrong = replace(proof, roles={**proof.roles, "zero_points": qmm.one_point(3)})
    with pytest.raises(WitnessMismatch, match=r"differ between onnx\.reference and the proof"):
        check(wrong, Tensors(None))
    if not whole:
        full = check(proof, Tensors(None), full=True)
        assert (full.all, full.elements) == (True, 1024 * 1030)


def test_external_data(tmp_path: Path) -> None:
    """Codes are read from one file and written, laid out anew, to another; kept bytes stay where they are."""
    for name, spelling, files in (("new", {"kind": "int4"}, 2), ("uint4", {}, 1), ("bytes", NIBBLES, 1)):
        built = build_affine(k=1024, n=2500, block=32, **spelling)
        folder = tmp_path / name
        folder.mkdir()
        onnx.save(built.model, folder / "in.onnx", save_as_external_data=True, location="w.bin", size_threshold=1000)
        report = rewrite(folder / "in.onnx", folder / "out.onnx", verify=True)
        assert [witness.all for _, witness in report.rewritten if witness] == [True]
        assert report.output_bytes < 100_000  # scales and zero points under 1 MB that are new stay inside
        assert sum(path.suffix != ".onnx" for path in folder.iterdir()) == files
        assert_close(built, run_reference(onnx.load(folder / "out.onnx"), built.feeds))


# -- Refused in words


def test_every_call_must_have_the_bytes_that_are_laid_out_anew() -> None:
    built = build_affine(place=["function"], hold="leaves", literals="constant", calls=2)
    report = recognize(built.model)
    assert report.proofs == ()
    assert "is another tensor at each call; one is expected where bytes are laid out anew" in report.refusals[0].reason


def test_int8_look_alikes_stay_as_they_are() -> None:
    for kind in (np.int8, np.uint8):
        built = build_affine(by="column")
        for tensor in built.model.graph.initializer:
            if tensor.name in ("dec/packed", "dec/points"):
                array = onnx.numpy_helper.to_array(tensor).astype(kind)
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        before = raw(built.model)
        report = rewrite_model(built.model, Tensors(None), vendor=True)
        assert report.rewritten == ()
        assert "is not INT4 or UINT4, nor the nibbles of bytes, at node 'dec/Dequantize'" in report.refused[0].reason
        assert raw(built.model) == before
