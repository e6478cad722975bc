"""Decoding loops: carried outputs, caches in place, generation against onnxruntime, many lengths in flat memory."""

from __future__ import annotations

import gc
import re
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import onnx
import pytest
from decoders import CARRY, GROUPS, SIZE, VOCABULARY, concat, decoder, gqa, greedy
from noise import TABLE, gap, session
from places import HAS_GPU, place  # noqa: F401 - a fixture

from lut4tool.produce import quantize_file
from lut4tool.rewrite import rewrite
from lut4tool.runtime import Runtime
from lut4tool.runtime import session as session_module
from lut4tool.runtime.cache import Cache
from lut4tool.runtime.graph import RunError
from lut4tool.runtime.state import State

PROMPT = np.random.default_rng(1).integers(0, VOCABULARY, (2, 5))


class Theirs:
    """The same loop in onnxruntime, the carried values as NumPy arrays; `outputs` are those of the last run."""

    def __init__(self, model: onnx.ModelProto, batch: int = 2) -> None:
        self.session = session(model)
        self.names = [output.name for output in self.session.get_outputs()]
        kinds = {
            value.name: np.float16 if "float16" in value.type else np.float32 for value in self.session.get_inputs()
        }
        self.past = {name: np.zeros((batch, GROUPS, 0, SIZE), kinds[name]) for name in CARRY}
        self.outputs: dict[str, np.ndarray] = {}

    def __call__(self, feeds: Any) -> np.ndarray:
        self.outputs = dict(zip(self.names, self.session.run(None, {**feeds, **self.past}), strict=True))
        self.past = {name: self.outputs[source] for name, source in CARRY.items()}
        return self.outputs["logits"]


def ours(state: State) -> Any:
    return lambda feeds: state.run(["logits"], feeds)[0]


def hidden(body: str = "h = Tanh(s)") -> onnx.ModelProto:
    """A recurrent model: s = x @ w + previous."""
    text = f"agraph (float[batch, 4] x, float[batch, 4] before) => (float[batch, 4] h) {{ s = Add(x, before) {body} }}"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')


# ---- generation


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("attention", [gqa, concat])
def test_greedy_generation_equals_onnxruntime_token_for_token(attention: Any) -> None:
    model = decoder(attention)
    state = Runtime(model).state(CARRY, chunk=8)
    theirs = Theirs(model)
    expected, found = greedy(theirs, PROMPT, [5, 5], 40), greedy(ours(state), PROMPT, [5, 5], 40)
    assert found.tolist() == expected.tolist()
    assert len(set(expected.ravel().tolist())) > 12
    assert state.in_place == set(CARRY)
    for name, value in state.values.items():
        assert isinstance(value, mx.array)
        assert gap(np.array(value), theirs.past[name]).largest <= TABLE[np.dtype(np.float32)]


@pytest.mark.usefixtures("place")
def test_rows_of_different_lengths_share_a_cache() -> None:
    model = decoder(gqa)
    state = Runtime(model).state(CARRY, chunk=4)
    expected, found = greedy(Theirs(model), PROMPT, [5, 2], 20), greedy(ours(state), PROMPT, [5, 2], 20)
    assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("attention", [gqa, concat])
def test_halves_stay_within_their_type_over_a_given_text(attention: Any) -> None:
    model = decoder(attention, np.float16)
    state, theirs = Runtime(model).state(CARRY, chunk=8), Theirs(model)
    text, largest = np.random.default_rng(2).integers(0, VOCABULARY, (2, 30)), 0.0
    for start, stop in [(0, 5), *((at, at + 1) for at in range(5, 30))]:
        feeds = {"input_ids": text[:, start:stop], "attention_mask": np.ones((2, stop), np.int64)}
        largest = max(largest, gap(ours(state)(feeds), theirs(feeds)).largest)
    assert largest <= TABLE[np.dtype(np.float16)]
    for name, value in state.values.items():
        assert gap(np.array(value), theirs.past[name]).largest <= TABLE[np.dtype(np.float16)]


