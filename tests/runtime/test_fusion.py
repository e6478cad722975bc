"""Fusion: what is fused equals onnxruntime and our own unfused run, and nothing is fused that another can see."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from noise import session
from onnx import helper, numpy_helper, parser

from lut4tool.runtime import RunError, Runtime, convolution, planning
from lut4tool.runtime.chains import Chain

pytestmark = pytest.mark.skipif(not convolution.available(), reason="no native library was compiled")

rng = np.random.default_rng(0)


def floats(*shape, scale=1.0):
    return np.asarray(scale * rng.standard_normal(shape), np.float32)


#: Constants that the models below name.
CONSTANTS = {
    "w": floats(8, 4, 3, 3, scale=0.2), "w1": floats(8, 8, 1, 1, scale=0.4), "wd": floats(8, 1, 3, 3, scale=0.4),
    "wt": floats(4, 5, 3, 3, scale=0.2), "line": floats(6, 4, 5, scale=0.3), "square": floats(4, 6),
    "cube": floats(2, 4, 1, 1, 1), "b": floats(8), "gamma": floats(8), "beta": floats(8), "mean": floats(8),
    "var": np.abs(floats(8)) + 0.5, "channel": floats(8, 1, 1), "channels": floats(1, 8, 1, 1),
    "short": floats(8, 1), "points": floats(6), "table": floats(2, 8, 1, 1), "deep": floats(1, 1, 1, 1, 1),
    "batch": floats(2, 1, 1, 1),
    "one": floats(1), "three": np.array(3, np.float32), "six": np.array(6, np.float32),
    "two": np.array([2], np.int64), "line_bias": floats(1, 8, 1), "wide": floats(11),
    "zero": np.array(0, np.float32), "half": np.array(0.5, np.float32), "high": np.array(1e38, np.float32),
}  # fmt: skip


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    """A model of the parser's text, with the constants that it reads."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}')
    made = {name for node in proto.graph.node for name in node.output}
    read = {name for node in proto.graph.node for name in node.input}
    for node in proto.graph.node:
        for attribute in node.attribute:
            read |= {name for inner in attribute.g.node for name in inner.input}
    for name in sorted((read - made) & CONSTANTS.keys()):
        proto.graph.initializer.append(numpy_helper.from_array(CONSTANTS[name], name))
    return proto


def fused(runtime: Runtime) -> list[str]:
    """The operators that other nodes' steps do."""
    return [row["op"].split("::")[1] for row in runtime.plan.describe() if row["where"].startswith("fused into ")]


def checked(proto: onnx.ModelProto, monkeypatch, feeds, wanted: list[str], tolerance: float = 5e-6) -> Runtime:
    """Run a model fused, unfused and in onnxruntime, compare, and hold the fused operators to `wanted`."""
    runtime = Runtime(proto, device="cpu")
    assert fused(runtime) == wanted
    expected = session(proto).run(None, feeds)
    with monkeypatch.context() as patch:
        patch.setattr(planning, "fuse", lambda *_: None)
        plain = Runtime(proto, device="cpu")
    assert len(plain.plan.steps()) == len(runtime.plan.steps()) + len(wanted)
    for found, unfused, other in zip(runtime.run(None, feeds), plain.run(None, feeds), expected, strict=True):
        assert found.shape == unfused.shape == other.shape
        room = tolerance * max(1.0, np.abs(other).max())
        assert np.abs(found - other).max() <= room
        assert np.abs(found - unfused).max() <= room
    again = runtime.run(None, feeds)
    assert all(np.array_equal(one, two) for one, two in zip(again, runtime.run(None, feeds), strict=True))
    return runtime


BATCH_NORM = "BatchNormalization(c, gamma, beta, mean, var)"
IMAGE = {"x": floats(2, 4, 9, 11)}

