"""Runtime: feeds and results, types, plans and their problems, against onnxruntime and onnx.reference."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from lut4tool import formats, native
from lut4tool.errors import Lut4Error
from lut4tool.formats import DOMAIN, Lookup4Weight
from lut4tool.runtime import RunError, Runtime, Unsupported
from lut4tool.runtime.dtypes import TYPES, to_mx, to_numpy

rng = np.random.default_rng(0)


def model(text: str, ir_version: int = 8, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : {opset}]> {text}')


def runtime(text: str, **versions: int) -> Runtime:
    return Runtime(model(text, **versions), device="cpu")


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


ADD = "g (float[N, 3] x, float[N, 3] y) => (float[N, 3] z, float[N, 3] d) { z = Add(x, y) d = Sub(x, y) }"


# -- interface


def test_inputs_and_outputs_are_described_as_onnxruntime_describes_them() -> None:
    text = "g (float[N, 3] a, int64 b, double[2, 2] c, bool[K] d, string[1] e) => (float[N, 3] f, double[2, 2] h) {"
    proto = model(text + " f = Identity(a) h = Identity(c) }")
    theirs = onnxruntime.InferenceSession(proto.SerializeToString())
    ours = Runtime(proto, device="cpu")
    for get in ("get_inputs", "get_outputs"):
        expected = [(info.name, info.type, info.shape) for info in getattr(theirs, get)()]
        assert [(info.name, info.type, info.shape) for info in getattr(ours, get)()] == expected


def test_run_picks_outputs_by_name_and_calling_gives_all() -> None:
    add, x, y = runtime(ADD), floats(2, 3), floats(2, 3)
    np.testing.assert_array_equal(add.run(["d", "z", "d"], {"x": x, "y": y}), [x - y, x + y, x - y])
    results = add({"x": x, "y": y})
    assert list(results) == ["z", "d"]
    np.testing.assert_array_equal(results["z"], x + y)


def test_a_model_comes_as_a_path_bytes_or_a_proto(tmp_path: Path) -> None:
    proto = model(ADD)
    onnx.save(proto, tmp_path / "add.onnx")
    feeds = {"x": floats(1, 3), "y": floats(1, 3)}
    for source in (tmp_path / "add.onnx", str(tmp_path / "add.onnx"), proto.SerializeToString(), proto):
        np.testing.assert_array_equal(Runtime(source, device="cpu").run(["z"], feeds)[0], feeds["x"] + feeds["y"])


def test_mlx_arrays_go_in_and_stay_mlx_arrays_when_asked() -> None:
    add, x, y = runtime(ADD), floats(2, 3), floats(2, 3)
    kept = add.run(None, {"x": mx.array(x), "y": y}, as_numpy=False)
    assert all(isinstance(value, mx.array) for value in kept)
    np.testing.assert_array_equal(np.array(kept[0]), x + y)
    again = add.run(["z"], {"x": kept[0], "y": kept[1]})[0]
    assert type(again) is np.ndarray
    np.testing.assert_array_equal(again, (x + y) + (x - y))


@pytest.mark.parametrize(
    ("feeds", "sentence"),
    [
        ({"x": floats(2, 3)}, "input 'y' is missing; it is tensor(float) of shape [N, 3]"),
        ({"x": floats(2, 3), "y": floats(2, 3), "k": floats(1)}, "no input 'k'; it has 'x', 'y'"),
        (
            {"x": floats(2, 3), "y": floats(2, 3).astype(np.float64)},
            "input 'y' is tensor(float) of shape [N, 3], not tensor(double)",
        ),
        ({"x": floats(2, 3), "y": mx.zeros((2, 3), mx.int32)}, "not tensor(int32)"),
        ({"x": floats(2, 3), "y": [[1.0, 2.0, 3.0]]}, "a NumPy or MLX array is wanted, not list"),
        ({"x": floats(2, 3), "y": floats(3)}, "not of shape [3]: its rank is 2"),
        ({"x": floats(2, 3), "y": floats(2, 4)}, "not of shape [2, 4]: dimension 1 must be 3"),
        ({"x": floats(2, 3), "y": floats(5, 3)}, "dimension 0, 'N', is 2 in input 'x'"),
    ],
)
def test_feeds_that_do_not_fit_are_one_clear_error_before_anything_runs(feeds: dict[str, Any], sentence: str) -> None:
    add = runtime(ADD)
    with pytest.raises(RunError, match=re.escape(sentence)):
        add.run(None, feeds)
    np.testing.assert_array_equal(
        add.run(["z"], {"x": np.ones((1, 3), np.float32)} | {"y": np.ones((1, 3), np.float32)})[0], 2
    )


def test_an_unknown_output_is_an_error() -> None:
    with pytest.raises(RunError, match="no output 'q'; it has 'z', 'd'"):
        runtime(ADD).run(["q"], {"x": floats(1, 3), "y": floats(1, 3)})


def test_a_node_that_fails_is_named_and_the_runtime_stays_usable() -> None:
    reshape = runtime("g (float[N] x) => (float[2, K] y) <int64[2] s = {2, -1}> { [split] y = Reshape(x, s) }")
    with pytest.raises(RunError, match=r"node 'split' \(Reshape\) failed: "):
        reshape.run(None, {"x": floats(3)})
    assert all(reshape.plan.graph.frame[slot] is None for slot in reshape.plan.dynamic)
    assert reshape.run(None, {"x": floats(4)})[0].shape == (2, 2)


def test_results_and_feeds_share_no_memory_with_the_model() -> None:
    same = runtime(
        "g (float[3] x) => (float[3] y, float[3] z) <float[3] w = {1, 2, 3}> { y = Identity(x) z = Identity(w) }"
    )
    x = floats(3)
    y, z = same.run(None, {"x": x})
    y[:], z[:] = 9, 9
    assert not np.any(x == 9)
    np.testing.assert_array_equal(same.run(None, {"x": x}), [x, np.array([1, 2, 3], np.float32)])


def test_results_share_memory_with_nothing() -> None:
    """Views of feeds, of constants and of each other become arrays of their own."""
    text = """g (float[2, 3] x, bool b)
        => (float[3, 2] t, float[2, 3] i, float[6] r, float[2, 3] w, float[1, 3] s, float[3] k)
    <float[3] c = {1, 2, 3}, int64[1] flat = {-1}, int64[1] one = {1}, int64[1] zero = {0}>
    { t = Transpose(x) i = Identity(x) r = Reshape(x, flat) k = Identity(c) s = Slice(x, zero, one)
      w = If(b) <then_branch = g () => (float[2, 3] y) { y = Identity(x) },
                 else_branch = g () => (float[2, 3] z) { z = Add(x, c) }> }"""
    views, x = runtime(text), floats(2, 3)
    x.setflags(write=False)
    feeds = {"x": x, "b": np.array(True)}
    first, second = views.run(None, feeds), views.run(None, feeds)
    arrays = [x, *first, *second]
    assert not any(np.shares_memory(a, b) for at, a in enumerate(arrays) for b in arrays[:at])
    for result in first:
        result[...] = 0
    for result, other in zip(views.run(None, feeds), second, strict=True):
        np.testing.assert_array_equal(result, other)


def test_a_weight_of_bytes_is_widened_once_and_one_of_four_bits_never() -> None:
    """On a CPU: a chain of casts and scales whose result takes at most four bytes a byte of the file."""

    def product(kind: int, size: int) -> Runtime:
        weight = helper.make_tensor("q", kind, [300, 400], rng.integers(0, 8, 120_000))
        scale = numpy_helper.from_array(np.float32([0.5]).reshape(()), "scale")
        nodes = [helper.make_node("Cast", ["q"], ["f"], to=size), helper.make_node("Mul", ["f", "scale"], ["w"])]
        nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
        ends = [helper.make_tensor_value_info(*end) for end in (("x", size, [1, 300]), ("y", size, [1, 400]))]
        graph = helper.make_graph(nodes, "g", [ends[0]], [ends[1]], [weight, scale])
        return Runtime(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), device="cpu")

    made = [product(kind, TensorProto.FLOAT) for kind in (TensorProto.INT8, TensorProto.UINT4)]
    assert [len(one.plan.steps()) for one in made] == [1, 3]
    kept = [[v for v in one.plan.graph.frame if isinstance(v, np.ndarray) and v.size == 120_000] for one in made]
    assert [value.dtype for value in kept[0]] == ([] if native.compiled() else [np.float32])  # [] once it is laid out
    assert len(kept[1]) == 1


def test_four_threads_take_turns() -> None:
    chain = runtime("g (float[N] x) => (float[N] y) { a = Mul(x, x) b = Add(a, x) c = Exp(b) y = Sub(c, a) }")
    faults: list[str] = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal(50 + seed).astype(np.float32)
        for _ in range(50):
            (y,) = chain.run(None, {"x": x})
            kept = chain.run(None, {"x": x}, as_numpy=False)[0]
            if not np.allclose(y, np.exp(x * x + x) - x * x, rtol=1e-5) or not np.array_equal(np.array(kept), y):
                faults.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


# -- types


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)], ids=str)
def test_every_type_passes_exactly(kind: Any, shape: tuple[int, ...]) -> None:
    info = [helper.make_tensor_value_info(name, kind.number, shape) for name in "xyz"]
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("If", ["c"], ["z"])]
    for name in ("then_branch", "else_branch"):
        inner = helper.make_graph(
            [helper.make_node("Identity", ["x"], ["t"])],
            name,
            [],
            [helper.make_tensor_value_info("t", kind.number, shape)],
        )
        nodes[1].attribute.append(helper.make_attribute(name, inner))
    graph = helper.make_graph(nodes, "g", [info[0], helper.make_tensor_value_info("c", TensorProto.BOOL, [])], info[1:])
    same = Runtime(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), device="cpu")
    x = np.full(shape, "é", object) if kind.name == "string" else np.ones(shape).astype(kind.numpy)
    for result in same.run(None, {"x": x, "c": np.array(True)}):
        assert result.dtype == kind.numpy
        assert result.shape == shape
        np.testing.assert_array_equal(result, x)


def test_conversions_keep_every_bit_and_never_narrow() -> None:
    for value in (
        np.array([1 / 3, 1e300]),
        np.array([2**63 + 1], np.uint64),
        np.array([2**53 + 1]),
        np.array([1j], np.complex64),
    ):
        assert to_numpy(to_mx(value)).tobytes() == value.tobytes()
    bits = np.arange(1 << 16, dtype=np.uint16)
    for half in (np.float16, ml_dtypes.bfloat16):
        assert to_numpy(to_mx(bits.view(half))).tobytes() == bits.tobytes()
    turned = bits.reshape(256, 256).T.view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_numpy(to_mx(turned)).view(np.uint16), turned.view(np.uint16))
    for host in (np.zeros(2, np.complex128), np.zeros(2, ml_dtypes.int4), np.array(["a"], object)):
        assert to_mx(host) is host


def test_float64_is_computed_in_float64() -> None:
    x = rng.standard_normal(100)
    (y,) = runtime("g (double[N] x) => (double[N] y) { a = Exp(x) y = Mul(a, x) }").run(None, {"x": x})
    np.testing.assert_allclose(y, np.exp(x) * x, rtol=1e-15)


def test_raw_bytes_of_a_npz_file_are_viewed_as_the_declared_type(tmp_path: Path) -> None:
    x = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", x=x)
    raw = np.load(tmp_path / "x.npz")["x"]
    assert raw.dtype.kind == "V"
    np.testing.assert_array_equal(
        runtime("g (bfloat16[N] x) => (bfloat16[N] y) { y = Identity(x) }").run(None, {"x": raw})[0], x
    )


def test_a_result_of_another_type_than_declared_is_an_error() -> None:
    wrong = runtime("g (float[N] x) => (double[N] y) { y = Add(x, x) }")
    with pytest.raises(RunError, match=r"output 'y' came as tensor\(float\); the model declares tensor\(double\)"):
        wrong.run(None, {"x": floats(2)})


# -- constants


def test_an_initializer_that_is_an_input_is_a_default_from_ir_4_on() -> None:
    text = "g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {10, 20}> { y = Add(x, w) }"
    x = np.array([1, 2], np.float32)
    new, old = runtime(text, ir_version=4), runtime(text, ir_version=3)
    np.testing.assert_array_equal(new.run(None, {"x": x})[0], [11, 22])
    np.testing.assert_array_equal(new.run(None, {"x": x, "w": x})[0], [2, 4])
    np.testing.assert_array_equal(old.run(None, {"x": x})[0], [11, 22])
    assert [info.name for info in old.get_inputs()] == ["x"]


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("value = float[2] {1, 2}", np.array([1, 2], np.float32)),
        ("value_float = 0.5", np.array(0.5, np.float32)),
        ("value_floats = [0.5, 2.0]", np.array([0.5, 2], np.float32)),
        ("value_int = 7", np.array(7)),
        ("value_ints = [7, 8]", np.array([7, 8])),
        ('value_string = "é"', np.array("é", object)),
        ('value_strings = ["a", "b"]', np.array(["a", "b"], object)),
    ],
)
def test_constants_of_every_form(attribute: str, expected: np.ndarray) -> None:
    kind = {"f": "float", "i": "int64", "O": "string"}[expected.dtype.kind]
    shape = f"[{len(expected)}]" if expected.ndim else ""
    (y,) = runtime(f"g () => ({kind}{shape} y) {{ y = Constant <{attribute}> () }}").run(None, {})
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("indices", [np.array([1, 5]), np.array([[0, 1], [1, 2]])], ids=["flat", "coordinates"])
def test_sparse_constants_and_initializers_come_dense(indices: np.ndarray) -> None:
    values = numpy_helper.from_array(np.array([3, 4], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices, "i"), [2, 3])
    node = helper.make_node("Constant", [], ["c"], sparse_value=sparse)
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "wc"]
    graph = helper.make_graph([node], "g", [], outputs, sparse_initializer=[sparse])
    for value in Runtime(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), device="cpu"
    ).run(None, {}):
        np.testing.assert_array_equal(value, [[0, 3, 0], [0, 0, 4]])


def test_steps_of_small_constants_run_while_planning() -> None:
    folded = runtime("""g (float[N] x) => (float[M] y) <int64[2] s = {2, -1}> {
        two = Constant <value_int = 2> () a = Mul(s, two) b = Add(a, two)
        c = ReduceSum <keepdims = 1> (b) y = Reshape(x, c)
    }""")
    assert [step.operator.name for step in folded.plan.steps()] == ["Reshape"]
    assert folded.run(None, {"x": floats(6)})[0].shape == (6,)


def test_random_values_are_drawn_in_every_run() -> None:
    draw = runtime("g () => (float[8] y) { y = RandomNormal <shape = [8]> () }")
    assert not np.array_equal(draw.run(None, {})[0], draw.run(None, {})[0])


def test_external_weights_are_read_from_the_models_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    proto = model("g (float[100] x) => (float[100] y) { y = Add(x, w) }")
    w = floats(100)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    x = floats(100)
    np.testing.assert_array_equal(Runtime(folder / "m.onnx", device="cpu").run(None, {"x": x})[0], x + w)
    bare = onnx.load(folder / "m.onnx", load_external_data=False)
    np.testing.assert_array_equal(Runtime(bare, device="cpu", base_dir=folder).run(None, {"x": x})[0], x + w)
    with pytest.raises(Lut4Error, match="base_dir"):
        Runtime(bare, device="cpu")
    next(e for e in bare.graph.initializer[0].external_data if e.key == "location").value = "../secret"
    (tmp_path / "secret").write_bytes(w.tobytes())
    with pytest.raises(Lut4Error, match="leads outside the model's folder"):
        Runtime(bare, device="cpu", base_dir=folder)


# -- problems


def test_every_problem_of_a_model_is_in_one_report() -> None:
    proto = model("""g (bool c, float[N] x) => (float[N] y) {
        [first] a = Frobnicate(x)
        [second] b = Relu <slope = 0.5> (a)
        [third] d = Add(x)
        [fourth] e = Cast(x)
        [fifth] f = Relu(x, x)
        y = If (c) <
            then_branch = t () => (float[N] p) { [sixth] p = Frobnicate(x) },
            else_branch = u () => (float[N] q) { [seventh] q = Add(x, nowhere) }
        > }""")
    with pytest.raises(Unsupported) as caught:
        Runtime(proto, device="cpu")
    text = str(caught.value)
    for sentence in (
        "node 'first': ai.onnx::Frobnicate is not supported at version 17",
        "node 'second': Relu has no attribute 'slope'",
        "node 'third': Add needs the input 'b'",
        "node 'fourth': Cast needs the attribute 'to'",
        "node 'fifth': Relu takes at most 1 inputs, not 2",
        "then_branch/sixth': ai.onnx::Frobnicate",
        "else_branch/seventh' reads 'nowhere', which nothing defines",
    ):
        assert sentence in text
    assert len(text.splitlines()) == 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("g (float[N] x) => (float[N] y) { [n] y = Relu(a) a = Exp(x) }",
         "node 'n' reads 'a', which is computed after it: the"),
        ("g (float[N] x) => (float[N] y) { [n] a = Add(x, y) y = Relu(a) }", "or has a cycle"),
        ("g (float[N] x) => (float[N] y) { y = Relu(x) y = Exp(x) }", "the name 'y' is defined twice"),
        ("g (float[N] x, float[N] x) => (float[N] y) { y = Relu(x) }", "the name 'x' is defined twice"),
        ("g (float[N] x) => (float[N] y, float[N] z) { y = Relu(x) }", "graph output 'z' is computed by no node"),
    ],
)  # fmt: skip
def test_broken_graphs_are_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(sentence)):
        runtime(text)


def test_a_model_without_the_standards_version_is_refused() -> None:
    proto = model("g (float[N] x) => (float[N] y) { y = Relu(x) }")
    del proto.opset_import[:]
    with pytest.raises(Unsupported, match="imports no version"):
        Runtime(proto, device="cpu")


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08"], ids=["empty", "text", "cut"])
def test_bytes_that_are_no_model_are_refused(data: bytes) -> None:
    with pytest.raises(Lut4Error):
        Runtime(data, device="cpu")


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(Lut4Error, match="tpu"):
        Runtime(model(ADD), device="tpu")


# -- what a plan tells


def test_a_plan_tells_what_runs_on_the_host_and_in_which_kernel() -> None:
    weight = Lookup4Weight(rng.integers(0, 256, 32, dtype=np.uint8), floats(4), formats.NF4, 8, 8, 16)
    arrays = {"packed": weight.packed, "scales": weight.scales, "codebook": weight.codebook}
    proto = model(
        "g (float[N, 8] x) => (float[M, 4] y, int64[2] s) { r = Constant <value_ints = [-1, 4]> () s = Shape(x) }"
    )
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    product = helper.make_node(
        "Lookup4MatMul", ["x", *arrays], ["p"], "product", domain=DOMAIN, **weight.attributes("float32")
    )
    proto.graph.node.extend([product, helper.make_node("Reshape", ["p", "r"], ["y"], "split")])
    planned = Runtime(proto, device="cpu")
    rows = {row["node"]: row for row in planned.plan.describe()}
    assert rows["product"]["where"] == planned.kernels["product"].name
    assert rows["split"]["where"] == planned.plan.place
    assert rows["Shape:s"]["where"] == "shape"
    x = floats(3, 8)
    np.testing.assert_allclose(
        planned.run(["y"], {"x": x})[0], (x @ formats.decode(weight)).reshape(-1, 4), rtol=1e-5, atol=1e-6
    )


def test_nodes_of_one_name_are_told_apart() -> None:
    twins = runtime("g (float[N] x) => (float[N] y, float[N] z) { [same] y = Exp(x) [same] z = Neg(x) [] w = Abs(x) }")
    assert [step.name for step in twins.plan.steps()] == ["same", "same:z", "Abs:w"]


def test_a_profile_names_operators_places_and_shapes(tmp_path: Path) -> None:
    chain = runtime("g (float[N] x) => (float[N] y) { a = Exp(x) b = Exp(a) y = Mul(b, a) }")
    rows = chain.profile({"x": floats(5)}, tmp_path / "trace.json")
    assert {(row["op"], row["count"], row["type"], row["shape"], row["bytes"]) for row in rows} == {
        ("Exp", 2, "float", "[5]", 40),
        ("Mul", 1, "float", "[5]", 20),
    }
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["Exp", "Exp", "Mul"]
    assert len(chain.plan.graph.steps) == 3


def test_running_never_imports_the_reference_evaluator() -> None:
    program = f"""
