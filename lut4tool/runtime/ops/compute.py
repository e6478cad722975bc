"""Where, and in which type, a heavy float operator computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import BY_MLX, MLX_OF, TYPES, on_host, to_device, to_mx, to_numpy
from lut4tool.runtime.ops import codes

_ML_FLOATS = {row.numpy for row in TYPES if "float" in row.name and row.numpy.kind == "V"}
_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def is_float(value: Any) -> bool:
    """Whether an array holds floats; to NumPy, bfloat16 and the types below it are no numbers at all."""
    if isinstance(value, mx.array):
        return bool(mx.issubdtype(value.dtype, mx.floating))
    return value.dtype.kind == "f" or value.dtype in _ML_FLOATS


def working(*values: Any) -> tuple[Any, ...]:
    """Return (xp, *values) ready to compute: NumPy views on a CPU, mx arrays elsewhere; halves widened to float32.

    Where MLX lacks the type, and for float64, which MLX convolves in float32, all of them are NumPy arrays too; codes
    of 8 bits and fewer are decoded. None stays None.
    """
    host = on_host() or any(map(_stays, values))
    xp: Any = np if host else mx
    return xp, *(None if value is None else widened(to_numpy(value) if host else _sent(value)) for value in values)


def _sent(value: Any) -> Any:
    """A value as an mx.array, codes as the float32 numbers that they stand for."""
    return codes.decode(value) if isinstance(value, np.ndarray) and codes.known(value.dtype) else to_mx(value)


def _stays(value: Any) -> bool:
    """Whether a value's type keeps it on the host."""
    if isinstance(value, mx.array):
        return value.dtype == mx.float64
    if value is None or codes.known(value.dtype):
        return False
    return value.dtype == np.float64 or value.dtype not in MLX_OF


def widened(value: Any) -> Any:
    """A half as float32, any other value as it is."""
    if isinstance(value, mx.array):
        return value.astype(mx.float32) if value.dtype in (mx.float16, mx.bfloat16) else value
    return value.astype(np.float32) if value.dtype in _HALVES else value


def finish(value: Any, like: Any) -> Any:
    """Return a computed value in the type of the ONNX value `like`, where the device has its values."""
    return finish_as(value, numpy_type(like))


def finish_as(value: Any, dtype: np.dtype) -> Any:
    """The same for a NumPy type."""
    if isinstance(value, mx.array):
        return value.astype(MLX_OF[dtype]) if dtype in MLX_OF else codes.encode(value, dtype)
    with np.errstate(all="ignore"):  # a half's overflow is the standard's Inf
        return to_device(np.asarray(value).astype(dtype, copy=False))


def numpy_type(value: Any) -> np.dtype:
    """The NumPy type of an mx or NumPy array."""
    return BY_MLX[value.dtype].numpy if isinstance(value, mx.array) else value.dtype


def computed(function: Callable[..., Any], *values: Any) -> Any:
    """Return function(xp, *values) on `working` values, in the type of the first of them."""
    xp, *ready = working(*values)
    return finish(function(xp, *ready), values[0])


def on_device(xp: Any, function: Callable[..., Any], *values: Any) -> Any:
    """The same, but host values (xp is numpy) give a host value."""
    if xp is not np:
        return computed(function, *values)
    result = np.asarray(function(np, *map(widened, values)))
    return result.astype(numpy_type(values[0]), copy=False)
