"""Regions: what is compiled gives what the steps give, is bounded, and never stands for other values or shapes.

On a machine without a GPU, MLX's compiler of a CPU serves: the steps compute in MLX, as on a GPU.
"""

from __future__ import annotations

import io
import re
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from backend_cases import leaves, node_tests, reason_to_fail, value
from decoders import CARRY, VOCABULARY, concat, decoder, gqa
from places import HAS_GPU, compute_in

from lut4tool.runtime import Runtime, backend, dtypes, regions
from lut4tool.runtime.backend import BackendError, mx
from lut4tool.runtime.graph import RunError
from lut4tool.runtime.profile import Profile
from lut4tool.runtime.regions import KEPT, REMEMBERED, Region

FUSES = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="MLX fuses with g++ on a CPU")


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile: on a GPU as ever; on a CPU as on a GPU, where the backend has turned MLX's compiler off."""
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    monkeypatch.delenv(regions.SWITCH, raising=False)
    compute_in("mlx", monkeypatch)
    mx.enable_compile()
    yield
    if not HAS_GPU:
        mx.disable_compile()


def model(body: str, **tensors: Any) -> onnx.ModelProto:
    """A model from onnx's text: `inputs => outputs { nodes }`, and constants of these values."""
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> agraph {body}')
    made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tensors.items())
    for number, node in enumerate(made.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"
    return made


def found(runtime: Runtime) -> list[Region]:
    """Every region of a plan, the smaller ones that a region has become after it."""
    pending = [call for graph in runtime.plan.graphs() for call, *_ in graph.lines if isinstance(call, Region)]
    every = []
    while pending:
        every.append(pending.pop(0))
        pending += [call for call, *_ in every[-1].lines if isinstance(call, Region)]
    return every


def compiled(runtime: Runtime) -> list[list[str]]:
    """The operators of each region that has a function."""
    return [
        [step.operator.name for step in region.steps] for region in found(runtime) if any(region.functions.values())
    ]


def check(runtime: Runtime, proto: onnx.ModelProto, feeds: dict[str, np.ndarray], times: int = 1) -> None:
    """Run, and compare with onnx.reference."""
    expected = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    for _ in range(times):
        for mine, wanted in zip(runtime.run(None, feeds), expected, strict=True):
            assert mine.dtype == np.asarray(wanted).dtype
            np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=1e-6)


RANDOM = np.random.default_rng(4)
SQUARE = RANDOM.standard_normal((4, 4)).astype(np.float32)
#: Nothing that MLX would fuse, and shapes that are computed.
SHAPES = (
    "(float[a, n] x) => (float[b, c] y, int64[k] s) "
    "{ h = MatMul(x, w) t = Transpose(h) s = Shape(t) u = Reshape(t, s) y = MatMul(w, u) }"
)


def rows(count: int) -> dict[str, np.ndarray]:
    return {"x": RANDOM.standard_normal((count, 4)).astype(np.float32)}


# ---- what a function gives


def test_steps_are_compiled_when_shapes_come_again_and_give_what_they_gave() -> None:
    proto = model(SHAPES, w=SQUARE)
    runtime = Runtime(proto)
    check(runtime, proto, rows(3))
    assert compiled(runtime) == []
    check(runtime, proto, rows(3))
    assert compiled(runtime) == [["MatMul", "Transpose", "Shape", "Reshape", "MatMul"]]
    for count in (3, 2, 2, 3, 1, 2, 0, 0, 3):
        check(runtime, proto, rows(count))
    (region,) = found(runtime)
    assert region.compilations == len(region.functions) == 3


def operations(runtime: Runtime, x: np.ndarray) -> list[str]:
    """What the one function of a runtime's one region calls in MLX."""
    (region,), text = found(runtime), io.StringIO()
    (function,) = region.functions.values()
    with mx.stream(runtime.device):
        mx.export_to_dot(text, function([mx.array(x)])[0])
    return re.findall(r'label ?= ?"([A-Za-z]+)"', text.getvalue())


def test_no_operations_are_fused() -> None:
    proto = model("(float[n] x) => (float[n] y) { a = Mul(x, x) b = Exp(a) c = Neg(b) y = Add(c, x) }")
    runtime = Runtime(proto)
    x = np.linspace(-1, 1, 33, dtype=np.float32)
    check(runtime, proto, {"x": x}, times=3)
    assert compiled(runtime) == [["Mul", "Exp", "Neg", "Add"]]
    assert operations(runtime, x) == ["Multiply", "Exp", "Negative", "Add"]
    theirs, text = mx.compile(lambda x: mx.exp(x * x)), io.StringIO()  # what others compile is fused as ever
    mx.export_to_dot(text, theirs(mx.array(x)))
    assert "Compiled" in text.getvalue()