SPANS = ((0, 4), (4, 5), (5, 8), (8, 9))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("attention", "spans", "padding"),
    [
        pytest.param(concat, SPANS, 0, id="concat"),
        pytest.param(gqa, SPANS, 0, id="gqa"),
        pytest.param(gqa, ((0, 4), (4, 5), (5, 6), (6, 7)), 2, id="rows of different lengths"),
        pytest.param(gqa, (*SPANS, (6, 7), (7, 12)), 0, id="steps taken back"),
    ],
)
def test_a_state_gives_what_plain_runs_give_bit_for_bit(attention: Any, spans: Any, padding: int) -> None:
    runtime, state = Runtime(decoder(attention)), Runtime(decoder(attention)).state(CARRY, chunk=3)
    past: dict[str, Any] = {name: np.zeros((2, GROUPS, 0, SIZE), np.float32) for name in CARRY}
    for start, stop in spans:
        ids = np.arange(2 * start, 2 * stop).reshape(2, -1)
        mask = (np.arange(stop) < np.array([[stop], [stop - padding]])).astype(np.int64)
        plain = runtime({"input_ids": ids, "attention_mask": mask, **past})
        carried = dict(zip(plain, state.run(None, {"input_ids": ids, "attention_mask": mask}), strict=True))
        past = {name: plain[source] for name, source in CARRY.items()}
        for name, value in plain.items():
            np.testing.assert_array_equal(carried[name], value, err_msg=f"{name}, steps {start} to {stop}")


# ---- where the values are


@pytest.mark.usefixtures("place")
def test_a_carried_value_is_the_one_that_the_run_made(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, seen = Runtime(hidden()), []
    evaluate = runtime.evaluate

    def watched(names: Any, feeds: Any) -> list[Any]:
        seen.append((feeds["before"], *evaluate(names, feeds)))
        return list(seen[-1][1:])

    monkeypatch.setattr(runtime, "evaluate", watched)
    state = runtime.state({"before": "h"})
    for _ in range(3):
        state.run(None, {"x": np.ones((2, 4), np.float32)})
    (_, *_, first), (second, *_, third), (fourth, *_) = seen
    assert second is first
    assert fourth is third


def test_mlx_arrays_pass_through_a_run_without_numpy(place: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def refuse(value: Any) -> Any:
        raise AssertionError(f"{type(value).__name__} went through NumPy")

    same = Runtime(onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> agraph (float[n] x) => (float[n] y, float[n] z) '
        "{ y = Identity(x) z = Add(x, x) }"
    ))  # fmt: skip
    x = mx.array(np.arange(8, dtype=np.float32))
    if place == "mlx":
        monkeypatch.setattr(session_module, "to_numpy", refuse)
        assert same.run(["y"], {"x": x}, as_numpy=False)[0] is x
    y, z = same.run(None, {"x": x}, as_numpy=False)
    assert isinstance(y, mx.array)
    assert isinstance(z, mx.array)
    assert (y.tolist(), z.tolist()) == (x.tolist(), (2 * x).tolist())


@pytest.mark.parametrize("attention", [gqa, concat])
def test_a_cache_is_written_in_place_and_grows_by_chunks(attention: Any, place: str) -> None:  # noqa: F811
    state = Runtime(decoder(attention)).state(CARRY, chunk=16)
    buffers, capacities = [], []
    for total in range(1, 41):
        state.run(["logits"], {"input_ids": np.array([[total]]), "attention_mask": np.ones((1, total), np.int64)})
        cache = state._held["past_key_1"]
        view = cache.buffer if isinstance(cache.buffer, np.ndarray) else np.array(cache.buffer, copy=False)
        buffers.append(view.__array_interface__["data"][0])
        capacities.append(cache.capacity)
        assert state.values["past_key_1"].shape == (1, GROUPS, total, SIZE)
    assert capacities == [16] * 16 + [32] * 16 + [48] * 8
    copies = [len(set(part)) - 1 for part in (buffers[:16], buffers[16:32], buffers[32:])]
    # A GPU may still hold the buffer of the step before when the next begins: MLX then copies it.
    assert sum(copies) <= (12 if HAS_GPU and place == "mlx" else 0)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("attention", [gqa, concat])
def test_values_taken_from_a_state_do_not_change_with_it(attention: Any) -> None:
    state = Runtime(decoder(attention)).state(CARRY)
    feeds = {"input_ids": np.array([[3, 4]]), "attention_mask": np.ones((1, 2), np.int64)}
    _, kept = state.run(["logits", "present_key_0"], feeds, as_numpy=False)
    before, taken = np.array(kept), state.values
    values = {name: np.array(value) for name, value in taken.items()}
    for total in (2, 3) if attention is gqa else (3, 4):  # the first writes a step again
        state.run(["logits"], {"input_ids": np.array([[5]]), "attention_mask": np.ones((1, total), np.int64)})
    np.testing.assert_array_equal(np.array(kept), before)
    assert all(np.array_equal(np.array(taken[name]), values[name]) for name in taken)
    assert (attention is concat) == np.array_equal(np.array(state.values["past_key_0"])[:, :, :2], before)


@pytest.mark.usefixtures("place")
def test_a_cache_may_grow_along_any_axis_and_keeps_its_type_and_sizes() -> None:
    text = "agraph (float[a, n] x, float[a, past] before) => (float[a, total] after, float[total, a] turned)"
    body = "{ after = Concat<axis=-1>(before, x, x) turned = Transpose(after) }"
    state = Runtime(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text} {body}')).state(
        {"before": "after"}, chunk=5
    )
    assert state.in_place == {"before"}
    whole = np.zeros((2, 0), np.float32)
    for size in (1, 0, 3, 2):
        x = np.arange(2 * size, dtype=np.float32).reshape(2, size)
        whole = np.concatenate([whole, x, x], axis=1)
        after, turned = state.run(None, {"x": x})
        np.testing.assert_array_equal(after, whole)
        np.testing.assert_array_equal(turned, whole.T)
    with pytest.raises(RunError, match=r"float32 \[3, 2\] cannot follow a cache of .*float32 \[2, 12\]"):
        state.run(None, {"x": np.zeros((3, 1), np.float32)})
    np.testing.assert_array_equal(np.array(state.values["before"]), whole)