FUSED = {
    "batch normalization": (f"c = Conv<pads=[1,1,1,1]>(x, w, b) y = {BATCH_NORM}", ["BatchNormalization"]),
    "batch normalization, no bias": (f"c = Conv(x, w) y = {BATCH_NORM}", ["BatchNormalization"]),
    "batch normalization and relu": (
        f"c = Conv<strides=[2,2]>(x, w) n = {BATCH_NORM} y = Relu(n)", ["BatchNormalization", "Relu"],
    ),
    "a caffe model's scale and shift": (
        f"c = Conv(x, w) n = {BATCH_NORM} m = Mul(n, channel) a = Add(m, channels) y = LeakyRelu<alpha=0.2>(a)",
        ["BatchNormalization", "Mul", "Add", "LeakyRelu"],
    ),
    "scalars": ("c = Conv(x, w) m = Mul(c, one) a = Sub(three, m) y = Div(a, six)", ["Mul", "Sub", "Div"]),
    "clip and max": ("c = Conv(x, w, b) a = Clip(c, zero, six) y = Max(a, half)", ["Clip", "Max"]),
    "a factor after the curve": ("c = Conv(x, w) s = Tanh(c) y = Mul(s, channel)", ["Tanh", "Mul"]),
    "silu": ("c = Conv(x, w, b) s = Sigmoid(c) y = Mul(c, s)", ["Sigmoid", "Mul"]),
    "hard swish, written out": (
        "c = Conv(x, w) a = Add(c, three) k = Clip(a, zero, six) m = Mul(c, k) y = Div(m, six)",
        ["Add", "Clip", "Mul", "Div"],
    ),
    "gelu, written out": (
        "c = Conv(x, w) d = Div(c, six) e = Erf(d) a = Add(e, one) m = Mul(c, a) y = Mul(m, half)",
        ["Div", "Erf", "Add", "Mul", "Mul"],
    ),
    "hard swish": ("c = Conv(x, w) h = HardSwish(c) y = HardSigmoid<alpha=0.3>(h)", ["HardSwish", "HardSigmoid"]),
    "a residual": (
        "c = Conv(x, w) r = Relu(c) d = Conv(r, w1, b) a = Add(d, r) y = Relu(a)", ["Relu", "Add", "Relu"],
    ),
    "a shortcut that is a convolution too": (
        "c = Conv(x, w) d = Conv(x, w, b) a = Sum(c, d) y = Relu(a)", ["Sum", "Relu"],
    ),
    "what is taken away": ("c = Conv(x, w) d = Conv(x, w, b) y = Sub(d, c)", ["Sub"]),
    "depthwise": (
        f"p = Conv(x, w) c = Conv<group=8, pads=[1,1,1,1]>(p, wd) n = {BATCH_NORM} y = Relu(n)",
        ["BatchNormalization", "Relu"],
    ),
    "a gate, one value a channel": (
        "c = Conv(x, w) g = GlobalAveragePool(c) h = Conv(g, w1) s = Sigmoid(h) m = Mul(c, s) y = Relu(m)",
        ["Sigmoid", "Mul", "Relu"],
    ),
    "no convolution": ("c = Conv(x, w) t = Transpose<perm=[0,1,3,2]>(c) a = Sigmoid(t) m = Mul(t, a) y = Add(m, one)",
                       ["Mul", "Add"]),
    "a normalization before": (
        f"c = MaxPool<kernel_shape=[2,2]>(p) p = Conv(x, w) n = {BATCH_NORM} y = Relu(n)", ["Relu"],
    ),
    "dropout": ("c = Conv(x, w) d = Dropout(c) y = Relu(d)", ["Dropout", "Relu"]),
    "a transposed convolution": ("c = ConvTranspose(x, wt) l = LeakyRelu(c) y = Tanh(l)", ["LeakyRelu", "Tanh"]),
}  # fmt: skip


def ordered(text: str) -> str:
    """The nodes of a model, p before c where c reads it."""
    return (
        text
        if "MaxPool" not in text
        else text.replace(
            "c = MaxPool<kernel_shape=[2,2]>(p) p = Conv(x, w)", "p = Conv(x, w) c = MaxPool<kernel_shape=[2,2]>(p)"
        )
    )