def test_two_that_trace_at_once_fuse_nothing_until_both_are_done() -> None:
    def fused() -> bool:
        text = io.StringIO()
        mx.export_to_dot(text, mx.compile(lambda x: mx.exp(x * x))(mx.ones(3)))
        return "Compiled" in text.getvalue()

    found = [fused()]
    for on in (False, False, True, True):
        backend.set_fusing(on)
        found.append(fused())
    assert found == [True, False, False, False, True]


@FUSES
def test_operations_are_fused_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(regions.SWITCH, "fuse")
    proto = model("(float[n] x) => (float[n] y) { a = Mul(x, x) b = Exp(a) c = Neg(b) y = Add(c, x) }")
    runtime = Runtime(proto)
    x = np.linspace(-1, 1, 33, dtype=np.float32)
    check(runtime, proto, {"x": x}, times=3)
    assert operations(runtime, x) == ["CompiledMultiplyExpNegativeAdd"]


def operators() -> list[Any]:
    """The standard's node tests that draw no random numbers; all of them take a minute, so most are marked slow."""
    drawn = regions._RANDOM | {"Dropout"}
    usable = [
        name
        for name, test in sorted(node_tests().items())
        if reason_to_fail(name) is None and not any(node.op_type in drawn for node in test.model.graph.node)
    ]
    marks = [[] if number % 40 == 5 else [pytest.mark.slow] for number in range(len(usable))]
    return [pytest.param(name, marks=mark) for name, mark in zip(usable, marks, strict=True)]


@pytest.mark.parametrize("name", operators())
def test_an_operator_compiled_gives_what_it_gives_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "LEAST", 1)
    test = node_tests()[name]
    runtime = Runtime(test.model)
    for given, _ in test.data_sets:
        names = [item.name for item in test.model.graph.input]
        feeds = {key: value(data) for key, data in zip(names, given, strict=False)}
        first, *later = (runtime.run(None, feeds) for _ in range(3))
        for results in later:
            for mine, before in zip(leaves(results), leaves(first), strict=True):
                assert np.asarray(mine).dtype == np.asarray(before).dtype
                assert repr(np.asarray(mine).tolist()) == repr(np.asarray(before).tolist())


# ---- what is not in a region, or in one of its own


def test_a_step_that_reads_values_parts_two_regions_and_its_error_names_it() -> None:
    proto = model(
        "(float[a, n] x, int64[k] at) => (float[k, n] y) "
        "{ h = MatMul(x, w) t = Transpose(h) g = Gather<axis=1>(t, at) u = Transpose(g) y = MatMul(u, w) }",
        w=SQUARE,
    )
    runtime = Runtime(proto)
    at = np.array([2, 0, -1])
    check(runtime, proto, {**rows(3), "at": at}, times=3)
    assert compiled(runtime) == [["MatMul", "Transpose"], ["Transpose", "MatMul"]]
    assert [row["region"] for row in runtime.plan.describe()] == ["1", "1", "", "2", "2"]
    with pytest.raises(RunError, match=r"node 'Gather_2' \(Gather\) failed: .*index 3 is out of range"):
        runtime.run(None, {**rows(3), "at": at + 1})
    check(runtime, proto, {**rows(3), "at": at})


@pytest.mark.parametrize("seen", [1, 3])
def test_a_shape_that_fails_names_its_node_and_spoils_nothing(seen: int) -> None:
    proto = model(
        "(float[a, n] x) => (float[b, c] y) { h = MatMul(x, w) u = Reshape(h, two) y = Transpose(u) }",
        w=SQUARE,
        two=np.array([2, -1]),
    )
    runtime = Runtime(proto)
    check(runtime, proto, rows(2), times=seen)
    wrong = np.zeros((2, 5), np.float32)
    for _ in range(3):
        with pytest.raises(RunError, match=r"node 'MatMul_0' \(MatMul\) failed"):
            runtime.run(None, {"x": wrong})
    assert all(runtime.plan.graph.frame[slot] is None for slot in runtime.plan.dynamic)
    check(runtime, proto, rows(2), times=3)
    assert compiled(runtime) == [["MatMul", "Reshape", "Transpose"]]


