"""The native curves against NumPy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lut4tool import native
from lut4tool.runtime import curves

pytestmark = pytest.mark.skipif(not native.compiled(), reason="no native library was compiled")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "erf"])
def test_curves_from_end_to_end(name):
    ends = np.array([0, -0.0, 1e-30, -1e-30, 90, -90, 1e30, -1e30, np.inf, -np.inf], np.float32)
    x = np.concatenate([ends, np.linspace(-20, 20, 40001, dtype=np.float32)]).reshape(-1, 1)
    wanted = {"sigmoid": sigmoid, "tanh": np.tanh, "erf": np.vectorize(math.erf)}[name](
        np.clip(x.astype(np.float64), -700, 700)
    )
    found = curves.curve(name, x)
    assert found.shape == x.shape
    room = 4 * np.spacing(np.abs(wanted).astype(np.float32)) + 2.0**-125  # the least of them become 0
    assert (np.abs(found - wanted) <= room).all()
    assert (found[8:10] == wanted[8:10].astype(np.float32)).all()
    assert np.isnan(curves.curve(name, np.array([np.nan], np.float32))).all()


def test_gelu():
    x = np.linspace(-9, 9, 40001, dtype=np.float32)
    wanted = 0.5 * x.astype(np.float64) * (1 + np.vectorize(math.erf)(x.astype(np.float64) * math.sqrt(0.5)))
    room = 4 * np.spacing(np.maximum(np.abs(x), np.abs(wanted)).astype(np.float32))
    assert (np.abs(curves.curve("gelu", x) - wanted) <= room).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 16), (40, 333), (2, 3, 1000)])
def test_softmax(shape):
    x = (20 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    wide = (x - x.max(-1, keepdims=True)).astype(np.float64)
    wanted = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    np.testing.assert_allclose(curves.softmax(x), wanted, rtol=2e-6, atol=2e-37)
    found = curves.softmax(x, logarithm=True)
    np.testing.assert_allclose(found, wide - np.log(np.exp(wide).sum(-1, keepdims=True)), rtol=1e-6, atol=1e-5)


def test_softmax_of_what_is_not_finite():
    inf, nan = np.inf, np.nan
    x = np.array([[0, -inf, 0], [-inf, -inf, -inf], [inf, 0, 0], [0, nan, 0]], np.float32)
    with np.errstate(all="ignore"):
        powers = np.exp(x - x.max(-1, keepdims=True))
        wanted = powers / powers.sum(-1, keepdims=True)
    np.testing.assert_allclose(curves.softmax(x), wanted, rtol=1e-6)


@pytest.mark.parametrize("columns", [1, 7, 16, 700])
@pytest.mark.parametrize("biased", [False, True])
def test_normalized(columns, biased):
    random = np.random.default_rng(1)
    x = (3 + random.standard_normal((5, 9, columns))).astype(np.float32)
    scale, bias = random.standard_normal((2, columns)).astype(np.float32)
    wide, epsilon = x.astype(np.float64), 1e-3
    mean = wide.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt(wide.var(-1, keepdims=True) + epsilon)
    wanted = (wide - mean) * inverse * scale + (bias if biased else 0)
    found = curves.normalized(x, columns, scale, bias if biased else None, epsilon)
    for one, other in zip(found, (wanted, mean.reshape(-1), inverse.reshape(-1)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