@pytest.mark.parametrize("case", FUSED)
def test_what_follows_a_convolution_is_fused(case, monkeypatch):
    text, wanted = FUSED[case]
    checked(
        model(f"g (float[N, 4, H, W] x) => (float[N, K, P, Q] y) {{ {ordered(text)} }}"), monkeypatch, IMAGE, wanted
    )


#: Nodes, further outputs, and what is fused into other steps than the convolution's.
KEPT: dict[str, tuple[str, str, list[str]]] = {
    "the convolution's result is an output": (f"c = Conv(x, w) y = {BATCH_NORM}", "c", []),
    "another node reads it": ("c = Conv(x, w) y = Relu(c) z = Exp(c)", "z", []),
    "three nodes read it": ("c = Conv(x, w) a = Sigmoid(c) m = Mul(c, a) y = Add(m, c)", "", ["Mul", "Add"]),
    "a detour that does not come back": ("c = Conv(x, w) a = Exp(c) b = Sigmoid(a) y = Mul(c, b)", "", ["Mul"]),
    "a detour seen by another": ("c = Conv(x, w) a = Sigmoid(c) y = Mul(c, a) z = Exp(a)", "z", []),
    "weights that a feed may change": (f"c = Conv(x, v) y = {BATCH_NORM}", "", []),
    "statistics that a node computes": (
        "c = Conv(x, w) s = Exp(mean_) y = BatchNormalization(c, gamma, beta, mean, s)", "", [],
    ),
    "training": (
        "c = Conv(x, w) y, u, v_ = BatchNormalization<training_mode=1>(c, gamma, beta, mean, var)", "", [],
    ),
    "no curve that has a stage": ("c = Conv(x, w) y = Exp(c)", "", []),
    "a constant on the left of a quotient": ("c = Conv(x, w) y = Div(six, c)", "", []),
    "a constant of several axes": ("c = Conv(x, w) y = Mul(c, table)", "", []),
    "the larger of it and a vector": ("c = Conv(x, w) y = Max(c, channel)", "", []),
    "a value and itself": ("c = Conv(x, w) y = Mul(c, c)", "", []),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_another_can_see_is_not_fused(case, monkeypatch):
    text, extra, elsewhere = KEPT[case]
    more = f", float[N, K, P, Q] {extra}" if extra else ""
    proto = model(f"g (float[N, 4, H, W] x, float[8, 4, 3, 3] v, float[8] mean_) => (float[] y{more}) {{ {text} }}")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {**IMAGE, "v": CONSTANTS["w"], "mean_": CONSTANTS["mean"]}
    runtime = checked(proto, monkeypatch, feeds, elsewhere, 2e-5)
    assert not runtime.plan.steps()[0].fused


def test_a_subgraph_sees_the_result(monkeypatch):
    text = """
    g (float[N, 4, H, W] x, bool t) => (float[N, K, P, Q] y) {
        c = Conv(x, w) d = Relu(c)
        r = If(t) <
            then_branch = a () => (float[N, K, P, Q] p) { p = Exp(c) },
            else_branch = b () => (float[N, K, P, Q] q) { e = Conv(x, w, b) q = Relu(e) }
        >
        y = Add(d, r)
    }"""
    for value in (True, False):
        runtime = checked(model(text), monkeypatch, {**IMAGE, "t": np.array(value)}, ["Add", "Relu"])
    assert [step.operator.name for step in runtime.plan.graph.steps] == ["Conv", "If", "Relu"]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("c = Conv(x, w) y = Add(c, r)", (1, 1, 7, 9)),
        ("c = Conv(x, w) m = Mul(c, r) y = Relu(m)", (9,)),
        ("c = Conv(x, w) m = Mul(c, r) y = Relu(m)", (2, 8, 7, 1)),
        ("c = Conv(x, w) m = Mul(c, r) y = Relu(m)", (3, 2, 8, 7, 9)),
        ("c = Conv(x, w) s = Sigmoid(c) m = Mul(c, s) a = Sub(m, r) y = Mul(a, channel)", (2, 1, 1, 1)),
        ("c = Conv(x, w) m = Mul(c, short) y = Relu(m)", ()),
        ("c = Conv(x, w) m = Mul(c, points) y = Relu(m)", ()),
        ("c = Conv(x, w) m = Mul(c, deep) y = Relu(m)", ()),
        ("c = Conv(x, w) m = Mul(c, channel) y = Add(m, batch)", ()),
        ("c = Conv(x, w) m = Mul(c, channel) s = Sigmoid(m) n = Mul(s, batch) y = Relu(n)", ()),
    ],
)
def test_what_broadcasts_otherwise_runs_node_by_node(text, shape, monkeypatch):
    size = (2, 4, 10, 8) if "short" in text or "points" in text else (2, 4, 9, 11)
    operand = f", float[{', '.join('abcdef'[: len(shape)])}] r" if "r)" in text else ", float r"
    proto = model(f"g (float[N, 4, H, W] x{operand}) => (float[] y) {{ {text} }}")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    operators = [node.op_type for node in proto.graph.node[1:]]
    checked(proto, monkeypatch, {"x": floats(*size), "r": floats(*shape)}, operators)


