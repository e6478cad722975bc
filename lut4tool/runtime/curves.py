"""Curves of float32 arrays on a CPU, in the native library."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from lut4tool import native

_NATIVE: Any = importlib.import_module("lut4tool.native._native") if native.compiled() else None
_THREADS = native.thread_count()


def curve(name: str, x: np.ndarray) -> np.ndarray | None:
    """The curve "sigmoid" or "tanh" of x, within 4 units in the last place; None where NumPy must."""
    if _NATIVE is None or x.dtype != np.float32:
        return None
    out = np.empty(x.shape, np.float32)
    _NATIVE.curve(name, np.ascontiguousarray(x).reshape(-1), out.reshape(-1), _THREADS)
    return out
