"""onnx's backend tests: those that are no node tests, run here; what is promised of the node tests, counted here.

The node tests themselves run in the file of their family of operators, in test_ops_*.py and test_control.py.
"""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from backend_cases import XFAIL, family, leaves, node_tests, reason_to_fail, value
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from lut4tool.runtime import dtypes
from lut4tool.runtime.backend import mx
from lut4tool.runtime.graph import Step
from lut4tool.runtime.planning import Unsupported
from lut4tool.runtime.session import Runtime

GRADIENTS = {
    "test_gradient_of_add": "Gradient trains: it stands for the derivative of the graph that it is in",
    "test_gradient_of_add_and_mul": "Gradient trains: it stands for the derivative of the graph that it is in",
}


def model_tests(kind: str) -> list[Any]:
    found = []
    for test in load_model_tests(kind=kind):
        reason = GRADIENTS.get(test.name)
        marks = [pytest.mark.xfail(reason=reason, strict=True, raises=Unsupported)] if reason else []
        found.append(pytest.param(test, id=test.name, marks=marks))
    assert found
    return found


def stored(path: Path, kind: onnx.TypeProto) -> Any:
    """A value in a file, of the type that the model declares."""
    data = path.read_bytes()
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if kind.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return numpy_helper.to_array(onnx.TensorProto.FromString(data))


@pytest.mark.parametrize(
    "case", [case for kind in ("simple", "pytorch-converted", "pytorch-operator") for case in model_tests(kind)]
)
def test_model(case: TestCase) -> None:
    folder = Path(case.model_dir)
    runtime = Runtime(folder / "model.onnx", device="cpu")
    sets = sorted(folder.glob("test_data_set_*"))
    assert sets
    for data in sets:
        given = [item for item in runtime.get_inputs() if item.name not in runtime.plan.defaults]
        wanted = runtime.get_outputs()
        feeds = {item.name: stored(data / f"input_{index}.pb", item.proto) for index, item in enumerate(given)}
        expected = [stored(data / f"output_{index}.pb", item.proto) for index, item in enumerate(wanted)]
        Runner.assert_similar_outputs(leaves(expected), leaves(runtime.run(None, feeds)), case.rtol, case.atol)


@pytest.mark.parametrize("case", model_tests("real"))
def test_light_model(case: TestCase) -> None:
    """Networks of the zoo, their weights made by ConstantOfShape; the outputs are onnx.reference's."""
    path = Path(onnx.__file__).parent.parent / case.url
    runtime = Runtime(path, device="cpu")
    feeds = {}
    for item in runtime.get_inputs():
        count = np.prod(item.shape)
        feeds[item.name] = (np.arange(count).reshape(item.shape) / count).astype(np.float32)
    outputs = sorted(path.parent.glob(f"{path.stem}_output_*.pb"))
    expected = [numpy_helper.to_array(onnx.TensorProto.FromString(output.read_bytes())) for output in outputs]
    assert len(expected) == len(runtime.get_outputs())
    Runner.assert_similar_outputs(expected, runtime.run(None, feeds), case.rtol, case.atol)


def test_every_family_of_node_tests_runs_in_a_file():
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py")]
    calls = re.findall(r"[( ]cases\(([^)]*)", "\n".join(texts))
    named = {name for call in calls for name in re.findall(r'"(\w+)"', call)}
    assert {family(test) for test in node_tests().values()} <= named


def test_almost_every_node_test_has_to_pass():
    assert all(any(re.fullmatch(pattern, name) for name in node_tests()) for pattern in XFAIL)
    passing = [name for name in node_tests() if reason_to_fail(name) is None]
    # onnx 1.23 has 1,884, of which 1,860 must pass; other versions of it have more or fewer.
    assert len(node_tests()) - len(passing) <= 24


def computed_by_mlx(result: Any, inputs: list[Any]) -> bool:
    """Whether MLX is yet to compute a result, or nothing is computed; float64 is left out: on a GPU it has the mark."""
    if result is None or any(result is given for given in inputs):
        return True
    if not isinstance(result, mx.array):  # made of shapes and small constants, or codes
        return not any(isinstance(given, mx.array) for given in inputs) or result.dtype.itemsize == 1
    text = io.StringIO()
    mx.export_to_dot(text, result)
    waits = "rectangle" in text.getvalue()
    return waits or result.dtype == mx.float64 or any(np.size(given) == result.size for given in inputs)


#: They take their values apart as they run, and hand over what their bodies computed.
BODIES = {"If", "Loop", "Scan"}


def test_nine_in_ten_node_tests_need_no_host_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's marks, and that they are honest: what is not marked is computed by MLX, with values as on a GPU."""
    monkeypatch.setattr(dtypes, "HOST", mx.gpu)
    free, lies = [], set()
    for test in node_tests().values():
        runtime = Runtime(test.model, device="cpu")
        marks = {row["node"]: row["where"] for row in runtime.plan.describe()}
        if "host" not in marks.values() and reason_to_fail(test.name) is None:
            free.append(test.name)

        def watched(step: Step, name: str = test.name, runtime: Runtime = runtime, marks: Any = marks) -> Any:
            def call() -> Any:
                result = step.call()
                if marks[step.name] == "mlx" and step.operator.name not in BODIES:
                    inputs = [runtime.plan.graph.frame[slot] for slot in step.inputs]
                    parts = result if isinstance(result, tuple) else (result,)
                    if not all(computed_by_mlx(part, inputs) for part in parts):
                        lies.add((name, step.operator.name))
                return result

            return call

        for graph in runtime.plan.graphs():
            graph.watch(watched)
        names = [item.name for item in test.model.graph.input]
        for given, _ in test.data_sets:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runtime.run(None, {name: value(data) for name, data in zip(names, given, strict=False)})
    assert not lies
    assert len(free) >= 0.9 * len(node_tests())
