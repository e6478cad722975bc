"""What a model that cannot be planned is told: types, attributes, versions, all at once; and mutants of all kinds."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from lut4tool.runtime import backend, planning
from lut4tool.runtime.planning import Unsupported, check
from lut4tool.runtime.session import Runtime

CPU = backend.device("cpu")


def model(text: str, version: int = 21) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}, "local" : 1]> {text}')


@pytest.mark.parametrize(
    ("text", "version", "sentence"),
    [
        ("(string[N] x) => (string[N] y) { y = Abs (x) }", 21,
         "Abs takes no tensor(string) as its input 'X', only float"),
        ("(float[N] x, double[N] z) => (float[N] y) { y = Add (x, z) }", 21,
         "Add wants one type for its inputs 'A' and 'B', not tensor(float) and tensor(double)"),
        ("(float[N] x) => (float[N] y) { s = Shape (x) y = Relu (s) t = Sin (s) }", 14,
         "Sin takes no tensor(int64) as its input 'input', only float, double, float16"),
        ("(float[N] x) => (float[N] y) { h = Cast <to = 7> (x) y = Sqrt (h) }", 21, "Sqrt takes no tensor(int64)"),
        ("(float[N] x) => (float[N] y) { y = Sin <depth = 3> (x) }", 21, "Sin has no attribute 'depth'"),
        ("(float[N] x) => (float[N] y) { y = LeakyRelu <alpha = 3> (x) }", 21, "'alpha' of type INT, not FLOAT"),
        ("(float[N] x) => (float[N] y) { y = Cast (x) }", 21, "Cast needs the attribute 'to'"),
        ("(float[N] x) => (float[N] y) { y, z = Relu (x) }", 21, "Relu has at most 1 outputs, not 2"),
        ("(float[N, C] x) => (float[N] y) { y = AveragePool <kernel_shape = [2], auto_pad = \"SAME\"> (x) }", 21,
         "AveragePool has auto_pad 'SAME', which is none of NOTSET, SAME_UPPER, SAME_LOWER, VALID"),
        ("(string[N] x) => (string[N] y) { y = StringConcat (x, x) }", 19,
         "StringConcat is not supported at version 19"),
        ("(float[N] x) => (float[N] y) { y = Relu (x) }", 999, "the model imports version 999"),
        ("(float[N] x, seq(float[N]) z) => (float[N] y) { y = Add (x, z) }", 21, "takes no seq(tensor(float))"),
        ("(float[N] x, bool c) => (float[N] y) { y = If (c) <then_branch = a () => (float[N] p) { p = Det (w) },"
         " else_branch = b () => (float[N] q) { q = Not (x) }> }", 21, "Not takes no tensor(float)"),
    ],
)  # fmt: skip
def test_what_a_schema_does_not_allow(text: str, version: int, sentence: str) -> None:
    proto = model(f"g {text}", version)
    with pytest.raises(Unsupported) as error:
        Runtime(proto, device="cpu")
    assert sentence in str(error.value)
    assert any(sentence in line for line in check(proto, CPU))


def test_operators_versions_and_types_are_in_one_report() -> None:
    proto = model("g (string[N] x) => (string[N] y) { a = Abs (x) b = Nothing (x) c = Swish (x) y = Identity (x) }")
    with pytest.raises(Unsupported) as error:
        Runtime(proto, device="cpu")
    lines = str(error.value).splitlines()
    assert lines[0] == "the model cannot run, for 3 reasons:"
    for line, part in zip(
        lines[1:], ["tensor(string)", "Nothing is not supported", "Swish is not supported"], strict=True
    ):
        assert part in line
    assert check(proto, CPU) == [line.strip() for line in lines[1:]]


def test_a_type_that_nothing_tells_is_no_problem() -> None:
    """A function's inputs have no types; what a branch gives has the type that the branch declares, if any."""
    proto = model(
        "g (float[N] x) => (float[N] y) { t = local.f (x) y = Relu (t) }"
        '<opset_import: ["" : 21], domain: "local"> f (a) => (b) { b = Exp (a) }'
    )
    x = np.array([1, -1], np.float32)
    np.testing.assert_allclose(Runtime(proto, device="cpu").run(None, {"x": x})[0], np.exp(x), rtol=1e-6)


def test_looking_ahead_reads_no_weights(tmp_path: Path) -> None:
    """External data that is not there does not keep `check` from looking at the graph."""
    proto = model("g (float[N, 4096] x) => (float[N, 4096] y) { y = MatMul (x, w) }")
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4096, 4096])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="nowhere.bin")
    proto.graph.initializer.append(weight)
    assert check(proto, CPU) == []


@pytest.mark.parametrize("place", ["numpy", "mlx"])
def test_mutants_run_or_are_refused_in_words(place: str) -> None:
    """500 of fuzz.py's: none crashes, hangs or raises anything but a Lut4Error."""
    script = Path(__file__).parents[1] / "fuzz.py"
    done = subprocess.run(
        [sys.executable, script, "2026", "0", "500", place], capture_output=True, text=True, timeout=400, check=False
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("fault")] == []
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    assert lines[-1] == "done 499"


CALLS = """<ir_version: 10, opset_import: ["" : 17, "local" : 1]> g (double[N] x) => (double[N] y) { %s }
<domain: "local", opset_import: ["" : 17]> f (a) => (b) { c = Constant () t = Relu (a) b = Add (t, c) }"""


def test_a_constant_of_a_function_is_one_for_all_calls() -> None:
    proto = parser.parse_model(CALLS % " ".join(f"{'y' if at == 0 else f'y{at}'} = local.f (x)" for at in range(50)))
    large = onnx.TensorProto(data_type=onnx.TensorProto.DOUBLE, dims=[1 << 17], double_data=[1.0] * (1 << 17))
    proto.functions[0].node[0].attribute.append(onnx.helper.make_attribute("value", large))
    tracemalloc.start()
    runtime = Runtime(proto, device="cpu")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20  # 50 of them are 50 MB
    assert runtime.run(["y"], {"x": np.ones(1)})[0].shape == (1 << 17,)


def test_a_very_long_name_is_abridged_where_it_stands_before_others() -> None:
    proto = parser.parse_model(CALLS % "y = local.f (x)")
    one = onnx.numpy_helper.from_array(np.ones(1))
    proto.functions[0].node[0].attribute.append(onnx.helper.make_attribute("value", one))
    proto.graph.node[0].name = "n" * (1 << 20)
    names = [step.name for step in Runtime(proto, device="cpu").plan.steps()]
    assert names
    assert all(len(name) < 1100 and name.startswith("nnn") for name in names)


def test_what_is_computed_while_planning_takes_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large constants that a small file asks for: some are made once, the others at each run."""
    monkeypatch.setattr(planning, "ROOM", 5 << 19)
    each = "t{0} = ConstantOfShape <value = float[1] {{2.0}}> (s) y{0} = Add (x, t{0})"
    nodes = " ".join(each.format(at) for at in range(9))
    outputs = ", ".join(f"float[N] y{at}" for at in range(9))
    text = f"g (float[1] x) => ({outputs}) <int64[1] s = {{131072}}> {{ {nodes} }}"
    runtime = Runtime(model(text), device="cpu")
    made = [step for step in runtime.plan.steps() if step.operator.name == "ConstantOfShape"]
    assert len(made) == 4  # of half a MB each, five have room
    for y in runtime.run(None, {"x": np.ones(1, np.float32)}):
        assert (y.size, y.min(), y.max()) == (131072, 3, 3)