@pytest.mark.parametrize("shape", [(2, 3, 6), (6,), (2, 1, 4, 3, 6)])
@pytest.mark.parametrize("nodes", ["n = Mul(x, r) y = Mul(n, points)", "n = Sub(x, r) t = Tanh(n) y = Add(t, x)"])
def test_a_value_for_each_row(nodes, shape, monkeypatch):
    """As a normalization along the last axis has them: one pass of the stages."""
    ports = [f"float[{', '.join(letters[: len(shape)])}]" for letters in ("abcdef", "ghijkl")]
    proto = model(f"g ({ports[0]} x, {ports[1]} r) => (float[] y) {{ {nodes} }}")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    operators = [node.op_type for node in proto.graph.node[1:]]
    with monkeypatch.context() as patch:
        patch.setattr(Chain, "alone", None)
        Runtime(proto, device="cpu").run(None, {"x": floats(*shape), "r": floats(*shape[:-1], 1)})
    checked(proto, monkeypatch, {"x": floats(*shape), "r": floats(*shape[:-1], 1)}, operators)


def test_an_operand_that_fits_no_more_is_an_error_that_names_its_node():
    runtime = Runtime(
        model("g (float[N, 4, H, W] x, float[A, B] r) => (float[N, K, P, Q] y) { c = Conv(x, w) [sum] y = Add(c, r) }")
    )
    assert fused(runtime) == ["Add"]
    with pytest.raises(RunError, match="node 'sum' \\(Add\\) failed"):
        runtime.run(None, {**IMAGE, "r": floats(5, 5)})


@pytest.mark.parametrize("case", ["one", "cube"])
def test_convolutions_of_other_ranks(case, monkeypatch):
    rank, weight = {"one": (1, "line"), "cube": (3, "cube")}[case]
    x = floats(2, 4, *[8, 7, 6][:rank])
    axes = ", ".join("HWD"[:rank])
    proto = model(
        f"g (float[N, 4, {axes}] x) => (float[N, K, {axes}] y) {{ c = Conv(x, {weight}) m = Mul(c, half) y = Relu(m) }}"
    )
    checked(proto, monkeypatch, {"x": x}, ["Mul", "Relu"] if rank == 1 else ["Relu"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s = Squeeze(c, two) a = Add(s, line_bias) y = Relu(a)", ["Squeeze", "Add", "Relu"]),
        ("s = Squeeze(c, two) g = Sigmoid(s) y = Mul(s, g)", ["Squeeze", "Sigmoid", "Mul"]),
        ("s = Squeeze(c, two) m = Mul(s, s2) y = Neg(m)", ["Squeeze", "Neg"]),
        ("g = Sigmoid(c) s = Squeeze(g, two) d = Squeeze(c, two) y = Mul(s, d)", []),
        ("s = Squeeze(c, two) m = Mul(s, wide) y = Neg(m)", ["Squeeze", "Neg"]),
    ],
)
def test_an_axis_that_is_taken_away(text, wanted, monkeypatch):
    proto = model(
        f"g (float[N, 4, 1, W] x, float[N, 8, W] s2) => (float[N, 8, W] y) {{ c = Conv<pads=[1,1,1,1]>(x, w) {text} }}"
    )
    checked(proto, monkeypatch, {"x": floats(2, 4, 1, 11), "s2": floats(2, 8, 11)}, wanted)


