"""A wrong proof stops all and is said aloud; codes without an entry are their own site's fault."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from commanding import Run, runner
from onnx import numpy_helper

from build import Built, Chain, build_many
from lut4tool import rewrite as module
from lut4tool.recognize import Report, recognize
from lut4tool.rewrite import rewrite, rewrite_model
from lut4tool.storage import Tensors

SMALL = [Chain(rows=10, cols=6, block=8, prefix=f"c{seed}/", seed=seed) for seed in range(3)]
LARGE = [Chain(rows=1100, cols=1000, block=64, prefix=f"c{seed}/", seed=seed) for seed in range(2)]


@pytest.fixture
def bend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the proofs of some sites wrong, as a fault of the recognizer would."""

    def bend(*indices: int) -> None:
        def recognized(model: onnx.ModelProto, **options: object) -> Report:
            report = recognize(model, **options)
            proofs = list(report.proofs)
            for index in indices:
                facts = {**proofs[index].attributes, "high_nibble_first": 0}
                proofs[index] = dataclasses.replace(proofs[index], attributes=facts)
            return dataclasses.replace(report, proofs=tuple(proofs))

        monkeypatch.setattr(module, "recognize", recognized)

    return bend


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capsys)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("chains", [SMALL, LARGE], ids=["small", "large"])
def test_a_wrong_proof_stops_all(bend: Callable[..., None], chains: list[Chain], verify: bool) -> None:
    bend(0)
    built = build_many(chains)
    before = built.model.SerializeToString(deterministic=True)
    report = rewrite_model(built.model, Tensors(None), verify=verify)
    assert report.rewritten == ()
    assert report.refused == report.differing
    (refusal,) = report.differing
    assert (refusal.node, refusal.at) == ("MatMul0", "MatMul0")
    assert "elements of the weight of 'MatMul0' differ between onnx.reference and the proof" in refusal.reason
    assert built.model.SerializeToString(deterministic=True) == before
    assert report.to_json()["differing"] == report.to_json()["refused"] == [refusal.to_json()]


def test_all_that_share_a_wrong_weight_are_left(bend: Callable[..., None]) -> None:
    from build import build

    bend(0)  # the witness looks at the first that shares it
    model = build(products=2).model
    before = model.SerializeToString(deterministic=True)
    report = rewrite_model(model, Tensors(None))
    assert (report.rewritten, len(report.differing)) == ((), 2)
    assert model.SerializeToString(deterministic=True) == before


def test_the_command_writes_nothing_and_ends_with_4(bend: Callable[..., None], run: Run, tmp_path: Path) -> None:
    bend(1)
    onnx.save(build_many(SMALL).model, "in.onnx")
    said = run("rewrite", "in.onnx", "out.onnx")
    assert said.status == 4
    assert said.err.startswith("lut4tool: WITNESS DIFFERS: MatMul1: ")
    assert said.err.count("\n") == 1
    assert "refused: MatMul1: " in said.out
    assert "nothing written" in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]
    said = run("rewrite", "in.onnx", "out.onnx", "--force", "--json", "--verify")
    assert said.status == 4
    document = json.loads(said.out)
    assert document["rewritten"] == []
    assert [site["node"] for site in document["differing"]] == ["MatMul1"]
    assert "WITNESS DIFFERS" in said.err
    said = run("run", "in.onnx", "--rewrite", "--random")
    assert said.status == 4
    assert "WITNESS DIFFERS: MatMul1: " in said.err


# Codes without an entry


def unpacked(rows: int, cols: int, code: int, at: int) -> Built:
    """Two weights of INT64 codes, one an element; in the first one code is `code`."""
    nodes, tensors = [], []
    rng = np.random.default_rng(0)
    for index in range(2):
        codes = rng.integers(0, 16, (rows, cols))
        if not index:
            codes.reshape(-1)[at] = code
        tensors.append(numpy_helper.from_array(codes, f"codes{index}"))
        nodes.append(onnx.helper.make_node("Gather", ["table", f"codes{index}"], [f"w{index}"], f"Gather{index}"))
        nodes.append(onnx.helper.make_node("MatMul", ["x", f"w{index}"], [f"y{index}"], f"MatMul{index}"))
    tensors.append(numpy_helper.from_array(np.linspace(-1, 1, 16, dtype=np.float32), "table"))
    infos = [onnx.helper.make_tensor_value_info(name, 1, None) for name in ("x", "y0", "y1")]
    graph = onnx.helper.make_graph(nodes, "g", infos[:1], infos[1:], tensors)
    imports = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
    return Built(model, {"x": rng.standard_normal((2, rows)).astype(np.float32)}, [])


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(6, 10), (1030, 1030)])
@pytest.mark.parametrize(("code", "at"), [(16, 1), (-17, 59)])
def test_a_code_without_an_entry_leaves_the_others(
    rows: int, cols: int, code: int, at: int, verify: bool, tmp_path: Path
) -> None:
    """In a large weight the code is one that no sample meets."""
    built = unpacked(rows, cols, code, at + (2 * 4096 if rows > 100 else 0))
    onnx.save(built.model, tmp_path / "in.onnx")
    report = rewrite(tmp_path / "in.onnx", tmp_path / "out.onnx", verify=verify)
    assert [proof.site.name for proof, _ in report.rewritten] == ["MatMul1"]
    (refusal,) = report.refused
    assert report.differing == ()  # the fault is the model's
    assert f"code {code} has no entry in a codebook of 16" in refusal.reason
    assert "'MatMul0'" in refusal.reason
    kept = onnx.load(tmp_path / "out.onnx").graph.node
    assert [node.op_type for node in kept] == ["Gather", "MatMul", "Lookup4MatMul"]


def test_the_command_takes_it_for_no_fault_of_its_own(run: Run) -> None:
    onnx.save(unpacked(6, 10, 99, 3).model, "in.onnx")
    said = run("rewrite", "in.onnx", "out.onnx")
    assert said.status == 0
    assert said.err == ""
    assert "refused: MatMul0: the weight of 'MatMul0' cannot be laid out: code 99 has no entry" in said.out
