"""The demonstration: its gradient is one, and its figures are of what it says."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from lut4tool.demo import DemoError, build_block, demo
from lut4tool.formats import FP4
from lut4tool.measure import ENGINES, FOLDING_OFF, LUT4TOOL, ONNXRUNTIME, MeasureError, difference, measure


def test_dx_is_the_gradient_of_y():
    model = build_block(64, 96, heads=4)
    onnx.checker.check_model(model, full_check=True)
    run = ReferenceEvaluator(model)
    random = np.random.default_rng(0)
    x, dy, direction = (random.standard_normal((5, 64)).astype(np.float32) for _ in range(3))
    step = np.float32(1e-2)
    ahead, behind = (
        np.vdot(run.run(["y"], {"x": place, "dy": dy})[0].astype(np.float64), dy)
        for place in (x + step * direction, x - step * direction)
    )
    (dx,) = run.run(["dx"], {"x": x, "dy": dy})
    assert np.vdot(dx.astype(np.float64), direction) == pytest.approx((ahead - behind) / (2 * step), rel=1e-3)


def test_each_weight_is_one_chain_with_a_forward_and_an_adjoint_product():
    model = build_block(64, 96, block_size=32, codebook=FP4)
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("Gather") == 7
    names = [node.name.split("/") for node in model.graph.node if node.name.endswith(("/forward", "/adjoint"))]
    assert sorted(name for name, _ in names) == sorted(2 * ["q", "k", "v", "o", "gate", "up", "down"])
    (codebook,) = (tensor for tensor in model.graph.initializer if tensor.name == "lut4/codebook")
    assert onnx.numpy_helper.to_array(codebook).tobytes() == FP4.tobytes()
    assert not [tensor.name for tensor in model.graph.initializer if list(tensor.dims) == [64, 64]]
    first, second = (build_block(64, 96).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_heads_must_divide_dim():
    with pytest.raises(DemoError, match="dim 65 is not a multiple of 8 heads"):
        build_block(65, 96)


def test_without_graphsurgeon_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx_graphsurgeon", None)
    with pytest.raises(DemoError, match="pip install onnx-graphsurgeon"):
        build_block(64, 96)


def test_the_demo_measures_both_models_in_every_engine(tmp_path):
    seen = []
    report = demo(tmp_path / "new", progress=lambda *what: seen.append(what), dim=64, hidden=96)
    assert [(row.model, row.engine) for row in report.rows] == [
        ("original", ONNXRUNTIME),
        ("rewritten", ONNXRUNTIME),
        ("rewritten", FOLDING_OFF),
        ("original", LUT4TOOL),
        ("rewritten", LUT4TOOL),
    ]
    assert report.sites == 14
    assert report.witness_elements == 2 * (4 * 64 * 64 + 3 * 64 * 96)
    assert report.dense_bytes == 4 * (4 * 64 * 64 + 3 * 64 * 96)
    assert report.original_bytes == (tmp_path / "new" / "block.onnx").stat().st_size
    assert report.largest_difference <= 2e-5
    assert [len(row.measured.kernels) for row in report.rows] == [0, 0, 0, 0, 14]
    assert all(0 < row.measured.model_bytes < row.measured.peak_bytes for row in report.rows)
    assert json.loads(json.dumps(report.to_json()))["rows"][4]["model"] == "rewritten"
    assert report.missing == {}
    assert ("measure", 5, 5) in seen


def test_without_onnxruntime_it_says_so_and_measures_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("lut4tool.demo.find_spec", lambda name: None)
    report = demo(tmp_path, dim=64, hidden=96)
    assert [row.engine for row in report.rows] == [LUT4TOOL, LUT4TOOL]
    assert report.to_json()["missing"] == {
        "onnxruntime": "not installed, so it is not compared with; pip install onnxruntime"
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path, engine):
    with pytest.raises(MeasureError, match=f"none.onnx failed in {engine}: .*none.onnx"):
        measure(tmp_path / "none.onnx", {}, engine)


def test_difference_is_relative_and_keeps_nan():
    expected = {"a": np.array([1.0, -4.0], np.float32), "b": np.zeros(0, np.float32)}
    assert difference({"a": np.array([1.0, -3.0]), "b": np.zeros(0)}, expected) == 0.25
    assert np.isnan(difference({"a": np.array([np.nan, -4.0]), "b": np.zeros(0)}, expected))
