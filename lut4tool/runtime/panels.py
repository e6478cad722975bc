"""Products on a CPU with float32 weights that are constant: laid out once in panels of 16 columns, no BLAS called."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import numpy as np

from lut4tool import native

_NATIVE: Any = importlib.import_module("lut4tool.native._native") if native.compiled() else None
_THREADS = native.thread_count()
_COLUMNS = 16
#: Bytes of the largest weight that is laid out anew: the product with a larger one is as fast where it lies.
_MOST = 1 << 24

#: Panels of the weights that are in use, by the array that they are made of and whether it is transposed.
_LAID: dict[tuple[int, bool], tuple[weakref.ref[np.ndarray], np.ndarray]] = {}


def _laid(weight: np.ndarray, transposed: bool) -> np.ndarray:
    """The panels [ceil(N / 16), K, 16] of a weight [K, N], or [N, K] transposed; nodes that share it share them."""
    key = id(weight), transposed
    known, panels = _LAID.get(key, (None, None))
    if known is not None and panels is not None and known() is weight:
        return panels
    columns = weight.T if transposed else weight
    depth, width = columns.shape
    whole = np.zeros((depth, -(-width // _COLUMNS) * _COLUMNS), np.float32)
    whole[:, :width] = columns
    panels = native.aligned(whole.reshape(depth, -1, _COLUMNS).transpose(1, 0, 2)).reshape(-1)
    _LAID[key] = weakref.ref(weight, lambda _: _LAID.pop(key, None)), panels
    return panels


class Product:
    """x [..., K] times a weight [K, N], plus a bias [N] where there is one.

    reads: of the operator's inputs only the first is read when it runs.
    """

    reads = (0,)

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None = None, transposed: bool = False) -> None:
        self.depth, self.width = weight.shape[::-1] if transposed else weight.shape
        self.panels, self.bias = _laid(weight, transposed), None
        if bias is not None:
            self.bias = np.zeros(self.panels.size // self.depth, np.float32)
            self.bias[: self.width] = bias

    def __call__(self, x: np.ndarray, *_: Any) -> np.ndarray:
        """Return the product [..., N]."""
        *rest, depth = x.shape
        if depth != self.depth:
            raise ValueError(f"a of shape {list(x.shape)} and b of shape {[self.depth, self.width]} have no product")
        out = np.empty((*rest, self.width), np.float32)
        if not x.size:
            out[...] = 0 if self.bias is None else self.bias[: self.width]
        else:
            rows = np.ascontiguousarray(x).reshape(-1, depth)
            _NATIVE.multiply_panels(rows, self.panels, self.bias, out.reshape(-1, self.width), _THREADS)
        return out


def product(weight: np.ndarray | None, bias: np.ndarray | None = None, transposed: bool = False) -> Product | None:
    """Lay out a weight [K, N], or [N, K] transposed; None where it is no constant float32 matrix, or too large."""
    if _NATIVE is None or weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        return None
    return Product(weight, bias, transposed) if 0 < weight.nbytes <= _MOST else None