def test_random_numbers_are_drawn_in_every_run() -> None:
    proto = model(
        "(float[a, n] x) => (float[a, n] y) { h = MatMul(x, w) r = RandomNormalLike(h) t = MatMul(r, w) "
        "y = MatMul(t, w) }",
        w=SQUARE,
    )
    runtime, feeds = Runtime(proto), rows(2)
    results = [runtime.run(None, feeds)[0].tobytes() for _ in range(4)]
    assert len(set(results)) == 4
    assert compiled(runtime) == [["MatMul", "MatMul"]]


def test_no_operator_of_the_standard_that_draws_is_forgotten() -> None:
    # Dropout draws in training only, where it reads its data; the others say so for the order of their sums.
    marked = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.non_deterministic}
    told = {"Dropout", "AffineGrid", "CausalConvWithState", "DepthToSpace", "LinearAttention", "SpaceToDepth"}
    assert marked - told - {"SequenceMap"} == regions._RANDOM | regions._APART


def test_what_a_body_captures_is_not_compiled_into_it() -> None:
    proto = model(
        "(float[a, n] x, bool flag) => (float[a, n] y) { h = MatMul(x, w) g = MatMul(h, w) "
        "y = If(flag) <then_branch = yes () => (float[p, q] o) { s = MatMul(h, w) o = MatMul(s, w) }, "
        "else_branch = no () => (float[p, q] o) { s = Transpose(g) t = Transpose(s) o = MatMul(t, w) }> }",
        w=SQUARE,
    )
    runtime = Runtime(proto)
    for flag in (True, False, True, True, False, False, True):
        check(runtime, proto, {**rows(3), "flag": np.array(flag)})
    assert len(compiled(runtime)) == 3


def test_a_host_value_is_part_of_what_a_function_is_for() -> None:
    # The number of an iteration is a host value, of the same shape every time.
    proto = model(
        "(float[a, n] x, int64 trips) => (float[a, n] y, float[t, a, n] each) { y, each = Loop(trips, , x) <body = "
        "turn (int64 i, bool go, float[a, n] before) => (bool on, float[a, n] after, float[a, n] out) { "
        "on = Identity(go) f = Cast<to = 1>(i) m = MatMul(before, w) out = Mul(m, f) after = MatMul(out, w) }> }",
        w=SQUARE,
    )
    runtime, x = Runtime(proto), rows(3)["x"]
    for _ in range(4):
        last, each = runtime.run(None, {"x": x, "trips": np.array(3)})
        wanted, after = [], x.astype(np.float64)
        for turn in range(3):
            wanted.append(after @ SQUARE * turn)
            after = wanted[-1] @ SQUARE
        np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(last, after, rtol=1e-5, atol=1e-5)
    assert sum(region.compilations for region in found(runtime)) >= 3


# ---- what is bounded


def test_a_thousand_lengths_compile_little_and_keep_less() -> None:
    proto = model(SHAPES, w=SQUARE)
    runtime = Runtime(proto)
    for count in range(1000):
        runtime.run(None, rows(count % 499 + 1))
    assert all(region.compilations == 0 for region in found(runtime))
    order = RANDOM.integers(1, 60, 1500)
    for count in order:
        runtime.run(None, rows(int(count)))
    for region in found(runtime):
        assert len(region.functions) <= KEPT
        assert len(region._calls) <= REMEMBERED
    whole = found(runtime)[0]
    assert KEPT < whole.compilations < 4 * KEPT
    check(runtime, proto, rows(7))


def test_lengths_that_come_in_turns_are_compiled_once() -> None:
    proto = model(SHAPES, w=SQUARE)
    runtime = Runtime(proto)
    for _ in range(6):
        for count in range(1, KEPT + 1):
            runtime.run(None, rows(count))
    (whole, *_) = found(runtime)
    assert whole.compilations == len(whole.functions) == KEPT


def test_functions_that_hold_large_arrays_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "KEPT_BYTES", 1_000_000)
    proto = model("(float[n] x) => (float[n] y) { s = Shape(x) o = ConstantOfShape(s) t = Transpose(x) y = Sub(t, o) }")
    runtime = Runtime(proto)
    for _ in range(3):
        for count in (100_000, 100_001, 100_002):  # 400,000 bytes of zeros each
            check(runtime, proto, {"x": RANDOM.standard_normal(count).astype(np.float32)})
    (region,) = found(runtime)
    assert 3 <= region.compilations <= 6
    assert len(region.functions) == 2


