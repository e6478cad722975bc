"""Types that MLX lacks, of 8 bits and fewer, converted by MLX: their codes stay on the host, a byte an element."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import to_numpy

#: The integers, and how many bits of a byte are theirs.
INTEGERS = {np.dtype(getattr(ml_dtypes, name)): int(name[-1]) for name in ("int4", "uint4", "int2", "uint2")}
_NAMES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1fn")
FLOATS = tuple(np.dtype(getattr(ml_dtypes, name)) for name in _NAMES)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def known(dtype: np.dtype) -> bool:
    """Whether it is one of these types; float8e8m0 can be decoded only."""
    return dtype in INTEGERS or dtype in FLOATS or dtype == E8M0


@cache
def _table(dtype: np.dtype) -> np.ndarray:
    """What each byte stands for."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def decode(x: np.ndarray) -> Any:
    """The float32 values of an array of any of these types: exact."""
    return mx.take(mx.array(_table(x.dtype)), mx.array(x.view(np.uint8)))


def encode(x: Any, dtype: np.dtype, saturate: int = 1) -> np.ndarray:
    """An mx.array's values in one of these types: integers cut off and wrapped, floats rounded half to even.

    Beyond a float8's range lies its largest value, or with saturate 0 what its own conversion makes of Inf.
    """
    if dtype in INTEGERS:
        low = x.astype(mx.int32) & ((1 << INTEGERS[dtype]) - 1)
        return to_numpy(low.astype(mx.uint8)).view(dtype)
    return to_numpy(_rounded(x.astype(mx.float32), dtype, saturate)).view(dtype)


def _rounded(x: Any, dtype: np.dtype, saturate: int) -> Any:
    """The codes of float32 values."""
    info = ml_dtypes.finfo(dtype)
    size, sign = abs(x), (x.view(mx.uint32) >> 31).astype(mx.int32)
    size = mx.minimum(size, float(info.max) * (1 if saturate or dtype == FLOATS[-1] else 2))
    exponent = mx.maximum((size.view(mx.int32) >> 23) - 127, int(info.minexp))
    unit = ((exponent - int(info.nmant) + 127) << 23).view(mx.float32)  # the distance of neighbours there
    # A carry of the rounded steps runs into the exponent by itself.
    code = mx.round(size / unit).astype(mx.int32) + ((exponent - int(info.minexp)) << int(info.nmant))
    largest, infinite, invalid = (int(np.array(v).astype(dtype).view(np.uint8)) for v in (info.max, np.inf, np.nan))
    code = mx.where(code > largest, infinite & 0x7F if infinite != 0x80 else 0x80, code)
    code = mx.where(mx.isnan(x), invalid, code)
    negative = code | (sign << (info.bits - 1))
    if dtype.name.endswith("fnuz"):  # which has no -0
        negative = mx.where(code == 0, 0, negative)
    return negative.astype(mx.uint8)