def test_an_axis_that_cannot_be_taken_away_is_an_error_that_names_its_node():
    proto = model(
        "g (float[N, 4, H, W] x) => (float[N, 8, W] y) { c = Conv(x, w) [flat] s = Squeeze(c, two) y = Relu(s) }"
    )
    with pytest.raises(RunError, match="node 'flat' \\(Squeeze\\) failed"):
        Runtime(proto).run(None, IMAGE)


def test_a_profile_names_what_a_step_has_taken_in(tmp_path):
    runtime = Runtime(model("g (float[N, 4, H, W] x) => (float[N, K, P, Q] y) { c = Conv(x, w) [curve] y = Relu(c) }"))
    runtime.profile(IMAGE, tmp_path / "trace.json")
    (event,) = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (event["name"], event["args"]["fused"]) == ("Conv", ["curve"])


def test_products_and_vectors(monkeypatch):
    text = "m = MatMul(x, square) a = Add(m, points) r = Relu(a) n = Mul(r, points) y = Sub(n, points)"
    proto = model(f"g (float[N, M, 4] x) => (float[N, M, 6] y) {{ {text} }}")
    checked(proto, monkeypatch, {"x": floats(3, 5, 4)}, ["Add", "Relu", "Mul", "Sub"])


def test_a_factor_that_float32_does_not_hold_is_not_multiplied_out(monkeypatch):
    text = "c = Conv(x, w) m = Mul(c, high) n = Mul(m, high) y = Relu(n)"
    proto = model(f"g (float[N, 4, H, W] x) => (float[N, K, P, Q] y) {{ {text} }}")
    expected = session(proto).run(None, IMAGE)[0]
    runtime = Runtime(proto)
    assert fused(runtime) == ["Mul", "Mul", "Relu"]
    assert np.isinf(expected).any()
    assert np.array_equal(runtime.run(None, IMAGE)[0], expected)


def test_not_a_number_goes_through(monkeypatch):
    proto = model(f"g (float[N, 4, H, W] x) => (float[N, K, P, Q] y) {{ c = Conv(x, w) n = {BATCH_NORM} y = Relu(n) }}")
    x = floats(1, 4, 9, 11)
    x[0, 1, 4, 4] = np.nan
    runtime = Runtime(proto)
    found, expected = runtime.run(None, {"x": x})[0], np.isnan(session(proto).run(None, {"x": x})[0])
    assert expected.any()
    assert np.array_equal(np.isnan(found), expected) or np.isnan(found).sum() == 8 * 9