def test_a_cache_takes_no_other_type() -> None:
    cache = Cache(np.zeros(2), chunk=4)
    with pytest.raises(ValueError, match=r"float32 \[1\] cannot follow a cache of float64 \[2\]"):
        cache.append(np, [np.ones(1, np.float32)], 0)


@pytest.mark.parametrize(
    ("attention", "op", "read"),
    [
        (gqa, "Shape", "past_key_0"),
        (gqa, "Identity", "past_key_0"),
        (gqa, "Neg", "present_key_0"),
        (concat, "Neg", "past_key_0"),
        (concat, "Identity", "past_key_0"),
    ],
)
def test_a_cache_that_the_graph_looks_at_is_not_written_in_place(attention: Any, op: str, read: str) -> None:
    model = decoder(attention)
    model.graph.node.append(onnx.helper.make_node(op, [read], ["seen"]))
    kind = onnx.TensorProto.INT64 if op == "Shape" else onnx.TensorProto.FLOAT
    model.graph.output.append(onnx.helper.make_tensor_value_info("seen", kind, None))
    state, theirs = Runtime(model).state(CARRY), Theirs(model, batch=1)
    assert state.in_place == set(CARRY) - {"past_key_0"}
    for total in (1, 2, 3):
        feeds = {"input_ids": np.array([[7 * total]]), "attention_mask": np.ones((1, total), np.int64)}
        theirs(feeds)
        assert gap(state.run(["seen"], feeds)[0], theirs.outputs["seen"]).largest <= TABLE[np.dtype(np.float32)]


@pytest.mark.parametrize(
    ("body", "grown"),
    [
        ("after = Concat<axis=0>(before)", [2, 2]),
        ("after = Concat<axis=0>(before, before)", [4, 8]),
        ("after = Concat<axis=0>(x, before)", [3, 4]),
        ("after = Concat<axis=0>(before, x) seen = If(yes) <then_branch = g () => (float[n] o) { o = Neg(before) }, "
         "else_branch = h () => (float[m] o) { o = Neg(x) }>", [3, 4]),
    ],
)  # fmt: skip
def test_what_else_concat_may_do_with_a_value_is_not_done_in_place(body: str, grown: list[int]) -> None:
    text = "agraph (float[one] x, float[past] before) => (float[total] after) <bool yes = {1}>"
    state = Runtime(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text} {{ {body} }}')).state(
        {"before": "after"}
    )
    assert state.in_place == set()
    x = np.ones(1, np.float32)
    sizes = [
        state.run(["after"], {"x": x, "before": np.zeros(2, np.float32)})[0].size,
        state.run(["after"], {"x": x})[0].size,
    ]
    assert sizes == grown


