"""Weights that are laid out anew: witnessed as laid out, shared, inline or streamed to a file.

The layout is a planted one: the same chain with its nibbles swapped, so that the low one is first.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from differences import compare
from onnx import TensorProto
from rewriting import assert_same_results, run_reference

from build import Built, Chain, build, build_many
from lut4tool import rewrite as module
from lut4tool import storage
from lut4tool.formats import FormatError
from lut4tool.recognize import Proof, Report, recognize
from lut4tool.recognize.layout import Laid, Layout, LayoutError
from lut4tool.recognize.witness import WitnessMismatch, check
from lut4tool.rewrite import rewrite, rewrite_model, save
from lut4tool.storage import Tensors

LARGE: dict[str, Any] = {"rows": 1030, "cols": 1030, "block": 64, "check": False}  # over 2^20, blocks cross rows


def swap(packed: np.ndarray) -> np.ndarray:
    return packed >> 4 | packed << 4


def swap_wrongly(packed: np.ndarray) -> np.ndarray:
    return swap(packed) ^ 1


def fail(packed: np.ndarray) -> np.ndarray:
    raise FormatError("these are no codes")


def swapped(proof: Proof, make: Any = swap) -> Proof:
    """The same proof, its packed bytes laid out anew."""
    (name, *others), packed = proof.roles.values(), proof.tensor("packed")
    laid = Laid(make, (name,), (), TensorProto.UINT8, tuple(packed.dims))
    roles = dict(zip(proof.roles, (laid, *others), strict=True))
    return replace(proof, roles=roles, attributes={**proof.attributes, "high_nibble_first": 0})


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    def recognized(*given: Any, **options: Any) -> Report:
        report = recognize(*given, **options)
        return replace(report, proofs=tuple(map(swapped, report.proofs)))

    monkeypatch.setattr(module, "recognize", recognized)


def only_proof(built: Built, make: Any = swap) -> Proof:
    return swapped(recognize(built.model).proofs[0], make)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("spelling", [{}, LARGE, LARGE | {"block": 1 << 20}], ids=["small", "large", "long blocks"])
def test_a_witness_sees_the_bytes_as_they_are_laid_out(spelling: dict[str, Any], full: bool) -> None:
    built = build(**spelling)
    witness = check(only_proof(built), Tensors(None), full=full)
    assert witness.all == (full or not spelling)
    with pytest.raises(WitnessMismatch, match="dec/MatMul"):
        check(only_proof(built, swap_wrongly), Tensors(None), full=full)


@pytest.mark.parametrize("spelling", [{}, LARGE, LARGE | {"block": 1 << 20}], ids=["small", "large", "long blocks"])
def test_pieces_are_the_whole(spelling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lut4tool.recognize.layout._PIECE_ELEMENTS", 1 << 15)
    built = build(**spelling)
    pieces = list(Layout(only_proof(built), Tensors(None)).pieces("packed"))
    joined = np.concatenate(pieces)  # of long blocks, without padding past the last piece
    assert joined.size * 2 >= built.parts[0].chain.rows * built.parts[0].chain.cols
    assert joined.tobytes() == swap(built.parts[0].packed)[: joined.size].tobytes()
    assert len(pieces) > 30 or not spelling
    assert max(piece.size for piece in pieces) <= 1 << 14


def test_in_memory() -> None:
    built = build(perm="written", products=2)
    after = copy.deepcopy(built.model)
    report = rewrite_model(after, Tensors(None))
    assert [proof.to_json()["bytes"] for proof, _ in report.rewritten] == ["repacked"] * 2
    comparison = compare(built.model, after)
    assert comparison.wrong == []
    assert (comparison.tensors_added, comparison.initializers_removed) == (1, len(built.model.graph.initializer) - 2)
    assert [tensor.name for tensor in after.graph.initializer] == [
        "dec/scales", "dec/codebook", "dec/packed/Lookup4MatMul/packed"
    ]  # fmt: skip
    onnx.checker.check_model(after, full_check=True)
    assert_same_results(built, after)


@pytest.mark.parametrize("ir", [3, 7, 10])
def test_ir_versions(ir: int) -> None:
    built = build(ir=ir)
    after = copy.deepcopy(built.model)
    rewrite_model(after, Tensors(None))
    assert compare(built.model, after).wrong == []
    assert [entry.name for entry in after.graph.input] == ["x"]
    onnx.checker.check_model(after, full_check=True)
    assert_same_results(built, after)


def test_chains_that_share_bytes_share_what_is_laid_out() -> None:
    shared = Chain(rows=8, cols=8, leaf_prefix="w/", prefix="a/")
    built = build_many([shared, Chain(rows=8, cols=8, leaf_prefix="w/", prefix="b/", perm="written")])
    after = copy.deepcopy(built.model)
    rewrite_model(after, Tensors(None))
    assert compare(built.model, after).tensors_added == 1
    assert_same_results(built, after)


def test_bytes_with_another_reader_stay() -> None:
    built = build(consumers=["Cast"])
    after = copy.deepcopy(built.model)
    rewrite_model(after, Tensors(None))
    assert compare(built.model, after).wrong == []
    assert {"dec/packed", "dec/packed/Lookup4MatMul/packed"} <= {tensor.name for tensor in after.graph.initializer}
    assert_same_results(built, after)


def test_a_taken_name_gets_a_number() -> None:
    built = build()
    name = "dec/packed/Lookup4MatMul/packed"
    built.model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), name))
    after = copy.deepcopy(built.model)
    rewrite_model(after, Tensors(None))
    assert after.graph.initializer[-1].name == f"{name}_1"
    assert compare(built.model, after).wrong == []
    assert_same_results(built, after)


@pytest.mark.parametrize("place", [["If"], ["Loop"], ["Scan"], ["function"], ["If", "function"], ["function", "Loop"]])
def test_subgraphs_and_functions(place: list[str]) -> None:
    built = build(place=place, hold="inside", literals="constant", leaves="constant")
    after = copy.deepcopy(built.model)
    rewrite_model(after, Tensors(None))
    comparison = compare(built.model, after)
    assert comparison.wrong == []
    assert comparison.tensors_added == (2 if place[0] == "If" else 1)
    onnx.checker.check_model(after, full_check=True)
    assert_same_results(built, after)


def test_values_that_have_no_layout_change_nothing() -> None:
    built = build()
    before = built.model.SerializeToString(deterministic=True)
    module.recognize = lambda *given, **options: replace(
        (report := recognize(*given, **options)), proofs=(swapped(report.proofs[0], fail),)
    )
    with pytest.raises(LayoutError, match="the weight of 'dec/MatMul' cannot be laid out: these are no codes"):
        rewrite_model(built.model, Tensors(None), witness=False)
    assert built.model.SerializeToString(deterministic=True) == before


# Files


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_MOST_INLINE", 1000)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("target", ["in.onnx", "out.onnx", "b/out.onnx"])
def test_large_ones_go_to_a_file(target: str, tmp_path: Path, small_limit: None) -> None:
    (tmp_path / "b").mkdir()
    built = build(rows=64, cols=64, block=32, perm="written")
    (tmp_path / "in.onnx").write_bytes(built.model.SerializeToString())
    dry = rewrite(tmp_path / "in.onnx", tmp_path / target, dry_run=True)
    assert files(tmp_path) == {"in.onnx"}
    report = rewrite(tmp_path / "in.onnx", tmp_path / target)
    assert files(tmp_path) == {"in.onnx", target, f"{target}.data"}
    assert report.notes == (f"1 tensor laid out anew: 2.0 KB of external data, in {Path(target).name}.data",)
    assert report.output_bytes == dry.output_bytes == (tmp_path / target).stat().st_size
    moved = (tmp_path / f"{target}.data").stat().st_size
    assert (report.input_data_bytes, report.output_data_bytes, dry.output_data_bytes) == (0, moved, moved)
    after = storage.read_model(tmp_path / target)
    assert compare(built.model, after).wrong == []
    assert_same_results(built, onnx.load(tmp_path / target), [run_reference])


def test_external_bytes_are_streamed_to_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays as it is, and only a few megabytes of it are held at a time."""
    monkeypatch.setattr("lut4tool.recognize.layout._PIECE_ELEMENTS", 1 << 16)
    sizes: list[int] = []
    real = Layout.role

    def seen(layout: Layout, role: str, units: Any = None) -> np.ndarray:
        array = real(layout, role, units)
        sizes.extend([array.nbytes] * (role == "packed"))
        return array

    monkeypatch.setattr(Layout, "role", seen)
    let_go: list[bool] = []
    release = Tensors.release
    monkeypatch.setattr(Tensors, "release", lambda held: let_go.append(bool(held._touched)) or release(held))
    built = build(rows=2048, cols=1200, block=64)
    onnx.save(copy.deepcopy(built.model), tmp_path / "in.onnx", save_as_external_data=True, location="w.bin")
    data = (tmp_path / "w.bin").read_bytes()
    rewrite(tmp_path / "in.onnx", tmp_path / "out.onnx", verify=True)
    assert (tmp_path / "w.bin").read_bytes() == data
    assert files(tmp_path) == {"in.onnx", "w.bin", "out.onnx", "out.onnx.data"}
    assert (tmp_path / "out.onnx.data").read_bytes() == swap(built.parts[0].packed).tobytes()
    assert max(sizes) <= 1 << 17  # the witness takes more at a time
    assert sizes.count(1 << 15) > 30
    assert sum(let_go) > 30  # pages of the old file, after each piece
    assert_same_results(built, onnx.load(tmp_path / "out.onnx"), [run_reference])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_crash_leaves_no_new_data(
    error: BaseException, tmp_path: Path, small_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(rows=64, cols=64, block=32)
    (tmp_path / "in.onnx").write_bytes(built.model.SerializeToString())

    def fail(*given: Any) -> None:
        raise error

    monkeypatch.setattr(storage.os, "replace", fail)
    with pytest.raises((storage.StorageError, KeyboardInterrupt)):
        rewrite(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert files(tmp_path) == {"in.onnx"}
