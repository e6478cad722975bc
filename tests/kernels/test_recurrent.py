"""The native layers of LSTM and GRU against their definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
from contrib_cases import contrib, onnxruntimes

from lut4tool import native
from lut4tool.runtime import int8, recurrent
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.skipif(not native.compiled(), reason="no native library was compiled")


def floats(random, *shape):
    """Normal numbers, which nobody may write to."""
    array = random.standard_normal(shape).astype(np.float32)
    array.setflags(write=False)
    return array


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, product, h, c):
    """A step from the input's gates and what multiplies a state."""
    i, o, f, g = np.split(x + product(h), 4, axis=1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def stepped(step, x, lengths, backward, states):
    """Y and the last states of one direction, step by step."""
    states = [state.astype(np.float64) for state in states]
    y = np.zeros((*x.shape[:2], states[0].shape[1]))
    for t in reversed(range(len(x))) if backward else range(len(x)):
        there = np.ones(x.shape[1], bool) if lengths is None else lengths > t
        new = step(x[t], *states)
        states = [np.where(there[:, None], a, b) for a, b in zip(new, states, strict=True)]
        y[t] = np.where(there[:, None], states[0], 0)
    return y, states


def close(found, wanted, atol):
    """Y [T, D, B, H] and states [D, B, H] against a list of directions."""
    for place, part in enumerate(found):
        expected = np.stack([one[0] if place == 0 else one[1][place - 1] for one in wanted], 1 if place == 0 else 0)
        assert part.shape == expected.shape
        np.testing.assert_allclose(part, expected, rtol=0, atol=atol)


SIZES = [(1, 1, 1), (3, 5, 20), (7, 40, 130), (2, 64, 272)]  # batch, inputs, hidden
LENGTHS = [None, 3]


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("batch", "inputs", "hidden"), SIZES)
def test_lstm(directions, lengths, backward, batch, inputs, hidden):
    random = np.random.default_rng(3)
    x, b = 3 * floats(random, 6, batch, inputs), floats(random, directions, 8 * hidden)
    w, r = (floats(random, directions, 4 * hidden, n) / np.float32(np.sqrt(n)) for n in (inputs, hidden))
    h, c = floats(random, directions, batch, hidden), floats(random, directions, batch, hidden)
    ends = None if lengths is None else np.resize([3, 0, 6], batch).astype(np.int32)
    found = recurrent.layer("lstm", w, r, b)(x, h, c, ends, backward)
    wanted = []
    for d in range(directions):
        gates = x.astype(np.float64) @ w[d].T.astype(np.float64) + b[d, : 4 * hidden] + b[d, 4 * hidden :]
        state = r[d].T.astype(np.float64)
        step = lambda x, h, c, state=state: lstm(x, lambda h: h @ state, h, c)  # noqa: E731
        wanted.append(stepped(step, gates, ends, backward or d == 1, (h[d], c[d])))
    close(found, wanted, 2e-5)


