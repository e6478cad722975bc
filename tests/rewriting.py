"""Rewrites models and compares their results, bit for bit, in runtimes that are not ours."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
from differences import compare
from onnx.reference import ReferenceEvaluator

from build import Built
from lut4tool.rewrite import rewrite_model
from lut4tool.storage import Tensors


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
