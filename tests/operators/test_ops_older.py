"""Every operator at every older version of its schema: onnx's node tests, stamped with that version, in onnxruntime.

A node test serves a version whose schema has its attributes, inputs, outputs and types. What no node test serves is a
case of test_ops_versions.py, or a test named here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from backend_cases import RANDOM, node_tests, single, value
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.runner import Runner
from test_ops_versions import CASES

from lut4tool.runtime import registry
from lut4tool.runtime.dtypes import type_of
from lut4tool.runtime.session import Runtime

OLDEST = 7
#: Tested at the end of this file.
UNCOMPARED = {
    "Loop", "Multinomial", "Optional", "OptionalGetElement", "OptionalHasElement", "RandomNormal", "RandomNormalLike",
    "RandomUniform", "RandomUniformLike",
}  # fmt: skip


@cache
def single_node_tests() -> dict[str, list[TestCase]]:
    """The node tests of one node of the standard's main domain, by operator."""
    found: dict[str, list[TestCase]] = {}
    for test in node_tests().values():
        (node, *others) = test.model.graph.node
        if others or node.domain:
            continue
        found.setdefault(node.op_type, []).append(test)
    return found


def older() -> Iterator[tuple[str, int]]:
    """(operator, version) of every schema that is not the newest, from OLDEST on, of every operator that is served."""
    registry.load()
    served = {row.name for row in registry.operators() if not row.domain}
    histories: dict[str, list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain and schema.name in served:
            histories.setdefault(schema.name, []).append(schema)
    for name, schemas in sorted(histories.items()):
        schemas.sort(key=lambda schema: schema.since_version)
        for schema, after in pairwise(schemas):
            if after.since_version > OLDEST and not schema.deprecated and schema.name not in UNCOMPARED:
                yield name, max(schema.since_version, OLDEST)


def fits(test: TestCase, schema: Any) -> bool:
    """Whether a test's node is one of this schema's."""
    (node,) = test.model.graph.node
    inputs = dict(zip([i.name for i in test.model.graph.input], test.data_sets[0][0], strict=False))
    given = [name for name in node.input if name]
    if not {a.name for a in node.attribute} <= schema.attributes.keys() or len(node.output) > schema.max_output:
        return False
    if not schema.min_input <= len(node.input) <= schema.max_input or not set(given) <= inputs.keys():
        return False
    for index, name in enumerate(node.input):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        data = value(inputs[name]) if name else None
        element = type_of(data) if isinstance(data, np.ndarray) else None
        if name and (element is None or f"tensor({element.name})" not in formal.types):
            return False
    return True


def stamped(test: TestCase, version: int) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(test.model)
    model.ir_version = min(model.ir_version, 10)
    (entry,) = (entry for entry in model.opset_import if not entry.domain)
    entry.version = version
    return model


def expected(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any] | None:
    """What onnxruntime computes, None where it has no kernel, or not for these values."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)
    except Exception:  # noqa: BLE001 - onnxruntime's own types, and any other: then another test has to serve
        return None


def covered(name: str, version: int) -> bool:
    """Whether test_ops_versions.py has this operator at this version of its schema."""
    since = onnx.defs.get_schema(name, version).since_version
    return any(
        case.op_type == name and onnx.defs.get_schema(name, case.version).since_version == since for case in CASES
    )


@pytest.mark.parametrize(("name", "version"), [pair for pair in older() if not covered(*pair)], ids=str)
def test_older_version(name, version):
    schema, compared = onnx.defs.get_schema(name, version), 0
    for test in single_node_tests().get(name, ()):
        if compared == 3:
            break
        if not fits(test, schema):
            continue
        model = stamped(test, version)
        names = [item.name for item in model.graph.input]
        feeds = {n: np.asarray(value(data)) for n, data in zip(names, test.data_sets[0][0], strict=False)}
        theirs = expected(model, feeds)
        if theirs is None:
            continue
        ours = Runtime(model, device="cpu").run(None, feeds)
        if name in RANDOM:
            ours, theirs = [part * 0 for part in ours], [part * 0 for part in theirs]
        Runner.assert_similar_outputs(theirs, ours, max(test.rtol, 1e-5), max(test.atol, 1e-6))
        compared += 1
    assert compared


# Nothing in the outputs of these can be compared but their types and shapes, or they are no tensors.
@pytest.mark.parametrize("version", [7, 21])
@pytest.mark.parametrize(
    "name", ["RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial"]
)
def test_random_operators(name, version):
    x = np.full((2, 3), 0.5, np.float32)
    given, attributes = ([], {"shape": [2, 3]}) if name in ("RandomNormal", "RandomUniform") else ([x], {})
    model = single(name, version, given, attributes, 1)
    feeds = {f"x{index}": data for index, data in enumerate(given)}
    (theirs,) = expected(model, feeds) or [None]
    (ours,) = Runtime(model, device="cpu").run(None, feeds)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("version", [7, 11, 13, 16, 19, 21, 23, 24])
def test_loop(version):
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {version}]> '
        "g (int64 m, bool c, float[2] x) => (float[2] y, float[N, 2] rows)"
        "{ y, rows = Loop (m, c, x) <body = body (int64 i, bool go, float[2] s) => (bool on, float[2] t, float[2] row)"
        "  { on = Identity (go) t = Add (s, x) row = Mul (s, t) }> }"
    )
    feeds = {"m": np.array(3), "c": np.array(True), "x": np.array([1.5, -2], np.float32)}
    theirs = expected(model, feeds)
    assert theirs is not None
    Runner.assert_similar_outputs(theirs, Runtime(model, device="cpu").run(None, feeds), 1e-6, 0)


@pytest.mark.parametrize("version", [15, 18])
def test_optionals(version):
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {version}]> g (float[N] x) => (bool full, float[N] y, bool empty)'
        "{ some = Optional (x) full = OptionalHasElement (some) y = OptionalGetElement (some)"
        "  none = Optional <type: type_proto = float[N]> () empty = OptionalHasElement (none) }"
    )
    x = np.arange(3, dtype=np.float32)
    full, y, empty = Runtime(model, device="cpu").run(None, {"x": x})
    assert (full, empty) == (True, False)
    np.testing.assert_array_equal(y, x)
