"""Control flow, functions and captured values, against onnxruntime and onnx.reference."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from backend_cases import cases
from backend_cases import check as run_case
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from lut4tool import formats
from lut4tool.formats import DOMAIN, Lookup4Weight
from lut4tool.runtime import RunError, Runtime, Unsupported, registry
from lut4tool.runtime.ops import sizes

FLOAT = TensorProto.FLOAT
rng = np.random.default_rng(0)


@pytest.mark.parametrize("case", cases("controlflow", "sequence", "optional"))
def test_node(case: Any) -> None:
    run_case(case)


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    parsed = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "local" : 1]> {text}')
    onnx.checker.check_model(parsed)
    return parsed


def ort(proto: onnx.ModelProto, feeds: dict[str, Any]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)


def check(proto: onnx.ModelProto, *several: dict[str, Any]) -> Runtime:
    """Run one Runtime on each of the feeds and compare with onnxruntime; nothing may be left in its frame."""
    runtime = Runtime(proto, device="cpu")
    for feeds in several:
        for ours, theirs in zip(runtime.run(None, feeds), ort(proto, feeds), strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert all(runtime.plan.graph.frame[slot] is None for slot in runtime.plan.dynamic)
    return runtime


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_if_captures_values_of_the_graph_around_it() -> None:
    proto = model("""g (bool c, float[N] x) => (float[N] y, float[N] w) {
        t = Mul(x, x)
        y, w = If (c) <
            then_branch = a () => (float[N] p, float[N] q) { p = Add(t, x) q = Identity(t) },
            else_branch = b () => (float[N] r, float[N] s) { r = Sub(t, x) s = Neg(x) }
        >
    }""")
    x = floats(5)
    check(proto, *[{"c": np.array(flag), "x": x} for flag in (True, False, True)])


def test_if_inside_if_reads_through_two_levels() -> None:
    proto = model("""g (bool c, bool d, float[N] x) => (float[N] y) {
        t = Exp(x)
        y = If (c) <
            then_branch = a () => (float[N] p) {
                u = Mul(t, t)
                p = If (d) <
                    then_branch = aa () => (float[N] pp) { pp = Add(u, x) },
                    else_branch = ab () => (float[N] pq) { pq = Add(t, x) }
                >
            },
            else_branch = b () => (float[N] r) { r = Neg(t) }
        >
    }""")
    x = floats(4)
    check(proto, *[{"c": np.array(c), "d": np.array(d), "x": x} for c in (True, False) for d in (True, False)])


LOOP = """g (int64 m, bool c, float limit, float[2] x) =>
        (float[2] last, float total, float[K, 2] rows, int64[K] steps) {{
    zero = Constant <value_float = 0.0> ()
    last, total, rows, steps = Loop ({m}, {c}, x, zero) <
        body = b (int64 i, bool c, float[2] s, float t) => (bool go, float[2] s2, float t2, float[2] row, int64 step) {{
            s2 = Mul(s, x)
            sum = ReduceSum <keepdims = 0> (s2)
            t2 = Add(t, sum)
            row = Add(s2, s)
            step = Identity(i)
            go = Less(t2, limit)
        }}
    >
}}"""


@pytest.mark.parametrize(
    ("m", "c", "trips", "cond", "limit"),
    [
        pytest.param("m", "c", 4, True, 1e9, id="to the trip count"),
        pytest.param("m", "c", 50, True, 40.0, id="early exit"),
        pytest.param("", "c", 0, True, 40.0, id="condition alone"),
        pytest.param("m", "", 3, True, 1e9, id="trip count alone"),
        pytest.param("m", "c", 1, True, 1e9, id="once"),
    ],
)
def test_loop(m: str, c: str, trips: int, cond: bool, limit: float) -> None:
    proto = model(LOOP.format(m=m or '""', c=c or '""').replace('""', ""))
    x = np.array([1.5, 1.25], np.float32)
    feeds = {"m": np.array(trips), "c": np.array(cond), "limit": np.array(limit, np.float32), "x": x}
    check(proto, feeds, feeds)


@pytest.mark.parametrize(("trips", "cond"), [(0, True), (5, False)])
def test_loop_without_iterations_gives_empty_scan_outputs(trips: int, cond: bool) -> None:
    proto = model(LOOP.format(m="m", c="c"))
    feeds = {"m": np.array(trips), "c": np.array(cond), "limit": np.array(1, np.float32), "x": floats(2)}
    runtime = Runtime(proto, device="cpu")
    last, total, rows, steps = runtime.run(None, feeds)
    np.testing.assert_array_equal(last, feeds["x"])
    assert total == 0
    assert rows.shape == (0, 2)
    assert rows.dtype == np.float32
    assert steps.shape == (0,)
    assert steps.dtype == np.int64


def test_a_negative_trip_count_is_an_error() -> None:
    proto = model(LOOP.format(m="m", c="c"))
    feeds = {"m": np.array(-3), "c": np.array(True), "limit": np.array(1, np.float32), "x": floats(2)}
    with pytest.raises(RunError, match=r"node 'Loop:.*' \(Loop\) failed.*not negative, not -3"):
        Runtime(proto, device="cpu").run(None, feeds)


STEPS = """g (int64 m, float[N] x) => (float[N] last, float[M, P] rows) {
    t = Constant <value = bool {1}> ()
    last, rows = Loop (m, t, x) <body = b (int64 i, bool c, float[N] s) => (bool d, float[N] s2, float[P] row) {
        d = Identity (c)
        s2 = Neg (s)
        start = Constant <value_ints = [0]> ()
        end = Constant <value_ints = [1]> ()
        row = Slice (s2, start, end)
    }>
}"""


def traced(proto: onnx.ModelProto, feeds: dict[str, Any]) -> int:
    """Bytes at the peak of a run, over what its Runtime holds."""
    runtime = Runtime(proto, device="cpu")
    tracemalloc.start()
    runtime.run(None, feeds)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_scan_outputs_take_their_own_size_and_no_more() -> None:
    """A row that is a part of a large value does not keep it."""
    feeds = {"m": np.array(3000), "x": np.ones(10_000, np.float32)}
    assert traced(model(STEPS), feeds) < 1 << 18  # 3,000 values would be 120 MB


def test_a_loop_without_scan_outputs_takes_no_memory_for_its_iterations() -> None:
    proto = model(STEPS)
    body = proto.graph.node[1].attribute[0].g
    del proto.graph.node[1].output[1], proto.graph.output[1], body.output[2]
    peaks = [traced(proto, {"m": np.array(steps), "x": np.ones(4, np.float32)}) for steps in (100, 20_000)]
    assert peaks[1] < peaks[0] + 2000


def test_scan_outputs_are_refused_where_they_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "memory", lambda: 1 << 16)
    feeds = {"m": np.array(1 << 40), "x": np.ones(4, np.float32)}
    with pytest.raises(
        RunError, match=r"\(Loop\) failed.*would take 65.5 KB after 16384 iterations, more than half of"
    ):
        Runtime(model(STEPS), device="cpu").run(None, feeds)


@pytest.mark.parametrize("change", ["less of the body", "more for the body"])
def test_a_loop_that_does_not_fit_its_body_is_refused(change: str) -> None:
    proto = model(STEPS)
    if change == "less of the body":
        del proto.graph.node[1].attribute[0].g.output[:]
    else:
        proto.graph.node[1].input.append("x")
    with pytest.raises(Unsupported, match=r"Loop.*its body has 3 inputs"):
        Runtime(proto, device="cpu")


def test_loop_state_may_grow_and_loops_may_nest() -> None:
    proto = model("""g (int64 n, float[K] x) => (float[M] y, float[n] sums) {
        t = Constant <value = bool {1}> ()
        y, sums = Loop (n, t, x) <body = outer (int64 i, bool c, float[A] s) => (bool c2, float[B] s2, float z) {
            c2 = Identity(c)
            s2 = Concat <axis = 0> (s, x)
            one = Constant <value_int = 1> ()
            j = Add(i, one)
            start = ReduceSum <keepdims = 0> (s2)
            z = Loop (j, c, start) <body = inner (int64 k, bool d, float v) => (bool d2, float v2) {
                d2 = Identity(d)
                extra = ReduceMax <keepdims = 0> (s2)
                v2 = Add(v, extra)
            }>
        }>
    }""")
    check(proto, {"n": np.array(3), "x": floats(2)}, {"n": np.array(1), "x": floats(3)})


def scan_model(attributes: dict[str, Any], x: str, z: str, rows: str) -> onnx.ModelProto:
    body = parser.parse_graph("""b (float[2] s, float[2] a, float[3] c) => (float[2] s2, float[2] r, float[3] q) {
        s2 = Add(s, a) r = Mul(s2, a) m = ReduceSum <keepdims = 1> (s2) q = Mul(c, m) }""")
    node = helper.make_node(
        "Scan", ["s", "x", "z"], ["last", "rows", "others"], body=body, num_scan_inputs=2, **attributes
    )
    graph = parser.parse_graph(
        f"g (float[2] s, float{x} x, float{z} z) => (float[2] last, float{rows} rows, float[U, V] others) {{}}"
    )
    graph.node.append(node)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("attributes", "x_shape", "z_shape"),
    [
        ({}, (4, 2), (4, 3)),
        ({"scan_input_directions": [0, 1]}, (4, 2), (4, 3)),
        ({"scan_output_directions": [1, 0]}, (4, 2), (4, 3)),
        ({"scan_input_axes": [1, 0]}, (2, 4), (4, 3)),
        ({"scan_output_axes": [1, -1]}, (4, 2), (4, 3)),
        ({"scan_input_axes": [-1, -2], "scan_input_directions": [1, 1], "scan_output_axes": [0, 1]}, (2, 4), (4, 3)),
    ],
)
def test_scan(attributes: dict[str, Any], x_shape: tuple[int, int], z_shape: tuple[int, int]) -> None:
    proto = scan_model(attributes, "[A, B]", "[C, D]", "[E, F]")
    check(proto, {"s": floats(2), "x": floats(*x_shape), "z": floats(*z_shape)})


def test_texts_are_scanned_one_by_one() -> None:
    """Into Scan, where they have different lengths, and out of Scan and Loop, where they have no axes."""
    proto = model(
        """g (string[N] x, int64 trips, string start) => (string[N] y, string[N] same, string last, string[M] z) {
        y, same = Scan <num_scan_inputs=1, body=b (string e) => (string twice, string e2) {
            twice = StringConcat(e, e) e2 = Identity(e) }> (x)
        last, z = Loop <body=l (int64 i, bool go, string s) => (bool on, string r, string o) {
            on = Identity(go) r = StringConcat(s, s) o = StringConcat(s, start) }> (trips, "", start)
        }""",
        opset=20,
    )
    feeds = {"x": np.array(["a", "bcd", ""], object), "trips": np.array(3), "start": np.array("q", object)}
    for ours, theirs in zip(Runtime(proto, device="cpu").run(None, feeds), ort(proto, feeds), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tolist() == theirs.tolist()


def test_scan_inputs_of_different_lengths_are_an_error() -> None:
    runtime = Runtime(scan_model({}, "[A, B]", "[C, D]", "[E, F]"), device="cpu")
    with pytest.raises(RunError, match=r"Scan.*different lengths: \[3, 4\]"):
        runtime.run(None, {"s": floats(2), "x": floats(4, 2), "z": floats(3, 3)})


def test_a_sequence_grows_through_a_loop() -> None:
    proto = model("""g (int64 n, seq(float[K]) start, float[K] x) => (seq(float[K]) all, int64 count) {
        t = Constant <value = bool {1}> ()
        all = Loop (n, t, start) <body = b (int64 i, bool c, seq(float[K]) s) => (bool d, seq(float[K]) e) {
            d = Identity(c)
            f = CastLike(i, x)
            y = Mul(x, f)
            e = SequenceInsert(s, y) }>
        count = SequenceLength(all)
    }""")
    x = floats(3)
    found, count = Runtime(proto, device="cpu").run(None, {"n": np.array(3), "start": [x], "x": x})
    assert count == 4
    for part, factor in zip(found, (1, 0, 1, 2), strict=True):
        np.testing.assert_allclose(part, x * np.float32(factor), rtol=1e-6)
    assert len(Runtime(proto, device="cpu").run(["all"], {"n": np.array(0), "start": [], "x": x})[0]) == 0


SCAN8 = """g (int64[B] lengths, float[B, 2] s, float[B, T, 2] x) => (float[B, 2] last, float[B, T, 2] rows) {
    last, rows = Scan <num_scan_inputs = 1 %s, body = b (float[2] a, float[2] v) => (float[2] c, float[2] r) {
        c = Add(a, v) r = Mul(c, v) }> (lengths, s, x)
}"""


@pytest.mark.parametrize("directions", ["", ", directions = [1]"])
def test_scan_8_goes_over_each_entry_of_a_batch_as_far_as_its_length(directions: str) -> None:
    proto = model(SCAN8 % directions, opset=8)
    lengths, s, x = np.array([2, 4, 0]), floats(3, 2), floats(3, 4, 2)
    last, rows = Runtime(proto, device="cpu").run(None, {"lengths": lengths, "s": s, "x": x})
    for place, length in enumerate(lengths):
        steps = x[place, :length][::-1] if directions else x[place, :length]
        sums = s[place] + np.cumsum(steps, axis=0)
        np.testing.assert_allclose(last[place], sums[-1] if length else s[place], rtol=1e-5)
        np.testing.assert_allclose(rows[place, :length], sums * steps, rtol=1e-5, atol=1e-6)
    full = {"lengths": np.array([4, 4, 4]), "s": s, "x": x}
    check(proto, full)
    with pytest.raises(RunError, match="sequence_lens"):
        Runtime(proto, device="cpu").run(None, {**full, "lengths": np.array([4, 5, 0])})


def test_a_scan_reads_what_its_graph_and_the_graph_around_that_define() -> None:
    proto = model("""g (bool go, float[2] s, float[T, 2] x) => (float[2] y, float[T, 2] rows) {
        k = Exp(s)
        y, rows = If (go) <then_branch = t () => (float[2] p, float[T, 2] q) {
            h = Neg(k)
            p, q = Scan <num_scan_inputs = 1, body = b (float[2] a, float[2] v) => (float[2] c, float[2] r) {
                w = Mul(v, k) c = Add(a, w) r = Add(c, h) }> (s, x)
        }, else_branch = e () => (float[2] u, float[T, 2] v) { u = Identity(s) v = Identity(x) }>
    }""")
    feeds = {"s": floats(2), "x": floats(3, 2)}
    check(proto, {"go": np.array(True), **feeds}, {"go": np.array(False), **feeds})


FUNCTIONS = """
g (float[N] x) => (float[N] y, float[N] z) { y = local.outer <alpha = 0.5> (x) z = local.outer (x) }
<opset_import: ["" : 17, "local" : 1], domain: "local">
outer <alpha: float = 2.0> (x) => (y) { t = local.inner <beta: float = @alpha> (x) y = Add(t, x) }
<opset_import: ["" : 17], domain: "local">
inner <beta> (x) => (y) {
    b = Constant <value_float: float = @beta> ()
    t = LeakyRelu <alpha: float = @beta> (x)
    y = Mul(t, b)
}
"""


def test_functions_call_functions_with_attributes_by_reference() -> None:
    proto = model(FUNCTIONS)
    runtime = check(proto, {"x": floats(6)})
    assert {step.name.split("/")[0] for step in runtime.plan.steps()} == {"outer:y", "outer:z"}


def test_a_function_that_calls_itself_is_refused() -> None:
    proto = model(FUNCTIONS)
    proto.functions[1].node[1].CopyFrom(helper.make_node("inner", ["x"], ["t"], domain="local", beta=1.0))
    proto.functions[1].opset_import.append(helper.make_opsetid("local", 1))
    with pytest.raises(registry.Unsupported, match="inner calls itself"):
        Runtime(proto, device="cpu")


@pytest.mark.parametrize(
    "node",
    [
        pytest.param("Celu <alpha = 0.7> (x)", id="function body"),
        pytest.param("Celu (x)", id="default attributes"),
        pytest.param('Gelu <approximate = "tanh"> (x)', id="body that depends on attributes"),
        pytest.param("MeanVarianceNormalization <axes = [0]> (x)", id="body of an older opset"),
    ],
)
def test_an_operator_without_a_row_runs_as_the_body_of_its_schema(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = model(f"g (float[N] x) => (float[N] y) {{ y = {node} }}", opset=20)
    registry.load()
    monkeypatch.delitem(registry._TABLE, ("", node.split()[0]), raising=False)
    runtime = Runtime(proto, device="cpu")
    feeds = {"x": floats(7)}
    assert all("/" in step.name for step in runtime.plan.steps())
    np.testing.assert_allclose(
        runtime.run(None, feeds)[0], ReferenceEvaluator(proto).run(None, feeds)[0], rtol=1e-5, atol=1e-6
    )


def branch(weight: Lookup4Weight, output: str) -> onnx.GraphProto:
    """A branch whose only node is named "proj" in every branch, as are its weights."""
    arrays = {"packed": weight.packed, "scales": weight.scales, "codebook": weight.codebook}
    node = helper.make_node(
        "Lookup4MatMul", ["x", *arrays], [output], "proj", domain=DOMAIN, **weight.attributes("float32")
    )
    info = helper.make_tensor_value_info(output, FLOAT, None)
    return helper.make_graph([node], "branch", [], [info], [numpy_helper.from_array(a, n) for n, a in arrays.items()])


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
def test_one_node_name_in_two_branches_keeps_two_weights(perm: tuple[int, int]) -> None:
    weights = [
        Lookup4Weight(rng.integers(0, 256, 48, dtype=np.uint8), floats(6) ** 2, formats.NF4, 8, 12, 16, perm)
        for _ in "01"
    ]
    node = helper.make_node(
        "If", ["c"], ["y"], "If_0", then_branch=branch(weights[1], "t"), else_branch=branch(weights[0], "e")
    )
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", FLOAT, [None, None]),
        ],
        [helper.make_tensor_value_info("y", FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    runtime = Runtime(helper.make_model(graph, opset_imports=opsets, ir_version=8), device="cpu")
    x = floats(3, weights[0].shape[0])
    dense = [formats.decode(weight).astype(np.float64).transpose(perm) for weight in weights]
    for pick in (0, 1, 0, 1):
        (y,) = runtime.run(None, {"c": np.array(bool(pick)), "x": x})
        bound = 2.0**-21 * (np.abs(x).astype(np.float64) @ np.abs(dense[pick]))
        assert np.all(np.abs(y - x.astype(np.float64) @ dense[pick]) <= bound)
    assert set(runtime.kernels) == {"If_0/then_branch/proj", "If_0/else_branch/proj"}
