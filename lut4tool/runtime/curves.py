"""Curves of float32 arrays on a CPU, and what is computed row by row, in the native library."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from lut4tool import native

_NATIVE: Any = importlib.import_module("lut4tool.native._native") if native.compiled() else None
_THREADS = native.thread_count()


def available() -> bool:
    """Whether the native library serves."""
    return _NATIVE is not None


def curve(name: str, x: np.ndarray) -> np.ndarray | None:
    """The curve "sigmoid", "tanh", "erf" or "gelu" of x, within 4 units in the last place; None where NumPy must.

    Gelu's error is 4 units of the larger of |x| and itself.
    """
    if _NATIVE is None or x.dtype != np.float32:
        return None
    out = np.empty(x.shape, np.float32)
    _NATIVE.curve(name, np.ascontiguousarray(x).reshape(-1), out.reshape(-1), _THREADS)
    return out


def softmax(x: np.ndarray, logarithm: bool = False) -> np.ndarray:
    """e^x over its sum along the last axis, or the logarithm of that; x is float32 and not empty."""
    out = np.empty(x.shape, np.float32)
    flat = (-1, x.shape[-1])
    _NATIVE.softmax(np.ascontiguousarray(x).reshape(flat), logarithm, out.reshape(flat), _THREADS)
    return out


def normalized(
    x: np.ndarray, columns: int, scale: np.ndarray, bias: np.ndarray | None, epsilon: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of `columns` elements less their mean over their deviation, times scale plus bias [columns].

    Returns it, and the mean and the inverse deviation of each row; all are float32, and x is not empty.
    """
    out, flat = np.empty(x.shape, np.float32), (-1, columns)
    rows = np.ascontiguousarray(x).reshape(flat)
    mean, inverse = np.empty((2, len(rows)), np.float32)
    _NATIVE.normalize(rows, scale, bias, epsilon, out.reshape(flat), mean, inverse, _THREADS)
    return out, mean, inverse