# ---- a state's life


def test_a_state_starts_from_zeros_or_from_what_is_fed() -> None:
    runtime, x = Runtime(hidden()), np.full((3, 4), 0.5, np.float32)
    state, other = runtime.state({"before": "h"}), runtime.state({"before": "h"})
    assert state.values == {}
    np.testing.assert_array_equal(state.run(None, {"x": x})[0], runtime.run(None, {"x": x, "before": 0 * x})[0])
    first, (second,) = np.array(state.values["before"]), state.run(None, {"x": x})
    np.testing.assert_array_equal(second, runtime.run(None, {"x": x, "before": first})[0])
    np.testing.assert_array_equal(other.run(None, {"x": x, "before": first})[0], second)
    np.testing.assert_array_equal(state.run(None, {"x": x, "before": first})[0], second)
    state.reset()
    np.testing.assert_array_equal(state.run(None, {"x": x})[0], first)


@pytest.mark.parametrize("attention", [gqa, concat])
def test_a_run_that_fails_changes_nothing(attention: Any) -> None:
    runtime = Runtime(decoder(attention))
    state, other = runtime.state(CARRY), runtime.state(CARRY)
    step = [{"input_ids": np.array([[n]]), "attention_mask": np.ones((1, n), np.int64)} for n in (1, 2)]
    other.run(None, step[0])
    state.run(None, step[0])
    with pytest.raises(RunError, match="'logits2'"):
        state.run(["logits2"], step[1])
    with pytest.raises(RunError, match="node_"):
        state.run(None, {**step[1], "input_ids": np.array([[VOCABULARY + 1]])})
    with pytest.raises(RunError, match="input 'attention_mask' is missing"):
        state.run(None, {"input_ids": step[1]["input_ids"]})
    assert {name: value.shape for name, value in state.values.items()} == dict.fromkeys(CARRY, (1, GROUPS, 1, SIZE))
    for found, expected in zip(state.run(None, step[1]), other.run(None, step[1]), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("attention", [gqa, concat])
def test_a_run_that_fails_after_the_caches_are_written_changes_nothing(attention: Any) -> None:
    model = decoder(attention)
    model.graph.node.append(onnx.helper.make_node("Gather", ["logits", "row"], ["picked"], name="pick"))
    model.graph.input.append(onnx.helper.make_tensor_value_info("row", onnx.TensorProto.INT64, []))
    model.graph.output.append(onnx.helper.make_tensor_value_info("picked", onnx.TensorProto.FLOAT, None))
    runtime = Runtime(model)
    state, other = runtime.state(CARRY), runtime.state(CARRY)
    assert state.in_place == set(CARRY)
    for one in (state, other):
        one.run(
            None,
            {"input_ids": np.ones((2, 1), np.int64), "attention_mask": np.ones((2, 1), np.int64), "row": np.array(0)},
        )
    before = {name: np.array(value) for name, value in state.values.items()}
    feeds = {"input_ids": np.full((2, 3), 5), "attention_mask": np.ones((2, 4), np.int64), "row": np.array(9)}
    with pytest.raises(RunError, match="'pick'"):
        state.run(None, feeds)
    assert all(np.array_equal(np.array(value), before[name]) for name, value in state.values.items())
    mask = np.array([[1, 1], [1, 0]])  # the second row writes its first step again: nothing of the failed run is left
    feeds = {"input_ids": np.full((2, 1), 8), "attention_mask": mask, "row": np.array(0)}
    for found, expected in zip(state.run(None, feeds), other.run(None, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_step_that_leaves_a_hole_in_the_cache_is_an_error() -> None:
    state = Runtime(decoder(gqa)).state(CARRY)
    state.run(None, {"input_ids": np.array([[1]]), "attention_mask": np.ones((1, 1), np.int64)})
    with pytest.raises(RunError, match="has no room for 1 steps after 2"):
        state.run(None, {"input_ids": np.array([[1]]), "attention_mask": np.ones((1, 3), np.int64)})


@pytest.mark.parametrize(
    ("carry", "chunk", "sentence"),
    [
        ({"q": "h"}, 1, "'q' cannot carry 'h': the model has no input 'q'"),
        ({"before": "q"}, 1, "'before' cannot carry 'q': the model has no output 'q'"),
        ({"before": "n"}, 1, "'before' cannot carry 'n': it is tensor(float), not tensor(int64)"),
        ({"before": "h"}, 0, "a cache grows by at least 1 step at a time, not 0"),
    ],
)
def test_what_cannot_be_carried_is_refused(carry: dict[str, str], chunk: int, sentence: str) -> None:
    model = hidden("h = Tanh(s) n = Shape(s)")
    model.graph.output.append(onnx.helper.make_tensor_value_info("n", onnx.TensorProto.INT64, [2]))
    with pytest.raises(RunError, match=re.escape(sentence)):
        Runtime(model).state(carry, chunk)


def test_a_first_value_that_does_not_fit_is_refused() -> None:
    state = Runtime(decoder(gqa)).state(CARRY)
    feeds = {"input_ids": np.array([[1]]), "attention_mask": np.ones((1, 1), np.int64)}
    with pytest.raises(RunError, match="input 'past_key_0' is tensor"):
        state.run(None, {**feeds, "past_key_0": np.zeros((1, GROUPS, 0, SIZE), np.float64)})


# ---- many lengths


def lookup_decoder(folder: Path) -> Path:
    """The decoder with 4-bit weights, rewritten to our operators."""
    onnx.save(decoder(concat), folder / "float.onnx")
    quantize_file(folder / "float.onnx", folder / "chains.onnx", block_size=16)
    report = rewrite(folder / "chains.onnx", folder / "packed.onnx")
    assert len(report.rewritten) >= 12
    return folder / "packed.onnx"


@dataclass(frozen=True)
class Memory:
    """What is alive: bytes of MLX arrays, bytes that Python and NumPy hold, Python objects, resident bytes."""

    arrays: int
    traced: int
    objects: int
    resident: int


def memory() -> Memory:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if sys.platform == "linux" else 0
    return Memory(mx.get_active_memory(), tracemalloc.get_traced_memory()[0], len(gc.get_objects()), resident)


def run_lengths(path: Path, lengths: range, monkeypatch: pytest.MonkeyPatch) -> tuple[Memory, Memory]:
    """Run prompts of these lengths; return what is alive after the first half and after the second."""
    runtime = Runtime(path)

    def run(length: int) -> None:
        past = {name: np.zeros((1, GROUPS, 0, SIZE), np.float32) for name in CARRY}
        feeds = {"input_ids": np.full((1, length), 3), "attention_mask": np.ones((1, length), np.int64)}
        assert runtime.run(["logits"], {**feeds, **past})[0].shape == (1, length, VOCABULARY)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel was built for one more length")

    for length in (*range(1, 18), lengths.stop):  # kernels are built on first use, for few rows and for many
        run(length)
    for name in ("metal_kernel", "cuda_kernel"):
        monkeypatch.setattr(mx.fast, name, refuse)
    marks, middle = [], len(lengths) // 2
    for part in (lengths[:middle], lengths[middle:]):
        for length in part:
            run(length)
        marks.append(memory())
    return marks[0], marks[1]


def test_forty_lengths_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lookup_decoder(tmp_path)
    tracemalloc.start()
    try:
        middle, end = run_lengths(path, range(18, 58), monkeypatch)
    finally:
        tracemalloc.stop()
    assert middle.arrays == end.arrays
    assert end.traced - middle.traced < 40_000  # one activation of the longest prompt takes 16,000
    assert end.objects - middle.objects < 30


@pytest.mark.slow
def test_a_thousand_lengths_take_flat_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    middle, end = run_lengths(lookup_decoder(tmp_path), range(3, 1003), monkeypatch)
    assert middle.arrays == end.arrays
    assert end.objects - middle.objects < 30
    assert end.resident - middle.resident < 64 << 20  # the scores of the longest prompt take 16 MB


@pytest.mark.slow
@pytest.mark.parametrize("attention", [gqa, concat])
def test_a_thousand_tokens_equal_onnxruntime(attention: Any) -> None:
    model = decoder(attention)
    state = Runtime(model).state(CARRY)
    expected, found = greedy(Theirs(model), PROMPT, [5, 5], 1000), greedy(ours(state), PROMPT, [5, 5], 1000)
    assert found.tolist() == expected.tolist()
    assert state.values["past_key_0"].shape == (2, GROUPS, 1004, SIZE)
