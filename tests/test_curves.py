"""The native curves against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from lut4tool import native
from lut4tool.runtime import curves

pytestmark = pytest.mark.skipif(not native.compiled(), reason="no native library was compiled")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_curves_from_end_to_end(name):
    ends = np.array([0, -0.0, 1e-30, -1e-30, 90, -90, 1e30, -1e30, np.inf, -np.inf], np.float32)
    x = np.concatenate([ends, np.linspace(-20, 20, 40001, dtype=np.float32)]).reshape(-1, 1)
    wanted = {"sigmoid": sigmoid, "tanh": np.tanh}[name](np.clip(x.astype(np.float64), -700, 700))
    found = curves.curve(name, x)
    assert found.shape == x.shape
    room = 4 * np.spacing(np.abs(wanted).astype(np.float32)) + 2.0**-125  # the least of them become 0
    assert (np.abs(found - wanted) <= room).all()
    assert (found[8:10] == wanted[8:10].astype(np.float32)).all()
    assert np.isnan(curves.curve(name, np.array([np.nan], np.float32))).all()