def test_a_bound_that_is_not_a_number_is_not_fused():
    proto = model("g (float[N, 6] x) => (float[N, 6] y) { m = Mul(x, half) n = Clip(m, bound) y = Neg(n) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(np.nan), "bound"))
    runtime = Runtime(proto, device="cpu")
    assert fused(runtime) == []
    assert np.isnan(runtime.run(None, {"x": floats(2, 6)})[0]).all()


def test_the_sign_of_nothing_is_kept():
    proto = model("g (float[N, 6] x) => (float[N, 6] y) { m = Mul(x, half) n = Div(m, six) y = Relu(n) }")
    proto.graph.node[2].op_type = "Neg"
    x = np.array([[0.0, -0.0, 1, -1, np.inf, -np.inf]], np.float32)
    runtime = Runtime(proto, device="cpu")
    assert fused(runtime) == ["Div", "Neg"]
    (found,), (expected,) = runtime.run(None, {"x": x}), session(proto).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (np.signbit(found) == np.signbit(expected)).all()


def test_other_types_run_as_they_are(monkeypatch):
    text = "c = Conv(x, h) y = Relu(c)"
    proto = model(f"g (double[N, 4, H, W] x, double[8, 4, 3, 3] h) => (double[N, K, P, Q] y) {{ {text} }}")
    assert fused(Runtime(proto)) == []
    halves = helper.make_tensor("h", onnx.TensorProto.FLOAT16, (8, 4, 3, 3), CONSTANTS["w"].astype(np.float16))
    proto = model("g (float16[N, 4, H, W] x) => (float16[N, K, P, Q] y) { c = Conv(x, h) y = Relu(c) }")
    proto.graph.initializer.append(halves)
    assert fused(Runtime(proto)) == []


def test_nothing_to_convolve(monkeypatch):
    text = f"c = Conv<pads=[1,1,1,1]>(x, w, b) n = {BATCH_NORM} y = Relu(n)"
    proto = model(f"g (float[N, 4, H, W] x) => (float[N, K, P, Q] y) {{ {text} }}")
    assert Runtime(proto).run(None, {"x": np.zeros((0, 4, 5, 5), np.float32)})[0].shape == (0, 8, 5, 5)


def test_a_filled_weight_is_made_once():
    text = """
        s = Constant<value = int64[4] {8, 4, 3, 3}>() k = ConstantOfShape<value = float[1] {0.5}>(s)
        c = Conv(x, k) y = Relu(c)"""
    proto = model(f"g (float[N, 4, H, W] x) => (float[N, K, P, Q] y) {{ {text} }}")
    runtime = Runtime(proto)
    assert [step.operator.name for step in runtime.plan.steps()] == ["Conv"]
    text = """
        s = Constant<value = int64[2] {1000, 1000}>() k = ConstantOfShape(s)
        r = ReduceSum(k) y = Add(x, r)"""
    wide = model(f"g (float[N] x) => (float[A, B] y) {{ {text} }}")
    assert [step.operator.name for step in Runtime(wide).plan.steps()] == ["ReduceSum", "Add"]
    assert len(session(proto).run(None, IMAGE)[0]) == 2


def test_a_convolution_of_constants_whose_result_is_too_large_to_keep(monkeypatch):
    """Planning has run it, so that its weights are packed; the chain after it is fused without it."""
    proto = model(
        "g (float[N, 1, 1, 1] x) => (float[N, 8, H, W] y) { c = Conv(image, w) m = Mul(c, half) y = Add(m, x) }"
    )
    proto.graph.initializer.append(numpy_helper.from_array(floats(1, 4, 110, 110), "image"))
    checked(proto, monkeypatch, {"x": floats(1, 1, 1, 1)}, ["Add"])


def test_a_chain_of_many_nodes_is_planned_in_linear_time():
    """20,000 nodes, in chains of four."""
    count = 0
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["v0"])]
    for count in range(1, 20001):
        kind = ("Relu", "Sigmoid", "Exp", "Neg", "Tanh")[count % 5]
        nodes.append(helper.make_node(kind, [f"v{count - 1}"], [f"v{count}"]))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, [1, 4, 3, 3])],
        [helper.make_tensor_value_info(f"v{count}", 1, None)],
        [numpy_helper.from_array(CONSTANTS[name], name) for name in ("w", "b")],
    )  # fmt: skip
    runtime = Runtime(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert len(runtime.plan.steps()) == 1 + 4000 + 4000
    assert sum(len(step.fused) for step in runtime.plan.steps()) == 20001 - 8001
