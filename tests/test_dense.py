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