import sys, numpy as np
from onnx import parser
from lut4tool.runtime import Runtime
model = parser.parse_model('<ir_version: 8, opset_import: ["" : 20]> {ADD}')
Runtime(model, device="cpu").run(None, {{"x": np.ones((1, 3), np.float32), "y": np.ones((1, 3), np.float32)}})
assert not [name for name in sys.modules if name.startswith(("onnx.reference", "onnxruntime", "lut4tool.recognize"))]
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux alone")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_large_external_weight_is_in_memory_once(tmp_path: Path, dtype: Any) -> None:
    """320 MB in a file with an offset; in a fresh process, for a peak is for life."""
    count, offset = (320 << 20) // np.dtype(dtype).itemsize, 4096 + 64
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = onnx.TensorProto(name="w", dims=[count], data_type=kind, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", str(offset))):
        weight.external_data.add(key=key, value=value)
    nodes = [helper.make_node("Gather", ["w", "at"], ["y"])]
    infos = [helper.make_tensor_value_info("at", TensorProto.INT64, [3]), helper.make_tensor_value_info("y", kind, [3])]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    values = np.memmap(tmp_path / "w.bin", np.uint8, "w+", shape=offset + (320 << 20))[offset:].view(dtype)
    values[[1, count // 3, count - 1]] = [1, 2, 3]
    values.base.flush()
    program = f"""
import resource, sys
import numpy as np
from onnx import parser
from lut4tool.runtime import Runtime
small = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> {ADD}')
Runtime(small, device="cpu").run(None, {{"x": np.ones((1, 3), np.float32), "y": np.ones((1, 3), np.float32)}})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(y,) = Runtime(sys.argv[1], device="cpu").run(None, {{"at": np.array([1, {count // 3}, {count - 1}])}})
assert y.astype(float).tolist() == [1, 2, 3], y
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "m.onnx")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert int(done.stdout) < (320 + 64 + 32) * 1024