# ---- decoding loops


@pytest.mark.parametrize("attention", [gqa, concat])
def test_in_a_decoding_loop_the_steps_between_the_caches_are_compiled_once(attention: Any) -> None:
    proto = decoder(attention)
    runtime, plain = Runtime(proto), Runtime(proto)
    for graph in plain.plan.graphs():
        graph.watch(lambda step: step.call)
    state, other = runtime.state(CARRY, chunk=16), plain.state(CARRY, chunk=16)
    text = RANDOM.integers(0, VOCABULARY, (1, 40))
    counts = []
    for start, stop in [(0, 4), *((at, at + 1) for at in range(4, 40))]:
        feeds = {"input_ids": text[:, start:stop], "attention_mask": np.ones((1, stop), np.int64)}
        mine, wanted = (one.run(["logits"], feeds)[0] for one in (state, other))
        np.testing.assert_array_equal(mine, wanted)
        counts.append(sum(region.compilations for region in found(runtime)))
    assert state.in_place == set(CARRY)
    assert counts[12] == counts[-1] > 0
    served = sum(len(names) for names in compiled(runtime))
    assert served > len(runtime.plan.graph.steps) / 3
    assert not any("GroupQueryAttention" in names for names in compiled(runtime))


# ---- switches, threads, what is seen


@pytest.mark.parametrize("switch", [regions.SWITCH, "MLX_DISABLE_COMPILE"])
def test_a_switch_turns_compiling_off(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "0" if switch == regions.SWITCH else "1")
    if switch != regions.SWITCH:
        mx.disable_compile()  # MLX reads the variable when it starts
    proto = model(SHAPES, w=SQUARE)
    runtime = Runtime(proto)
    check(runtime, proto, rows(2), times=3)
    assert found(runtime) == []


def test_a_word_that_the_switch_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(regions.SWITCH, "yes")
    with pytest.raises(BackendError, match="LUT4TOOL_COMPILE is 'yes'; it takes 0, 1, fuse"):
        Runtime(model(SHAPES, w=SQUARE))


def test_nothing_is_compiled_where_mlx_would_fuse_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_set_compile_mode", lambda: None)
    proto = model(SHAPES, w=SQUARE)
    runtime = Runtime(proto)
    check(runtime, proto, rows(2), times=3)
    assert found(runtime) == []


def test_on_a_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "HOST", mx.cpu)
    compute_in("numpy", monkeypatch)
    runtime = Runtime(model(SHAPES, w=SQUARE), device="cpu")
    assert backend.kind(runtime.device) == "cpu"
    assert found(runtime) == []


def test_functions_serve_in_every_thread() -> None:
    proto = model(SHAPES, w=SQUARE)
    runtime, faults = Runtime(proto), []
    check(runtime, proto, rows(3), times=2)

    def work() -> None:
        try:
            for count in (3, 2, 3, 2, 3):
                check(runtime, proto, rows(count))
        except BaseException as error:  # noqa: BLE001 - for the test's own thread
            faults.append(error)

    for _ in range(3):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert faults == []
    check(runtime, proto, rows(3))


def test_functions_released_in_another_thread_are_not_taken_for_others() -> None:
    # A function is known to MLX's compiler by its address, which Python uses again.
    for scale in range(1, 9):
        proto = model("(float[a, n] x) => (float[n, a] y) { h = MatMul(x, w) y = Transpose(h) }", w=scale * SQUARE)
        runtime = Runtime(proto)
        thread = threading.Thread(target=lambda r=runtime, p=proto: check(r, p, rows(3), times=3))
        thread.start()
        thread.join()
        check(runtime, proto, rows(3), times=2)
        del runtime


def test_a_profile_shows_every_step_and_leaves_the_regions() -> None:
    proto = model(SHAPES, w=SQUARE)
    runtime = Runtime(proto)
    check(runtime, proto, rows(3), times=2)
    with Profile(runtime.plan) as profile:
        check(runtime, proto, rows(3))
    assert [event.step.operator.name for event in profile.events] == [node.op_type for node in proto.graph.node]
    assert len(compiled(runtime)) == 1
    check(runtime, proto, rows(3))
