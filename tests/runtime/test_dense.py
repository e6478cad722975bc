"""The native dense products against NumPy in float64 and integers."""

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
