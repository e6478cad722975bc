"""The types of a byte and less, converted by MLX as on a GPU, against ml_dtypes: every code, and every tie."""

from __future__ import annotations

import numpy as np
import pytest

from lut4tool.runtime.backend import mx
from lut4tool.runtime.ops import codes
from lut4tool.runtime.ops.cast import convert

BYTES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("dtype", [*codes.FLOATS, *codes.INTEGERS, codes.E8M0], ids=str)
def test_every_code_is_decoded(dtype: np.dtype) -> None:
    values = BYTES.view(dtype)
    np.testing.assert_array_equal(np.array(codes.decode(values)), values.astype(np.float32))


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("dtype", codes.FLOATS, ids=str)
def test_floats_are_rounded_as_ml_dtypes_does(dtype: np.dtype, saturate: int) -> None:
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        grid = BYTES.view(dtype).astype(np.float32)
    finite = np.unique(grid[np.isfinite(grid)])
    wide = rng.standard_normal(20_000) * 10.0 ** rng.integers(-8, 6, 20_000)
    x = np.concatenate([grid, (finite[1:] + finite[:-1]) / 2, wide, [np.inf, -np.inf, -0.0, 1e38]]).astype(np.float32)
    found = codes.encode(mx.array(x), dtype, saturate)
    np.testing.assert_array_equal(found.view(np.uint8), convert(x, dtype, saturate).view(np.uint8))


@pytest.mark.parametrize("dtype", codes.INTEGERS, ids=str)
def test_integers_are_cut_off_and_wrap(dtype: np.dtype) -> None:
    x = np.arange(-40, 40, 0.5).astype(np.float32)
    np.testing.assert_array_equal(codes.encode(mx.array(x), dtype).view(np.uint8), convert(x, dtype).view(np.uint8))
