"""The native dense products and convolutions against NumPy in float64 and integers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lut4tool.runtime import dense

pytestmark = pytest.mark.skipif(not dense.available(), reason="no native library was compiled, or no BLAS is here")


def frozen(array):
    """The array, which nobody may write to."""
    array.setflags(write=False)
    return array


def floats(random, *shape):
    return frozen(random.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize("columns", [1, 5, 1000])
@pytest.mark.parametrize("depth", [1, 3, 513])
def test_products_of_every_layout(rows, columns, depth):
    random = np.random.default_rng(0)
    lefts = floats(random, rows, depth), floats(random, depth, rows).T, floats(random, rows, 2 * depth)[:, ::2]
    rights = floats(random, depth, columns), floats(random, columns, depth).T, floats(random, 2 * depth, columns)[::-2]
    for a, b in itertools.product(lefts, rights):
        bound = 2.0**-20 * (np.abs(a.astype(np.float64)) @ np.abs(b))
        assert (np.abs(dense.matmul(a, b) - a.astype(np.float64) @ b) <= bound).all()


def convolved(x, w, bias, strides, dilations, before, out, group):
    """The definition, in float64."""
    batch, _, height, width = x.shape
    y = np.zeros((batch, w.shape[0], *out)) + bias.reshape(-1, 1, 1)
    count, depth = w.shape[0] // group, w.shape[1]
    for i, j in np.ndindex(out):
        for p, q in np.ndindex(w.shape[2:]):
            row, column = i * strides[0] + p * dilations[0] - before[0], j * strides[1] + q * dilations[1] - before[1]
            if not (0 <= row < height and 0 <= column < width):
                continue
            seen = x[:, :, row, column].astype(np.float64).reshape(batch, group, depth)
            taps = w[:, :, p, q].reshape(group, count, depth)
            y[:, :, i, j] += np.einsum("ngd,gmd->ngm", seen, taps).reshape(batch, -1)
    return y


@pytest.mark.parametrize(
    ("group", "depth", "count"), [(1, 1, 3), (1, 5, 40), (2, 16, 1), (8, 1, 2), (3, 2, 40), (1, 40, 130)]
)
@pytest.mark.parametrize("size", [(1, 9), (7, 7), (5, 30)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 2), (1, 5)])
def test_convolutions(group, depth, count, size, kernel):
    random = np.random.default_rng(1)
    x, w = floats(random, 2, group * depth, *size), floats(random, group * count, depth, *kernel)
    bias = floats(random, group * count)
    for strides, dilations, before in [((1, 1), (1, 1), (0, 0)), ((2, 1), (1, 2), (1, 3)), ((3, 2), (2, 1), (4, 0))]:
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        room = [n + b + 1 - span for n, b, span in zip(size, before, spans, strict=True)]  # one zero after
        out = tuple(max(0, r) // s + 1 for r, s in zip(room, strides, strict=True))
        found = dense.conv(x, w, bias, (*strides, *dilations, *before), out, group)
        wanted = convolved(x, w, bias, strides, dilations, before, out, group)
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("types", list(itertools.product((np.uint8, np.int8), repeat=2)))
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 777), (9, 513, 5), (32, 200, 64)])
@pytest.mark.parametrize("one", [True, False])
def test_products_of_bytes_are_exact(types, shape, one):
    random, (rows, depth, columns) = np.random.default_rng(2), shape

    def drawn(dtype, *size):
        info = np.iinfo(dtype)
        return frozen(random.integers(info.min, info.max + 1, size).astype(dtype))

    a, b = drawn(types[0], rows, depth), drawn(types[1], depth, columns)
    a_zero, b_zero = drawn(types[0], 1 if one else rows), drawn(types[1], 1 if one else columns)
    wanted = (a.astype(np.int64) - a_zero.reshape(-1, 1)) @ (b.astype(np.int64) - b_zero)
    assert (dense.matmul_bytes(a, a_zero, dense.pack_bytes(b, b_zero)) == wanted).all()
    assert (dense.matmul_bytes(a, None, dense.pack_bytes(b, None)) == a.astype(np.int64) @ b.astype(np.int64)).all()


@pytest.mark.parametrize("size", [1, 31, 100, 4096])
@pytest.mark.parametrize("shift", [-9, 0, 9])
def test_values_are_quantized_as_the_standard_says(size, shift):
    x = frozen(np.random.default_rng(size).standard_normal(size).astype(np.float32) + np.float32(shift))
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    scale = np.float32(high - low) / np.float32(255)
    zero = np.rint(np.clip(-low / scale, 0, 255))
    values, found_scale, found_zero = dense.quantized(x)
    assert (found_scale, found_zero) == (scale, zero)
    assert (values == np.clip(np.rint(x / scale) + zero, 0, 255)).all()


def test_what_is_not_finite_is_left_to_numpy():
    assert dense.quantized(np.array([0, np.nan], np.float32)) is None
    assert dense.quantized(np.full(40, -np.inf, np.float32)) is None
    assert dense.quantized(np.zeros(3, np.float32))[1] == 1


def stepped(gates, x, r, lengths, backward, states):
    """A cell in float64, step by step: gates(x [B, G * H], product of h, states) -> new states."""
    states = [state.astype(np.float64) for state in states]
    y = np.zeros((*x.shape[:2], states[0].shape[1]))
    for t in reversed(range(len(x))) if backward else range(len(x)):
        there = np.ones(x.shape[1], bool) if lengths is None else lengths > t
        new = gates(x[t].astype(np.float64), r.astype(np.float64), *states)
        states = [np.where(there[:, None], a, b) for a, b in zip(new, states, strict=True)]
        y[t] = np.where(there[:, None], states[0], 0)
    return y, states


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_gates(x, r, h, c):
    i, o, f, g = np.split(x + h @ r.T, 4, axis=1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("lengths", [None, np.array([3, 0, 6])])
@pytest.mark.parametrize("hidden", [1, 20, 130])
def test_lstm(backward, lengths, hidden):
    random = np.random.default_rng(3)
    x, r, h, c = (
        floats(random, *shape) for shape in ((6, 3, 4 * hidden), (4 * hidden, hidden), (3, hidden), (3, hidden))
    )
    x, r = frozen(x * np.float32(5)), frozen(r / np.float32(np.sqrt(hidden)))  # gates from near 0 to the flat ends
    y, *found = dense.lstm(x, r, h, c, lengths, backward)
    wanted, states = stepped(lstm_gates, x, r, lengths, backward, (h, c))
    for one, other in zip((y, *found), (wanted, *states), strict=True):
        assert np.abs(one - other).max() <= 1e-5


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("lengths", [None, np.array([3, 0, 6])])
@pytest.mark.parametrize("reset_after", [False, True])
@pytest.mark.parametrize("hidden", [1, 20, 130])
def test_gru(backward, lengths, reset_after, hidden):
    random = np.random.default_rng(4)
    x, r, h = (floats(random, *shape) for shape in ((6, 3, 3 * hidden), (3 * hidden, hidden), (3, hidden)))
    r, bias = frozen(r / np.float32(np.sqrt(hidden))), floats(random, hidden)

    def gates(x, r, h):
        z, reset = np.split(sigmoid((x + h @ r.T)[:, : 2 * hidden]), 2, axis=1)
        late = r[2 * hidden :].T
        added = reset * (h @ late + bias) if reset_after else (reset * h) @ late + bias
        return ((1 - z) * np.tanh(x[:, 2 * hidden :] + added) + z * h,)

    found = dense.gru(x, r, bias, reset_after, h, lengths, backward)
    wanted, states = stepped(gates, x, r, lengths, backward, (h,))
    for one, other in zip(found, (wanted, *states), strict=True):
        assert np.abs(one - other).max() <= 1e-5


def test_lstm_of_bytes():
    """The state rounded in each step, the product exact."""
    random, hidden = np.random.default_rng(5), 20
    x, h, c = (floats(random, *shape) for shape in ((6, 3, 4 * hidden), (3, hidden), (3, hidden)))
    q, factor = (
        frozen(random.integers(-128, 128, (hidden, 4 * hidden)).astype(np.int8)),
        floats(random, 4 * hidden) / 300,
    )
    product = dense.RoundedProduct(dense.pack_bytes(q, None), factor, dense.quantized)

    def gates(x, _, h, c):
        steps, scale, zero = dense.quantized(h.astype(np.float32))
        rounded = (steps.astype(np.float64) - zero) * scale
        return lstm_gates(x + rounded @ (q * factor.astype(np.float64)), np.zeros((4 * hidden, hidden)), h, c)

    y, *found = dense.lstm(x, product, h, c, None, False)
    wanted, states = stepped(gates, x, np.zeros(1), None, False, (h, c))
    for one, other in zip((y, *found), (wanted, *states), strict=True):
        assert np.abs(one - other).max() <= 0.02  # a step of the state's rounding may fall on its other side


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_curves_from_end_to_end(name):
    ends = np.array([0, -0.0, 1e-30, -1e-30, 90, -90, 1e30, -1e30, np.inf, -np.inf], np.float32)
    x = frozen(np.concatenate([ends, np.linspace(-20, 20, 40001, dtype=np.float32)]).reshape(-1, 1))
    wanted = {"sigmoid": sigmoid, "tanh": np.tanh}[name](np.clip(x.astype(np.float64), -700, 700))
    found = dense.curve(name, x)
    assert found.shape == x.shape
    room = 4 * np.spacing(np.abs(wanted).astype(np.float32)) + 2.0**-125  # the least of them become 0
    assert (np.abs(found - wanted) <= room).all()
    assert (found[8:10] == wanted[8:10].astype(np.float32)).all()
    assert np.isnan(dense.curve(name, np.array([np.nan], np.float32))).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_values_are_quantized_to_a_given_scale(dtype):
    random, info = np.random.default_rng(6), np.iinfo(dtype)
    x = frozen(np.concatenate([9 * random.standard_normal(1000), [np.inf, -np.inf]]).astype(np.float32))
    scale, zero = np.float32(0.07), np.array(info.max // 3, dtype)
    found = dense.quantize_linear(x, np.array(scale), zero, np.dtype(dtype))
    assert found.dtype == dtype
    assert (found == np.clip(np.rint(x / scale) + np.float32(zero), info.min, info.max)).all()
    assert dense.quantize_linear(np.array([np.nan], np.float32), np.array(scale), zero, np.dtype(dtype)) == 0
