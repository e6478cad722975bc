"""A folder to run commands in, and models for them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from commanding import Run, runner
from onnx import TensorProto, helper

from build import build


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in an empty folder and in this process."""
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capsys)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A model with one chain."""
    path = tmp_path / "chain.onnx"
    onnx.save(build(rows=12, cols=10, block=8).model, path)
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model with nothing to rewrite: y = x + x."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])], "g", [value], [helper.make_tensor_value_info("y", 1, ["n", 4])]
    )
    path = tmp_path / "plain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path
