"""onnx's own generated node tests, by family of operators, run through Runtime on the CPU.

    @pytest.mark.parametrize("case", cases("math", "logical"))
    def test_node(case):
        check(case)

A family is a folder of onnx/defs ("math", "nn", "traditionalml", ...). A test belongs to the family of its operator;
the `_expanded` form of a test (its operator replaced by the standard's function body) to the family of the plain one.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

#: Regular expressions of the tests that fail, and why: all others must pass, and these must not.
XFAIL = {
    "test_attention_4d_causal_fp16_expanded": "sums of halves differ by a float16 step, 1.2e-3; tolerance 1e-3",
    "test_resize_downsample_scales_(linear|cubic)_align_corners": "the expected values divide by length * scale - 1, "
    "where the standard's formula, and onnxruntime, divide by length_resized - 1, a whole number",
}

#: Operators whose values the standard leaves to chance: shapes and types are compared.
RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


@functools.cache
def node_tests() -> dict[str, TestCase]:
    """Every generated node test of the installed onnx, by name (about 5 s, once)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own generators overflow on purpose
        return {test.name: test for test in load_model_tests(kind="node")}


@functools.cache
def _families() -> dict[tuple[str, str], str]:
    files = {(s.domain, s.name): s.file.replace("\\", "/") for s in onnx.defs.get_all_schemas_with_history()}
    return {key: file.split("defs/")[1].split("/")[0] for key, file in files.items()}


def operators(test: TestCase) -> list[tuple[str, str]]:
    """(domain, operator) of each node of a test's model, Constant nodes last."""
    nodes = sorted(test.model.graph.node, key=lambda node: node.op_type == "Constant")
    return [("" if node.domain == "ai.onnx" else node.domain, node.op_type) for node in nodes]


def family(test: TestCase) -> str:
    """The family that a test belongs to."""
    plain = node_tests().get(re.sub(r"_expanded.*", "", test.name), test)
    return _families()[operators(plain)[0]]


def reason_to_fail(name: str) -> str | None:
    """Why a node test fails, None where it has to pass."""
    return next((reason for pattern, reason in XFAIL.items() if re.fullmatch(pattern, name)), None)


def cases(*families: str) -> list[Any]:
    """Parameters for every test of some families; those in XFAIL are strict: one that starts to pass is a failure."""
    found = []
    for test in node_tests().values():
        if family(test) in families:
            reason = reason_to_fail(test.name)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            found.append(pytest.param(test, id=test.name, marks=marks))
    return found


def value(data: Any) -> Any:
    """A feed or an expected value: TensorProtos hold the types that the generators cannot spell in NumPy."""
    return numpy_helper.to_array(data) if isinstance(data, onnx.TensorProto) else data


def frozen(value: Any) -> Any:
    """A feed that no operator may write to."""
    if isinstance(value, list):
        return [frozen(part) for part in value]
    if isinstance(value, np.ndarray):
        value = value.view()
        value.setflags(write=False)
    return value


def leaves(value: Any) -> list[Any]:
    """The arrays of nested sequences; onnx's runner fails on a sequence of scalars."""
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, list | tuple) else [value]


def check(test: TestCase, atol: float = 0.0) -> None:
    """Run a test's model on each of its data sets and compare with the standard's tolerances and exact types.

    atol: the least absolute tolerance, where a sum in another order leaves other noise around an exact 0.
    """
    from lut4tool.runtime.session import Runtime

    runtime = Runtime(test.model, device="cpu")
    names = [item.name for item in test.model.graph.input]
    random = any(name in RANDOM for _, name in operators(test)) or "bernoulli" in test.name
    for inputs, outputs in test.data_sets:
        # An input that the data leaves out at the end is absent.
        feeds = {name: frozen(value(data)) for name, data in zip(names, inputs, strict=False)}
        expected = [value(data) for data in outputs]
        found = runtime.run(None, feeds)
        if random:
            expected, found = [part * 0 for part in expected], [part * 0 for part in found]
        Runner.assert_similar_outputs(leaves(expected), leaves(found), test.rtol, max(test.atol, atol))


def single(
    op_type: str, version: int, inputs: Sequence[Any], attributes: Mapping[str, Any], outputs: int, domain: str = ""
) -> onnx.ModelProto:
    """A model of one operator at one version of its domain; a None among the inputs is absent."""
    names = ["" if data is None else f"x{index}" for index, data in enumerate(inputs)]
    results = [f"y{index}" for index in range(outputs)]
    node = helper.make_node(op_type, names, results, domain=domain, **attributes)
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
        for name, data in zip(names, inputs, strict=True)
        if name
    ]
    graph = helper.make_graph([node], "single", given, [onnx.ValueInfoProto(name=name) for name in results])
    opsets = [helper.make_opsetid(domain, version), *([helper.make_opsetid("", 17)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def against_onnxruntime(
    op_type: str,
    version: int,
    inputs: Sequence[Any],
    *,
    outputs: int = 1,
    rtol: float = 1e-6,
    atol: float = 1e-7,
    domain: str = "",
    **attributes: Any,
) -> None:
    """Run one operator at one opset version here and in onnxruntime, unoptimized; compare values and exact types."""
    import onnxruntime

    from lut4tool.runtime.session import Runtime

    model = single(op_type, version, inputs, attributes, outputs, domain)
    feeds = {f"x{index}": data for index, data in enumerate(inputs) if data is not None}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    found = Runtime(model, device="cpu").run(None, {name: frozen(data) for name, data in feeds.items()})
    Runner.assert_similar_outputs(expected, found, rtol, atol)