@pytest.mark.parametrize("kind", ["gru", "gru_reset_after"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("batch", "inputs", "hidden"), SIZES)
def test_gru(kind, directions, lengths, batch, inputs, hidden):
    random = np.random.default_rng(4)
    x, b = 3 * floats(random, 6, batch, inputs), floats(random, directions, 6 * hidden)
    w, r = (floats(random, directions, 3 * hidden, n) / np.float32(np.sqrt(n)) for n in (inputs, hidden))
    h = floats(random, directions, batch, hidden)
    ends = None if lengths is None else np.resize([3, 0, 6], batch).astype(np.int32)
    found = recurrent.layer(kind, w, r, b)(x, h, None, ends, False)

    def step_of(d):
        state, bias = r[d].T.astype(np.float64), b[d, 3 * hidden :].astype(np.float64)

        def step(x, h):
            product = h @ state + bias
            z, reset = (sigmoid(x[:, part] + product[:, part]) for part in (slice(hidden), slice(hidden, 2 * hidden)))
            late = slice(2 * hidden, None)
            added = reset * product[:, late] if kind != "gru" else (reset * h) @ state[:, late] + bias[late]
            return ((1 - z) * np.tanh(x[:, late] + added) + z * h,)

        return step

    gates = [x.astype(np.float64) @ w[d].T.astype(np.float64) + b[d, : 3 * hidden] for d in range(directions)]
    close(found, [stepped(step_of(d), gates[d], ends, d == 1, (h[d],)) for d in range(directions)], 2e-5)


@pytest.mark.parametrize("hidden", [6, 144])
def test_lstm_of_bytes(hidden):
    """Input and state rounded as DynamicQuantizeLinear does, the products exact."""
    random, inputs = np.random.default_rng(5), 9
    x, h, c = floats(random, 6, 3, inputs), floats(random, 1, 3, hidden), floats(random, 1, 3, hidden)
    w, r = (random.integers(-128, 128, (n, 4 * hidden)).astype(np.int8) for n in (inputs, hidden))
    zero, factors = np.int8([3]), random.uniform(0.5, 1, 4 * hidden).astype(np.float32) / (70 * np.sqrt(hidden))
    layer = recurrent.byte_layer(
        [recurrent.byte_panels(w, zero, factors)], [recurrent.byte_panels(r, zero, factors)], None, hidden
    )
    found = layer(x, h, c, None, False)

    def product(x, q):
        steps, scale, point = int8.quantized(x.astype(np.float32))
        return (steps.astype(np.float64) - point) * scale @ ((q.astype(np.float64) - zero) * factors)

    gates = product(x.reshape(-1, inputs), w).reshape(6, 3, -1)
    step = lambda x, h, c: lstm(x, lambda h: product(h, r), h, c)  # noqa: E731
    # A step of the state's rounding may fall on its other side.
    close(found, [stepped(step, gates, None, False, (h[0], c[0]))], 0.02)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads, monkeypatch):
    """A step that is divided between threads gives the same bits."""
    random, hidden = np.random.default_rng(6), 272
    x, w, r = floats(random, 30, 2, 8), floats(random, 1, 4 * hidden, 8), floats(random, 1, 4 * hidden, hidden)
    layer = recurrent.layer("lstm", w, r / np.float32(20), None)
    monkeypatch.setattr(recurrent, "_THREADS", 1)
    wanted = layer(x, None, None, None, False)
    monkeypatch.setattr(recurrent, "_THREADS", threads)
    for _ in range(5):
        for one, other in zip(layer(x, None, None, None, False), wanted, strict=True):
            assert (one == other).all()


@pytest.mark.parametrize("op_type", ["LSTM", "GRU"])
@pytest.mark.parametrize("constant", [(), (1, 2, 3)])
@pytest.mark.parametrize("layout", [0, 1])
def test_the_operators_run_in_it(op_type, constant, layout, monkeypatch):
    """Against onnxruntime, or our own layout 0: the other is not in onnxruntime."""
    calls, run = [], recurrent.Layer.__call__
    monkeypatch.setattr(recurrent.Layer, "__call__", lambda *values: calls.append(1) or run(*values))
    random, gates = np.random.default_rng(7), 4 if op_type == "LSTM" else 3
    values = [floats(random, 5, 2, 3), floats(random, 2, gates * 6, 3), floats(random, 2, gates * 6, 6)]
    values += [floats(random, 2, 2 * gates * 6), np.array([5, 2], np.int32), floats(random, 2, 2, 6)]
    options = {"domain": "", "outputs": gates - 1, "direction": "bidirectional", "hidden_size": 6, "constant": constant}
    expected = onnxruntimes(contrib(op_type, values, **options), values)
    if layout:
        values = [v.swapaxes(0, 1).copy() if place in (0, 5) else v for place, v in enumerate(values)]
        options["layout"] = 1
        moved = [expected[0].transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in expected[1:])]
    model = contrib(op_type, values, **options)
    inputs = {value.name: values[int(value.name[1:])] for value in model.graph.input}
    found = Runtime(model, device="cpu").run(None, inputs)
    assert calls
    for one, other in zip(found, moved if layout else expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
